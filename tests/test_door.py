"""What comes in is bounded: time and memory grow with the input and not faster, impossible numbers
and headings are refused wherever a table is read, and two writers of one file lose nothing."""

from __future__ import annotations

import ast
import csv
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold import files
from fourfold.backends.megatron.log import Megatron
from fourfold.backends.nemo.log import Summary
from fourfold.cost.fit.calibration import shipped
from fourfold.errors import UserError
from fourfold.events import Event
from fourfold.logs import metrics, tables
from fourfold.logs.book import Book
from fourfold.logs.lines import Line
from fourfold.logs.mapping import propose
from fourfold.logs.nested import Yaml, bracketed
from fourfold.logs.row import Row
from fourfold.spec import codec, texts
from fourfold.spec.tokens import TokenInfo, edges_of, token_paths
from fourfold.tables.forms import parse
from fourfold.traces.events import read_chrome
from fourfold.verbs.requests import FitRequest, ReportRequest, ScoreRequest
from tests.growth import QUADRATIC, grows
from tests.sources import tree_of

SOURCE = Path(fourfold.__file__).parent
BLOOM = Path(__file__).parent / "golden" / "bloom.csv"


def _yaml(size: int) -> None:
    yaml = Yaml()
    for depth in range(size // 200):
        yaml.feed(" " * min(depth, 300) + "k" * 100 + ": [" + "1, " * 30 + "]")


def _charts(size: int) -> None:
    runs = [f"run{i} - iteration_time" for i in range(size // 100)]
    items = ((n, {"Step": str(n), **dict.fromkeys(runs, "1.5")}) for n in range(8))
    metrics.charts(items, ["Step", *runs], book := Book(), "")
    assert len(book.runs) == len(runs)


def _names(size: int) -> None:
    rows = [Row({"row_id": "same", "log": "a.csv"}) for _ in range(size // 10)]
    tables._name(rows, set())
    assert len({row["row_id"] for row in rows}) == len(rows)


def _dashes(size: int) -> None:
    assert not Megatron(Book()).take(Line(1, "-" * size))


def _key(size: int) -> None:
    with pytest.raises(UserError, match="more than 32 parts"):
        texts.parse_toml(".".join(["'a b'"] * size) + " = 1")


def _trace(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(text)
        with pytest.raises(UserError, match=r"no traceEvents|of over 1 MB|does not end|no objects"):
            read_chrome(path)


# Each took time with the square of its size, or memory.
INPUTS: dict[str, Callable[[int], object]] = {
    "brackets in a heading": lambda size: propose(["[" * size]),
    "defaults in Bridge's list": lambda size: Summary().feed("  a: " + "  (Mcore default: " * size),
    "deep YAML": _yaml,
    "deep brackets": lambda size: bracketed(("{" + "k" * 3000 + ": [1, 2, ") * (size // 300)),
    "runs of a chart": _charts,
    "dashes in a log": _dashes,
    "rows of one name": _names,
    "parts of a TOML key": _key,
    "heads of a trace in its head": lambda n: _trace('{"a":[' + '{"traceEvents":[]},' * n + "1]}"),
    "members of a trace's head": lambda n: _trace("{" + '"a":1,' * n + '"b":1}'),
    "ends of events in an event": lambda n: _trace('{"traceEvents":[{"a":[' + "{}," * 20 * n),
    "brackets in an event": lambda n: _trace('{"traceEvents":[{"a":[' + "[]," * 20 * n),
    "values for events": lambda n: _trace('{"traceEvents":[' + "1," * n),
}


@pytest.mark.parametrize("name", INPUTS)
def test_time_and_memory_grow_no_faster_than_the_input(name: str) -> None:
    def most_bytes(size: int) -> int:
        tracemalloc.start()
        try:
            INPUTS[name](size)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    INPUTS[name](1000)
    assert most_bytes(40_000) < 8 * max(most_bytes(10_000), 1_000_000)
    assert grows(INPUTS[name], 10_000, least=0.01) < QUADRATIC


def test_a_configuration_takes_bounded_memory() -> None:
    yaml = Yaml()
    tracemalloc.start()
    for depth in range(60):
        yaml.feed(" " * depth + "k" * 118 + ":")
    for _ in range(30):
        yaml.feed(" " * 60 + "x: [" + "1," * 1900 + "]")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # 1,900 values a line, each under a path of 7 KB, were 400 MB


def test_a_table_of_too_many_rows_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "MOST_ROWS", 5)
    log, columns = tmp_path / "rows.csv", tmp_path / "map.toml"
    log.write_text("gpus,step\n" + "8,1.5\n" * 6)
    columns.write_text('[columns]\nn_gpus = "gpus"\nstep_s = "step"\n')
    request = fourfold.CollectRequest(logs=(str(log),), map=str(columns), out=str(tmp_path / "o"))
    with pytest.raises(UserError, match="more than 5 rows"):
        fourfold.collect(request)


def _readers(path: str) -> dict[str, Callable[[], Any]]:
    return {
        "lint": lambda: fourfold.lint([path]),
        "report": lambda: fourfold.report(ReportRequest(sources=(path,))),
        "fit": lambda: fourfold.fit(FitRequest(rows=(path,))),
        "score": lambda: fourfold.score(ScoreRequest(rows=(path,))),
        "predict": lambda: fourfold.predict_table(path),
        "collect": lambda: fourfold.collect(
            fourfold.CollectRequest(logs=(path,), out=f"{path}.out")
        ),
    }


@pytest.mark.parametrize(
    ("headings", "rule"),
    [(["c"] * 1001, "more than 1000 columns"), (["x" * 501], "heading of more than 500 letters")],
)
def test_every_command_refuses_headings_that_are_none(tmp_path, headings, rule) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(headings) + "\n" + "1," * len(headings) + "\n")
    for read in _readers(str(path)).values():
        with pytest.raises(UserError, match=rule):
            read()
    head = "|".join(headings)
    with pytest.raises(UserError, match=rule):
        parse(f"|{head}|\n|{'---|' * len(headings)}\n", "md")


def _with(tmp_path: Path, count: int = 8, **cells: str) -> str:
    head, *rows = csv.reader(BLOOM.read_text().splitlines())
    rows = [row for row in rows if row[head.index("status")] == "ok"][:count]
    for name, text in cells.items():
        rows[0][head.index(name)] = text
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([head, *rows])
    return str(path)


@pytest.mark.parametrize("text", ["1e300", "1e400", "1e-300", "0", "-1", "9" * 400])
@pytest.mark.parametrize("column", ["step_s", "mem_gb", "tokens_s_gpu", "n_gpus"])
def test_an_impossible_number_is_used_for_nothing(tmp_path, column, text) -> None:
    path = _with(tmp_path, 2, **{column: text})
    assert fourfold.lint([path]).checked == "1 table, 2 rows checked"
    if column != "n_gpus":
        fourfold.report(ReportRequest(sources=(path,)))
    if column == "step_s":
        said: list[Event] = []
        (score,) = fourfold.score(ScoreRequest(rows=(path,)), on_event=said.append).results
        assert score.score.rows == 1
        assert "not used" in said[0].text
    assert len(fourfold.predict_table(path).rows()) == 2


def test_fit_says_that_few_rows_say_little_and_where_other_tables_go(tmp_path, monkeypatch) -> None:
    said: list[Event] = []
    monkeypatch.setattr("fourfold.verbs.fit.calibrate", lambda *tables, **more: shipped())
    fourfold.fit(FitRequest(rows=(_with(tmp_path, 1),)), on_event=said.append)
    assert any("1 measured row cannot tell" in event.text for event in said)
    foreign = tmp_path / "team.csv"
    foreign.write_text("gpus,step time (ms)\n8,900\n")
    with pytest.raises(UserError, match=r"fourfold collect .*team\.csv"):
        fourfold.fit(FitRequest(rows=(str(foreign),)))


def test_two_collects_into_one_file_lose_no_row(tmp_path, monkeypatch) -> None:
    """The first writer is held up until the second has had time to read what was there before."""
    write, started = files.write_text, threading.Event()

    def slow(*args: Any, **more: Any) -> None:
        started.set()
        time.sleep(0.2)
        write(*args, **more)

    monkeypatch.setattr(files, "write_text", slow)
    out = tmp_path / "all.csv"
    rows = {name: [Row({"log": f"{name}.log", "step_s": "1"})] for name in "ab"}
    first = threading.Thread(
        target=tables.keep, args=(rows["a"], str(out)), kwargs={"force": False}
    )
    first.start()
    started.wait()
    assert tables.keep(rows["b"], str(out), force=False) == 2
    first.join()
    written = csv.DictReader(out.read_text().splitlines())
    assert [row["row_id"] for row in written] == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["all.csv"]  # and no lock is left


def test_half_of_a_character_is_refused() -> None:
    assert texts.parse_json('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
    for text in ('{"a": "\\ud800"}', '{"\\udc00x": 1}', '["\\ude00\\ud83d"]'):
        with pytest.raises(UserError, match="half of a character"):
            texts.parse_json(text)


def test_a_token_file_may_claim_any_vocabulary(tmp_path: Path) -> None:
    """2^32 counters are 32 GiB; the child has two."""
    name = str(tmp_path / "claimed")
    path, side = token_paths(name)
    path.write_bytes(b"\1\0\0\0" * 3 + b"\xff\xff\xff\xff")
    info = TokenInfo(
        dtype="uint32", vocab=2**32, tokens=4, documents=1, end=-1, tokenizer="given",
        unigram_nats=0.0, sha256="", edges=edges_of(path, 16),
    )  # fmt: skip
    side.write_text(codec.to_json(info))
    code = (
        "import fourfold, sys\n"
        f"shown = fourfold.show_tokens({name!r})\n"
        "print(shown.distinct_tokens, round(shown.unigram_nats, 4), shown.checksum)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)),
        env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.split() == ["2", "0.5623", "differs"]


# --- every reader of a file goes through the door

_NAMES = {"open", "read_text", "read_bytes", "memmap", "fromfile", "genfromtxt", "loadtxt",
          "safe_open"}  # fmt: skip
# Files that are opened elsewhere: "FILE FUNCTION" and why nobody waits for them.
OUTSIDE_OF_THE_DOOR = {
    "cost/fit/calibration.py _read": "the package's own data",
    "cost/fit/calibration.py states": "the package's own data",
    "conformance/verdicts.py ": "the package's own data",
    "conformance/verdicts.py _text": "the package's own source",
    "conformance/verdicts.py add": "the package's own source",
    "page/document.py asset": "the package's own data",
    "page/document.py plotly_script": "an installed package's data",
    "spec/texts.py text": "the package's own data",
    "conformance/ranks/host.py failure": "its own temporary folder",
    "conformance/ranks/host.py run_cell": "its own temporary folder",
    "launch/outcomes.py kernel_kills": "/sys",
    "result/machine.py _of_cpu": "/proc",
    "result/machine.py host_memory_bytes": "/sys",
    "spec/hf/folder.py _opened": "opened by name, once the door has opened it",
    "traces/nsys.py read_nsys": "opened by name, once the door has opened it",
}


def _opens_to_read(call: ast.Call) -> bool:
    """Whether a call opens a file by its name to read it. What os.open opens has flags of its own
    and is a lock, a device or a folder: readers hold a stream."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and not _writes(call.args[1:], call)
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    if owner == "sqlite3":
        return function.attr == "connect"
    if owner in ("files", "stored", "os", "webbrowser") or function.attr not in _NAMES:
        return False
    of_numpy = owner == "np"
    if of_numpy and ast.unparse(call.args[0]) == "stream":  # which the door has opened
        return False
    return of_numpy or not _writes(call.args, call)


def _writes(args: Iterable[ast.expr], call: ast.Call) -> bool:
    modes = [*args, *(word.value for word in call.keywords if word.arg == "mode")]
    return any(isinstance(m, ast.Constant) and str(m.value)[:1] in ("w", "a", "x") for m in modes)


def _readers_by_name(path: Path) -> Iterator[str]:
    def visit(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and _opens_to_read(child):
                yield f"{path.relative_to(SOURCE)} {inside}"
            yield from visit(child, inside)

    return visit(tree_of(path), "")


def test_readers_of_files_use_the_door() -> None:
    doors = {SOURCE / "files.py", SOURCE / "result" / "files" / "stored.py"}
    paths = sorted({*SOURCE.rglob("*.py")} - doors)
    assert len(paths) > 300
    assert {name for path in paths for name in _readers_by_name(path)} == {*OUTSIDE_OF_THE_DOOR}


@pytest.mark.parametrize(
    "source",
    ["open(p)", "open(p, 'rb')", "p.open()", "p.open('rb')", "p.read_text()", "p.read_bytes()",
     "gzip.open(p)", "sqlite3.connect(p)", "np.fromfile(p)", "np.memmap(p, mode='r')"],
)  # fmt: skip
def test_a_reader_outside_of_the_door_is_found(source: str) -> None:
    assert _opens_to_read(ast.parse(source).body[0].value)


@pytest.mark.parametrize(
    "source", ["open(p, 'wb')", "p.open('a')", "files.read_text(p)", "np.fromfile(stream)"]
)
def test_writers_and_the_door_are_not(source: str) -> None:
    assert not _opens_to_read(ast.parse(source).body[0].value)


def test_pipes_without_a_writer_and_folders_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.json")
    with files.open_stream(pipe) as stream:
        assert stream.read() == b""
    for read in (files.open_regular, files.open_own, files.read_own):
        with pytest.raises(UserError, match="is not a regular file"):
            read(pipe)
    for path, rule in ((tmp_path, "is a folder"), (Path("/dev/zero"), "is a device")):
        with pytest.raises(UserError, match=rule):
            files.open_stream(path)
    with pytest.raises(UserError, match="is not a regular file"):
        fourfold.diagnose([str(pipe)])
