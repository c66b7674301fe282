"""Private names of torch stand in one file, which says what they are for: read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).parent.parent.parent / "src" / "fourfold" / "engine"
COMPAT = ENGINE / "compat.py"


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


def private_uses(text: str) -> Iterator[str]:
    """Private names that come from elsewhere: imports of torch, and attributes of anything but the
    standard library's modules (os._exit) that the file does not define."""
    tree = ast.parse(text)
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"import of {name}" for name in parts if is_private(name))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if root_of(node) not in sys.stdlib_module_names:
                yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Call) and root_of(node.func) in ("getattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and is_private(name) and name not in own:
                yield f"line {node.lineno}: {name!r}"


@pytest.mark.parametrize(
    "path", sorted(ENGINE.rglob("*.py")), ids=lambda path: str(path.relative_to(ENGINE))
)
def test_private_names_of_torch_stand_in_compat(path: Path) -> None:
    if path != COMPAT:
        assert not list(private_uses(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch.utils import _pytree",
        "import torch\ntorch._foreach_norm([])",
        "import torch\ntorch.cuda._sleep(3)",
        "import torch\nops = torch.ops._c10d_functional.wait_tensor",
        "import torch.distributed as dist\nnames = dist.distributed_c10d._world.pg_names",
        "def key(tensor):\n    return tensor.untyped_storage()._cdata",
        "def inner(tensor):\n    return getattr(tensor, '_local_tensor', tensor)",
    ],
)
def test_the_test_sees_private_names(text: str) -> None:
    assert list(private_uses(text))


def test_compat_holds_nothing_that_nobody_uses() -> None:
    inside = COMPAT.read_text(encoding="utf-8")
    paths = [path for path in ENGINE.rglob("*.py") if path != COMPAT]
    others = "".join(path.read_text(encoding="utf-8") for path in paths)
    functions = [node for node in ast.parse(inside).body if isinstance(node, ast.FunctionDef)]
    unused = [f.name for f in functions if f.name not in others and inside.count(f.name) < 2]
    assert not unused
