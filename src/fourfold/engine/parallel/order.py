"""Makes a model parallel: each axis is applied from outside, in this order.

1. pipeline  cut: build only the layers and ends of this rank's stage (of each virtual stage)
2. tensor    cut matrices, put collectives around blocks; keep some experts, send tokens to others
3. context   replace the attention core; then restrict its kernels
4. fp8       replace the products of the (already split) layers
5. loss      overwrite the logits with their gradient
6. kernels   custom kernels for activations that the compiler handles slowly
7. recompute wrap what is left, so that collectives inside are repeated too
8. compile   one graph per layer, recompute inside
9. offload   move what all of the above keeps for the backward pass to the host
10. data     shard last, when a layer's parameters are final
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend

from fourfold.cost.count.params import stage_layers
from fourfold.engine.compat import DTYPES, activation_dtype
from fourfold.engine.model.activations import apply_fast_activations
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.grouped import apply_grouped
from fourfold.engine.model.layers import KERNELS, Core
from fourfold.engine.parallel.context import apply_context
from fourfold.engine.parallel.data import apply_data
from fourfold.engine.parallel.experts import apply_experts
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.lean_loss import apply_lean_loss
from fourfold.engine.parallel.products import apply_float8
from fourfold.engine.parallel.tensor import apply_tensor
from fourfold.engine.parallel.wrap import apply_compile, apply_offload, apply_recompute
from fourfold.errors import UserError
from fourfold.search.legal import require_legal
from fourfold.spec.run import RunSpec

# On Hopper cuDNN's take half of flash's time; what it can't do, the others can.
_AUTO_CUDA = [*KERNELS["fused"], SDPBackend.MATH]
Step = Callable[[Decoder, RunSpec, World], None]


def cut_chunk(spec: RunSpec, stage: int) -> Decoder:
    """The modules of one of pp x virtual stages, without storage."""
    model, policy, seq_len = spec.model, spec.policy, spec.batch.seq_len
    layers = stage_layers(model, spec.layout.pp * policy.virtual_stages, seq_len)[stage]
    with torch.device("meta"):
        decoder = Decoder(
            model, seq_len, layers, fused=policy.fused_projections, loss_chunks=policy.loss_chunks
        )
    decoder.to(DTYPES[policy.dtypes.param])
    keep_state_wide(decoder)
    return decoder


def keep_state_wide(decoder: Decoder) -> None:
    """What routers keep between steps moves by too little for 16 bits."""
    for router in decoder.routers:
        for name, state in list(router.named_parameters(recurse=False)):
            if not state.requires_grad:
                wide = torch.promote_types(state.dtype, torch.float32)
                setattr(router, name, torch.nn.Parameter(state.to(wide), requires_grad=False))


def _tensor(decoder: Decoder, spec: RunSpec, world: World) -> None:
    sequence, seq_len = spec.policy.sequence_parallel, spec.batch.seq_len
    apply_tensor(decoder, spec.model, world.tp, seq_len=seq_len, sequence=sequence)


def attention_kernels(attention: str, device_type: str) -> list[SDPBackend] | None:
    """Kernels of whole-sequence attention in order of preference; None: torch chooses."""
    if attention != "auto":
        return KERNELS[attention]
    return _AUTO_CUDA if device_type == "cuda" else None


def _attention(decoder: Decoder, spec: RunSpec, world: World) -> None:
    backends = attention_kernels(spec.policy.attention, world.device_type)
    for module in decoder.modules():
        if isinstance(module, Core):
            _refuse_kernel(spec, world.device_type)
            module.backends = backends


def _refuse_kernel(spec: RunSpec, device_type: str) -> None:
    """Torch names no reason where a kernel does not exist, and only in the first step."""
    kernel, alibi = spec.policy.attention, spec.model.positions.kind == "alibi"
    rule = ""
    if device_type == "cpu" and kernel in ("cudnn", "efficient"):
        rule = "is a kernel that torch has only on GPUs"
    if device_type == "cuda" and kernel == "flash" and alibi:
        rule = "does not support ALiBi on GPUs"
    if rule:
        raise UserError(rule, field="policy.attention", value=kernel, hint="use attention = auto")


def _float8(decoder: Decoder, spec: RunSpec, world: World) -> None:
    if spec.policy.dtypes.compute == "fp8":
        apply_float8(decoder, world.device_type)


def _kernels(decoder: Decoder, spec: RunSpec, world: World) -> None:
    if spec.policy.compile and world.device_type == "cuda":
        dtype = activation_dtype(spec.policy.dtypes.compute)
        apply_fast_activations(decoder, dtype)
        apply_grouped(decoder, dtype)


def _recompute(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_recompute(decoder, spec.policy)


def _compile(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_compile(decoder, enabled=spec.policy.compile, shapes=_micro_shapes(spec))


def _micro_shapes(spec: RunSpec) -> int:
    """Different sizes of micro batches in all stages of a ramp-up, and one of padding."""
    batch, dp = spec.batch, spec.layout.dp
    shares = {share for size, _ in batch.stages() for share in (size // dp, -(-size // dp))}
    return len({size for share in shares for size in batch.micro_sizes(share)}) + 1


def _offload(decoder: Decoder, spec: RunSpec, world: World) -> None:
    apply_offload(decoder, spec.policy, world.device_type)


ORDER: tuple[Step, ...] = (
    _tensor,
    apply_experts,
    apply_context,
    _attention,
    _float8,
    apply_lean_loss,
    _kernels,
    _recompute,
    _compile,
    _offload,
    apply_data,
)


def parallelize(spec: RunSpec, world: World) -> list[Decoder]:
    """The chunks of this rank with every axis applied; still on the meta device. Chunk c of
    pipeline rank r is virtual stage c x pp + r; without virtual stages there is one."""
    require_legal(spec)
    pp = spec.layout.pp
    chunks = [cut_chunk(spec, c * pp + world.stage) for c in range(spec.policy.virtual_stages)]
    for chunk in chunks:
        for apply in ORDER:
            apply(chunk, spec, world)
    return chunks
