"""What did a trace measure? Steps of the list as they ran, beside what was computed for them."""

from __future__ import annotations

from dataclasses import dataclass


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
