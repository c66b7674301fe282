"""What one operator sends (payload: the whole tensor), computes (2 FLOPs a multiply-add; every
query-key pair counts, causal or not, as in torch's counter) and needs meanwhile on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fourfold.engine import compat

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# torch's names of one collective, by API: c10d's in place, coalesced and functional ones.
_TORCH_NAMES = {
    "all-reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced"
    " all_reduce_coalesced_",
    "all-gather": "allgather_ _allgather_base_ allgather_coalesced_ all_gather_into_tensor"
    " allgather_into_tensor_coalesced_ all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce-scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_"
    " reduce_scatter_tensor reduce_scatter_tensor_coalesced",
    "all-to-all": "alltoall_ alltoall_base_ all_to_all_single",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "send": "send isend",
    "recv": "recv_ recv_any_source_ irecv",
}
OPS = {name: op for op, names in _TORCH_NAMES.items() for name in names.split()}


def is_collective(func: Any) -> bool:
    return func.namespace in _NAMESPACES


def collective(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, str, int] | None:
    """(group's name, our name of the collective, payload bytes); None for waits and barriers."""
    op = OPS.get(compat.op_name(func).split("::")[1])
    if op is None:
        return None
    tensors = [leaf for leaf in compat.tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    lists = [_bytes_of(item) for item in (*args, out) if isinstance(item, (list, tuple))]
    name = next(_group_names((*args, *kwargs.values())), "?")
    return name, op, max([*sizes, *lists], default=0)


def _bytes_of(item: Any) -> int:
    """A list of tensors is one payload: the shards of an all-gather, coalesced gradients."""
    leaves = [leaf for leaf in compat.tree_leaves(item) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _group_names(arguments: tuple[Any, ...]) -> Iterator[str]:
    """c10d's operators carry a boxed group, the functional ones its name (and a reduction's)."""
    known = set(compat.group_names().values())
    for argument in arguments:
        if isinstance(argument, str) and argument in known:
            yield argument
        elif isinstance(argument, torch.ScriptObject):
            try:
                yield str(dist.ProcessGroup.unbox(argument).group_name)
            except (RuntimeError, TypeError, ValueError):
                continue  # a boxed reduce operation, not a group


_ATTENTION_FORWARD = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)


def is_attention(func: Any) -> bool:
    """Whether an operator is a fused attention kernel, forward or backward."""
    name = compat.op_name(func).removeprefix("aten::")
    return func.namespace == "aten" and name.removesuffix("_backward") in _ATTENTION_FORWARD


def op_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    count = _formula(func)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


@functools.cache
def _formula(func: Any) -> Callable[..., int] | None:
    """FLOPs of an operator's arguments; None: it makes no products."""
    if func.namespace != "aten":
        return None
    name = compat.op_name(func).removeprefix("aten::")
    if name in _ATTENTION_FORWARD:
        return _attention
    if name.removesuffix("_backward") in _ATTENTION_FORWARD:
        return _attention_backward
    return _grouped if name == "_grouped_mm" else flop_registry.get(compat.op_packet(func))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _pairs(query, key) * 2 * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    return _pairs(query, key) * 2 * (3 * query.shape[-1] + 2 * value.shape[-1])


def _grouped(x: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    """Of experts; every row or column is in one group."""
    return 2 * x.numel() * weights.shape[-1]


def _pairs(query: torch.Tensor, key: torch.Tensor) -> int:
    """Query-key pairs over all query heads; keys may have fewer heads. Layout [B, H, S, D]."""
    return query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]


def workspace_bytes(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """What a CUDA kernel asks of the allocator while it runs, and returns before it ends. Measured
    on an H200 with torch 2.11 as differences of peaks."""
    if func.namespace != "aten":
        return ()
    name = compat.op_name(func).removeprefix("aten::")
    if name.removesuffix("_backward") in _ATTENTION_FORWARD and name.endswith("_backward"):
        return (_attention_workspace(*args[:3]),)
    if name == "embedding_dense_backward":
        return _embedding_workspace(*args[:3])
    return ()


def _attention_workspace(_: Tensor, query: Tensor, key: Tensor) -> int:
    """The gradient of queries is summed in fp32 beside two numbers a row; gradients of keys and
    values first have as many heads as queries."""
    rows = query.numel() // query.shape[-1]
    size = query.numel() * 4 + 2 * rows * 4
    if key.shape[1] != query.shape[1]:
        heads = query.shape[0] * query.shape[1]
        size += 2 * heads * key.shape[2] * query.shape[-1] * query.element_size()
    return size


# Up to so many tokens one kernel adds rows; beyond, indices are sorted first.
_SORTED_TOKENS = 3072
_PARTIAL_ROWS = 128  # tokens that one partial sum takes at most (ATen/native/cuda/Embedding.cu)
_WARP = 32


def _embedding_workspace(grad: Tensor, tokens: Tensor, num_weights: int) -> tuple[int, ...]:
    """Sorted indices, begins of the partial sums, and those sums in fp32."""
    count, width = tokens.numel(), grad.shape[-1]
    if count <= _SORTED_TOKENS:
        return ()
    sums = count // _PARTIAL_ROWS + min(count, num_weights)
    return (count * 8 * 4, sums * 8 * 3, sums * -(-width // _WARP) * _WARP * 4)


class RmsNorm(torch.autograd.Function):
    """The storages of torch's fused kernel. Its values are never read: tensors here are fake."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        root = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, root)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _TokensFirst(torch.autograd.Function):
    """The layout in which a GPU's kernel returns [B, H, S, C]: that of its queries, whose tokens
    come before heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _, heads, tokens, size = x.shape
        return x.as_strided(x.shape, (heads * tokens * size, size, heads * size, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Inside, fused kernels of GPUs stand for what the CPU would do in pieces. torch normalises on
    a GPU by one kernel, which keeps its input and one number a token; on a CPU the same call is a
    dozen operators, two of which keep the whole input again in fp32. For dry runs, which have
    shapes and no values. A GPU's attention takes values that are narrower than keys, a CPU's would
    make all scores."""
    original, attention = F.rms_norm, F.scaled_dot_product_attention

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
        if weight is None:
            return original(x, shape, weight, eps)
        return RmsNorm.apply(x, weight)

    def attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        if q.shape[-1] == v.shape[-1] or "attn_mask" in how:
            return attention(q, k, v, **how)
        return _TokensFirst.apply(compat.fused_forward(q, k, v, causal=how.get("is_causal", False)))

    with (
        compat.patched(F, "rms_norm", rms_norm),
        compat.patched(F, "scaled_dot_product_attention", attend),
    ):
        yield
