"""What would a rank hold, compute and send? Counted by running the engine on fake tensors.

What a GPU holds that no tensor shows is named, with a source each.

Bytes and FLOPs of one step of one rank. `state_bytes` + `activation_bytes` = `peak_bytes`: weights,
gradients and optimizer state, and all the rest, at the fullest moment of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fourfold.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Payload bytes of a step: whole tensors of collectives, messages of send and recv."""

    axis: str
    op: str
    bytes: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Bytes of one kind at the peak: parameters, gradients, optimizer, gathered, activations."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A tensor that was there at the peak, what made it and in which phase; '' is not known."""

    bytes: int
    kind: str
    shape: str
    dtype: str
    op: str
    phase: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCount:
    """`params` are the weights this rank's stage and tp shard hold, before dp shards them.

    `micro_batches` of the step; `counted_at` the two smaller numbers that were really run when the
    rest follows a straight line (empty: all were run).
    """

    stage: int
    rank: int
    params: int
    state_bytes: int
    activation_bytes: int
    peak_bytes: int
    peak_phase: str
    flops: int
    comm: tuple[Traffic, ...]
    kinds: tuple[Kind, ...]
    largest: tuple[Large, ...]
    micro_batches: int
    counted_at: tuple[int, ...] = ()
    seconds: float = 0.0


def extrapolated(few: RankCount, more: RankCount, micro_batches: int) -> RankCount:
    """The count at `micro_batches` from two smaller ones: each quantity is a straight line.

    Exact for FLOPs and traffic once the pipeline is full, since further micro batches are alike;
    for memory too, with slope 0 under 1f1b but for the tokens kept.
    """
    step = more.micro_batches - few.micro_batches
    ahead = micro_batches - more.micro_batches
    assert step > 0
    assert ahead >= 0

    def at(first: int, second: int) -> int:
        return second + (second - first) * ahead // step

    before = {(traffic.axis, traffic.op): traffic for traffic in few.comm}
    pairs = [(before[traffic.axis, traffic.op], traffic) for traffic in more.comm]
    state = at(few.state_bytes, more.state_bytes)
    peak = at(few.peak_bytes, more.peak_bytes)
    grown = {"activations": peak - more.peak_bytes}
    return replace(
        more,
        state_bytes=state,
        activation_bytes=peak - state,
        peak_bytes=peak,
        flops=at(few.flops, more.flops),
        comm=tuple(
            replace(new, bytes=at(old.bytes, new.bytes), calls=at(old.calls, new.calls))
            for old, new in pairs
        ),
        kinds=tuple(
            replace(kind, bytes=kind.bytes + grown.get(kind.name, 0)) for kind in more.kinds
        ),
        micro_batches=micro_batches,
        counted_at=(few.micro_batches, more.micro_batches),
        seconds=few.seconds + more.seconds,
    )


# On an H200 with torch 2.11 and NCCL 2.28, device memory in use beyond what torch's allocator had
# reserved: 0.649 GB for the context, 0.735 GB once matrix products and attention had run; the first
# communicator added 0.585 GB, a second 0.409 GB (each of one rank).
CONTEXT_BYTES = 735 * 10**6
FIRST_COMMUNICATOR_BYTES = 585 * 10**6
COMMUNICATOR_BYTES = 409 * 10**6
# torch's notes on CUDA: one workspace for each cuBLAS handle, 32 MiB from Hopper on.
WORKSPACE_BYTES = 32 * 2**20
# The same runs, five models of 1 to 7 billion parameters: reserved over allocated at the peak.
# Cached memory is given back before an allocation fails, so it is told and not added.
RESERVED_RATIO = (1.18, 1.28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    name: str
    bytes: int
    source: str


def unseen_parts(spec: RunSpec) -> tuple[Unseen, ...]:
    """Of one rank on a GPU; the peak of its tensors is not in here."""
    count = communicators(spec)
    parts = [
        Unseen(
            name="CUDA context and kernels",
            bytes=CONTEXT_BYTES,
            source="measured on an H200, torch 2.11",
        ),
        Unseen(name="cuBLAS workspace", bytes=WORKSPACE_BYTES, source="torch's notes on CUDA"),
    ]
    if count:
        size = FIRST_COMMUNICATOR_BYTES + (count - 1) * COMMUNICATOR_BYTES
        source = "measured on an H200, NCCL 2.28: 0.585 GB for the first, 0.409 GB for each other"
        parts.append(Unseen(name=f"{count} NCCL communicators", bytes=size, source=source))
    return tuple(parts)


def communicators(spec: RunSpec) -> int:
    """Groups of more than one rank that a rank of the engine belongs to, the world among them."""
    layout = spec.layout
    tied_ends = layout.pp > 1 and spec.model.tied
    sizes = (layout.tp, layout.cp, layout.pp, layout.dp * layout.cp, layout.shard * layout.cp)
    return sum(size > 1 for size in (*sizes, layout.replicate, layout.world)) + tied_ends
