"""What makes engines run where they were not made to, with the reason of each line; what only one
of them needs lies in its own folder. Nothing here touches arithmetic that is compared, but for the
stand-ins at the end, which every answer names."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
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
