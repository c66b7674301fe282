"""dryrun: what any rank of any world would hold, compute and send, counted by the engine itself
without hardware: every operator and collective of a step happens on tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, progress
from fourfold.launch.local import answers
from fourfold.launch.permit import core_count
from fourfold.result.job import Job, Limits
from fourfold.result.one_rank import RankCount, unseen_parts
from fourfold.search.legal import require_legal
from fourfold.spec import codec
from fourfold.spec.layout import AXES
from fourfold.spec.run import RunSpec

_LIMITS = Limits(start_s=1800.0, step_s=1800.0)


@dataclass(frozen=True, slots=True)
class DryRun:
    """Counts of the ranks asked for; `unseen` is what a GPU holds and a dry run cannot see."""

    spec: RunSpec
    counts: tuple[RankCount, ...]

    @property
    def worst(self) -> RankCount:
        return max(self.counts, key=lambda count: count.peak_bytes)

    @property
    def unseen(self) -> list[Any]:
        return list(unseen_parts(self.spec))

    @property
    def peak_with_unseen_bytes(self) -> int:
        return self.worst.peak_bytes + sum(part.bytes for part in self.unseen)

    @property
    def extrapolation(self) -> str:
        first = self.counts[0]
        if not first.counted_at:
            return ""
        few, more = first.counted_at
        return (
            f"counted at {few} and {more} micro batches, extrapolated linearly "
            f"to the {first.micro_batches} of the step"
        )

    def moved_bytes(self, count: RankCount, axis: str) -> int:
        return sum(traffic.bytes for traffic in count.comm if traffic.axis == axis)

    def plain(self) -> dict[str, Any]:
        return {
            "model": self.spec.model.name,
            "layout": str(self.spec.layout),
            "gpus": self.spec.gpus,
            "stages": [codec.encode(count) for count in self.counts],
            "worst_stage": self.worst.stage,
            "unseen": [codec.encode(part) for part in self.unseen],
            "unseen_bytes": sum(part.bytes for part in self.unseen),
            "peak_with_unseen_bytes": self.peak_with_unseen_bytes,
            "extrapolation": self.extrapolation,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One for each rank; bytes of its collectives by axis."""
        head = {"model": self.spec.model.name, "layout": str(self.spec.layout)}
        return [
            head
            | {n: v for n, v in codec.encode(one).items() if not isinstance(v, list | dict)}
            | {f"{axis}_bytes": self.moved_bytes(one, axis) for axis in (*AXES, "ep")}
            for one in self.counts
        ]


def dryrun(
    spec: RunSpec, *, rank: int | None = None, stages: bool = False, on_event: OnEvent = ignore
) -> DryRun:
    """Of rank 0 or `rank`, or of one rank of every pipeline stage; cores share the work."""
    ranks = [rank or 0]
    if stages:
        ranks = [stage * spec.layout.stride("pp") for stage in range(spec.layout.pp)]
    elif not 0 <= ranks[0] < spec.gpus:
        raise UserError(f"must be from 0 to {spec.gpus - 1}", field="rank", value=rank)
    require_legal(spec)
    job = Job(
        job="dryrun",
        # Variables of the ranks change no count.
        specs=(replace(spec, device="cpu", policy=replace(spec.policy, env=())),),
        ranks=min(len(ranks), core_count()),
        options=(("ranks", ",".join(map(str, ranks))),),
        limits=_LIMITS,
    )
    return DryRun(spec, tuple(answers(job, RankCount, ranks, progress(on_event))))
