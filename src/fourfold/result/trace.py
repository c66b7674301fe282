"""What a trace measured: the steps of the list as they ran, beside what was computed for them.

What a profiler's trace of our own engine tells of its run besides events.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from fourfold import files
from fourfold.errors import UserError
from fourfold.spec import RunSpec, check

How = Literal["new", "copied", "received", "view"]
MessageOp = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One step of rank 0. Live and peak bytes are of the step alone, workspaces left out on a CPU.

    `flops` and `payload_bytes` were counted as the operators ran; a payload is a whole buffer, of
    which a rank sends its share.
    """

    name: str
    seconds: float
    flops: int
    payload_bytes: int
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeasure:
    """`peaks_from`: allocator (CUDA) or ledger (live storages, CPU). `wrong` is of all ranks."""

    device: str
    torch: str
    ranks: int
    peaks_from: str
    steps: tuple[StepMeasure, ...]
    checked: int
    wrong: tuple[str, ...]


# The ledger fills these in as the pass goes on: a tensor may get its name, or be sent, later.


@dataclass(slots=True)
class TensorCount:
    """`how`: new, copied, received or view (which has no memory of its own); `named` by a module,
    else called after the operator that made it; `symbolic`: its shape as printed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    how: How
    bytes: int
    named: bool = False
    symbolic: str = ""

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class MessageCount:
    """`bytes` of the whole buffer: what is gathered, exchanged, summed or sent."""

    op: MessageOp
    group: str
    bytes: int


@dataclass(slots=True)
class StepCount:
    """One step, done `times` over: each of its numbers is of one time, memory of all. `kind`:
    product, message or attention, whichever came first. `masked_flops` are left out of `flops`:
    pairs that a causal kernel skips, which a dry run counts."""

    name: str
    formula: str = ""
    times: int = 1
    kind: str = ""
    operators: tuple[str, ...] = ()
    tensors: tuple[TensorCount, ...] = ()
    flops: int = 0
    masked_flops: int = 0
    messages: tuple[MessageCount, ...] = ()
    live_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """One layer of one rank, forward and backward, in order."""

    steps: tuple[StepCount, ...]


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


def trace_path(name: str, ranks: int = 1) -> Path:
    """Where a trace is to be written, checked before minutes of work: it replaces traces alone."""
    path = Path(name).absolute()
    rule = "must be a name that ends in .json or .json.gz"
    check.that(name.endswith((".json", ".json.gz")), "trace", name, rule)
    hint = "create it first"
    check.that(path.parent.is_dir(), "trace", name, "is in a folder that does not exist", hint)
    for file in trace_files(path, ranks):
        rule = "exists and is not a profiler's trace"
        check.that(_may_replace(file), "trace", str(file), rule, "choose another name")
    return path


def _may_replace(path: Path) -> bool:
    if not path.exists():
        return True
    import gzip  # only paid where there is a file

    try:
        with files.open_stream(path, field="trace") as plain:
            stream = gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain
            start = stream.read(4096)
    except (OSError, EOFError, UserError):
        return False
    return not start or b'"schemaVersion"' in start


def trace_files(path: Path, ranks: int) -> list[Path]:
    """Each rank writes its own."""
    return [path] if ranks == 1 else [numbered(path, f"rank{rank}") for rank in range(ranks)]


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
