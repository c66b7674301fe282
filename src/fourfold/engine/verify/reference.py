"""The reference that every layout must reproduce, and how far a layout is from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine.compat import DTYPES, activation_dtype
from fourfold.engine.data.source import Source
from fourfold.engine.model.decoder import IGNORE, Decoder
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.order import keep_state_wide
from fourfold.engine.parallel.products import apply_float8
from fourfold.engine.parallel.shards import InitRule, Shard, ShardPlace, initialize, shards_of
from fourfold.engine.training.gradients import ScalerSettings
from fourfold.engine.training.optimizer import KINDS, OptimizerSettings, param_groups
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class Truth:
    """Losses and norms of each step, gradients of the first, parameters after the last; on CPU."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a comparison fixes besides the run: data, initial values, optimizer, steps."""

    source: Source
    settings: OptimizerSettings
    rule: InitRule
    steps: int


def train_alone(spec: RunSpec, recipe: Recipe, device: torch.device) -> Truth:
    """The same training in one process without parallel code: one model (two in mixed precision),
    the whole batch at once, torch's own clipping, optimizer and scaling of the loss."""
    dtypes = spec.policy.dtypes
    masters = _model(spec, DTYPES[dtypes.param], device)
    shards = shards_of(masters, spec.model, spec.batch.seq_len, ShardPlace())
    initialize(shards, seed=spec.seed, layers=spec.model.layers, rule=recipe.rule)
    mixed = dtypes.compute != dtypes.param
    decoder = _model(spec, activation_dtype(dtypes.compute), device) if mixed else masters
    if dtypes.compute == "fp8":
        apply_float8(decoder, device.type)
    weights: list[Tensor] = [w for w in masters.parameters() if w.requires_grad]
    settings = recipe.settings
    groups = param_groups(weights, settings)
    optimizer = KINDS[spec.policy.optimizer].reference(groups, settings)
    first = ScalerSettings().initial
    scaler = torch.amp.GradScaler(device.type, init_scale=first, enabled=dtypes.compute == "fp16")
    losses, norms, grads = [], [], {}
    for step in range(recipe.steps):
        if mixed:
            _copy(masters, decoder, grads=False)
        _begin_routers(decoder, spec, step, scaler)
        loss = _loss(decoder, spec, recipe.source, step, device)
        scaler.scale(loss).backward()
        losses.append(float(loss.detach()) + _balance(decoder))
        if mixed:
            _copy(decoder, masters, grads=True)
        scaler.unscale_(optimizer)
        if step == 0:
            learned = (shard for shard in shards if shard.param.requires_grad)
            grads = {shard.name: _grad(shard) for shard in learned}
        limit = float("inf") if settings.max_norm is None else settings.max_norm
        norms.append(float(nn.utils.clip_grad_norm_(weights, limit)))
        _end_routers(masters, decoder)
        scaler.step(optimizer)
        scaler.update()
        masters.zero_grad()
        decoder.zero_grad()
    params = {shard.name: shard.values.cpu().clone() for shard in shards}
    return Truth(losses, norms, grads, params)


def _model(spec: RunSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(spec.model, spec.batch.seq_len, fused=False)
    decoder.to(dtype).to_empty(device=device)
    keep_state_wide(decoder)
    for router in decoder.routers:
        router.watch_margin = True
    return decoder


def _begin_routers(decoder: Decoder, spec: RunSpec, step: int, scaler: Any) -> None:
    for router in decoder.routers:
        router.tokens = spec.batch.at(step).tokens
        router.loss_scale = torch.tensor(scaler.get_scale()) if scaler.is_enabled() else None
        router.seen = router.losses = None


def _balance(decoder: Decoder) -> float:
    return sum(float(router.losses) for router in decoder.routers if router.losses is not None)


def _end_routers(masters: Decoder, decoder: Decoder) -> None:
    """Of the whole batch, which one process has seen."""
    for master, router in zip(masters.routers, decoder.routers, strict=True):
        assert router.seen is not None
        master.take_up(router.seen)


def _loss(
    decoder: Decoder, spec: RunSpec, source: Source, step: int, device: torch.device
) -> Tensor:
    positions = torch.arange(spec.batch.seq_len, device=device)
    sequences = torch.arange(spec.batch.global_batch_at(step), device=device)
    tokens, targets = source.batch(spec.batch.sequences_before(step), sequences, positions)
    dtype = activation_dtype(spec.policy.dtypes.compute)
    tables = make_tables(spec.model, positions, range(spec.model.heads), dtype)
    return decoder(tokens, tables, targets) / (targets != IGNORE).sum()


def _grad(shard: Shard) -> Tensor:
    assert shard.grad is not None, f"{shard.name} has no gradient"
    return shard.grad.cpu().clone()


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module, *, grads: bool) -> None:
    for old, new in zip(source.parameters(), target.parameters(), strict=True):
        if grads and old.requires_grad:
            assert old.grad is not None
            new.grad = old.grad.to(new.dtype)
        elif not grads:
            new.copy_(old)


# A tensor whose values are all this much smaller than the largest is measured against the largest.
_FLOOR = 1e-3


@dataclass(slots=True)
class RankFindings:
    """Of one rank: largest absolute differences by tensor, and the rectangles it looked at."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, float] = field(default_factory=dict)
    params: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[str, tuple[int, int], tuple[int, int]]] = field(default_factory=list)

    def look(
        self, shards: Iterable[Shard], truth: Truth, *, at_grads: bool, scale: float = 1.0
    ) -> None:
        """`scale`: what the loss was multiplied by before the backward pass."""
        gaps, wanted = (self.grads, truth.grads) if at_grads else (self.params, truth.params)
        for shard in shards:
            if at_grads and not shard.param.requires_grad:
                continue
            have = shard.grad if at_grads else shard.values
            want = _cut(wanted[shard.name], shard)
            gap = want.abs().max() if have is None else (have.cpu() / scale - want).abs().max()
            gaps[shard.name] = max(gaps.get(shard.name, 0.0), _finite(float(gap)))
            if not at_grads:
                self.seen.append((shard.name, shard.rect.rows, shard.rect.columns))


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


def verdict(
    findings: Sequence[RankFindings], truth: Truth, tolerances: Tolerances
) -> dict[str, Any]:
    loss = max(_relative(f.losses, truth.losses) for f in findings)
    norm = max(_relative(f.norms, truth.norms) for f in findings)
    grad, worst_grad = _worst([f.grads for f in findings], truth.grads)
    param, worst_param = _worst([f.params for f in findings], truth.params)
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
    if missing:
        row["error"] = f"no rank holds all of {missing[0]} ({len(missing)} tensors in all)"
    return row


def _relative(have: list[float], want: list[float]) -> float:
    return max(_finite(abs(a - b)) / abs(b) for a, b in zip(have, want, strict=True))


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
