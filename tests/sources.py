"""The source as trees, parsed once for all tests that read it."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    gc.disable()  # it would look at all the trees again and again: two thirds of the time
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return walked(tree_of(path))
