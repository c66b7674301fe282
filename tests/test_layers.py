"""Who may import whom? The direction of imports, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from tests.sources import nodes_of, tree_of

SOURCE = Path(__file__).parent.parent / "src" / "fourfold"

# folder -> folders it may import from; top-level modules (errors, units, files) are everybody's.
SPEC = {"spec"}
RESULT = SPEC | {"result"}
COST = RESULT | {"cost"}
_UNSORTED = COST | {"search", "launch", "tables", "logs", "conformance", "traces"}
ALLOWED = {
    "spec": SPEC,
    "result": RESULT,
    "cost": COST,
    "search": COST | {"search"},
    "show": COST | {"search", "conformance", "traces", "verbs", "show"},  # pages of typed answers
    "launch": RESULT | {"launch"},
    "tables": COST | {"tables"},
    "logs": COST | {"logs"},
    "conformance": SPEC | {"conformance"},
    # Nobody imports an engine: each is found by its folder (spec/engine.py).
    "backends": COST | {"search", "logs", "conformance", "backends"},
    "traces": COST | {"traces"},
    "verbs": COST | {"search", "launch", "tables", "logs", "conformance", "traces", "verbs"},
    "page": COST
    | {"search", "tables", "conformance", "traces", "verbs", "show", "options", "page"},
    "agents": COST | {"search", "verbs", "page", "agents"},
    "commands": SPEC
    | {"verbs", "show", "page", "agents", "options", "output", "commands"}
    | _UNSORTED,
}
# Top-level modules that have a direction of their own; the library's face names verbs and types.
TOP = {
    "__init__": {"spec", "verbs"},
    "__main__": {"cli"},
    "cli": {"commands", "options", "output", "spec"},
    "options": {"spec"},
    "output": set(),
}
# The engine may also ask these questions (a difference is named as other engines' are); nothing
# else of cost and search.
ENGINE_ALLOWED = RESULT | {"engine"}
ENGINE_MODULES = {
    "fourfold.search.legal",
    "fourfold.conformance.ranks",
    "fourfold.cost.count",
    "fourfold.cost.memory.allocator",
    "fourfold.cost.ops.op",
    "fourfold.cost.step.pipeline",
    "fourfold.cost.schedule",
    "fourfold.cost.trace",
}
# What speaks to our own engine as to any other.
OWN_ADAPTER = ("backends/fourfold/adapter.py", {"engine", "search", "spec"})
# What has another engine's rank counted by the ledger that our own dry run has.
MEMORY_ADAPTER = ("backends/*/adapter_memory*.py", {"engine"})
SHARED = {
    "door",
    "errors",
    "flag",
    "units",
    "files",
    "escape",
    "events",
    "installed",
    "text_table",
}
# Folders that call verbs by their exported names (`fourfold.plan`); the folders below them may not.
FACE_USERS = {"commands", "page", "agents"}
# Imported where they are used, never while a module loads: they cost 0.1 to 6 s.
LATE = {"anyio", "mcp", "numpy", "rich", "plotly", "matplotlib", "starlette", "torch", "uvicorn"}
# The vectorised cost model and search are reached only through commands that need NumPy anyway.
NUMPY_FOLDERS = {"cost", "search", "verbs", "traces"}


def _modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        found.append((relative.parts[0] if len(relative.parts) > 1 else "", path))
    return found


def _imports(nodes: Iterable[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative imports hide the direction"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for folder, path in _modules():
        for name in _imports(nodes_of(path)):
            if not (_may_import(folder, path.stem, name) or _is_adapter(path, name)):
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def _is_adapter(path: Path, name: str) -> bool:
    return any(
        fnmatch(path.relative_to(SOURCE).as_posix(), where) and name.split(".")[1] in allowed
        for where, allowed in (OWN_ADAPTER, MEMORY_ADAPTER)
    )


def _may_import(folder: str, stem: str, name: str) -> bool:
    parts = name.split(".")
    if parts == ["fourfold"]:
        return folder in FACE_USERS
    if parts[0] != "fourfold" or parts[1] in SHARED:
        return True
    if not folder:
        return parts[1] in TOP.get(stem, ())
    if folder == "engine":
        return parts[1] in ENGINE_ALLOWED or any(
            ".".join(parts[:depth]) in ENGINE_MODULES for depth in (3, 4)
        )
    return parts[1] in ALLOWED[folder]


def test_only_code_of_ranks_imports_torch() -> None:
    for _, path in _modules():
        names = {name.split(".")[0] for name in _imports(nodes_of(path))}
        assert _in_ranks(path) or "torch" not in names, path


def _in_ranks(path: Path) -> bool:
    parts = path.relative_to(SOURCE).parts
    is_adapter = parts[0] == "backends" and path.name.startswith(("adapter", "shims"))
    return is_adapter or parts[0] == "engine" or parts[:2] == ("conformance", "ranks")


def test_heavy_libraries_are_imported_late() -> None:
    for folder, path in _modules():
        if _in_ranks(path):
            continue
        body = tree_of(path).body
        top = {name.split(".")[0] for node in body for name in _imports_of(node)}
        heavy = top & LATE
        if folder in NUMPY_FOLDERS:
            heavy -= {"numpy"}
        assert not heavy, f"{path.relative_to(SOURCE)} imports {heavy} while loading"


def _imports_of(node: ast.stmt) -> list[str]:
    return _imports([node]) if isinstance(node, (ast.Import, ast.ImportFrom)) else []
