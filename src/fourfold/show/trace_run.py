"""How is a measured trace shown? Computed beside measured, step by step; a layer in two halves.

Memory is compared without the matrix library's workspace on a CPU, which holds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.cost.trace.steps import Program
from fourfold.cost.trace.walk import StepRow
from fourfold.result.trace import StepMeasure, TraceMeasure
from fourfold.show.table import render
from fourfold.show.trace import show_bytes
from fourfold.spec import codec

_HALVES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Pair:
    """One step, or one half of a layer: what was computed and what was measured."""

    name: str
    flops_rank: int
    live_bytes: int
    peak_bytes: int
    measured: StepMeasure


def pairs(program: Program, rows: Sequence[StepRow], measured: TraceMeasure) -> list[Pair]:
    if program.kind != "layer":
        return [
            Pair(row.name, row.flops_rank, row.live_bytes, row.step_peak_bytes, step)
            for row, step in zip(rows, measured.steps, strict=True)
        ]
    first_back = next(i for i, row in enumerate(rows) if row.name == "gradient")
    halves = (rows[:first_back], rows[first_back:])
    return [
        Pair(
            name,
            sum(row.flops_rank for row in half),
            half[-1].live_bytes,
            max(row.step_peak_bytes for row in half),
            step,
        )
        for name, half, step in zip(_HALVES, halves, measured.steps, strict=True)
    ]


def off_pct(pair: Pair) -> float:
    """Computed peak against measured, in percent."""
    return 100.0 * (pair.peak_bytes / pair.measured.peak_bytes - 1.0)


def text(found: Sequence[Pair], measured: TraceMeasure, style: str) -> str:
    cells = [
        [
            pair.name,
            f"{1e3 * pair.measured.seconds:.3f}",
            f"{pair.flops_rank / pair.measured.seconds / 1e12:.3g}" if pair.flops_rank else "-",
            show_bytes(pair.live_bytes),
            show_bytes(pair.measured.live_bytes),
            show_bytes(pair.peak_bytes),
            show_bytes(pair.measured.peak_bytes),
            f"{off_pct(pair):+.2f}",
        ]
        for pair in found
    ]
    heads = ["step", "ms", "TFLOP/s", "live", "measured", "peak", "measured", "off %"]
    return f"{render(heads, cells, style)}\n\n{verdict(measured)}"


def verdict(measured: TraceMeasure) -> str:
    ranks = "1 rank" if measured.ranks == 1 else f"{measured.ranks} ranks"
    where = f"{ranks} on {measured.device}, torch {measured.torch}"
    lines = [*(f"differs: {one}" for one in measured.wrong)]
    state = f"{len(measured.wrong)} differences" if measured.wrong else "all equal"
    what = (
        f"{measured.checked:,} tensors checked for shape and bytes, every step for bytes held and "
        "sent"
        if measured.checked
        else "bytes sent forward and backward checked on every rank"
    )
    lines.append(f"{what}: {state}")
    left_out = ", workspace left out" if measured.peaks_from == "ledger" else ""
    lines.append(f"{where}; step peaks of rank 0 from the {measured.peaks_from}{left_out}")
    return "\n".join(lines)


def plain(found: Sequence[Pair], measured: TraceMeasure) -> dict[str, Any]:
    data = codec.encode(measured)
    for step, pair in zip(data["steps"], found, strict=True):
        step |= {
            "computed_flops": pair.flops_rank,
            "computed_live_bytes": pair.live_bytes,
            "computed_peak_bytes": pair.peak_bytes,
            "peak_off_pct": off_pct(pair),
        }
    return data
