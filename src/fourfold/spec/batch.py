"""How much goes into a step? Sequence length in tokens, batches in sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fourfold.errors import UserError
from fourfold.spec import check

MAX_RAMP_STAGES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Batch ramp-up: from `start` by `increment` sequences, over `samples` sequences in all."""

    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        check.whole(start=self.start, increment=self.increment, samples=self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`micro_batch` need not divide the share of a data-parallel rank; 0 means 'auto'."""

    seq_len: int
    micro_batch: int = 1
    global_batch: int = 1
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        check.whole(1, 2**32, seq_len=self.seq_len, global_batch=self.global_batch)
        check.whole(0, 2**32, micro_batch=self.micro_batch)
        if self.ramp is None:
            return
        if self.ramp.start > self.global_batch:
            raise UserError(
                f"must not exceed global_batch={self.global_batch}",
                field="ramp.start",
                value=self.ramp.start,
            )
        if (self.global_batch - self.ramp.start) % self.ramp.increment:
            raise UserError(
                f"must divide global_batch - start = {self.global_batch - self.ramp.start}",
                field="ramp.increment",
                value=self.ramp.increment,
            )
        if (self.global_batch - self.ramp.start) // self.ramp.increment > MAX_RAMP_STAGES:
            raise UserError(
                f"makes more than {MAX_RAMP_STAGES} stages",
                field="ramp.increment",
                value=self.ramp.increment,
                way_out="choose a larger increment",
            )

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
        """(global batch, sequences at that size) of each ramp stage; 0 in the last one: open."""
        if self.ramp is None or self.ramp.start == self.global_batch:
            return ((self.global_batch, 0),)
        sizes = range(self.ramp.start, self.global_batch, self.ramp.increment)
        each = self.ramp.samples // len(sizes)
        return (*((size, each) for size in sizes), (self.global_batch, 0))

    def global_batch_at(self, step: int) -> int:
        """Sequences of step `step` (from 0): a stage of the ramp ends with a whole step."""
        return self._reached(step)[0]

    def sequences_before(self, step: int) -> int:
        """Sequences of all steps before step `step`."""
        return self._reached(step)[1]

    def at(self, step: int) -> Batch:
        """The batch of step `step` alone, without the ramp."""
        return replace(self, global_batch=self.global_batch_at(step), ramp=None)

    def without_ramp(self) -> Batch:
        """A measurement is of one size of batch: refuses a ramp, since its steps are not alike."""
        if self.ramp is not None:
            raise UserError(
                "steps of a ramp-up differ in size, and a measurement is of one",
                field="batch.ramp",
                value=f"{self.ramp.start},{self.ramp.increment},{self.ramp.samples}",
                way_out="leave it out to measure the full batch; `fourfold train` follows it",
            )
        return self

    def _reached(self, step: int) -> tuple[int, int]:
        """(global batch at `step`, sequences before it)."""
        seen = 0
        for size, sequences in self.stages()[:-1]:
            steps = -(-sequences // size)
            if step < steps:
                return size, seen + step * size
            step -= steps
            seen += steps * size
        return self.global_batch, seen + step * self.global_batch
