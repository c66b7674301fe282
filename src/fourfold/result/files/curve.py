"""The curve of a training: one JSON line per step with its own crc32, appended; no step appears
twice. A line that can't be believed is set aside when the curve is next rewritten.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.files import stored
from fourfold.spec import codec, texts

METRICS_FILE = "metrics.jsonl"
_UNREADABLE = ".unreadable"
# The last lines of a long file, for a look at where it stands.
_TAIL_BYTES = 4096
_MAX_BYTES = 2**31
_SUM = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\Z')


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step, counted from 1; `tokens` and `sequences` are those of all steps so far.

    `loss` is the mean over targets; `router_loss` what routers of experts add to it for balance,
    None without experts. `grad_norm` is before clipping, None where it overflowed and the step was
    skipped.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    sequences: int
    step_s: float
    tokens_per_s: float
    grad_norm: float | None = None
    mfu_pct: float | None = None
    router_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in order, each with its line; `bad`: lines that are none; `ends_bad`: one of them may
    be of a later step than the last point."""

    points: tuple[Point, ...] = ()
    lines: tuple[bytes, ...] = ()
    bad: tuple[bytes, ...] = ()
    ends_bad: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """Steps that were dropped, and lines that were set aside (in `aside`)."""

    steps: int = 0
    unreadable: int = 0
    aside: Path | None = None


def lines(points: Iterable[Point]) -> str:
    return "".join(f"{_line(point)}\n" for point in points)


def _line(point: Point) -> str:
    """A skipped step has its norm too, as null: every line has the same columns."""
    plain: dict[str, Any] = codec.encode(point)
    plain = plain if "grad_norm" in plain else plain | {"grad_norm": None}
    text = json.dumps(plain)[:-1]
    return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}'


def _point(line: bytes) -> Point | None:
    """None for what is no line of a curve, or has changed since it was written."""
    match = _SUM.search(line)
    if match is not None:
        body = line[: match.start()]
        if f"{zlib.crc32(body):08x}".encode() != match[1]:
            return None
        line = body + b"}"
    try:
        point = codec.decode(Point, texts.parse_json(line.decode()))
    except ValueError:  # a UserError is one, and so is what is no UTF-8
        return None
    return point if point.step > 0 and point.step_s >= 0 else None


def parse(path: Path) -> Curve:
    """All there is. Only a newline ends a line."""
    if not path.exists():
        return Curve()
    points: list[Point] = []
    good: list[bytes] = []
    bad: list[bytes] = []
    ends_bad = False
    for line in stored.read_bytes(path, _MAX_BYTES).split(b"\n"):
        if not line:
            continue
        point = _point(line)
        if point is None or (points and point.step <= points[-1].step):
            bad.append(line)
            ends_bad = True
            continue
        points.append(point)
        good.append(line)
        ends_bad = False
    return Curve(tuple(points), tuple(good), tuple(bad), ends_bad)


def cut(path: Path, step: int) -> Cut:
    """Drop what came after `step`, since it will be computed again, and set aside bad lines."""
    curve = parse(path)
    pairs = zip(curve.points, curve.lines, strict=True)
    lines = [line for point, line in pairs if point.step <= step]
    aside = path.with_name(path.name + _UNREADABLE)
    if curve.bad:
        with stored.appending(aside) as stream:
            stream.write(b"".join(line + b"\n" for line in curve.bad))
            stream.flush()
            os.fsync(stream.fileno())
    if curve.bad or len(lines) < len(curve.lines):
        files.write_bytes(path, b"".join(line + b"\n" for line in lines), own=True)
    dropped = len(curve.lines) - len(lines)
    return Cut(dropped, len(curve.bad), aside if curve.bad else None)


def last(path: Path) -> Point | None:
    """The newest whole line, without reading the file from its start."""
    try:
        with stored.opened(path) as (stream, size):
            stream.seek(max(0, size - _TAIL_BYTES))
            tail = stream.read(_TAIL_BYTES) or b""
    except UserError:
        return None
    whole = tail.rpartition(b"\n")[0].rpartition(b"\n")[2]
    return _point(whole) if whole else None
