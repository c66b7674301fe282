"""NVIDIA Nsight Systems' exports (nsys export --type sqlite): kernels, calls and NVTX ranges, no
operators and no shapes."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, NoReturn

from fourfold.errors import UserError
from fourfold.traces.events import Builder, Trace

SQLITE_MAGIC = b"SQLite format 3\x00"
_PREFIX = "CUPTI_ACTIVITY_KIND_"
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


def read_nsys(path: Path) -> Trace:
    builder = Builder(path)
    try:
        base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            meta = _read(base, builder)
        finally:
            base.close()
    except sqlite3.Error as error:
        _refuse(path, f"cannot be read as SQLite ({error})")
    except (TypeError, ValueError, OverflowError) as error:
        _refuse(path, f"has a value of another kind than nsys writes ({error})")
    return builder.trace(meta)


def _refuse(path: Path, rule: str) -> NoReturn:
    hint = "write it again: nsys export --type sqlite FILE.nsys-rep"
    raise UserError(rule, field="trace", value=str(path), hint=hint) from None


def _read(base: sqlite3.Connection, builder: Builder) -> dict[str, Any]:
    tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if f"{_PREFIX}KERNEL" not in tables:
        named = ", ".join(sorted(tables)[:4])
        raise sqlite3.Error(f"no kernels of nsys; its tables: {named or 'none'}")
    texts = dict(base.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    kernels = "SELECT start, end, demangledName, streamId, correlationId FROM " + _PREFIX + "KERNEL"
    for start, end, name, stream, correlation in base.execute(kernels):
        _add(builder, "kernel", start, end, str(texts.get(name, name)), stream, correlation)
    for kind, label in (("MEMCPY", "Memcpy"), ("MEMSET", "Memset")):
        if _PREFIX + kind in tables:
            column = "copyKind" if kind == "MEMCPY" else "0"
            asked = f"SELECT start, end, {column}, streamId, correlationId FROM {_PREFIX}{kind}"
            for start, end, way, stream, correlation in base.execute(asked):
                name = f"{label} {_COPIES.get(way, '')}".strip()
                _add(builder, "kernel", start, end, name, stream, correlation)
    if f"{_PREFIX}RUNTIME" in tables:
        asked = f"SELECT start, end, nameId, globalTid, correlationId FROM {_PREFIX}RUNTIME"
        for start, end, name, thread, correlation in base.execute(asked):
            text = str(texts.get(name, name)).partition("_v")[0]
            _add(builder, "call", start, end, text, thread, correlation)
    if "NVTX_EVENTS" in tables:
        asked = "SELECT start, end, text, textId FROM NVTX_EVENTS WHERE end IS NOT NULL"
        for start, end, text, number in base.execute(asked):
            name = str(text if text is not None else texts.get(number, ""))
            builder.mark(name, start / 1e3, end / 1e3)
    return _meta(base, tables)


def _add(
    builder: Builder, kind: str, start: int, end: int, name: str, thread: int, correlation: int
) -> None:
    """Nanoseconds in, microseconds kept."""
    builder.span(kind, start / 1e3, end / 1e3, name, thread, {"correlation": correlation})


def _meta(base: sqlite3.Connection, tables: set[str]) -> dict[str, Any]:
    if "TARGET_INFO_GPU" not in tables:
        return {}
    names = [row[0] for row in base.execute("SELECT name FROM TARGET_INFO_GPU LIMIT 1")]
    return {"deviceProperties": [{"name": name} for name in names]}
