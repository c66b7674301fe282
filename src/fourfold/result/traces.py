"""What a profiler's trace of our own engine tells of its run besides events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import UserError
from fourfold.spec.run import RunSpec

# Torch's own name of a step in a trace, which other tools look for; a number follows.
STEP_MARK = "ProfilerStep#"
# The entry of a Chrome trace, beside its events, that holds a TracedRun.
TRACE_KEY = "fourfold"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """`stand_in`: one rank alone, which fills buffers where its peers would send."""

    version: str
    rank: int
    spec: RunSpec
    stand_in: bool = False


def trace_path(name: str) -> Path:
    """Where a trace is to be written, checked before minutes of work."""
    path = Path(name).absolute()
    if not name.endswith((".json", ".json.gz")):
        rule = "must be a name that ends in .json or .json.gz"
        raise UserError(rule, field="trace", value=name)
    if not path.parent.is_dir():
        hint = "create it first"
        raise UserError("is in a folder that does not exist", field="trace", value=name, hint=hint)
    return path


def numbered(path: Path, word: str) -> Path:
    """One of several files: run.json.gz -> run.WORD.json.gz."""
    stem, dot, rest = path.name.partition(".json")
    return path.with_name(f"{stem}.{word}{dot}{rest}")


def trace_window(text: str) -> tuple[int, int]:
    """'A:B' -> the first and the last of the steps, numbered from 1 as in the curve."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        rule = "must be two steps A:B, the first and the last, from 1 on"
        raise UserError(rule, field="trace_steps", value=text, hint="such as 20:22")
    return int(first), int(last)
