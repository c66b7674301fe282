"""All private torch API, and what differs between torch 2.11 and 2.13; no other file has any. What
takes seconds to import (FSDP, DTensor, dynamo) is imported late: a ping does without."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes as without_modes  # noqa: F401
from torch.utils._pytree import tree_leaves as tree_leaves

from fourfold.spec.words import AROUND

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Functional collectives by name: the same in all supported versions, and they trace under compile.
functional, _aten = torch.ops._c10d_functional, torch.ops.aten
foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_
foreach_copy_, is_profiled = torch._foreach_copy_, torch.autograd._profiler_enabled
_WHOLE_ROW = 4096
sleep_cycles = torch.cuda._sleep  # lets the GPU wait, so that its host gets ahead


def quiet() -> None:
    """Keep known, harmless torch warnings off a user's terminal. FSDP2 calls collectives by names
    that 2.13 deprecates, and warns about it on every call."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\..*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def activation_dtype(compute: str) -> torch.dtype:
    """What activations and gathered weights are in, given the format of matrix products."""
    return DTYPES[AROUND.get(compute, compute)]


def local(tensor: Tensor) -> Tensor:
    """The part of a (possibly sharded) tensor on this rank, without DTensor's dispatch."""
    return getattr(tensor, "_local_tensor", tensor)


def storage_key(tensor: Tensor | torch.UntypedStorage) -> int:
    """The same for all views of a storage, as long as it lives."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    return tensor._version


@functools.cache
def op_name(func: Any) -> str:
    """'aten::mm'."""
    return func._schema.name


def op_arguments(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def op_packet(func: Any) -> Any:
    """The operator without its overload, as torch's FLOP formulas are filed."""
    return func._overloadpacket


def put_parameter(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """In the place of another of its shape, without a module's checks."""
    owner._parameters[name] = parameter


@functools.cache
def kernels() -> Any:
    """Our own kernels of GPUs. triton comes with torch for GPUs only, so they are imported late."""
    from fourfold.engine.model import triton_kernels

    return triton_kernels


def scaled_mm(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """A product in fp8, bf16 out."""
    return torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's flash kernel of the device, with its logsumexp."""
    if _on_host(q):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    keeps_sums: bool = True,
) -> Tensor:
    """cuDNN's, which takes values narrower than keys. `keeps_sums`: for a backward pass."""
    forward = _aten._scaled_dot_product_cudnn_attention
    return forward(q, k, v, None, keeps_sums, 0.0, causal, scale=scale)[0]


def flash_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs
    if _on_host(q):
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal)
    # No dropout, so the generator's state is never read. The kernel reads the logsumexp as if it
    # were contiguous, without a look at its strides: half of the queries is a slice.
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse, lengths = lse.contiguous(), (q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, seed
    )


def fake_store() -> dist.Store:
    """Of a world of which only this rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def finished_work() -> Any:
    """What a collective gives back that is over already."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr]

    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


def group_names() -> dict[dist.ProcessGroup, str]:
    """All groups of this process, by the name that functional collectives know them by."""
    names = dist.distributed_c10d._world.pg_names
    return {group: str(name) for group, name in list(names.items())}


def collectives_by_group() -> dict[str, str]:
    """Group name -> collectives started; empty before torch.distributed is up. Not of pipelines:
    sends and receives count too, and the middle stages have twice as many."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    counts: dict[str, str] = {}
    for group, name in group_names().items():
        if getattr(group, "group_desc", "") == "pp":
            continue
        # A backend without a counter (the fake one), or a group going away.
        with contextlib.suppress(RuntimeError):
            counts[name] = str(group._get_sequence_number_for_group())  # type: ignore[attr]
    return counts


def flight_record() -> str:
    """torch's record of the last collectives of this rank as JSON, '' where it keeps none."""
    from torch._C import _distributed_c10d as c10d

    # NCCL and the other backends keep separate recorders, under names that changed over versions.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        record = dump(includeCollectives=True, onlyActive=False).decode()
        if json.loads(record).get("entries"):
            return record
    return ""


def import_dynamo() -> None:
    import torch._dynamo  # noqa: F401


def allow_graphs(count: int) -> None:
    """torch gives up compiling a function at its limit of graphs, which is made to fit."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


@functools.cache
def keep_rows_whole() -> None:
    """Reductions over rows of up to 4,096 values read a row once; torch's limit is 1,024, above
    which norms take twice the time."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    original = InductorChoices.should_use_persistent_reduction

    def is_whole(features: Any, cooperative_reduction: bool) -> bool:
        inner = features.get_reduction_hint() == ReductionHint.INNER
        sizes = V.graph.sizevars
        if inner and sizes.statically_known_leq(features.reduction_numel, _WHOLE_ROW):
            return True
        return original(features, cooperative_reduction)

    InductorChoices.should_use_persistent_reduction = staticmethod(is_whole)


@functools.cache
def recompute_inside_functions() -> None:
    """Before 2.12 torch does not mark what a custom autograd function computes in a recomputed
    layer, and the compiler keeps it: 28 GiB of activations in llama-3.1-8b at 32k tokens."""
    from torch._functorch.autograd_function import autograd_function_apply
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    original = getattr(TagActivationCheckpoint, "tag_nodes", None)
    if original is None:
        return

    def mark(region: Any, **how: Any) -> Any:
        original(region, **how)
        for node in region.graph.nodes:
            if node.target is autograd_function_apply:
                body = getattr(region, node.args[0].target)
                for inner in body.graph.nodes:
                    if inner.op.startswith("call_"):
                        inner.meta |= {key: node.meta[key] for key in ("ac_graph_id", "recompute")}
        return region

    TagActivationCheckpoint.tag_nodes = staticmethod(mark)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_s() -> float:
    """Seconds torch.compile has taken so far in this process, by its own account."""
    spent = torch._dynamo.utils.calculate_time_spent()
    return float(spent.get("total_wall_time", spent.get("entire_frame_compile", 0.0)))


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Inside, compiled functions run as written; under a dispatch mode they would refuse to."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def forget_compiled() -> None:
    torch._dynamo.reset()


@functools.cache
def distributed_tensors() -> tuple[type, ...]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
