"""Private names of torch stand in files compat*, which say what they are for: attributes by the
linter (SLF), what it does not see here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ENGINE = Path(__file__).parent.parent.parent / "src" / "fourfold" / "engine"
COMPAT = sorted(ENGINE.glob("compat*.py"))
PATHS = sorted(path for path in ENGINE.rglob("*.py") if path not in COMPAT)
_HIDDEN = re.compile(
    r"^ *(?:from torch\S*\._|import torch\S*\._|from torch\S* import [^#\n]*\b_[a-z]).*"
    r"|[gs]etattr\((?!self\b)[^)\n]*[\"']_[a-z].*",
    re.MULTILINE | re.IGNORECASE,
)


def test_private_names_of_torch_stand_in_compat() -> None:
    for path in PATHS:
        assert not _HIDDEN.findall(path.read_text(encoding="utf-8")), path
    assert all(_HIDDEN.search(path.read_text(encoding="utf-8")) for path in COMPAT)


def test_compat_holds_nothing_that_nobody_uses() -> None:
    inside = "".join(path.read_text(encoding="utf-8") for path in COMPAT)
    others = "".join(path.read_text(encoding="utf-8") for path in PATHS)
    functions = [node for node in ast.parse(inside).body if isinstance(node, ast.FunctionDef)]
    unused = [f.name for f in functions if f.name not in others and inside.count(f.name) < 2]
    assert not unused
