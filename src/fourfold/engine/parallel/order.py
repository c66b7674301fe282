"""How does a model become a parallel one? Each axis is applied from outside, in this order.

1. pipeline  cut: build only this stage's layers and ends
2. tensor    cut matrices, put collectives around blocks
3. context   replace the attention core
4. recompute wrap what is left, so that collectives inside are repeated too
5. compile   one graph per layer, recompute inside
6. data      shard last: what a layer's parameters are is now settled
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fourfold.cost.stages import stage_layers
from fourfold.engine.compat import DTYPES
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.context import apply_context
from fourfold.engine.parallel.data import apply_data
from fourfold.engine.parallel.recompute import apply_recompute
from fourfold.engine.parallel.regional import apply_compile
from fourfold.engine.parallel.tensor import apply_tensor
from fourfold.engine.world import World
from fourfold.spec.run import RunSpec

Step = Callable[[Decoder, RunSpec, World], None]


def cut_stage(spec: RunSpec, world: World) -> Decoder:
    """This stage's modules, without storage."""
    model, policy, seq_len = spec.model, spec.policy, spec.batch.seq_len
    layers = stage_layers(model, spec.layout.pp, seq_len)[world.stage]
    with torch.device("meta"):
        decoder = Decoder(
            model,
            seq_len,
            layers,
            fused=policy.fused_projections,
            loss_chunks=policy.loss_chunks,
        )
    return decoder.to(DTYPES[policy.dtypes.param])


def _tensor(decoder: Decoder, spec: RunSpec, world: World) -> None:
    sequence, seq_len = spec.policy.sequence_parallel, spec.batch.seq_len
    apply_tensor(decoder, spec.model, world.tp, seq_len=seq_len, sequence=sequence)


def _context(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_context(decoder, spec.policy.cp_kind, world.cp)


def _recompute(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_recompute(decoder, spec.policy.recompute)


def _compile(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_compile(decoder, enabled=spec.policy.compile)


def _data(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_data(decoder, world.data_mesh(spec.policy.zero), spec.policy)


ORDER: tuple[Step, ...] = (_tensor, _context, _recompute, _compile, _data)


def parallelize(spec: RunSpec, world: World) -> Decoder:
    """The stage of this rank with every axis applied; still on the meta device."""
    decoder = cut_stage(spec, world)
    for apply in ORDER:
        apply(decoder, spec, world)
    return decoder
