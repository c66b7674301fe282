"""Private names of torch stand in files compat*, which say what they are for: read from source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import tree_of

ENGINE = Path(__file__).parent.parent.parent / "src" / "fourfold" / "engine"
COMPAT = sorted(ENGINE.glob("compat*.py"))
PATHS = sorted(path for path in ENGINE.rglob("*.py") if path not in COMPAT)
_NAMEDTUPLES = ("_asdict", "_replace", "_fields")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """What the file itself defines: functions, classes, fields, attributes it assigns."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def torch_names(tree: ast.AST) -> set[str]:
    """Names under which a file knows torch's modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {alias.asname or "torch" for alias in aliases}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def private_uses(text: str, own: frozenset[str] = frozenset()) -> Iterator[str]:
    """Private names that come from elsewhere: imports of torch, attributes of its modules, and
    attributes of any object that the engine (`own`) does not define itself."""
    tree = ast.parse(text)
    own, torchs = own | own_names(tree), torch_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"import of {name}" for name in parts if is_private(name))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            root = root_of(node)
            ours = node.attr in own or node.attr in _NAMEDTUPLES or root in sys.stdlib_module_names
            if root in torchs or not ours:
                yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Call) and root_of(node.func) in ("getattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and is_private(name) and name not in own:
                yield f"line {node.lineno}: {name!r}"


@cache
def names_of_the_engine() -> frozenset[str]:
    return frozenset().union(*(own_names(tree_of(path)) for path in PATHS))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ENGINE)))
def test_private_names_of_torch_stand_in_compat(path: Path) -> None:
    assert not list(private_uses(path.read_text(encoding="utf-8"), names_of_the_engine()))


def test_compat_holds_nothing_that_nobody_uses() -> None:
    inside = "".join(path.read_text(encoding="utf-8") for path in COMPAT)
    others = "".join(path.read_text(encoding="utf-8") for path in PATHS)
    functions = [node for node in ast.parse(inside).body if isinstance(node, ast.FunctionDef)]
    unused = [f.name for f in functions if f.name not in others and inside.count(f.name) < 2]
    assert not unused
