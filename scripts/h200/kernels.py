"""Kernels of training alone on one GPU: attention, grouped products, fp8 products with casts.

python scripts/h200/kernels.py FOLDER [--seconds 230]

Writes FOLDER/attention.csv, linears.csv, grouped.csv and products.csv. What a kernel refuses is
printed and left out; what does not fit into the seconds is missing from the end of its table.
TFLOP/s count causal attention as half of the square, and nothing that is computed again but the
scores of attention's backward.
"""

from __future__ import annotations

import argparse
import csv
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hot import Call, Gauge, Timing, copies, heat, kernels_of, time_calls
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TOKENS = 16384  # of a call of attention, unless one sequence is longer
LENGTHS = tuple(2**n for n in range(10, 18))


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head: int  # of queries and keys
    value: int


class Case(NamedTuple):
    """A kernel of one shape: what says which, what makes its calls (which are taken in turn), and
    the FLOPs of one."""

    facts: dict[str, object]
    calls: Callable[[], list[Call]]
    flops: float


# ---- Attention ----

LATENT, WIDE = Heads(16, 16, 192, 128), Heads(16, 8, 256, 256)
MIDDLE, SMALL = Heads(32, 8, 128, 128), Heads(32, 8, 64, 64)
# kernels.csv has the middle and small heads by cuDNN to 131,072 tokens and by flash to 32,768.
ATTENTION = [
    *((heads, "cudnn", (8192,)) for heads in (MIDDLE, SMALL)),
    *((heads, "cudnn", LENGTHS) for heads in (LATENT, WIDE)),
    (WIDE, "flash", LENGTHS),  # flash takes no values of another size than queries
    *((heads, "efficient", LENGTHS[1:6:2]) for heads in (LATENT, WIDE, MIDDLE, SMALL)),
    *((heads, "flash", LENGTHS[-2:]) for heads in (MIDDLE, SMALL)),
]


def attention(names: dict[str, str]) -> Iterator[Case]:
    """Return cases of both passes. `names` receives the CUDA kernels behind each."""
    for heads, kernel, lengths in ATTENTION:
        for length in lengths:
            for which in ("forward", "backward"):
                yield _attention(heads, kernel, length, which, names)


def _attention(heads: Heads, kernel: str, length: int, which: str, names: dict[str, str]) -> Case:
    batch = max(1, TOKENS // length)
    # The efficient kernel takes as many KV heads as queries have.
    kv_heads = heads.heads if kernel == "efficient" else heads.kv_heads

    def calls() -> list[Call]:
        q = _random(batch, heads.heads, length, heads.head).requires_grad_()
        k = _random(batch, kv_heads, length, heads.head).requires_grad_()
        v = _random(batch, kv_heads, length, heads.value).requires_grad_()

        def forward() -> torch.Tensor:
            with sdpa_kernel(KERNELS[kernel]):
                grouped = kv_heads != heads.heads
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        def backward() -> object:
            return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        call: Call = forward
        if which == "backward":
            out = forward()
            grad = torch.randn_like(out)
            call = backward
        title = f"{kernel} {heads.head}/{heads.value} {which}"
        if title not in names:
            names[title] = "; ".join(kernels_of(call)[:2])
        return [call]

    facts: dict[str, object] = {
        "kernel": kernel, "batch": batch, "heads": heads.heads, "kv_heads": kv_heads,
        "seq_len": length, "head_size": heads.head, "value_size": heads.value, "pass": which,
    }  # fmt: skip
    widths = {
        "forward": heads.head + heads.value,
        "backward": 3 * heads.head + 2 * heads.value,
    }
    return Case(facts, calls, float(batch * heads.heads * length * length * widths[which]))


# ---- Grouped products of experts ----

EXPERTS = {
    "qwen3-30b": (2048, 768, (8, 32)),
    "dsv2-lite": (2048, 1408, (8, 32)),
    "dsv3": (7168, 2048, (8, 32)),
    "mixtral-8x7b": (4096, 14336, (8,)),
}
ROWS = (64, 256, 1024, 4096)
MOST_ROWS = 65536


def grouped() -> Iterator[Case]:
    """Products of both matrices of gated experts, and their gradients, in bf16 and in fp8."""
    for model, (hidden, ffn, counts) in EXPERTS.items():
        for experts in counts:
            for rows in ROWS:
                if rows * experts <= MOST_ROWS:
                    yield from _grouped(model, hidden, ffn, experts, rows)


def _grouped(model: str, hidden: int, ffn: int, experts: int, rows: int) -> Iterator[Case]:
    many = rows * experts
    ends = torch.arange(rows, many + 1, rows, device="cuda", dtype=torch.int32)
    for matrix, wide, deep in (("up", 2 * ffn, hidden), ("down", hidden, ffn)):
        sets = range(copies(2 * (many * (wide + deep) + experts * wide * deep)))
        x = [_random(many, deep) for _ in sets]
        w = [_random(experts, wide, deep) for _ in sets]
        g = [_random(many, wide) for _ in sets]
        facts: dict[str, object] = {
            "shape": model, "hidden": hidden, "ffn": ffn, "experts": experts,
            "rows_per_expert": rows, "matrix": matrix,
        }  # fmt: skip
        for name, dtype, make, one, two in (
            ("forward", "bf16", _forward, x, w),
            ("dgrad", "bf16", _dgrad, g, w),
            ("wgrad", "bf16", _wgrad, g, x),
            ("forward", "fp8-row", _scaled_grouped, x, w),
        ):
            calls = functools.partial(_each, make, one, two, ends)
            yield Case(facts | {"pass": name, "dtype": dtype}, calls, 2.0 * many * wide * deep)


def _each(
    make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Call],
    one: list[torch.Tensor],
    two: list[torch.Tensor],
    ends: torch.Tensor,
) -> list[Call]:
    return [make(a, b, ends) for a, b in zip(one, two, strict=True)]


def _forward(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> Call:
    return lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)


def _dgrad(g: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> Call:
    return lambda: torch._grouped_mm(g, w, offs=ends)


def _wgrad(g: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> Call:
    return lambda: torch._grouped_mm(g.transpose(-2, -1), x, offs=ends)


def _scaled_grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> Call:
    x8, w8 = x.to(FP8), w.to(FP8).transpose(-2, -1)
    row = torch.ones(x.shape[0], device="cuda")
    columns = torch.ones(w.shape[0], w.shape[1], device="cuda")
    return lambda: torch._scaled_grouped_mm(
        x8, w8, row, columns, offs=ends, out_dtype=BF16, use_fast_accum=True
    )


# ---- Dense products in bf16 and fp8 ----

# Name: outputs x inputs of a linear layer of Llama 3; gate and up are one.
LINEARS = {
    "1b-up": (16384, 2048),
    "8b-qkv": (6144, 4096),
    "8b-o": (4096, 4096),
    "8b-up": (28672, 4096),
    "8b-down": (4096, 14336),
    "70b-up": (57344, 8192),
    "70b-down": (8192, 28672),
    "8b-head": (128256, 4096),
}
BATCHES = (4096, 16384)
BLOCK = 128


def products() -> Iterator[Case]:
    """Return products of a forward pass and of both gradients. In fp8 the hardware multiplies rows
    by rows: gradients take copies that lie the other way, whose making is no part of these."""
    for name, (wide, deep) in LINEARS.items():
        for tokens in BATCHES:
            for which, (m, n, k) in {
                "forward": (tokens, wide, deep),
                "dgrad": (tokens, deep, wide),
                "wgrad": (wide, deep, tokens),
            }.items():
                facts: dict[str, object] = {
                    "shape": name, "tokens": tokens, "pass": which, "m": m, "n": n, "k": k,
                }  # fmt: skip
                for kind, make in _KINDS.items():
                    calls = functools.partial(_sets, make, which, m, n, k)
                    yield Case(facts | {"dtype": kind}, calls, 2.0 * m * n * k)


def _sets(
    make: Callable[[str, int, int, int], Call], which: str, m: int, n: int, k: int
) -> list[Call]:
    sets = min(4, copies(2 * (m * k + n * k + m * n)))
    return [make(which, m, n, k) for _ in range(sets)]


def _bf16(which: str, m: int, n: int, k: int) -> Call:
    """As autograd calls it: the weight as it lies, transposed or not."""
    if which == "forward":
        x, w = _random(m, k), _random(n, k)
        return lambda: x @ w.t()
    if which == "dgrad":
        g, w = _random(m, k), _random(k, n)
        return lambda: g @ w
    g, x = _random(k, m), _random(k, n)
    return lambda: g.t() @ x


def _eight(which: str, m: int, n: int, k: int, *, by_row: bool) -> Call:
    a, b = _random(m, k).to(FP8), _random(n, k).to(FP8).t()
    shapes = ((m, 1), (1, n)) if by_row else ((), ())
    one, two = (torch.ones(shape, device="cuda") for shape in shapes)
    fast = by_row or which == "forward"  # as torchao's recipes set it
    return lambda: torch._scaled_mm(
        a, b, scale_a=one, scale_b=two, out_dtype=BF16, use_fast_accum=fast
    )


def _block(which: str, m: int, n: int, k: int) -> Call:
    """Return a product with scales of 1 x 128 on the left; of 128 x 128 on the right, but for the
    weight's gradient, where both sides are activations."""
    from torch.nn.functional import ScalingType

    a, b = _random(m, k).to(FP8), _random(n, k).to(FP8).t()
    one = torch.ones(k // BLOCK, m, device="cuda").t()
    if which == "wgrad":
        two, kind = torch.ones(k // BLOCK, n, device="cuda").t(), ScalingType.BlockWise1x128
    else:
        two = torch.ones(n // BLOCK, 4 * -(-k // (4 * BLOCK)), device="cuda").t()
        kind = ScalingType.BlockWise128x128
    return lambda: F.scaled_mm(a, b, one, ScalingType.BlockWise1x128, two, kind, output_dtype=BF16)


_KINDS: dict[str, Callable[[str, int, int, int], Call]] = {
    "bf16": _bf16,
    "fp8-tensor": lambda which, m, n, k: _eight(which, m, n, k, by_row=False),
    "fp8-row": lambda which, m, n, k: _eight(which, m, n, k, by_row=True),
    "fp8-block": _block,
}


# ---- Linear layers as a compiled engine runs them, casts included ----

WHOLE = ("8b-up", "8b-down", "70b-up")
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")


def linears() -> Iterator[Case]:
    """All three products of a compiled linear layer by torchao's recipe, with amax, scales, casts
    and copies."""
    tokens = BATCHES[-1]
    for name in WHOLE:
        wide, deep = LINEARS[name]
        x, grad = _random(tokens, deep).requires_grad_(), _random(tokens, wide)
        for recipe in RECIPES:
            facts: dict[str, object] = {
                "shape": name, "tokens": tokens, "outputs": wide, "inputs": deep, "recipe": recipe,
            }  # fmt: skip
            calls = functools.partial(_linear, recipe, wide, deep, x, grad)
            yield Case(facts, calls, 6.0 * tokens * wide * deep)


def _linear(recipe: str, wide: int, deep: int, x: torch.Tensor, grad: torch.Tensor) -> list[Call]:
    layer = torch.nn.Sequential(torch.nn.Linear(deep, wide, bias=False))
    layer.to("cuda", BF16)
    if recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
    torch._dynamo.reset()
    compiled, weight = torch.compile(layer), layer[0].weight

    def both() -> object:
        return torch.autograd.grad(compiled(x), (x, weight), grad)

    return [both]


# ---- All of them ----

TABLES: dict[str, Callable[[], Iterator[Case]]] = {
    "products": products,
    "grouped": grouped,
    "linears": linears,
}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def _row(case: Case, timing: Timing) -> dict[str, object]:
    return case.facts | {
        "seconds": f"{timing.seconds:.4g}", "low_s": f"{timing.low_s:.4g}",
        "high_s": f"{timing.high_s:.4g}", "tflops": f"{case.flops / timing.seconds / 1e12:.1f}",
        "calls": timing.calls, "sm_mhz": timing.sm_mhz, "watts": f"{timing.watts:.0f}",
    }  # fmt: skip


def measure(cases: Iterator[Case], gauge: Gauge, path: Path, end: float) -> int:
    """Time cases until `end`, a row each; what a kernel refuses is printed and left out."""
    rows: list[dict[str, object]] = []
    for case in cases:
        if time.perf_counter() > end:
            print(path.stem, "ends before", case.facts, flush=True)
            break
        try:
            timing = time_calls(case.calls(), gauge)
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0][:160]
            print(path.stem, *case.facts.values(), "refused:", why, flush=True)
            continue
        rows.append(_row(case, timing))
    if rows:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0], lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=230.0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    torch.manual_seed(0)
    gauge = Gauge()
    print(torch.__version__, torch.cuda.get_device_name(), torch.backends.cudnn.version())
    heat(6.0)
    names: dict[str, str] = {}
    shares = {"attention": 0.42, "linears": 0.62, "grouped": 0.84, "products": 1.0}
    for name, share in shares.items():
        cases = attention(names) if name == "attention" else TABLES[name]()
        end = begin + share * args.seconds
        many = measure(cases, gauge, args.folder / f"{name}.csv", end)
        print(f"{name}: {many} rows, {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()
    for title, kernels in names.items():
        print(title, "=", kernels[:200])


if __name__ == "__main__":
    main()
