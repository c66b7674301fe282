"""How far a layout is from the reference: largest differences of each rank, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.engine.parallel.shards import Shard
from fourfold.engine.training.trainer import Trainer
from fourfold.engine.verify.reference import Truth
from fourfold.spec.policy import Policy
from fourfold.units import counted

# A tensor whose values are all this much smaller than the largest is measured against the largest.
_FLOOR = 1e-3


# A rectangle of a published tensor, and its values.
Piece = tuple[str, tuple[int, int], tuple[int, int], Tensor]


@dataclass(slots=True)
class RankFindings:
    """Of one rank: largest absolute differences by tensor, and the rectangles it looked at; what
    its routers added to the losses; tokens of the batch by step, layer and expert; how many experts
    of a layer none of the rank's own tokens chose."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, float] = field(default_factory=dict)
    params: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[str, tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    counts: list[dict[int, list[int]]] = field(default_factory=list)
    idle: int = 0

    def look(
        self, shards: Iterable[Shard], truth: Truth, *, at_grads: bool, scale: float = 1.0
    ) -> list[Piece]:
        """`scale`: what the loss was multiplied by before the backward pass."""
        gaps, wanted = (self.grads, truth.grads) if at_grads else (self.params, truth.params)
        pieces: list[Piece] = []
        for shard in shards:
            if at_grads and not shard.param.requires_grad:
                continue
            have = shard.grad if at_grads else shard.values
            want = _cut(wanted[shard.name], shard)
            place = (shard.name, shard.rect.rows, shard.rect.columns)
            gap = want.abs().max()
            if have is not None:
                pieces.append((*place, have.cpu() / scale))
                gap = (pieces[-1][3] - want).abs().max()
            gaps[shard.name] = max(gaps.get(shard.name, 0.0), _finite(float(gap)))
            if not at_grads:
                self.seen.append(place)
        return pieces

    def look_at_routers(self, trainer: Trainer) -> None:
        """After a step's last backward pass."""
        routers, counts = trainer.balance.routers, trainer.balance.counts
        layers = trainer.balance.layers
        self.balance.append(sum(float(r.losses) for r in routers if r.losses is not None))
        self.counts.append(
            {} if counts is None else dict(zip(layers, counts.tolist(), strict=True))
        )
        self.idle += sum(int((r.seen[:-1] == 0).sum()) for r in routers if r.seen is not None)


def _cut(whole: Tensor, shard: Shard) -> Tensor:
    rows, columns = slice(*shard.rect.rows), slice(*shard.rect.columns)
    return whole[rows] if whole.ndim == 1 else whole[rows, columns]


def _finite(gap: float) -> float:
    """A NaN must not pass as 'no difference'."""
    return gap if math.isfinite(gap) else math.inf


@dataclass(frozen=True, slots=True)
class Tolerances:
    loss: float
    norm: float
    grad: float
    param: float


def tolerances_of(policy: Policy) -> Tolerances:
    """fp32 and fp64 must agree to rounding. Formats of 16 bits round gradients by about 1e-2, and
    Adam makes a whole step of a small gradient either way: parameters show only gross mistakes.
    fp8 keeps two or three bits and scales whole micro batches and shards: the same, and coarser."""
    dtypes = policy.dtypes
    if {dtypes.param, dtypes.compute, dtypes.reduce, dtypes.grad, dtypes.optimizer} == {"fp64"}:
        return Tolerances(loss=1e-9, norm=1e-9, grad=1e-9, param=1e-9)
    if dtypes.compute in ("fp32", "fp64"):
        return Tolerances(loss=1e-5, norm=1e-5, grad=1e-4, param=1e-3)
    if dtypes.compute == "fp8":
        return Tolerances(loss=5e-3, norm=5e-2, grad=0.5, param=1.0)
    return Tolerances(loss=1e-3, norm=1e-2, grad=1e-1, param=0.5)


def verdict(findings: Sequence[RankFindings], truth: Truth, policy: Policy) -> dict[str, Any]:
    tolerances = tolerances_of(policy)
    loss = max(_relative(f.losses, truth.losses) for f in findings)
    norm = max(_relative(f.norms, truth.norms) for f in findings)
    routed = routing(findings, truth) if truth.counts[0] else None
    exact = policy.dtypes.compute in ("fp32", "fp64")
    # In 16 bits a token may go to another expert with every right; what such a choice moves by a
    # whole token (and the norm before it) is not judged then, all else is.
    moved = (
        ("mlp.experts.", "mlp.router.", "mlp_norm.")
        if routed and routed["wrong"] and not exact
        else ()
    )
    grad, worst_grad = _worst([f.grads for f in findings], _without_parts(truth.grads, moved))
    param, worst_param = _worst([f.params for f in findings], _without_parts(truth.params, moved))
    missing, limits = _unseen(findings, truth), asdict(tolerances)
    gaps = {"loss_diff": loss, "norm_rel": norm, "grad_rel": grad, "param_rel": param}
    passed = all(gap <= limit for gap, limit in zip(gaps.values(), limits.values(), strict=True))
    row: dict[str, Any] = {
        # JSON has no infinity; null is a difference that is not a number.
        **{name: gap if math.isfinite(gap) else None for name, gap in gaps.items()},
        "worst_grad": worst_grad,
        "worst_param": worst_param,
        "pass": passed and not missing,
        "limits": limits,
    }
    if routed:
        row["routing"] = routed
        still = max(routed["state_rel"], routed["idle_rel"]) <= limits["grad"]
        row["pass"] &= not exact or (still and not routed["wrong"])
    if missing:
        row["error"] = (
            f"no rank holds all of {missing[0]} ({counted(len(missing), 'tensor')} in all)"
        )
    return row


def routing(findings: Sequence[RankFindings], truth: Truth) -> dict[str, Any]:
    """`wrong`: choices of another expert than in one process. `idle`: experts of a layer that no
    token of a step chose, `idle_on_a_rank`: none of a rank's own. What such experts and routers'
    state differ by is judged more strictly than the rest: no gradient excuses it."""
    order = {layer: i for i, layer in enumerate(sorted({k for f in findings for k in f.counts[0]}))}
    wrong = 0
    for finding in findings:
        for step, layers in enumerate(finding.counts):
            for layer, counts in layers.items():
                want = truth.counts[step][order[layer]]
                wrong = max(wrong, sum(abs(a - b) for a, b in zip(counts, want, strict=True)))
    state, _ = _worst([f.params for f in findings], {n: truth.params[n] for n in truth.start})
    resting = {name: truth.params[name] for name in idle_tensors(truth, [*order])}
    return {
        "margin": truth.margin,
        "seed": truth.seed,
        "wrong": wrong,
        "state_rel": state,
        "idle_rel": _worst([f.params for f in findings], resting)[0] if resting else 0.0,
        "idle": sum(n == 0 for step in truth.counts for layer in step for n in layer[:-1]),
        "idle_on_a_rank": sum(f.idle for f in findings),
        "dropped": sum(layer[-1] for step in truth.counts for layer in step),
    }


def idle_tensors(truth: Truth, layers: Sequence[int]) -> list[str]:
    """Weights of experts that no token chose in any step; `layers` are those with experts."""
    idle = []
    for at, layer in enumerate(layers):
        totals = [
            sum(step[at][e] for step in truth.counts) for e in range(len(truth.counts[0][at]))
        ]
        for expert in (e for e, total in enumerate(totals[:-1]) if not total):
            path = f"layers.{layer}.mlp.experts.{expert}"
            idle += [f"{path}.{name}.weight" for name in ("gate", "up", "down")]
    return idle


def _relative(have: list[float], want: list[float]) -> float:
    return max(_finite(abs(a - b)) / abs(b) for a, b in zip(have, want, strict=True))


def _without_parts(wanted: dict[str, Tensor], parts: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: one for name, one in wanted.items() if not any(part in name for part in parts)}


def _worst(gaps_of_ranks: list[dict[str, float]], wanted: dict[str, Tensor]) -> tuple[float, str]:
    sizes = {name: float(tensor.abs().max()) for name, tensor in wanted.items()}
    floor = _FLOOR * max(sizes.values())
    gaps = {
        name: max(gaps_of_rank.get(name, 0.0) for gaps_of_rank in gaps_of_ranks) / max(size, floor)
        for name, size in sizes.items()
    }
    name = max(gaps, key=gaps.__getitem__)
    return gaps[name], name


def _unseen(findings: Sequence[RankFindings], truth: Truth) -> list[str]:
    """Tensors of which some value was on no rank."""
    marks = {
        name: torch.zeros(tensor.shape[0], math.prod(tensor.shape[1:]), dtype=torch.bool)
        for name, tensor in truth.params.items()
    }
    for finding in findings:
        for name, rows, columns in finding.seen:
            marks[name][slice(*rows), slice(*columns)] = True
    return [name for name, mark in marks.items() if not bool(mark.all())]
