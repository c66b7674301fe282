"""Readers of traces: what they refuse, and that no name or value leads them anywhere else."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold.errors import MachineError, UserError
from fourfold.traces import events
from fourfold.verbs import diagnose as verb

TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
KERNELS = (
    f"CREATE TABLE {TABLE} "
    "(start INT, end INT, demangledName {}, streamId INT, correlationId INT)"
)


def kernel(**fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 1, "tid": 7} | fields


def mark(**fields: Any) -> dict[str, Any]:
    return kernel(cat="user_annotation", name="ProfilerStep#0", **fields)


def steps(**fields: Any) -> list[dict[str, Any]]:
    """Events of four steps, each with an optimizer at its end."""
    return [
        kernel(ts=1000.0 * step + 10.0 * i, dur=5, name="gemm" if i < 30 else "adamw_kernel")
        | fields
        for step in range(4)
        for i in range(40)
    ]


def diagnosed(path: Path, content: bytes | list[dict[str, Any]]) -> Any:
    text = content if isinstance(content, bytes) else json.dumps({"traceEvents": content}).encode()
    path.write_bytes(text)
    return fourfold.diagnose([str(path)])


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ([kernel(dur=int("9" * 400))], "'9{40}' where a time"),
        ([kernel(), mark(dur=int("9" * 400))], "'9{40}' where a time"),
        ([kernel(), mark(ts=10**400)], "'10{39}' where a time"),
        ([kernel(), mark(ts=float("-inf"))], "'-inf' where a time"),
        ([kernel(ts=1e17 * i) for i in range(40)], r"'1e\+17' where a time"),
        (steps(dur=-5), r"negative duration \(-5 us\)"),
        ([kernel(), mark(dur=-1.0)], "negative duration"),
        ([kernel(dur=float("nan"))], "'nan' where a time"),
        (b'{"a":[' + b'{"traceEvents":[]},' * 1000 + b"1]}", r"no traceEvents \(it has a\)"),
        (b'{"traceEvents":[{"ph":"X","args":[' + b"{}," * 400_000, "event of over 1 MB"),
        (b'{"traceEvents":[{"ph":"X","args":[' + b"[]," * 400_000, "event of over 1 MB"),
        (b'{"traceEvents":[' + b"1," * 1000 + b"1]}", "events that are no objects"),
        (b"[2024-05-01] iteration 1/ 10 | loss 3.2\n" * 9, "list, but not of events.*collect"),
        (b"step 1 loss 3.2\n" * 9, "is not a trace.*collect"),
        (b'{"step": 1, "loss": 3.2}\n' * 9, "has no traceEvents.*collect"),
    ],
)
def test_trace_is_refused_with_its_reason(content, rule, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rule):
        diagnosed(tmp_path / "trace.json", content)


def test_chrome_reader_keeps_every_event_of_long_names(tmp_path: Path) -> None:
    """Several pieces whose last events begin before the part that is searched for a boundary."""
    long = [event | {"name": event["name"] + "x" * 70_000} for event in steps()]
    answer = diagnosed(tmp_path / "trace.json", long)
    assert answer.step_s == diagnosed(tmp_path / "trace.json", steps()).step_s
    assert len(answer.found.linked.kernels) == 160
    assert max(map(len, answer.found.linked.trace.texts)) == events.MAX_NAME_CHARS


def test_chrome_list_of_events_may_lack_its_end(tmp_path: Path) -> None:
    text = json.dumps(steps()).encode()
    whole = diagnosed(tmp_path / "trace.json", text).step_s
    assert diagnosed(tmp_path / "trace.json", text[:-1] + b",\n").step_s == whole
    with pytest.raises(UserError, match="within its events"):
        diagnosed(tmp_path / "trace.json", text[:-9])


@pytest.mark.parametrize(
    ("limit", "rule"),
    [
        ("_MAX_EVENTS", "over 100 events"),
        ("_MAX_KEPT", "over 100 kernels and operators"),
        ("_MAX_TEXTS", "over 100 different names"),
        ("_MAX_TEXT_CHARS", "over 100 letters in names"),
        ("_MAX_MARKS", "over 100 marks"),
    ],
)
def test_trace_beyond_a_limit_is_refused(limit, rule, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(events, limit, 100)
    many = [event | {"name": f"kernel {i}"} for i, event in enumerate(steps())]
    content = [mark(ts=float(i)) for i in range(150)] if limit == "_MAX_MARKS" else many
    with pytest.raises(UserError, match=rule):
        diagnosed(tmp_path / "trace.json", content)


def test_trace_beyond_memory_is_refused(tmp_path, monkeypatch) -> None:
    def read(path: Path) -> Any:
        raise MemoryError

    monkeypatch.setattr(verb, "read_trace", read)
    with pytest.raises(MachineError, match="more memory"):
        diagnosed(tmp_path / "trace.json", steps())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.sqlite"])
def test_pipe_is_refused_as_a_trace(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UserError, match="is not a regular file"):
            fourfold.diagnose([str(path)])


def export(path: Path, name: str = "INT", end: str = "1000 * i + 500") -> None:
    """Write an export of nsys with kernels alone."""
    with contextlib.closing(sqlite3.connect(path.parent / "made")) as base:
        base.execute(KERNELS.format(name))
        rows = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r WHERE i < 60)"
        values = f"SELECT 1000 * i, {end}, 7, i FROM r"
        columns = "(start, end, streamId, correlationId)"
        base.execute(f"INSERT INTO {TABLE} {columns} {rows} {values}")
        base.commit()
    (path.parent / "made").rename(path)


def test_nsys_name_is_no_part_of_an_address(tmp_path: Path) -> None:
    """SQLite decodes escapes of an address and obeys what stands behind its question mark."""
    path = tmp_path / "strange%41?mode=rwc#x.sqlite"
    export(path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="has no whole step"):
        fourfold.diagnose([str(path)])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    (tmp_path / "%2e%2e").mkdir()
    inner = tmp_path / "%2e%2e" / "x.sqlite"
    inner.write_bytes(b"SQLite format 3\x00" + b"x" * 200)
    path.rename(tmp_path / "x.sqlite")
    with pytest.raises(UserError, match="cannot be read as SQLite"):  # not the file one folder up
        fourfold.diagnose([str(inner)])


def test_nsys_values_out_of_bounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    export(path, end="1000 * i - 500")
    with pytest.raises(UserError, match="negative duration"):
        fourfold.diagnose([str(path)])
    export(path, name="TEXT GENERATED ALWAYS AS (hex(zeroblob(50000000)))")
    with pytest.raises(UserError, match="too big"):
        fourfold.diagnose([str(path)])


def test_gzip_of_a_trace_is_read_in_pieces(tmp_path: Path) -> None:
    text = json.dumps({"schemaVersion": 1, "traceEvents": steps(), "traceName": "x"}, indent=1)
    plain = diagnosed(tmp_path / "trace.json", text.encode())
    packed = diagnosed(tmp_path / "trace.json.gz", gzip.compress(text.encode()))
    assert (packed.step_s, packed.found.linked.trace.meta) == (
        plain.step_s,
        {"schemaVersion": 1, "traceName": "x"},
    )
