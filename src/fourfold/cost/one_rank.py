"""What does the planner say of one stage, and what is a step when its compute was measured?

Seconds of a step, bytes of a rank. Compute is measured on one rank without peers; traffic, the
bubble and the waiting of many hosts are the planner's, with the cluster's links. The stages beside
the measured one are taken to be as slow as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.memory import own_engine as own_memory
from fourfold.cost.step.attention import attention_s
from fourfold.cost.step.context import context_s
from fourfold.cost.step.estimate import gradient_s
from fourfold.cost.step.gemm import Knobs
from fourfold.cost.step.host import floor, host_layer_s
from fourfold.cost.step.layer import fsdp_s, head_s, layer_times
from fourfold.cost.step.traffic import half_collective_s, p2p_rate
from fourfold.spec.words import SCHEDULES

COMPUTE = ("layers", "head", "embedding", "optimizer", "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of one run: its layers, and whether it holds the ends."""

    stage: int
    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The planner's compute of the stage: of one layer and micro batch, and of a step by part."""

    layer_s: float
    parts: dict[str, float]
    peak_bytes: float

    @property
    def compute_s(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A step whose compute was measured; `parts` sum to `step_s`."""

    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())


def predicted(c: Columns, knobs: Knobs, stage: Stage) -> Predicted:
    """What the planner thinks this stage computes, without any traffic. `c` holds one run."""
    layer = layer_times(c, knobs, micro=c.micro)
    tokens = c.micro * c.seq / c.cp
    forward_tp, forward_cp = _recomputed_traffic(c, knobs, layer.tp_comm)
    repeated = layer.recompute - c.full_ckpt * (forward_tp + forward_cp)
    busy = layer.gemm + layer.attention + layer.elementwise + repeated
    layer_s = _one(floor(busy, host_layer_s(c, knobs)))
    slots = _slots(c)
    params = _one(stage.layers * layer.params + (stage.first + stage.last) * _table(c))
    shards = np.where(c.zero >= 1, c.shard, 1.0)
    parts = {
        "layers": slots * stage.layers * layer_s,
        "head": slots * _one(head_s(c, knobs, tokens=tokens)) if stage.last else 0.0,
        "embedding": slots * _one(12.0 * tokens * c.hidden / c.hbm) if stage.first else 0.0,
        "optimizer": _one(45.0 * params / (c.hbm * shards)),
        "fixed": float(knobs["fixed_s"]),
    }
    return Predicted(layer_s=layer_s, parts=parts, peak_bytes=_peak_bytes(c, stage))


def joined(
    c: Columns, knobs: Knobs, stage: Stage, *, compute_s: float, layer_s: float, micro_s: float
) -> Joined:
    """The step from measured seconds: of the whole step, of one layer and of one micro batch."""
    layer = layer_times(c, knobs, micro=c.micro)
    forward_tp, forward_cp = _recomputed_traffic(c, knobs, layer.tp_comm)
    tp = _one(layer.tp_comm + c.full_ckpt * forward_tp)
    cp = _one(layer.cp_comm + c.full_ckpt * forward_cp)
    busy = layer_s + tp + cp
    fsdp = _one(fsdp_s(c, knobs, params=layer.params, busy=np.array([busy]))) - busy
    tokens = c.micro * c.seq / c.cp
    ends = 2.0 * half_collective_s(
        c, knobs, 2.0 * tokens * c.hidden, size=c.tp, stride=np.ones_like(c.tp)
    )
    slots = _slots(c)
    parts = {
        "compute, measured": compute_s,
        "tp": slots * (stage.layers * tp + (_one(ends) if stage.first else 0.0)),
        "cp": slots * stage.layers * cp,
        "dp": slots * stage.layers * fsdp + _gradients_s(c, knobs, stage, stage.layers * busy),
        "pp": slots * _handover_s(c, knobs, tokens),
    }
    slot_s = micro_s + (sum(parts.values()) - compute_s) / slots
    parts["bubble"] = (_one(c.pp) - 1.0) * slot_s * _kept_bubble(c)
    nodes = max(1.0, _one(c.gpus / c.node))
    waits = slots * float(knobs["noise_s"]) * nodes**0.75 if nodes > 1 and _one(c.pp) > 1 else 0.0
    jitter = (sum(parts.values()) + waits) * float(knobs["jitter"]) * float(np.log2(nodes))
    return Joined(parts=parts | {"jitter": waits + jitter})


def _one(value: Any) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def _slots(c: Columns) -> float:
    """Micro batches of the busiest rank; a smaller last one counts its share."""
    return _one(np.ceil(c.batch / c.dp) / c.micro)


def _table(c: Columns) -> float:
    return _one(c.vocab * c.hidden / c.tp)


def _recomputed_traffic(c: Columns, knobs: Knobs, tp_comm: Any) -> tuple[Any, Any]:
    """Forward parts of the layer's traffic, which a recomputed layer sends again."""
    forward_tp = tp_comm * 4.0 / np.where(c.sp > 0, 9.0, 8.0)
    attention, _ = attention_s(c, knobs, micro=c.micro)
    tokens = c.micro * c.seq / c.cp
    return forward_tp, context_s(c, knobs, tokens=tokens, attention=attention, backward=False)


def _gradients_s(c: Columns, knobs: Knobs, stage: Stage, window_s: float) -> float:
    layer = layer_times(c, knobs, micro=c.micro)
    params = stage.layers * layer.params + (stage.first + stage.last) * _table(c)
    return _one(gradient_s(c, knobs, params=params, window=np.array([window_s])))


def _handover_s(c: Columns, knobs: Knobs, tokens: Any) -> float:
    """Of one micro batch between stages, both ways."""
    moved = 2.0 * tokens * c.hidden / np.where(c.sp > 0, c.tp, 1.0)
    both = 2.0 * moved / p2p_rate(c, knobs, c.gpus / c.pp) + knobs["micro_s"]
    return _one(np.where(c.pp > 1, c.vpp * both, 0.0))


def _kept_bubble(c: Columns) -> float:
    zero_bubble = c.schedule == SCHEDULES.index("zero-bubble")
    return _one(np.where(zero_bubble, 1.0 / 3.0, 1.0 / np.maximum(1.0, c.vpp)))


def _peak_bytes(c: Columns, stage: Stage) -> float:
    """Tensors of this stage at its peak: without context, communicators and workspaces."""
    micros = np.ceil(c.batch / (c.dp * c.micro))
    first, middle, last = own_memory.stages(c, micros)
    usual = first if stage.first else last if stage.last else middle
    between = usual.flight + 1.0 - stage.stage  # of the stages between, each has one less
    flight = usual.flight if stage.first or stage.last else np.maximum(last.flight, between)
    own = replace(usual, layers=usual.layers * 0.0 + stage.layers, flight=flight)
    return _one(own_memory.stage_peak(c, own, micros).total)
