"""What does the planner say of one stage, and what is a step when its compute was measured?

Seconds of a step, bytes of a rank. Compute is measured on one rank without peers; traffic, the
bubble and the waiting of many hosts are the planner's, with the cluster's links. The stages beside
the measured one are taken to be as slow as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.memory import own_engine as own_memory
from fourfold.cost.step.estimate import (
    embedding_comm_s,
    embedding_s,
    fixed_s,
    gradient_s,
    handover_s,
    optimizer_s,
    waiting_s,
)
from fourfold.cost.step.kernels import attention_s
from fourfold.cost.step.layer import fsdp_s, head_s, layer_times
from fourfold.cost.step.pipeline import fill_share
from fourfold.cost.step.traffic import context_s, floor, host_layer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """One stage of one run: its layers, and whether it holds the ends."""

    stage: int
    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCompute:
    """The planner's compute of the stage: of one layer and micro batch, and of a step by part."""

    layer_s: float
    parts: dict[str, float]
    peak_bytes: float

    @property
    def compute_s(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """A step whose compute was measured; `parts` sum to `step_s`."""

    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())


def predicted(c: Columns, coef: Coefficients, stage: MeasuredStage) -> StageCompute:
    """What the planner thinks this stage computes, without any traffic. `c` holds one run."""
    layer = layer_times(c, coef, micro=c.micro)
    tokens = c.micro * c.seq / c.cp
    forward_tp, forward_cp = _recomputed_traffic(c, coef, layer.tp_comm)
    repeated = layer.recompute - c.full_ckpt * (forward_tp + forward_cp)
    busy = layer.gemm + layer.attention + layer.elementwise + repeated
    layer_s = _one(floor(busy, host_layer_s(c, coef)))
    slots, params = _slots(c), _params(c, stage)
    parts = {
        "layers": slots * stage.layers * layer_s,
        "head": slots * _one(head_s(c, coef, tokens=tokens)) if stage.last else 0.0,
        "embedding": slots * _one(embedding_s(c, tokens)) if stage.first else 0.0,
        "optimizer": _one(optimizer_s(c, params=params, weights=params)),
        "fixed": _one(fixed_s(c, coef)),
    }
    return StageCompute(layer_s=layer_s, parts=parts, peak_bytes=_peak_bytes(c, stage))


def joined(
    c: Columns,
    coef: Coefficients,
    stage: MeasuredStage,
    *,
    compute_s: float,
    layer_s: float,
    micro_s: float,
) -> JoinedStep:
    """The step from measured seconds: of the whole step, of one layer and of one micro batch."""
    layer = layer_times(c, coef, micro=c.micro)
    forward_tp, forward_cp = _recomputed_traffic(c, coef, layer.tp_comm)
    tp = _one(layer.tp_comm + c.full_ckpt * forward_tp)
    cp = _one(layer.cp_comm + c.full_ckpt * forward_cp)
    busy = layer_s + tp + cp
    fsdp = _one(fsdp_s(c, coef, params=layer.params, busy=np.array([busy]))) - busy
    tokens = c.micro * c.seq / c.cp
    ends = _one(embedding_comm_s(c, coef, tokens)) if stage.first else 0.0
    window = np.array([stage.layers * busy])
    reduced = _one(gradient_s(c, coef, params=_params(c, stage), window=window))
    slots = _slots(c)
    parts = {
        "compute, measured": compute_s,
        "tp": slots * (stage.layers * tp + ends),
        "cp": slots * stage.layers * cp,
        "dp": slots * stage.layers * fsdp + reduced,
        "pp": slots * _one(handover_s(c, coef, tokens)),
    }
    slot_s = micro_s + (sum(parts.values()) - compute_s) / slots
    parts["bubble"] = (_one(c.pp) - 1.0) * slot_s * _one(fill_share(c))
    work, slot_count = np.array([sum(parts.values())]), np.array([slots])
    return JoinedStep(
        parts=parts | {"jitter": sum(map(_one, waiting_s(c, coef, work=work, slots=slot_count)))}
    )


def _one(value: Any) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def _slots(c: Columns) -> float:
    """Micro batches of the busiest rank; a smaller last one counts its share."""
    return _one(c.share / c.micro)


def _params(c: Columns, stage: MeasuredStage) -> Floats:
    """Of one tensor rank: its layers, and a table at each end of the model."""
    return (stage.layers * c.layer_weights + (stage.first + stage.last) * c.vocab * c.hidden) / c.tp


def _recomputed_traffic(c: Columns, coef: Coefficients, tp_comm: Any) -> tuple[Any, Any]:
    """Forward parts of the layer's traffic, which a recomputed layer sends again."""
    forward_tp = tp_comm * 4.0 / np.where(c.sp > 0, 9.0, 8.0)
    attention, _ = attention_s(c, coef, micro=c.micro)
    tokens = c.micro * c.seq / c.cp
    return forward_tp, context_s(c, coef, tokens=tokens, attention=attention, backward=False)


def _peak_bytes(c: Columns, stage: MeasuredStage) -> float:
    """Tensors of this stage at its peak: without context, communicators and workspaces."""
    micros = c.micros
    first, middle, last = own_memory.stages(c, micros)
    usual = first if stage.first else last if stage.last else middle
    between = usual.flight + 1.0 - stage.stage  # of the stages between, each has one less
    flight = usual.flight if stage.first or stage.last else np.maximum(last.flight, between)
    own = replace(usual, layers=usual.layers * 0.0 + stage.layers, flight=flight)
    return _one(own_memory.stage_peak(c, own, micros).total)
