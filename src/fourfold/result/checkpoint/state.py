"""All of a checkpoint that is not a tensor, and whether it can be true."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fourfold.errors import UserError
from fourfold.spec import RunSpec, check
from fourfold.spec.train import TrainSettings
from fourfold.units import counted

# safetensors' layout, an index and a sealed state; 1 was never released.
FORMAT = 2
STATE_FILE = "state.json"
_SIZE, _SUM = re.compile(r"[0-9]{1,18}\Z"), re.compile(r"[0-9a-f]{8}\Z")
_MOST_STEPS, _LARGEST_SCALAR = 10**12, 2.0**62


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """All of a training that is not a tensor. `step`: steps done; `updates`: those that changed
    the weights, `skipped` the others (an overflow in fp16). `data` is the checksum of the tokens,
    '' for synthetic ones. `scalars` are numbers by name, as texts; `sums` the crc32 of each file.
    """

    step: int
    updates: int
    sequences: int
    spec: RunSpec
    settings: TrainSettings | None = None
    skipped: int = 0
    data: str = ""
    scalars: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    saved_at: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        rule = f"was written by another fourfold (this one reads format {FORMAT})"
        check.that(self.format == FORMAT, "format", self.format, rule, "update fourfold")
        check.whole(0, _MOST_STEPS, step=self.step, updates=self.updates, skipped=self.skipped)
        for name, text in self.scalars:
            good = 0 <= _number(text) <= _LARGEST_SCALAR
            check.that(good, name, text, "must be a number from 0 to 2^62")
        for field, texts, form in (("files", self.files, _SIZE), ("sums", self.sums, _SUM)):
            for name, text in texts:
                if form.fullmatch(text) is None:
                    raise UserError("is malformed", field=f"{field}.{name}")


def _number(text: str) -> float:
    """NaN where it is none: no comparison holds."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def disagreement(state: CheckpointState, named: int) -> str:
    """What of a state can't be true; `named`: the step in the name of its folder."""
    step, seen = state.step, state.spec.batch.sequences_before(state.step)
    if step != named:
        return f"step {step} in {STATE_FILE}, {named} in the folder's name"
    if state.updates + state.skipped != step:
        seen_steps = f"{counted(state.updates, 'update')} and {state.skipped} skipped"
        return f"{seen_steps} make not {counted(step, 'step')}"
    if state.sequences != seen:
        return f"{counted(state.sequences, 'sequence')}, where {counted(step, 'step')} have {seen}"
    listed = {name for name, _ in state.files}
    if listed != {name for name, _ in state.sums}:
        return "not every file has a size and a checksum"
    return ""
