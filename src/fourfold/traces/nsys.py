"""NVIDIA Nsight Systems' exports (nsys export --type sqlite): kernels, calls and NVTX ranges, no
operators and no shapes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fourfold.errors import UserError
from fourfold.traces.events import MAX_NAME_CHARS, Builder, Trace

SQLITE_MAGIC = b"SQLite format 3\x00"
_PREFIX = "CUPTI_ACTIVITY_KIND_"
# SQLite itself refuses a longer value, which a generated column may make from nothing.
_MAX_VALUE_BYTES = 2**20
_MAX_STRING_CHARS = 256 * 2**20
_BLOCK_ROWS = 10_000
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


def read_nsys(path: Path) -> Trace:
    builder = Builder(path)
    try:
        base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        base.execute("PRAGMA trusted_schema=OFF")
        try:
            meta = _read(base, builder)
        finally:
            base.close()
    except sqlite3.Error as error:
        _refuse(path, f"cannot be read as SQLite ({error})")
    except UserError:  # a ValueError as well
        raise
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
    texts = dict(_string_ids(base, builder)) if "StringIds" in tables else {}

    def rows(query: str) -> Iterator[tuple[Any, ...]]:
        cursor = base.execute(query)
        while block := cursor.fetchmany(_BLOCK_ROWS):
            yield from block
            builder.count(len(block))

    query = "SELECT start, end, demangledName, streamId, correlationId FROM " + _PREFIX + "KERNEL"
    for start, end, name, stream, correlation in rows(query):
        _add(builder, "kernel", start, end, str(texts.get(name, name)), stream, correlation)
    for kind, label in (("MEMCPY", "Memcpy"), ("MEMSET", "Memset")):
        if _PREFIX + kind in tables:
            column = "copyKind" if kind == "MEMCPY" else "0"
            query = f"SELECT start, end, {column}, streamId, correlationId FROM {_PREFIX}{kind}"
            for start, end, way, stream, correlation in rows(query):
                name = f"{label} {_COPIES.get(way, '')}".strip()
                _add(builder, "kernel", start, end, name, stream, correlation)
    if f"{_PREFIX}RUNTIME" in tables:
        query = f"SELECT start, end, nameId, globalTid, correlationId FROM {_PREFIX}RUNTIME"
        for start, end, name, thread, correlation in rows(query):
            text = str(texts.get(name, name)).partition("_v")[0]
            _add(builder, "call", start, end, text, thread, correlation)
    if "NVTX_EVENTS" in tables:
        query = "SELECT start, end, text, textId FROM NVTX_EVENTS WHERE end IS NOT NULL"
        for start, end, text, number in rows(query):
            name = str(text if text is not None else texts.get(number, ""))[:MAX_NAME_CHARS]
            builder.mark(name, start / 1e3, (end - start) / 1e3)
    return _meta(base, tables)


def _string_ids(base: sqlite3.Connection, builder: Builder) -> Iterator[tuple[int, str]]:
    """Yield (id, name) of kernels, calls and ranges, long names cut."""
    cursor = base.execute(f"SELECT id, substr(value, 1, {MAX_NAME_CHARS}) FROM StringIds")
    num_chars = 0
    while block := cursor.fetchmany(_BLOCK_ROWS):
        num_chars += sum(len(str(name)) for _, name in block)
        if num_chars > _MAX_STRING_CHARS:
            raise sqlite3.Error(f"names of over {_MAX_STRING_CHARS:,} letters")
        yield from block
        builder.count(len(block))


def _add(
    builder: Builder, kind: str, start: int, end: int, name: str, thread: int, correlation: int
) -> None:
    """Add a span of nanoseconds; a builder takes microseconds."""
    name = name[:MAX_NAME_CHARS]
    builder.span(kind, start / 1e3, (end - start) / 1e3, name, thread, {"correlation": correlation})


def _meta(base: sqlite3.Connection, tables: set[str]) -> dict[str, Any]:
    if "TARGET_INFO_GPU" not in tables:
        return {}
    names = [row[0] for row in base.execute("SELECT name FROM TARGET_INFO_GPU LIMIT 1")]
    return {"deviceProperties": [{"name": name} for name in names]}
