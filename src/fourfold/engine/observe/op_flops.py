"""FLOPs of one operator on the shapes it really got: products and attention, 2 per multiply-add.

Attention counts every query-key pair, causal or not, as torch's own counter does: forward 2
products per pair, backward 5 (scores again; gradients of values, probabilities, queries, keys).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fourfold.engine import compat

_ATTENTION_FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def is_attention(func: Any) -> bool:
    """Whether an operator is a fused attention kernel, forward or backward."""
    name = func._schema.name.removeprefix("aten::")
    return func.namespace == "aten" and name.removesuffix("_backward") in _ATTENTION_FORWARD


def op_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if func.namespace != "aten":
        return 0
    name = compat.op_name(func).removeprefix("aten::")
    if name.endswith("_backward") and name.removesuffix("_backward") in _ATTENTION_FORWARD:
        query, key, value = args[1], args[2], args[3]
        return _pairs(query, key) * 2 * (3 * query.shape[-1] + 2 * value.shape[-1])
    if name in _ATTENTION_FORWARD:
        query, key, value = args[0], args[1], args[2]
        return _pairs(query, key) * 2 * (query.shape[-1] + value.shape[-1])
    count = flop_registry.get(compat.op_packet(func))
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _pairs(query: torch.Tensor, key: torch.Tensor) -> int:
    """Query-key pairs over all query heads; keys may have fewer heads. Layout [B, H, S, D]."""
    return query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
