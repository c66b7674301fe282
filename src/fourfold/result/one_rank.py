"""What did one rank of a large world do, with real kernels and without its peers? Seconds, bytes.

An emulated rank is no run of its layout: nothing travels between ranks. It is an answer of its own
kind, never a row of the run store.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.result.dryrun import Traffic


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


def bare_s(result: OneRankResult, *parts: str, when: str = "") -> float:
    """Seconds of the kernels of one micro batch alone."""
    return sum(
        kernel.calls * kernel.seconds
        for kernel in result.kernels
        if kernel.part in parts and when in ("", kernel.when)
    )


def layer_s(result: OneRankResult) -> float:
    """Of one layer, forward and backward, in the engine."""
    both = result.phase("layers").seconds + result.phase("layers back").seconds
    return (both + result.phase("weights").seconds) / result.layers


def bare_layer_s(result: OneRankResult) -> float:
    return bare_s(result, "attention", "mlp") / result.layers


def micro_s(result: OneRankResult) -> float:
    """Of one steady micro batch, forward and backward."""
    once = ("data", "reduce", "optimizer", "once")
    return sum(phase.seconds for phase in result.phases if phase.name not in once)


def gap_pct(measured: float, alone: float) -> float:
    return 100.0 * (measured / alone - 1.0)
