"""How did a training go, step by step? One JSON line per step, appended; no step appears twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.spec import codec

METRICS_FILE = "metrics.jsonl"
# The last lines of a long file, for a look at where it stands.
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step, counted from 1; `tokens` and `sequences` are those of all steps so far.

    `grad_norm` is before clipping, None where it overflowed and the step was skipped.
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


def lines(points: Iterable[Point]) -> str:
    return "".join(json.dumps(_line(point)) + "\n" for point in points)


def _line(point: Point) -> dict[str, Any]:
    """A skipped step has its norm too, as null: every line has the same columns."""
    plain = codec.encode(point)
    return plain if "grad_norm" in plain else plain | {"grad_norm": None}


def read(path: Path) -> list[Point]:
    """All points; a last line that a kill cut short is no point."""
    if not path.exists():
        return []
    text = files.read_text(path, field="metrics")
    found = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            found.append(codec.decode(Point, codec.parse_json(line)))
        except UserError as error:
            raise error.within(f"{path} line {number}") from None
    return found


def cut(path: Path, step: int) -> int:
    """Drop what came after `step`: it will be computed again. How many steps that were."""
    points = read(path)
    kept = [point for point in points if point.step <= step]
    if path.exists():
        files.write_text(path, lines(kept), field="metrics")
    return len(points) - len(kept)


def last(path: Path) -> Point | None:
    """The newest whole line, without reading the file from its start."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            whole = stream.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return codec.decode(Point, json.loads(whole)) if whole else None
    except (OSError, ValueError):
        return None
