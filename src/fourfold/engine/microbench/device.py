"""Small loads with a known amount of work: matrix products, attention, copies, launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fourfold.engine.compat import scaled_mm
from fourfold.engine.observe.clock import seconds_of, synchronize
from fourfold.result.profile import AttentionPoint, CopyPoint, GemmPoint

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "unfused": SDPBackend.MATH,
}


def product(dtype: str, shape: tuple[int, int, int], device: torch.device) -> Callable[[], Tensor]:
    """A ready matrix product. Random values: zeros draw less power and run faster on GPUs."""
    m, n, k = shape
    left = torch.randn(m, k, device=device)
    right = torch.randn(n, k, device=device)
    if dtype == "fp8":
        a, b = left.to(DTYPES[dtype]), right.to(DTYPES[dtype]).t()
        scale = torch.ones((), device=device)
        return lambda: scaled_mm(a, b, scale)
    a, b = left.to(DTYPES[dtype]), right.to(DTYPES[dtype]).t()
    return lambda: a @ b


def gemm(
    dtype: str, shape: tuple[int, int, int], device: torch.device, budget_s: float
) -> GemmPoint | None:
    """None when the device has no such product (fp8 on older parts, half formats on some CPUs)."""
    m, n, k = shape
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        seconds = seconds_of(product(dtype, shape, device), device, budget_s)
    except (RuntimeError, NotImplementedError):
        return None
    return GemmPoint(dtype=dtype, m=m, n=n, k=k, seconds=seconds)


def attention(
    kernel: str, sizes: tuple[int, int, int, int], dtype: str, device: torch.device, budget_s: float
) -> AttentionPoint | None:
    """Sizes: batch, heads, tokens, head size. None when this kernel does not take them here."""
    batch, heads, tokens, head = sizes
    q, k, v = (
        torch.randn(sizes, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)
    )
    chosen: Any = sdpa_kernel(KERNELS[kernel]) if kernel in KERNELS else nullcontext()
    try:
        with chosen:
            forward_s = seconds_of(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                device,
                budget_s / 3,
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            grad = torch.randn_like(out)
            backward_s = seconds_of(
                lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
                device,
                budget_s * 2 / 3,
            )
    except RuntimeError:
        return None
    return AttentionPoint(
        kernel=kernel,
        dtype=dtype,
        batch=batch,
        heads=heads,
        head_size=head,
        seq_len=tokens,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def copy(count_bytes: int, device: torch.device, budget_s: float) -> CopyPoint:
    source = torch.ones(count_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, budget_s)
    return CopyPoint(moved_bytes=count_bytes, seconds=seconds)


def launch_s(device: torch.device, budget_s: float) -> float:
    """Host seconds of one small operator, the device never behind."""
    counter = torch.ones(1, device=device)
    return _host_seconds(lambda: counter.add_(1.0), device, budget_s)


def layer_launch_s(device: torch.device, budget_s: float) -> float:
    """Host seconds of one decoder layer too small to keep the device busy, both ways."""
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, device=device
    )
    tokens = torch.randn(1, 4, 16, device=device, requires_grad=True)
    return _host_seconds(lambda: layer(tokens).sum().backward(), device, budget_s)


def _host_seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    work()
    synchronize(device)
    calls, spent = 0, 0.0
    while spent < budget_s and calls < 100_000:
        began = time.perf_counter()
        for _ in range(100):
            work()
        spent += time.perf_counter() - began
        calls += 100
        synchronize(device)
    return spent / calls


def burst_and_sustained(
    dtype: str, shape: tuple[int, int, int], device: torch.device, seconds: float
) -> tuple[float, float]:
    """FLOP/s of a long run of one product: at its best, and over its last third."""
    work = product(dtype, shape, device)
    work()
    synchronize(device)
    flops = 2.0 * shape[0] * shape[1] * shape[2]
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until or len(rates) < 6:
        calls = max(1, round(0.05 * rates[-1] / flops)) if rates else 1
        for _ in range(calls):
            work()
        synchronize(device)
        rates.append(calls * flops / (time.perf_counter() - now))
    last = rates[-(len(rates) // 3) :]
    return sorted(rates)[len(rates) * 9 // 10], sum(last) / len(last)
