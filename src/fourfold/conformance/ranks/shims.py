"""Every line that makes an engine run where it was not made to, with its reason. None touches
arithmetic that is compared, but for the stand-ins at the end, which are named in every answer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
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


class Nothing:
    """A stream, an event, a context: takes every call and does nothing."""

    def __init__(self, *a: Any, **k: Any) -> None: ...
    def __call__(self, *a: Any, **k: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        return Nothing()

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *a: Any) -> bool:
        return False


def cuda_means_cpu() -> None:
    """Before the engine is imported: it asks questions about CUDA while it loads."""
    import torch._dynamo  # before the patches below: it refuses functions that it sees twice

    def nothing(*a: Any, **k: Any) -> None:
        return None

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

    def plain(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    def all_to_all_single(
        output: Tensor, input: Tensor, outs: Any = None, ins: Any = None, *a: Any, **k: Any
    ) -> Any:
        outs, ins = k.pop("output_split_sizes", outs), k.pop("input_split_sizes", ins)
        return real(output, input, plain(outs), plain(ins), *a, **k)

    dist.all_to_all_single = all_to_all_single


def _unequal_parts() -> None:
    """gloo refuses to gather and scatter parts of unequal sizes, which NCCL does."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outs: Any, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({o.shape for o in outs}) == 1:
            return gather(outs, x, group=group, async_op=async_op)
        for out, rank in zip(outs, dist.get_process_group_ranks(group), strict=True):
            if rank == dist.get_rank():
                out.copy_(x)
            dist.broadcast(out, rank, group=group)
        return None

    def reduce_scatter(
        out: Tensor, ins: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: Any = False
    ) -> Any:
        if len({i.shape for i in ins}) == 1:
            return scatter(out, ins, op=op, group=group, async_op=async_op)
        for part, rank in zip(ins, dist.get_process_group_ranks(group), strict=True):
            summed = part.clone()
            dist.all_reduce(summed, op=op, group=group)
            if rank == dist.get_rank():
                out.copy_(summed)
        return None

    patched: Any = dist
    patched.all_gather, patched.reduce_scatter = all_gather, reduce_scatter


def cpu_histogram() -> None:
    """The CPU's histc takes floating point only; engines count tokens of experts with it."""
    real = torch.histc
    torch.histc = lambda x, *a, **k: real(x.float(), *a, **k).to(x.dtype)


def local_attention(ring: Any) -> None:
    """DTensor has no sharding rule for the CPU's attention kernel, and its ring no CPU kernel:
    heads are attended to where they are, and `ring(q, k, v)` stands in where tokens are cut."""
    from torch.distributed.tensor import DTensor

    real = F.scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, *a: Any, **kw: Any) -> Any:
        if not isinstance(q, DTensor):
            return real(q, k, v, *a, **kw)
        mesh, places = q.device_mesh, q.placements
        if any(place.is_shard(2) for place in places):
            out = ring(q.to_local(), k.to_local(), v.to_local(), mesh)
        else:
            out = real(q.to_local(), k.to_local(), v.to_local(), *a, **kw)
        return DTensor.from_local(out, mesh, places, run_check=False)

    F.scaled_dot_product_attention = attention


# Stand-ins: what computes in place of an engine's own kernel. What surrounds them is proven.
STANDINS = {
    "norm": "RMSNorm in torch for TENorm: Megatron's own torch norm refuses sequence parallelism",
    "attention": "keys and values gathered for the ring kernel, which has no CPU form",
    "flex": "scaled_dot_product_attention for flex attention, which has no backward on CPU",
    "experts": "one product for each expert instead of a grouped one, which is for CUDA only",
}


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """[batch, heads, tokens, channels]; each rank of `group` holds a head and a tail chunk."""
    ranks, rank, half = dist.get_world_size(group), dist.get_rank(group), q.shape[2] // 2

    def tokens(i: int) -> Tensor:
        return torch.cat([torch.arange(half) + c * half for c in (i, 2 * ranks - 1 - i)])

    k, v = (Gathered.apply(z, group) for z in (k, v))
    k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
    hide = torch.cat([tokens(i) for i in range(ranks)])[None] > tokens(rank)[:, None]
    s = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(hide.to(q.device), -torch.inf)
    return s.softmax(-1) @ v


class SequenceNorm(nn.Module):
    """Stand-in 'norm'."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        said: Any = self.weight
        said.sequence_parallel = config.sequence_parallel  # as TENorm says it

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


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


def expert_products(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    """a's rows, grouped by `counts`, times b[expert]; rows after the last group are zeros."""
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    parts = [a[low:high] @ b[e] for e, (low, high) in enumerate(itertools.pairwise(ends))]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])])


def nothing_compiled() -> None:
    """DeepSpeed compiles C++ on first use: a shared-memory all-reduce, which gloo does too, and the
    two functions of torch that join and split tensors."""
    import deepspeed.runtime.engine as engine
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    comm: Any = sys.modules["deepspeed.comm.torch"]  # as an attribute it is torch itself
    comm.build_shm_op = lambda: None
    joins = {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}
    engine.UtilsBuilder = lambda: types.SimpleNamespace(load=lambda: types.SimpleNamespace(**joins))


def titan_on_cpu() -> None:
    """torchtitan decides once, while it loads, that it runs on CUDA; its files copy the answer."""
    import torchtitan.tools.utils  # noqa: F401  (loads most of them)

    cpu: Any = torch.cpu
    cpu.set_stream = getattr(cpu, "set_stream", lambda stream: None)  # it asks for the name
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if name.startswith("torchtitan") and getattr(module, "device_type", "") == "cuda":
            module.device_type = "cpu"
            if hasattr(module, "device_module"):
                module.device_module = cpu


def cpu_permutation() -> None:
    """torchtitan 0.2 has a CPU form of its permutation that none of its options reaches."""
    import torchtitan.models.moe.utils as utils

    real = utils.generate_permute_indices
    utils.generate_permute_indices = functools.partial(real, use_cpu=True)
