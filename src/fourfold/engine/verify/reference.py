"""What must every layout compute? The same training in one process that uses no parallel code:
one model, the whole batch at once, torch's own clipping, optimizer and scaling of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.engine.compat import DTYPES, activation_dtype
from fourfold.engine.data.source import Source
from fourfold.engine.model.decoder import IGNORE, Decoder
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.float8 import apply_float8
from fourfold.engine.parallel.shards import Shard, ShardPlace, shards_of
from fourfold.engine.training import init
from fourfold.engine.training.gradients import ScalerSettings
from fourfold.engine.training.init import InitRule
from fourfold.engine.training.optimizer import KINDS, OptimizerSettings, param_groups
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
    """The reference. Master weights and what is computed with are two models in mixed precision."""
    dtypes = spec.policy.dtypes
    masters = _model(spec, DTYPES[dtypes.param], device)
    shards = shards_of(masters, spec.model, spec.batch.seq_len, ShardPlace())
    init.fill(shards, seed=spec.seed, layers=spec.model.layers, rule=recipe.rule)
    mixed = dtypes.compute != dtypes.param
    decoder = _model(spec, activation_dtype(dtypes.compute), device) if mixed else masters
    if dtypes.compute == "fp8":
        apply_float8(decoder, device.type)
    weights: list[Tensor] = list(masters.parameters())
    settings = recipe.settings
    kind = KINDS[spec.policy.optimizer]
    optimizer = kind.reference(param_groups(weights, settings), settings)
    first = ScalerSettings().initial
    scaler = torch.amp.GradScaler(device.type, init_scale=first, enabled=dtypes.compute == "fp16")
    losses, norms, grads = [], [], {}
    for step in range(recipe.steps):
        if mixed:
            _copy_weights(masters, decoder)
        loss = _loss(decoder, spec, recipe.source, step, device)
        scaler.scale(loss).backward()
        losses.append(float(loss.detach()))
        if mixed:
            _copy_grads(decoder, masters)
        scaler.unscale_(optimizer)
        if step == 0:
            grads = {shard.name: _grad(shard) for shard in shards}
        limit = float("inf") if settings.max_norm is None else settings.max_norm
        norms.append(float(nn.utils.clip_grad_norm_(weights, limit)))
        scaler.step(optimizer)
        scaler.update()
        masters.zero_grad()
        decoder.zero_grad()
    params = {shard.name: shard.values.cpu().clone() for shard in shards}
    return Truth(losses, norms, grads, params)


def _model(spec: RunSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(spec.model, spec.batch.seq_len, fused=False)
    return decoder.to(dtype).to_empty(device=device)


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
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    for old, new in zip(source.parameters(), target.parameters(), strict=True):
        new.copy_(old)


def _copy_grads(source: nn.Module, target: nn.Module) -> None:
    for old, new in zip(source.parameters(), target.parameters(), strict=True):
        assert old.grad is not None
        new.grad = old.grad.to(new.dtype)
