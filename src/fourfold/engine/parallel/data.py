"""Data parallelism: FSDP2 over the ranks that see different tokens (dp x cp).

zero0: every rank holds everything, gradients are all-reduced once a step.
zero1: parameters, gradients and optimizer state are sharded between steps; inside a step weights
       and gradients are whole; gradients are reduced once, with the last micro batch.
zero2: gradients are reduced (and only the shard kept) with every micro batch.
zero3: weights too are whole only around their use; the last layer is kept, its backward comes next.
With one micro batch zero1 and zero2 are the same. Hybrid (copies x shards) reduces over copies too.

Reductions are sums: the loss is already divided by the global number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fourfold.engine.compat import (
    DTYPES,
    activation_dtype,
    cast_reduce_scatter,
    fsdp_after_backward,
)
from fourfold.engine.model.decoder import Decoder
from fourfold.spec.policy import Dtypes, Policy


def apply_data(decoder: Decoder, mesh: DeviceMesh, policy: Policy) -> None:
    """Shard each layer, then what is left (embedding, final norm, head) as one group."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": _formats(policy.dtypes)}
    layers = list(decoder.blocks.values())
    for layer in layers:
        again = policy.zero == 3 and layer is not layers[-1]
        fully_shard(layer, reshard_after_forward=again, **options)
    fully_shard(decoder, reshard_after_forward=False, **options)
    for module in _sharded(decoder):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    _set_wire_format(decoder, policy.dtypes)
    _set_prefetch([m for m in layers if isinstance(m, FSDPModule)], policy.prefetch)


def _formats(dtypes: Dtypes) -> MixedPrecisionPolicy:
    """FSDP accumulates unreduced gradients in its reduce dtype, so that is our accumulation dtype.

    Inputs are not cast: positions and rotary tables stay as wide as they are.
    """
    return MixedPrecisionPolicy(
        param_dtype=activation_dtype(dtypes.compute),
        reduce_dtype=DTYPES[dtypes.grad],
        cast_forward_inputs=False,
    )


def _set_prefetch(layers: list[FSDPModule], depth: int) -> None:
    """While a layer computes, gather the next `depth` in the direction of travel."""
    if depth == 0:
        return
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + depth])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - depth) : i][::-1])


def _sharded(decoder: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))


def _set_wire_format(decoder: Decoder, dtypes: Dtypes) -> None:
    if dtypes.reduce == dtypes.grad:
        return
    for module in _sharded(decoder):
        module.set_custom_reduce_scatter(cast_reduce_scatter(DTYPES[dtypes.reduce]))


def before_backward(decoder: Decoder, zero: int, *, last: bool, kind: str = "B") -> None:
    """Say what the coming backward does with gradients and weights.

    `kind`: B a whole one; I only to the inputs, whose gradients of weights are not whole yet; W the
    weights' part. `last`: the step's last that makes gradients of weights.
    """
    assert isinstance(decoder, FSDPModule)
    decoder.set_is_last_backward(last)
    decoder.set_requires_gradient_sync(kind != "I" and (last or zero >= 2))
    decoder.set_reshard_after_backward(last or zero == 3)


def backward_weights(decoder: Decoder, multiply: Callable[[int | None], None]) -> None:
    """A split backward's second part: `multiply` makes gradients of a layer (None: of the head).

    No autograd runs here, so what FSDP does after a backward pass is called by hand, layer by
    layer, as torch's own pipelines do: the next layer is multiplied while this one is reduced.
    """
    multiply(None)
    for index, layer in reversed(decoder.blocks.items()):
        multiply(index)
        fsdp_after_backward(layer)
    fsdp_after_backward(decoder, is_root=True)
