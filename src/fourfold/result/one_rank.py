"""One rank of a large world: counted on fake tensors (a dry run), or emulated without its peers.

Bytes and FLOPs of one step. `state_bytes` + `activation_bytes` = `peak_bytes`: weights, gradients
and optimizer state, and all the rest, at the fullest moment. An emulated rank is no run of its
layout, since nothing travels between ranks, and never a row of the run store.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fourfold.spec.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Payload bytes of a step: whole tensors of collectives, messages of send and recv."""

    axis: str
    op: str
    bytes: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKind:
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
    kinds: tuple[MemoryKind, ...]
    largest: tuple[Large, ...]
    micro_batches: int
    counted_at: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorBytes:
    """Bytes under each kind of torch's caching allocator: segments of fixed size, or expandable."""

    segments: int
    expandable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A tensor that was there at the peak: the module whose forward made it, the line of the
    engine's code (both '' where neither was running), its operator and its phase."""

    bytes: int
    kind: str
    module: str
    line: str
    shape: str
    dtype: str
    op: str
    phase: str


Fit = Literal["fits", "retries", "oom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorFits:
    """Under each kind of allocator, whether a rank runs in a limit: it `fits`, it runs after cached
    memory was returned to the driver in `retries`, which take time, or it is out of memory."""

    segments: Fit
    expandable: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """A setting by the engine's own name for it, and a value as the engine writes it."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """A job as an engine would run it. Where it comes from the engine's own settings, `settings`
    are those that decided a field, by the field's path in a run ('layout.cp'), and `uncounted` are
    settings that no field has and no dry run counts, each with the value that it must have."""

    model: str
    has_experts: bool
    layout: Layout
    sharding: str
    recompute: str
    precision: str
    precision_name: str
    is_compiled: bool
    seq_len: int
    micro_batch: int
    global_batch: int
    settings: dict[str, EngineSetting] = field(default_factory=dict)
    uncounted: tuple[tuple[EngineSetting, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryRequest:
    """One rank of another engine's job, by the arguments that the engine is started with, or, where
    a user's script would start it, by the `job`; `folder` has the files of both. `limit_bytes`:
    what the allocator may reserve."""

    rank: int
    world: int
    folder: str
    arguments: tuple[str, ...]
    limit_bytes: int | None = None
    job: EngineJob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJobReply:
    """The job of an engine's own settings, or why the engine does not take them, in its words."""

    job: EngineJob | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryCount:
    """What one rank of another engine's job holds: `allocated_bytes` of tensors, rounded as the
    allocator does, and `reserved_bytes` with what it caches; kinds and tensors of its peak, and the
    highest bytes of each phase. `params`: weights of this rank's stage, before they are sharded;
    `fits` is of the request's limit."""

    rank: int
    stage: int
    params: int
    allocated_bytes: AllocatorBytes
    reserved_bytes: AllocatorBytes
    kinds: tuple[MemoryKind, ...]
    phases: tuple[MemoryKind, ...]
    peak_phase: str
    peak: tuple[LiveTensor, ...]
    num_events: int
    num_unknown_values: int
    fits: AllocatorFits | None = None
    seconds: float = 0.0
    host_bytes: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Seconds of one phase of a step, of one micro batch (or of the step, for what it has once).

    `filled_s` of them went into values that peers would have sent; they are already taken off.
    """

    name: str
    seconds: float
    filled_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A kernel timed alone: seconds and FLOPs of a call, calls of one micro batch of the stage."""

    part: str
    name: str
    makes: str
    when: str
    shape: str
    calls: int
    seconds: float
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """Where the device's time went while a forward and a backward pass were watched."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What one micro batch can't do without, measured hot: its products, its attention (without
    what is computed `again`) and the bytes of everything else, mixed in a loop. `update_bytes` are
    of a step."""

    products_s: float
    attention_s: float
    again_products_s: float
    again_attention_s: float
    moved_bytes: float
    update_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRankResult:
    """`ran` of the step's `micro_batches` were run; the rest repeats the steady ones.

    `step_s`: measured steps with `ran` micro batches, fills in them. `compute_s`: a whole step
    without fills. `phases` of one micro batch: embed, layers, head, their backwards; of the step:
    data, between, reduce, optimizer. `peak_bytes` as measured, plus what the micro batches that
    were not run would keep. `watched`: forward and backward passes that `parts` are of.
    """

    rank: int
    world: int
    stage: int
    layers: int
    micro_batches: int
    ran: int
    step_s: tuple[float, ...]
    compute_s: float
    phases: tuple[PhaseTime, ...]
    kernels: tuple[KernelTime, ...]
    update_s: float
    update_elements: int
    comm: tuple[Traffic, ...]
    flops: int
    peak_bytes: int
    reserved_bytes: int
    retries: int
    peaks_from: str
    device: str
    torch: str
    parts: tuple[DevicePart, ...] = ()
    watched: tuple[int, int] = (0, 0)
    parts_note: str = ""
    floor: Floor | None = None

    def phase(self, name: str) -> PhaseTime:
        named = (phase for phase in self.phases if phase.name == name)
        return next(named, PhaseTime(name=name, seconds=0.0))


def kernels_s(result: OneRankResult, *parts: str, when: str = "") -> float:
    """Seconds of the kernels of one micro batch alone."""
    return sum(
        kernel.calls * kernel.seconds
        for kernel in result.kernels
        if kernel.part in parts and when in ("", kernel.when)
    )


def kernels_micro_s(result: OneRankResult) -> float:
    return kernels_s(result, "attention", "mlp", "head")


def layer_s(result: OneRankResult) -> float:
    """Of one layer, forward and backward, in the engine."""
    both = result.phase("layers").seconds + result.phase("layers back").seconds
    return (both + result.phase("weights").seconds) / result.layers


def kernels_layer_s(result: OneRankResult) -> float:
    return kernels_s(result, "attention", "mlp") / result.layers


def micro_s(result: OneRankResult) -> float:
    """Of one steady micro batch, forward and backward."""
    once = ("data", "reduce", "optimizer", "once")
    return sum(phase.seconds for phase in result.phases if phase.name not in once)


def gap_pct(measured: float, alone: float) -> float:
    return 100.0 * (measured / alone - 1.0)
