"""Every line that makes an engine run where it was not made to, with its reason. None touches
arithmetic that is compared, but for the stand-ins at the end, which are named in every answer."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import types
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Code that names its device 'cuda' means the one it runs on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # there is nothing to pin for
        if func in (torch.Tensor.pin_memory, torch.Tensor.cuda):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizer takes parameters whose type is called torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


class Nothing(contextlib.nullcontext):
    """A stream, an event, a context: takes every call and does nothing."""

    def __init__(self, *a: Any, **k: Any) -> None: ...
    def __call__(self, *a: Any, **k: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        return Nothing()


def cuda_means_cpu() -> None:
    """Before the engine is imported: it asks questions about CUDA while it loads."""
    import torch._dynamo  # before the patches below: it refuses functions that it sees twice

    nothing: Any = lambda *a, **k: None  # noqa: E731
    same: Any = lambda f=None, **k: f if f is not None else lambda g: g  # noqa: E731
    torch.compile = same  # needs a C++ compiler on CPU, and changes nothing that is compared
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = lambda: False, lambda: 0  # nobody makes a context
    cuda.current_device = lambda: torch.device("cpu")  # is passed on as a device
    cuda.set_device = cuda.synchronize = cuda.empty_cache = nothing  # nothing to wait for or free
    cuda.Stream = cuda.Event = Nothing  # one order of work: no streams
    cuda.current_stream = cuda.default_stream = Nothing()
    cuda.set_stream, cuda.stream = nothing, lambda s: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False  # no graphs
    cuda.get_device_capability = lambda *a: (9, 0)  # compared with numbers while loading
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *a: 0  # logged only
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()  # seeds of dropout, which is 0
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing  # marks for a profiler
    _plain_splits()
    _unequal_parts()
    OnCpu().__enter__()


def _plain_splits() -> None:
    """Split sizes that CUDA code copies to the host stay tensors here; gloo wants numbers."""
    real = dist.all_to_all_single
    plain = lambda sizes: sizes.tolist() if hasattr(sizes, "tolist") else sizes  # noqa: E731

    def all_to_all_single(output: Tensor, input: Tensor, *a: Any, **k: Any) -> Any:
        sizes = {n: plain(k.pop(n)) for n in ("output_split_sizes", "input_split_sizes") if n in k}
        return real(output, input, *map(plain, a[:2]), *a[2:], **sizes, **k)

    dist.all_to_all_single = all_to_all_single


def _unequal_parts() -> None:
    """gloo refuses to gather and scatter parts of unequal sizes, which NCCL does."""
    real_gather, real_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outs: Any, x: Tensor, group: Any = None, **k: Any) -> Any:
        if len({o.shape for o in outs}) == 1:
            return real_gather(outs, x, group=group, **k)
        for out, rank in zip(outs, dist.get_process_group_ranks(group), strict=True):
            if rank == dist.get_rank():
                out.copy_(x)
            dist.broadcast(out, rank, group=group)
        return None

    def reduce_scatter(out: Tensor, ins: Any, *a: Any, group: Any = None, **k: Any) -> Any:
        if len({i.shape for i in ins}) == 1:
            return real_scatter(out, ins, *a, group=group, **k)
        for part, rank in zip(ins, dist.get_process_group_ranks(group), strict=True):
            summed = part.clone()
            dist.all_reduce(summed, *a, group=group)
            if rank == dist.get_rank():
                out.copy_(summed)
        return None

    patched: Any = dist
    patched.all_gather, patched.reduce_scatter = all_gather, reduce_scatter


def cpu_histogram(real: Any = torch.histc) -> None:
    """The CPU's histc takes floating point only; engines count tokens of experts with it."""
    torch.histc = lambda x, *a, **k: real(x.float(), *a, **k).to(x.dtype)


def local_attention(ring: Any) -> None:
    """DTensor has no sharding rule for the CPU's attention kernel, and its ring no CPU kernel:
    heads are attended to where they are, and `ring(q, k, v)` stands in where tokens are cut."""
    from torch.distributed.tensor import DTensor

    real: Any = F.scaled_dot_product_attention

    def scaled_dot_product_attention(q: Any, k: Any, v: Any, *a: Any, **kw: Any) -> Any:
        if not isinstance(q, DTensor):
            return real(q, k, v, *a, **kw)
        mesh, places = q.device_mesh, q.placements
        held = (z.to_local() for z in (q, k, v))
        cut = any(place.is_shard(2) for place in places)
        out = ring(*held, mesh) if cut else real(*held, *a, **kw)
        return DTensor.from_local(out, mesh, places, run_check=False)

    F.scaled_dot_product_attention = scaled_dot_product_attention  # torch wraps it by its name


# Stand-ins: what computes in place of an engine's own kernel. What surrounds them is proven.


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """Stand-in 'attention': keys and values gathered, for rings, which have no CPU form. [batch,
    heads, tokens, channels]; each rank of `group` holds a head and a tail chunk."""
    ranks, rank, half = dist.get_world_size(group), dist.get_rank(group), q.shape[2] // 2

    def tokens(i: int) -> Tensor:
        return torch.cat([torch.arange(half) + c * half for c in (i, 2 * ranks - 1 - i)])

    k, v = (Gathered.apply(z, group) for z in (k, v))
    k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
    hide = torch.cat([tokens(i) for i in range(ranks)])[None] > tokens(rank)[:, None]
    s = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(hide.to(q.device), -torch.inf)
    return s.softmax(-1) @ v


class SequenceNorm(nn.RMSNorm):
    """Stand-in 'norm' for TENorm: Megatron's own torch norm refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        said: Any = self.weight
        said.sequence_parallel = config.sequence_parallel  # as TENorm says it


def norm_for_sequences() -> None:
    import megatron.core.transformer.torch_norm as torch_norm

    torch_norm.WrappedTorchNorm.__new__ = lambda cls, **kw: SequenceNorm(**kw)


class ContextAttention(nn.Module):
    """Stand-in 'attention' for TEDotProductAttention, the only one of Megatron that takes cp."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))  # from tokens, batch, heads, channels
        return gathered_attention(q, k, v, group).permute(2, 0, 1, 3).flatten(2)


def megatron_seeds() -> None:
    """Megatron keeps a CUDA generator of its own for dropout, which is 0 here."""
    import megatron.core.tensor_parallel.random as random

    if not torch.cuda.is_available():
        random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(1)


class Gathered(torch.autograd.Function):
    """All ranks' tokens (dimension 2) in rank order. Not torch's own differentiable all_gather:
    over gloo its backward reads a gradient that is not contiguous as if it were."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


def dense_flex_attention() -> None:
    """Stand-in 'flex', which has no backward on CPU: the same scores by the engine's own mask."""
    import torchtitan.models.common.attention as attention
    from torch.nn.attention.flex_attention import create_mask

    def dense(
        q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
    ) -> tuple[Tensor, None]:
        sizes = (q.shape[0], 1, q.shape[2], k.shape[2])
        kw = {"attn_mask": create_mask(block_mask.mask_mod, *sizes, device="cpu"), "scale": scale}
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **kw), None

    attention.FlexAttention.compiled_flex_attn = staticmethod(dense)


def ungrouped_experts() -> None:
    """Stand-in 'experts', whose grouped product is for CUDA only: rows of A, grouped by their ends,
    times B_t of their expert. The cast to bf16 for that kernel is left out."""
    import torchtitan.models.common.moe as moe

    def products(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        parts = [A[low:high] @ B_t[e] for e, (low, high) in enumerate(itertools.pairwise(ends))]
        return torch.cat([*parts, A.new_zeros(A.shape[0] - ends[-1], B_t.shape[-1])])

    tensor: Any = torch.Tensor
    tensor.bfloat16 = lambda self: self
    moe.GroupedExperts._grouped_mm = products


def micro_batch_lists() -> None:
    """torchtitan 0.3 gives a schedule lists of micro batches, which torch takes from 2.14 on; what
    older ones make of a whole batch is handed to the same function."""
    from torch.distributed.pipelining import schedules

    def step(self: Any, **kw: Any) -> None:
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(**kw)

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(kind.step).parameters:
            kind.step = step


def nothing_compiled() -> None:
    """DeepSpeed compiles C++ on first use: a shared-memory all-reduce, which gloo does too, and the
    two functions of torch that join and split tensors."""
    import deepspeed.runtime.engine as engine
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    comm: Any = sys.modules["deepspeed.comm.torch"]  # as an attribute it is torch itself
    comm.build_shm_op = lambda: None
    joins = {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}
    engine.UtilsBuilder = lambda: types.SimpleNamespace(load=lambda: types.SimpleNamespace(**joins))


def tensor_ranks_on_cpu() -> None:
    """accelerate takes tensor ranks of several devices only; CPU processes are none to it."""
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


def titan_on_cpu() -> None:
    """torchtitan decides once, while it loads, that it runs on CUDA; its files copy the answer."""
    import torchtitan.tools.utils  # noqa: F401  (loads most of them)

    cpu: Any = torch.cpu
    cpu.set_stream = getattr(cpu, "set_stream", lambda stream: None)  # it asks for the name
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if name.startswith("torchtitan") and getattr(module, "device_type", "") == "cuda":
            module.device_type, module.device_module = "cpu", cpu


def cpu_permutation() -> None:
    """torchtitan 0.2 has a CPU form of its permutation that none of its options reaches."""
    import torchtitan.models.moe.utils as utils

    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)
