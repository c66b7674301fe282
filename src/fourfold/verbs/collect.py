"""collect: logs and tables of other engines as measured rows, in a file that fit, score, predict,
report and lint read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError, inside
from fourfold.events import Event, OnEvent, ignore
from fourfold.flag import flag
from fourfold.logs.book import READERS, Book, read_log, read_nodes, run_and_rank
from fourfold.logs.mapping import ColumnMap, proposal, read_mapping
from fourfold.logs.row import COLUMNS, EXTRA, Row, complete, require_column, row_of, text_of
from fourfold.logs.tables import check_out, is_table, keep, read_table
from fourfold.spec import catalog, check, nccl_tests, texts
from fourfold.units import counted
from fourfold.verbs import Answer, Request

COLLECTED = "collected.csv"
_LOGS = (".log", ".txt", ".out", ".err", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", "")
_OF_NODE = re.compile(r"engine-[0-9]+\.log")
# What lies beside all that we keep of a run, a job or a checkpoint.
_KEPT = {"run.json": "RunReport", "job.json": "Job", "state.json": "CheckpointState"}
_NCCL_BYTES, _SNIFF_CHARS = 2**24, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRequest(Request):
    """`fields`: columns of the reference schema that hold for every run, as texts."""

    logs: tuple[str, ...] = flag(
        "logs, tables, or folders of them", "LOG", names=("logs",), nargs="+", default=()
    )
    runs: str = flag("store; rows go to its collected.csv (default: runs)", "DIR", default="runs")
    out: str | None = flag("file for the rows instead", "FILE.csv")
    map: str | None = flag("which column of a table is which field", "COLUMNS.toml")
    cluster: str | None = flag("cluster of the runs: its GPUs and links", "NAME")
    stack: str | None = flag("name for the engine (default: as the log shows)", "NAME")
    side: str | None = flag(
        "fields missing from the logs, for all or by file name", "FIELDS.toml", names=("--fields",)
    )
    reader: str | None = flag(
        "read logs as this engine's (default: recognised)", rare=True, choices=tuple(READERS)
    )
    force: bool = flag("overwrite even if fourfold did not write it", rare=True, default=False)
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class FileRead:
    """What became of one file; `book`: its lines, and those that could not be read."""

    log: str
    kind: str
    rows: list[Row] = field(default_factory=list)
    book: Book = field(default_factory=Book)
    proposal: str = ""
    link: dict[str, Any] | None = None
    is_named: bool = True  # not found in a folder
    notes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        book = self.book
        head = {"log": self.log, "kind": self.kind, "runs": len(self.rows), "lines": book.lines}
        shown = [{"line": number, "text": text} for number, text in book.shown]
        rest = {"unread_lines": book.unread, "unread": shown, "cut_lines": book.cut}
        return head | rest | {"notes": self.notes, "link": self.link}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(Answer):
    """`rows` of this call; `out` has them and those that were there before."""

    files: tuple[FileRead, ...]
    rows_read: tuple[Row, ...]
    out: str
    total: int

    @property
    def proposals(self) -> list[str]:
        return [one.proposal for one in self.files if one.proposal]

    @property
    def ok(self) -> bool:
        found = [bool(one.rows or one.link) for one in self.files if one.is_named]
        return not self.proposals and all(found) and bool(found or self.rows_read)

    def plain(self) -> dict[str, Any]:
        usable = sum(row.is_usable for row in self.rows_read)
        head = {"out": self.out, "usable": usable, "incomplete": len(self.rows_read) - usable}
        rows = [row.plain() for row in self.rows_read]
        return {"rows": rows, **head, "files": [one.plain() for one in self.files]}

    def rows(self) -> list[dict[str, Any]]:
        return [{name: row[name] for name in (*COLUMNS, *EXTRA)} for row in self.rows_read]


def collect(request: CollectRequest, *, on_event: OnEvent = ignore) -> Collected:
    """Read every file, complete the rows with what the request says, and keep them."""
    mapping = _mapping(request.map)
    given, by_file = _given(request), _side(request.side)
    out = request.out or str(Path(request.runs) / COLLECTED)
    check_out(out, force=request.force)
    done = []
    for logs in _by_run(_expanded(request.logs)):
        one, log = read_files(logs, request.reader, mapping), logs[0]
        one.is_named = not set(logs).isdisjoint(request.logs)
        extra = [fields for pattern, fields in by_file if fnmatch.fnmatch(Path(log).name, pattern)]
        own = {k: v for fields in extra for k, v in fields.items()} | given
        one.rows = [complete(row, own) for row in one.rows]
        done.append(one)
        on_event(Event(_summary(one)))
    rows = [row for one in done for row in one.rows]
    total = keep(rows, out, force=request.force)
    return Collected(files=tuple(done), rows_read=tuple(rows), out=out, total=total)


def read_files(
    logs: Sequence[str], reader: str | None = None, mapping: ColumnMap | None = None
) -> FileRead:
    """`logs`: of several, each is of another node."""
    log, is_one = logs[0], len(logs) == 1
    if is_one and not reader and (found := _nccl(log)) is not None:
        return found
    if is_one and not reader and (mapping is not None or is_table(log)):
        return _read_table(log, mapping)
    book = read_log(log, reader or "") if is_one else read_nodes(logs, reader or "")
    rows = [row_of(run, run.engine or book.engine) for run in book.runs]
    ranks = {found[1] for path in logs if (found := run_and_rank(Path(path).name))}
    for row in rows if ranks else ():
        row.fill(n_gpus=len(ranks))
        row.notes.append(f"n_gpus: {counted(len(ranks), 'rank')} with a log here")
    one = FileRead(log, book.engine if rows else "unknown", rows, book)
    if book.dropped_runs:
        one.notes.append(f"left out: {counted(book.dropped_runs, 'further run')}")
    return _marked(one)


def _read_table(log: str, mapping: ColumnMap | None) -> FileRead:
    table = read_table(log, mapping)
    metrics = [row_of(run, run.facts.get("stack", "")) for run in table.book.runs]
    one = FileRead(log, table.kind, table.rows or metrics, table.book)
    if table.kind == "unknown":
        one.proposal = proposal(table.headings)
    return _marked(one)


def _marked(one: FileRead) -> FileRead:
    for row in one.rows:
        row.fill(log=one.log, unread_lines=one.book.unread, source=Path(one.log).stem)
    return one


def _nccl(log: str) -> FileRead | None:
    """An output of nccl-tests: not a run, but how fast the links are."""
    try:
        if not Path(log).is_file() or Path(log).stat().st_size > _NCCL_BYTES:
            return None
        text = files.read_bytes(log, field="LOG", max_bytes=_NCCL_BYTES).decode(errors="replace")
        if not any(word in text[:_SNIFF_CHARS] for word in ("nccl-tests", "# nThread", "algbw")):
            return None
    except (OSError, UserError):
        return None  # said by whoever reads it as a log
    one = FileRead(log, "nccl-tests", book=Book(lines=text.count("\n")))
    try:
        found = nccl_tests.parse_log(text, Path(log).name)
        fitted = nccl_tests.fit(found, crosses=found.hosts > 1)
    except UserError as error:
        one.notes.append(str(error))
        return one
    one.link = {
        "op": found.op,
        "hosts": found.hosts,
        "ranks": found.ranks,
        "device": found.device_name,
        "bytes_per_s": fitted.bytes_per_s,
        "latency_s": fitted.latency_s,
    }
    return one


# --- what the user says


def _mapping(path: str | None) -> ColumnMap | None:
    if path is None:
        return None
    with inside(path):
        return read_mapping(files.read_text(path, field="map"))


def _given(request: CollectRequest) -> dict[str, str]:
    given: dict[str, str] = {}
    if request.cluster:
        place = catalog.cluster(request.cluster)
        given = {"cluster": place.name, "gpus_per_node": str(place.host_gpus)}
        if place.device.id in catalog.device_names():
            given["hardware"] = place.device.id
    if request.stack:
        given["stack"] = request.stack
    own = {require_column(n, field="--set"): text_of(v) for n, v in request.fields.items()}
    return given | own


def _side(path: str | None) -> list[tuple[str, dict[str, str]]]:
    """(pattern of file names, fields): those at the top of the file hold for all."""
    if path is None:
        return []
    with inside(path):
        data = texts.parse_toml(files.read_text(path, field="fields"))
        tables = {name: value for name, value in data.items() if isinstance(value, dict)}
        plain = {name: value for name, value in data.items() if name not in tables}
        return [
            (pattern, {require_column(n, field=n): text_of(v) for n, v in table.items()})
            for pattern, table in (("*", plain), *tables.items())
        ]


# --- files


def _expanded(logs: Sequence[str]) -> list[str]:
    """Files as named; of a folder, those in it that may be logs."""
    found: list[str] = []
    for log in check.given(logs, "LOG", "pass logs, or a folder of them"):
        path = Path(log)
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [
            str(item)
            for item in inside
            if item is path
            or (item.is_file() and item.suffix.lower() in _LOGS and not _is_ours(item))
        ]
    hint = "'fourfold report' and 'fit --runs' take our own runs, 'train --show' a training"
    check.that(found, "LOG", " ".join(logs), "contains no log of another engine", hint)
    return list(dict.fromkeys(found))


def _is_ours(path: Path) -> bool:
    """What we keep of a run, a job or a checkpoint is no log."""
    kept = any(_is_of(path.parent / name, kind) for name, kind in _KEPT.items())
    return path.name in (COLLECTED, ".index.json") or (kept and not path.match("engine*.log"))


def _is_of(path: Path, kind: str) -> bool:
    """Whether it is a file that we wrote: others have a state.json too."""
    try:
        with files.open_own(path) as stream:
            return f'"type": "{kind}"'.encode() in stream.read(200)
    except (OSError, UserError):
        return False


def _by_run(logs: Sequence[str]) -> list[list[str]]:
    """Logs of one run together: of nodes, in its folder of a store; of ranks, by name."""
    runs: dict[Path, list[str]] = {}
    for log in logs:
        path = Path(log)
        if found := run_and_rank(path.name):
            run = path.parent / found[0]
        else:
            run = path.parent if _OF_NODE.fullmatch(path.name) else path
        runs.setdefault(run, []).append(log)
    return [sorted(one, key=lambda log: (len(log), log)) for one in runs.values()]


def _summary(one: FileRead) -> str:
    if one.link is not None:
        return f"{one.log}: {one.kind}, {one.link['op']} over {counted(one.link['ranks'], 'rank')}"
    if one.proposal:
        return (
            f"{one.log}: a table to be mapped; save what is printed, fill it in, pass it as --map"
        )
    if not one.rows:
        unread = [counted(one.book.unread, "unreadable line")] if one.book.unread else []
        why = [*one.notes, *unread] or ["'fourfold collect --help' says what is read"]
        return f"{one.log}: no run found ({'; '.join(why)})"
    parts = [f"{counted(len(one.rows), 'run')} ({one.kind})"]
    counts = {"unreadable": one.book.unread, "cut": one.book.cut}
    parts += [counted(count, f"{what} line") for what, count in counts.items() if count]
    return f"{one.log}: {', '.join(parts)}"
