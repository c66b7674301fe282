"""Rules of the house, read from the source: one home per closed set of words, no circle between
files, one class per name, private names of torch in one place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from fourfold.cost.table.reference import REFERENCE_COLUMNS
from fourfold.result.report import OUTCOMES
from fourfold.spec import words
from fourfold.spec.engine import ENGINES, EXPORTS, FOLDER, GENERIC
from fourfold.spec.layout import AXES
from fourfold.spec.words import OURS
from fourfold.tables.row import KINDS
from fourfold.tables.styles import MPT, TOPOLOGY
from tests.sources import tree_of, walked

SOURCE = Path(__file__).parent.parent / "src" / "fourfold"
FILES = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: tree_of(SOURCE / name) for name in FILES}


# Closed set -> its home and its words. A word that other things are called too ("auto", "model") is
# left out: it would prove nothing.
HOMES: dict[str, tuple[str, set[str]]] = {
    "axes": ("spec/layout.py", {*AXES}),
    "schedules": ("spec/words.py", {*words.SCHEDULES}),
    "context kinds": ("spec/words.py", {*words.CP_KINDS}),
    "attention kernels": ("spec/words.py", {*get_args(words.Attention)} - {"auto"}),
    "recompute": ("spec/words.py", {*words.RECOMPUTE}),
    "precisions": ("spec/words.py", {*words.PRECISIONS}),
    "number formats": ("spec/words.py", {*words.DTYPES}),
    "shardings": ("spec/words.py", {*words.SHARDINGS}),
    "outcomes": ("result/report.py", {*OUTCOMES}),
    "reference columns": ("cost/table/reference.py", {*REFERENCE_COLUMNS} - {*KINDS} - {"status"}),
    "MPT columns": ("tables/styles.py", {column.heading for column in MPT} - {"Model", "GPU"}),
    "topology columns": ("tables/styles.py", {column.heading for column in TOPOLOGY}),
}


# Modules that must name most words of a set that is not theirs, and why.
HONEST = {
    ("axes", "cost/table/reference.py"): "columns of the reference schema",
    ("axes", "result/stored_run.py"): "columns of a list of runs",
    ("axes", "cost/one_rank.py"): "parts of a step that are named by the axis they serve",
    ("axes", "search/answer.py"): "the order of plain layouts; parts named by their axis",
    ("axes", "search/fixes.py"): "the order in which changes are tried",
    ("context kinds", "engine/parallel/context.py"): "the kernel of each",
    ("context kinds", "cost/ops/sequence.py"): "the operations of each",
    ("context kinds", "backends/megatron/export.py"): "Megatron's word for each",
    ("axes", "cost/trace/symbols.py"): "the sizes that each axis cuts",
    ("schedules", "backends/torchtitan/export.py"): "torchtitan's word for each",
    ("precisions", "engine/jobs/calibrate.py"): "what torch multiplies on a GPU and on a CPU",
    ("number formats", "engine/jobs/calibrate.py"): "what torch multiplies on a GPU and on a CPU",
    ("attention kernels", "engine/jobs/calibrate.py"): "torch's kernels on a GPU",
    ("recompute", "verbs/verify_cases.py"): "which case varies it how",
    **{
        ("axes", f"backends/{engine}/log.py"): "columns that this engine's prints decide"
        for engine in ("nanotron", "torchtitan")
    },
    ("axes", "conformance/cell.py"): "words of a layout that any engine may have",
    ("shardings", "conformance/cell.py"): "words of a layout that any engine may have",
    **{
        ("shardings", f"backends/{engine}/adapter.py"): "what the engine has of them"
        for engine in ("fourfold", "deepspeed")
    },
    ("axes", "logs/row.py"): "columns without which a row is incomplete",
}


def lists_of_words(tree: ast.AST) -> Iterator[tuple[int, list[str], bool]]:
    """(line, words, is a list) of everything that names several: tuples, lists, sets, Literals and
    chains of comparisons; and keys of dicts, which say what each word means to the module."""
    for node in walked(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield node.lineno, _texts(node.elts), True
        elif isinstance(node, ast.Dict):
            yield node.lineno, _texts(key for key in node.keys if key), False
        elif isinstance(node, ast.BoolOp):
            compared = [v.comparators for v in node.values if isinstance(v, ast.Compare)]
            yield node.lineno, _texts(side for sides in compared for side in sides), True


def _texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def copies(trees: Mapping[str, ast.AST]) -> dict[tuple[str, str], str]:
    """(set, file) -> where. A list of most words of a set, or a dict of all, is a copy of it; one
    or two words of many are what the module is about."""
    spelled = {}
    for name, tree in trees.items():
        for line, texts, is_list in lists_of_words(tree):
            for kind, (home, members) in HOMES.items():
                shared = members & {*texts}
                enough = len(members) // 2 + 1 if is_list else len(members)
                if name != home and len(shared) >= enough:
                    spelled[kind, name] = f"{name}:{line} spells out {kind}: {sorted(shared)}"
    return spelled


def imports(tree: ast.AST, known: Iterable[str]) -> set[str]:
    """Files of the package that a module imports, late imports and those for types counted."""
    names = set()
    for node in walked(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    paths = {name.removeprefix("fourfold.").replace(".", "/") for name in names if "." in name}
    return {f"{path}.py" for path in paths} & {*known}


def circles(trees: Mapping[str, ast.AST]) -> list[list[str]]:
    """Files that import each other, directly or through others."""
    arrows = {name: imports(tree, trees) for name, tree in trees.items()}
    reached: dict[str, set[str]] = {}
    for name in arrows:
        seen: set[str] = set()
        front = {*arrows[name]}
        while front:
            seen |= front
            front = {far for near in front for far in arrows[near]} - seen
        reached[name] = seen
    joined = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in arrows
        if name in reached[name]
    }
    return sorted(map(list, joined))


def same_names(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Classes that are defined more than once, and where; those inside functions and classes
    count too."""
    places: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in walked(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    return {key: files for key, files in places.items() if len(files) > 1}


def no_commands(trees: Mapping[str, ast.Module]) -> set[str]:
    """Files of commands/ that declare no command, or one without a docstring (its help)."""
    return {
        name
        for name, tree in trees.items()
        if name.startswith("commands/") and not name.endswith("__init__.py")
        if not all(helps := [bool(ast.get_docstring(one)) for one in _declared(tree)]) or not helps
    }


def _declared(tree: ast.Module) -> list[ast.FunctionDef]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("'command'" in ast.dump(d) for d in f.decorator_list)]


def command_imports(trees: Mapping[str, ast.AST]) -> set[str]:
    """Commands that import another command."""
    return {
        name
        for name, tree in trees.items()
        if name.startswith("commands/") and not name.endswith("__init__.py")
        if any(
            other.startswith("commands/") and other != "commands/__init__.py"
            for other in imports(tree, trees)
        )
    }


def questions(trees: Mapping[str, ast.Module]) -> set[str]:
    """Modules whose docstring opens with a question instead of saying what they hold."""
    opening = {name: (ast.get_docstring(t) or "").split("\n\n")[0] for name, t in trees.items()}
    return {name for name, paragraph in opening.items() if "?" in paragraph}


def flat_engine_files(names: Iterable[str]) -> set[str]:
    flat = {name for name in names if name.startswith("engine/") and name.count("/") == 1}
    return flat - {
        "engine/__init__.py",
        "engine/worker.py",
        "engine/compat.py",
        "engine/compat_fsdp.py",
        "engine/compat_modes.py",
    }


def test_each_closed_set_of_words_has_one_home() -> None:
    spelled = copies(trees())
    assert not [where for place, where in spelled.items() if place not in HONEST]
    assert not {*HONEST} - {*spelled}, "named as honest in vain"
    for kind, (home, members) in HOMES.items():
        texts = {text for _, listed, _ in lists_of_words(trees()[home]) for text in listed}
        texts |= {n.value for n in walked(trees()[home]) if isinstance(n, ast.Constant)}
        assert members <= texts, f"{home} is no home of {kind}"


def test_no_file_imports_itself_in_a_circle() -> None:
    assert not circles(trees())


def test_no_two_classes_share_a_name() -> None:
    assert not same_names(trees())


def test_every_file_of_commands_declares_commands() -> None:
    assert not no_commands(trees())
    assert not command_imports(trees())


def test_the_engine_is_sorted_into_folders() -> None:
    assert not flat_engine_files(FILES)


def test_every_module_says_what_it_holds() -> None:
    assert not questions(trees())


# Attributes are seen by the linter (SLF); these it does not see.
_HIDDEN = re.compile(
    r"^ *(?:from torch\S*\._|import torch\S*\._|from torch\S* import [^#\n]*\b_[a-z]).*"
    r"|[gs]etattr\((?!self\b)[^)\n]*[\"']_[a-z].*",
    re.MULTILINE | re.IGNORECASE,
)


def engine_files() -> tuple[list[Path], list[Path]]:
    """Files compat*, which say what private names of torch are for, and all others."""
    compat = sorted((SOURCE / "engine").glob("compat*.py"))
    return compat, sorted(path for path in (SOURCE / "engine").rglob("*.py") if path not in compat)


def test_private_names_of_torch_stand_in_compat() -> None:
    compat, others = engine_files()
    for path in others:
        assert not _HIDDEN.findall(path.read_text(encoding="utf-8")), path
    assert all(_HIDDEN.search(path.read_text(encoding="utf-8")) for path in compat)


def test_compat_holds_nothing_that_nobody_uses() -> None:
    inside, others = (
        "".join(path.read_text(encoding="utf-8") for path in paths) for paths in engine_files()
    )
    functions = [node for node in ast.parse(inside).body if isinstance(node, ast.FunctionDef)]
    unused = [f.name for f in functions if f.name not in others and inside.count(f.name) < 2]
    assert not unused


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('A = ("pp", "dp", "cp")', {"axes"}),
        ('from typing import Literal\nA = Literal["ring", "ulysses"]', {"context kinds"}),
        ('x = a == "zero1" or a == "zero2" or a == "zero3"', {"shardings"}),
        ('A = {"pp": 1, "dp": 2, "cp": 3, "tp": 4}', {"axes"}),
        ('A = ("ok", "oom")\nB = {"pp": 1, "tp": 2}\nC = "ring"', set()),
    ],
)
def test_a_copy_of_a_set_is_seen(text: str, kinds: set[str]) -> None:
    assert {kind for kind, _ in copies({"x/y.py": ast.parse(text)})} == kinds


def test_the_other_rules_can_fail() -> None:
    late = "def f():\n    from fourfold.a import c\n"
    trees = {
        "a/b.py": ast.parse("from fourfold.a.c import x\nclass A: ...\n" + late),
        "a/c.py": ast.parse("def f():\n    import fourfold.a.b\n"),
        "b.py": ast.parse("def f():\n    class A: ...\n"),
        "commands/x.py": ast.parse(
            'from fourfold.commands import y\n@command()\ndef x():\n    """Help."""'
        ),
        "commands/y.py": ast.parse("@command()\ndef y(): ..."),
        "commands/z.py": ast.parse("def z(): ..."),
    }
    assert circles(trees) == [["a/b.py", "a/c.py"]]
    assert same_names(trees) == {"A": ["a/b.py", "b.py"]}
    assert no_commands(trees) == {"commands/y.py", "commands/z.py"}
    assert command_imports(trees) == {"commands/x.py"}
    assert questions({"a.py": ast.parse('"""What is a? A.\n\nB."""'), **trees}) == {"a.py"}
    assert flat_engine_files(["engine/x.py", "engine/worker.py", "engine/a/b.py"]) == {
        "engine/x.py"
    }
    hidden = ("from torch._C import x", "from torch import _x", 'getattr(torch, "_x")')
    assert all(_HIDDEN.search(line) for line in hidden)
    assert not _HIDDEN.search('getattr(self, "_x")')


# Words that engines are called by, and the library or the launcher of torch too.
_OTHERS_TOO = {"torchrun", "transformers"}
# Files outside the engines' own folders that name one in their code, and why.
NAME_ENGINES = {
    **{
        f"commands/{name}.py": "examples in help"
        for name in ("estimates", "models", "plan", "read", "verify")
    },
    "verbs/conformance.py": "examples of a flag",
    "verbs/run_requests.py": "examples of a flag",
    "cost/count/flops.py": "conventions by the name of who published them",
    "tables/rules_work.py": "the convention of published tables without one",
    "search/advise.py": "whose kernel a shape is kind to",
    "spec/policy.py": "whose word for a module of recompute a hint explains",
    "spec/supported.py": "whose layer a remark leaves out",
}


def engine_words() -> re.Pattern[str]:
    """Every name of an engine but our own, in any spelling."""
    names = {*ENGINES, *EXPORTS, *(folder.name for folder in Path(FOLDER).iterdir())}
    names = {name.replace("_", "-") for name in names} - {GENERIC, OURS, *_OTHERS_TOO}
    longest = sorted((name for name in names if name[0] != "-"), key=len, reverse=True)
    words_ = (re.escape(name).replace(r"\-", "[-_ .]?") for name in longest)
    return re.compile(rf"(?<![a-z0-9])({'|'.join(words_)})(?![a-z0-9])", re.IGNORECASE)


def code_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every name and every string of a module but its docstrings."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in walked(tree)
        if isinstance(node, scopes) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in walked(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.lineno, node.name


def naming_engines(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """File outside the engines' folders -> where its code names one."""
    words_ = engine_words()
    return {
        name: f"{name}:{line} names {match[0]}"
        for name, tree in trees.items()
        if not name.startswith("backends/")
        for line, text in code_texts(tree)
        if (match := words_.search(text))
    }


def test_no_file_outside_an_engines_folder_names_it() -> None:
    found = naming_engines(trees())
    assert [where for name, where in found.items() if name not in NAME_ENGINES] == []
    assert [name for name in NAME_ENGINES if name not in found] == []


@pytest.mark.parametrize(
    "source",
    ["import megatron.core", "def _nemo(): ...", "hint = 'use torchtitan-0.2'", "x.deepspeed = 1"],
)
def test_an_engine_named_in_code_is_found(source: str) -> None:
    assert naming_engines({"spec/x.py": ast.parse(source)})
    assert not naming_engines({"backends/x/y.py": ast.parse(source)})
    assert not naming_engines({"spec/x.py": ast.parse(f'"""{source}."""\nnemotron = 1')})
