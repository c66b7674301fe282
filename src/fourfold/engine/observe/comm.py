"""Which operators are collectives, over which group, and how many bytes are in them?

Bytes are the payload: the whole tensor (gathered output, scattered input, message). A ring moves
(n-1)/n of it through each rank, twice for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine import compat

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# torch's names of one collective, by API: c10d's in place, coalesced and functional ones.
OPS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_coalesced_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_coalesced_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "isend": "send",
    "irecv": "recv",
}


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
