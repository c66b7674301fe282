"""The batch of a step: sequence length in tokens, batches in sequences."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import MISSING, dataclass, replace
from functools import lru_cache
from typing import Annotated

from fourfold.errors import UserError, shorten
from fourfold.flag import flag
from fourfold.spec import check, codec, words
from fourfold.units import count_from, size_from

MAX_RAMP_STAGES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Batch ramp-up: from `start` by `increment` sequences, over `samples` sequences in all.

    Megatron's rule: each of n increments has samples / n sequences, and a step has the size that
    holds where it begins. Small increments may have no step.
    """

    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        check.whole(start=self.start, increment=self.increment, samples=self.samples)

    def __str__(self) -> str:
        return f"{self.start},{self.increment},{self.samples}"

    @classmethod
    def parse(cls, text: str) -> Ramp:
        """'192,16,9765625' -> start, increment, samples."""
        example = "write START,INCREMENT,SAMPLES, such as 192,16,9765625"
        try:
            start, increment, samples = text.split(",")
            return cls(
                start=size_from(start), increment=size_from(increment), samples=count_from(samples)
            )
        except ValueError as error:
            why = f" ({error})" if isinstance(error, UserError) else ""
            rule = f"must be three whole numbers{why}"
            raise UserError(rule, field="ramp", value=text, hint=example) from None

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> Ramp:
        if not isinstance(data, dict):
            numbers = re.findall("[0-9]+", shorten(data))  # str() of a huge number fails
            start, increment, samples = numbers if len(numbers) == 3 else ("192", "16", "9765625")
            form = f"{path}={{start={start},increment={increment},samples={samples}}}"
            hint = f'write "{form}", or --ramp {start},{increment},{samples} for plan and train'
            raise UserError("must be a table", field=path, value=data, hint=hint)
        return codec.decode_fields(cls, data, path)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Sizes in order, with the first step of each and the sequences before it."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    seen: tuple[int, ...]


@lru_cache(maxsize=64)
def _walk(ramp: Ramp | None, full: int) -> _Walk:
    """Only sizes that some step has; the last one is `full` and does not end."""
    count = (full - ramp.start) // ramp.increment if ramp else 0
    sizes: list[int] = []
    steps: list[int] = []
    before: list[int] = []
    step = seen = 0
    while ramp and (reached := seen * count // ramp.samples) < count:
        size = ramp.start + reached * ramp.increment
        sizes.append(size)
        steps.append(step)
        before.append(seen)
        end = -(-(reached + 1) * ramp.samples // count)  # the first count of the next increment
        taken = -(-(end - seen) // size)
        step += taken
        seen += taken * size
    return _Walk((*sizes, full), (*steps, step), (*before, seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`micro_batch` need not divide the share of a data-parallel rank; 0 means 'auto'."""

    seq_len: Annotated[int, size_from] = flag(
        "sequence length in tokens: 8192 or 8k (k = 1024)", "N", default=MISSING
    )
    micro_batch: Annotated[int, size_from] = flag("sequences per micro batch", "N", default=1)
    global_batch: int = flag("sequences per step, or tokens: 4M, 4Mtokens", "N", default=1)
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        check.whole(1, 2**32, seq_len=self.seq_len, global_batch=self.global_batch)
        check.whole(0, 2**32, micro_batch=self.micro_batch)
        if self.ramp is None:
            return
        start, increment = self.ramp.start, self.ramp.increment
        rule = f"must not exceed global_batch={self.global_batch}"
        check.that(start <= self.global_batch, "ramp.start", start, rule)
        grown = self.global_batch - start
        rule = f"must divide global_batch - start = {grown}"
        check.that(grown % increment == 0, "ramp.increment", increment, rule)
        rule, hint = f"gives more than {MAX_RAMP_STAGES} batch sizes", "choose a larger increment"
        check.that(grown // increment <= MAX_RAMP_STAGES, "ramp.increment", increment, rule, hint)

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> Batch:
        """Like any table, but `global_batch = "4M"` counts tokens and micro_batch may be 'auto'."""
        if isinstance(data, dict):
            data = words.tidied({"batch": data})[0]["batch"]
        return codec.decode_fields(cls, data, path)

    @property
    def tokens(self) -> int:
        return self.seq_len * self.global_batch

    def shares(self, dp: int) -> tuple[int, ...]:
        """Sequences of each data-parallel rank; the first ranks take one more if need be."""
        base, more = divmod(self.global_batch, dp)
        return tuple(base + (rank < more) for rank in range(dp))

    def micro_sizes(self, share: int) -> tuple[int, ...]:
        """48 with micro batch 11 -> 11, 11, 11, 11, 4."""
        full, rest = divmod(share, self.micro_batch)
        return (self.micro_batch,) * full + ((rest,) if rest else ())

    def micro_plan(self, dp: int) -> tuple[tuple[int, ...], ...]:
        """For each data-parallel rank the sizes of its micro batches; padding is not among them."""
        return tuple(self.micro_sizes(share) for share in self.shares(dp))

    def micro_count(self, dp: int) -> int:
        """Micro batches of the busiest data-parallel rank."""
        share = (self.global_batch + dp - 1) // dp
        return (share + self.micro_batch - 1) // self.micro_batch

    def stages(self) -> tuple[tuple[int, int], ...]:
        """(global batch, steps) of each size that a ramp really runs; 0 steps in the last: open."""
        walk = _walk(self.ramp, self.global_batch)
        lengths = (after - step for step, after in zip(walk.steps, walk.steps[1:], strict=False))
        return tuple(zip(walk.sizes, (*lengths, 0), strict=True))

    def global_batch_at(self, step: int) -> int:
        """Sequences of step `step` (from 0)."""
        return self._reached(step)[0]

    def sequences_before(self, step: int) -> int:
        return self._reached(step)[1]

    def at(self, step: int) -> Batch:
        """The batch of step `step` alone, without the ramp."""
        return replace(self, global_batch=self.global_batch_at(step), ramp=None)

    def without_ramp(self) -> Batch:
        """A measurement is of one size of batch: refuses a ramp, since its steps are not alike."""
        if self.ramp is not None:
            rule = "changes the batch size between steps; a measurement needs one size"
            hint = "omit it to measure the full batch; 'fourfold train' follows the ramp"
            raise UserError(rule, field="batch.ramp", value=str(self.ramp), hint=hint)
        return self

    def _reached(self, step: int) -> tuple[int, int]:
        """(global batch at `step`, sequences before it)."""
        walk = _walk(self.ramp, self.global_batch)
        at = bisect_right(walk.steps, step) - 1
        return walk.sizes[at], walk.seen[at] + (step - walk.steps[at]) * walk.sizes[at]
