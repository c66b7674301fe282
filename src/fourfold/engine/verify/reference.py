"""The reference that every layout must reproduce: one process, no parallel code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from fourfold.engine.verify.plain_experts import Guess, RoutedStep, make_plain, take_up
from fourfold.engine.verify.plain_muon import PlainMuon
from fourfold.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class Truth:
    """Losses and norms of each step, gradients of the first, parameters after the last; on CPU.
    `balance`: what routers add to the losses. `start`, `moved`: what they keep, before and after
    the first step. `counts`: tokens by step, router and expert, and choices dropped. `margin`: how
    close a token came to another expert, with the `seed` drawn."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    start: dict[str, Tensor]
    moved: dict[str, Tensor]
    balance: list[float]
    counts: list[list[list[int]]]
    margin: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a comparison fixes besides the run: data, initial values, optimizer, steps."""

    source: Source
    settings: OptimizerSettings
    rule: InitRule
    steps: int


# Less than this many roundings between a chosen expert and the next, and an engine may choose
# another with every right; so many draws are tried.
_ROUNDINGS, _DRAWS = 1000, 40


def steady(spec: RunSpec, recipe: Callable[[RunSpec], Recipe], device: torch.device) -> Truth:
    """The first of seed, seed + 1000, ... whose choice of experts no rounding can change. Formats
    of 16 bits have no such case: there choices may differ."""
    compute, limit = spec.policy.dtypes.compute, 0.0
    if compute in ("fp32", "fp64") and spec.model.moe is not None:
        limit = _ROUNDINGS * torch.finfo(DTYPES[compute]).eps / 2
    for draw in range(_DRAWS):
        drawn = replace(spec, seed=spec.seed + 1000 * draw)
        truth = train_alone(drawn, recipe(drawn), device)
        if truth.margin >= limit:
            return truth
    raise RuntimeError(f"no draw of {_DRAWS} has experts further apart than {limit:.1e}")


def train_alone(
    spec: RunSpec, recipe: Recipe, device: torch.device, guess: Guess | None = None
) -> Truth:
    """The same training in one process without parallel code: one model (two in mixed precision),
    the whole batch at once, torch's own clipping, optimizer and scaling of the loss."""
    alone = _Alone(spec, recipe, device, guess or Guess())
    shards = alone.shards
    start, moved = alone.kept(), {}
    losses, norms, grads, routed = [], [], {}, []
    for step in range(recipe.steps):
        routed.append(RoutedStep(spec.batch.at(step).tokens))
        losses.append(alone.backward(step, routed[-1]))
        if step == 0:
            learned = (shard for shard in shards if shard.param.requires_grad)
            grads = {shard.name: _grad(shard) for shard in learned}
        norms.append(alone.update(routed[-1]))
        moved = moved or alone.kept()
    return Truth(
        losses=losses,
        norms=norms,
        grads=grads,
        params={shard.name: shard.values.cpu().clone() for shard in shards},
        start=start,
        moved=moved,
        balance=[sum(float(loss.detach()) for loss in one.losses) for one in routed],
        counts=[[counts.tolist() for counts in one.counts] for one in routed],
        margin=min(one.margin for one in routed),
        seed=spec.seed,
    )


class _Alone:
    """`masters` are updated, `decoder` computes; the same model but in mixed precision."""

    def __init__(self, spec: RunSpec, recipe: Recipe, device: torch.device, guess: Guess) -> None:
        self.spec, self.recipe, self.device, self.guess = spec, recipe, device, guess
        dtypes, settings = spec.policy.dtypes, recipe.settings
        self.masters = self.decoder = _model(spec, DTYPES[dtypes.param], device)
        self.shards = shards_of(self.masters, spec.model, spec.batch.seq_len, ShardPlace())
        initialize(self.shards, seed=spec.seed, layers=spec.model.layers, rule=recipe.rule)
        if dtypes.compute != dtypes.param:
            self.decoder = _model(spec, activation_dtype(dtypes.compute), device)
        if dtypes.compute == "fp8":
            apply_float8(self.decoder, device.type)
        self.experts = make_plain(self.decoder, guess)
        self.weights: list[Tensor] = [w for w in self.masters.parameters() if w.requires_grad]
        self.optimizer = self._optimizer(settings)
        first, scaled = ScalerSettings().initial, dtypes.compute == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, init_scale=first, enabled=scaled)

    def _optimizer(self, settings: OptimizerSettings) -> torch.optim.Optimizer:
        if self.spec.policy.optimizer == "muon":
            return PlainMuon(self.shards, settings, self.spec.policy.muon, self.guess.muon)
        groups = param_groups(self.weights, settings)
        return KINDS[self.spec.policy.optimizer].reference(groups, settings)

    def kept(self) -> dict[str, Tensor]:
        """What routers keep between steps."""
        return {s.name: s.values.cpu().clone() for s in self.shards if not s.param.requires_grad}

    def backward(self, step: int, routed: RoutedStep) -> float:
        """Gradients of the whole batch, on the masters; the loss."""
        mixed = self.decoder is not self.masters
        if mixed:
            _copy(self.masters, self.decoder, grads=False)
        for one in self.experts:
            one.step = routed
        loss = _loss(self.decoder, self.spec, self.recipe.source, step, self.device)
        loss = loss + routed.loss(self.guess)
        self.scaler.scale(loss).backward()
        if mixed:
            _copy(self.decoder, self.masters, grads=True)
        self.scaler.unscale_(self.optimizer)
        return float(loss.detach())

    def update(self, routed: RoutedStep) -> float:
        """The norm before it was clipped."""
        most = self.recipe.settings.max_norm
        limit = float("inf") if most is None else most
        norm = float(nn.utils.clip_grad_norm_(self.weights, limit))
        for router, counts in zip(self.masters.routers, routed.counts, strict=True):
            take_up(router, counts)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.masters.zero_grad()
        self.decoder.zero_grad()
        return norm


def _model(spec: RunSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(spec.model, spec.batch.seq_len, fused=False)
    decoder.to(dtype).to_empty(device=device)
    keep_state_wide(decoder)
    return decoder


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
