"""Documents of training text: a file is one, or, in .jsonl and .parquet, each of its rows is."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fourfold import door
from fourfold.errors import UserError, install
from fourfold.spec import check
from fourfold.spec.tokens import chunks

# A document of 256 MiB is a mistake: of a file without line ends, or one long string.
_MOST_BYTES = 2**28
_ROWS_AT_ONCE = 256


def documents(name: str, field: str, count: Callable[[int], object]) -> Iterator[Iterator[bytes]]:
    """The bytes of each document in pieces; `count` is told how many bytes were read."""
    ending = Path(name).suffix.lower()
    if ending in (".jsonl", ".ndjson"):
        texts = _of_lines(name, field, count)
    elif ending == ".parquet":
        texts = _of_parquet(name, field, count)
    else:
        yield _counted(name, count)
        return
    for text in texts:
        yield iter([text])


def _counted(name: str, count: Callable[[int], object]) -> Iterator[bytes]:
    for content in chunks(name):
        yield content
        count(len(content))


def _of_lines(name: str, field: str, count: Callable[[int], object]) -> Iterator[bytes]:
    rest, number = b"", 0
    for content in _counted(name, count):
        *lines, rest = (rest + content).split(b"\n") if b"\n" in content else (rest + content,)
        rule = f"has a line of more than {_MOST_BYTES >> 20} MiB"
        check.that(len(rest) <= _MOST_BYTES, "file", name, rule, "is this JSON lines?")
        for line in lines:
            number += 1
            yield from _of_line(line, name, f"line {number}", field)
    yield from _of_line(rest, name, f"line {number + 1}", field)


def _of_line(line: bytes, name: str, place: str, field: str) -> Iterator[bytes]:
    if not line.strip():
        return
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        rule = f"is not JSON ({error})"
        raise UserError(rule, field=place, source=name, hint="write one object a line") from None
    yield _text(found.get(field) if isinstance(found, dict) else None, name, place, field, found)


def _of_parquet(name: str, field: str, count: Callable[[int], object]) -> Iterator[bytes]:
    try:
        arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ModuleNotFoundError:
        rule, hint = "needs the package 'pyarrow', which is not installed", install("pyarrow")
        raise UserError(rule, field="file", value=name, hint=hint) from None
    try:
        with parquet.ParquetFile(name) as file:
            columns = file.schema_arrow.names
            hint = f"columns: {', '.join(columns[:20])}; name one with --text-field"
            check.that(field in columns, "file", name, f"has no column '{field}'", hint)
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field]):
                count(batch.nbytes)
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _text(text, name, f"row {row}", field, {})
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"cannot be read ({error})", field="file", value=name) from None


def _text(text: Any, name: str, place: str, field: str, found: Any) -> bytes:
    if not isinstance(text, str):
        names = ", ".join(map(str, [*found][:20])) if isinstance(found, dict) else ""
        hint = f"fields: {names}; name one with --text-field" if names else ""
        raise UserError(f"has no text '{field}'", field=place, source=name, hint=hint)
    try:
        door.check_text(text)
    except UserError as error:
        raise error.within(place).inside(name) from None
    return text.encode()
