"""Seconds of one layer and one micro batch on one rank: a fold over its operations (cost/ops)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op
from fourfold.cost.step.cpu_rates import rates_of
from fourfold.cost.step.rates import Rates

# Parts of a layer's time by kind of operation, of messages by axis.
PART_OF = {
    "product": "gemm", "grouped product": "gemm", "attention": "attention", "norm": "elementwise",
    "elementwise": "elementwise", "cast": "elementwise", "copy": "elementwise", "tp": "tp_comm",
    "cp": "cp_comm", "shard": "fsdp_comm", "ep": "ep_comm", "etp": "ep_comm", "host": "host",
}  # fmt: skip
_ZERO: Floats = np.zeros(())


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer and one micro batch; `total` is what the parts become together."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    recompute: Floats
    tp_comm: Floats
    cp_comm: Floats
    ep_comm: Floats
    fsdp_comm: Floats
    host: Floats
    total: Floats
    launch_ratio: Floats  # the host's time to launch it against the device's to run it


def part_of(op: Op) -> str:
    return PART_OF[op.axis.partition(" ")[0] if op.kind == "collective" else op.kind]


def sums(ops: Iterable[Op], rates: Rates) -> dict[str, Floats]:
    """Seconds by part, and of what is computed again, if nothing ran beside anything else."""
    found = dict.fromkeys((*PART_OF.values(), "recompute"), _ZERO)
    for op in ops:
        seconds = rates.seconds(op)
        found[part_of(op)] = found[part_of(op)] + seconds
        if op.phase == "forward":
            found["recompute"] = found["recompute"] + op.again * seconds
    return found


def ops_s(ops: Iterable[Op], rates: Rates) -> Floats:
    """Seconds of operations that wait for each other, with what is computed again."""
    return sum(((1.0 + op.again) * rates.seconds(op) for op in ops), _ZERO)


def layer_times(c: Columns, coef: Coefficients, *, micro: Floats) -> LayerTimes:
    """Everything one layer does for one micro batch. What ZeRO-3 gathers travels beside it, and a
    GPU runs while its host launches; on a CPU each waits for the other."""
    rates = rates_of(c, coef)
    alone = sums(decoder_layer(c, micro), rates)
    move, launch = alone.pop("fsdp_comm"), alone.pop("host")
    busy = sum(alone.values(), _ZERO)
    gathered, total = rates.together(busy, move, launch)
    return LayerTimes(
        **alone,
        fsdp_comm=gathered - busy,
        host=total - gathered,
        total=total,
        launch_ratio=launch / gathered,
    )
