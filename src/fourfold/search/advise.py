"""Sizes that suit a GPU: what a hidden size, head count, MLP width, vocabulary or micro batch loses
to tiles, waves and kernel rules by the cost model's formulas, and the nearest that loses less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fourfold.cost.columns import Columns, Floats, columns
from fourfold.cost.kinds import DENSE
from fourfold.cost.run import device_facts
from fourfold.cost.step.estimate import ends_s, layer_times
from fourfold.cost.step.kernels import attention_s, misalignment, tile_waves
from fourfold.search.rules.case import divisors
from fourfold.spec import codec
from fourfold.spec.cluster import Device
from fourfold.spec.words import PRICED_ATTENTION

# A value is good enough to name when it gives this share of what the best nearby would.
SHARE_OF_GAIN = 2.0 / 3.0
# Losses below this are within what the model knows.
WORTH_SAYING = 1.02
FILLING = 64.0  # sequences for one, of which any head count fills a GPU
# A head size that costs the attention core this much more per FLOP is called slow.
SLOW_ATTENTION = 1.10
WINDOW = 0.04
# A width whose only head sizes lie outside is no model anybody trains.
USUAL_HEAD_SIZES = range(48, 289)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer on one rank: the sizes that decide how its kernels fit the GPU."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    seq_len: int
    micro_batch: int
    tp: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    ep: int = 1
    head_dim: int | None = None  # None: hidden / heads
    group: int = 1  # query heads per key head, where the number of heads is open

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def width(self) -> int:
        """Of all heads: that of the hidden state, unless heads have a size of their own."""
        return self.heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSize:
    """A value of a size beside the asked one, with the sizes that follow from it."""

    value: int
    tflops_gpu: float
    against_asked: float
    heads: int | None = None
    head_size: int | None = None
    attention_loss: float | None = None
    expert_ffn: int | None = None
    top_k: int | None = None
    rows: int | None = None  # tokens per expert and micro batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterSize:
    """The nearest value that loses little, and its speed per FLOP over that of the asked one."""

    value: int
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductLoss:
    """A layer's matrix product on one rank, [tokens, into] x [into, out], and what it loses against
    one that fills the GPU."""

    name: str
    tokens: int
    out: float
    into: float
    alignment_loss_pct: float
    wave_loss_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAdvice:
    """A size among its neighbours. `gemms` are those of a hidden size; `verdict`, `head_size` and
    `attention_loss` are about heads; `kernel_rule` is about a micro batch: whether Megatron's fused
    softmax takes it."""

    asked: int
    tflops_gpu: float
    loses_pct: float
    better: Annotated[BetterSize | None, codec.NULL]
    notes: tuple[str, ...]
    table: tuple[TriedSize, ...]
    gemms: tuple[ProductLoss, ...] | None = None
    verdict: str | None = None
    head_size: int | None = None
    attention_loss: float | None = None
    kernel_rule: bool | None = None


@dataclass(frozen=True, slots=True)
class Kernels:
    """The GPU, the coefficients and the kind of attention that the advice is for."""

    device: Device
    precision: str
    coefficients: dict[str, float]
    attention: str  # a word of PRICED_ATTENTION

    def columns(self, shapes: Sequence[LayerShape]) -> Columns:
        names = (
            "hidden",
            "heads",
            "kv_heads",
            "ffn",
            "vocab",
            "gated",
            "tp",
            "experts",
            "top_k",
            "expert_ffn",
            "ep",
            "width",
        )
        facts: dict[str, Sequence[float] | float] = {
            name: [getattr(s, name) for s in shapes] for name in names
        }
        facts |= {"seq": [s.seq_len for s in shapes], "micro": [s.micro_batch for s in shapes]}
        idle = {"layers": 1, "batch": 1, "gpus": 1, "pp": 1, "dp": 1, "link": 1e12, "net": 1e12}
        idle |= {"node": 8, "net_seen": 0}
        facts |= {"attention": PRICED_ATTENTION.index(self.attention)}
        facts |= {"routed": [float(s.experts > 0) for s in shapes]}
        return columns(
            len(shapes), **idle, **facts, **device_facts(self.device, self.precision.split("-")[0])
        )


def layer_rates(shapes: Sequence[LayerShape], kernels: Kernels) -> Floats:
    """FLOP/s of one rank in the compute of one layer, both ways."""
    c = kernels.columns(shapes)
    times = layer_times(c, kernels.coefficients, micro=c.micro)
    seconds = sum(times.parts[name] for name in ("gemm", "attention", "elementwise"))
    tokens = c.micro * c.seq
    return tokens * (6.0 * DENSE.count(c) + 12.0 * c.width * c.reach) / c.tp / seconds


def auto_heads(hidden: int, tp: int, head_size: int = 128) -> int:
    """Heads that divide hidden and go evenly to the ranks, of a size next to the usual 128."""
    counts = [d for d in divisors(hidden) if d % tp == 0] or divisors(hidden)
    return min(counts, key=lambda n: ((hidden // n) % 8 != 0, abs(hidden // n - head_size)))


def judged(asked: int, values: list[int], rates: Floats, notes: list[str]) -> SizeAdvice:
    """Return the asked value among its neighbours: what it loses and the nearest that loses
    little."""
    own_rate = float(rates[values.index(asked)])
    best = float(rates.max())
    enough = own_rate + SHARE_OF_GAIN * (best - own_rate)
    good = [v for v, rate in zip(values, rates, strict=True) if rate >= enough]
    closest = min(good, key=lambda v: (abs(v - asked), v))
    gain = float(rates[values.index(closest)]) / own_rate
    return SizeAdvice(
        asked=asked,
        tflops_gpu=own_rate / 1e12,
        loses_pct=100.0 * (1.0 - own_rate / best),
        better=BetterSize(value=closest, gain=gain) if gain > WORTH_SAYING else None,
        notes=tuple(notes),
        table=tuple(
            TriedSize(value=v, tflops_gpu=float(r) / 1e12, against_asked=float(r) / own_rate)
            for v, r in zip(values, rates, strict=True)
        ),
    )


def _alignment(name: str, size: int, tp: int) -> list[str]:
    """Why a dimension that tensor parallelism divides is slow."""
    if size % tp:
        return [f"{name} {size} is not divisible by tp {tp}"]
    part = size // tp
    step = int(np.gcd(part, 64))
    if step == 64:
        return []
    return [f"{name}/tp = {part} is a multiple of {step}, not of 64 (128 bytes in 16 bits)"]


def near(size: int, step: int) -> list[int]:
    """The size, and multiples of `step` near it."""
    low, high = int(size * (1 - WINDOW)), int(size * (1 + WINDOW))
    return sorted({size, *range(-(-low // step) * step, high + 1, step)})


def mlp_width(hidden: float, ratio: float, tp: int) -> int:
    """Return the aligned MLP width next to `ratio` times a hidden size: exact ratios of sizes that
    are only tried would lose to alignment what a user rounds away."""
    step = 64 * tp
    return max(step, round(ratio * hidden / step) * step)


def key_heads(heads: int, group: int) -> int:
    """Return the key heads of `heads` query heads in groups of `group`; as many as query heads
    where they do not divide into groups."""
    return heads // group if heads % group == 0 else heads


def hidden_advice(
    shape: LayerShape, kernels: Kernels, *, free_heads: bool, mlp_ratio: float | None
) -> SizeAdvice:
    """Hidden sizes near the asked one; heads and MLP follow it where the user left them open
    (`mlp_ratio`: of the MLP's width to the hidden size, None where it stays)."""
    follows = shape.heads if not free_heads and shape.head_dim is None else shape.tp
    step = int(np.lcm(64, follows))
    plain = {shape.hidden: shape}
    for hidden in near(shape.hidden, step):
        heads = auto_heads(hidden, shape.tp) if free_heads else shape.heads
        ffn = mlp_width(hidden, mlp_ratio, shape.tp) if mlp_ratio else shape.ffn
        is_grouped = shape.group > 1 or shape.kv_heads == shape.heads
        kv_heads = key_heads(heads, shape.group) if is_grouped else shape.kv_heads
        other = replace(shape, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)
        if other.head_size in USUAL_HEAD_SIZES and heads % kv_heads == 0:
            plain.setdefault(hidden, other)
    plain = dict(sorted(plain.items()))
    rates = layer_rates(list(plain.values()), kernels)
    notes = _alignment("hidden", shape.hidden, shape.tp)
    if len(plain) == 1:
        notes.append(f"no multiple of 64 nearby is divided by {shape.heads} heads; try other heads")
    advice = judged(shape.hidden, list(plain), rates, notes)
    tried = (
        replace(row, heads=plain[row.value].heads, head_size=plain[row.value].head_size)
        for row in advice.table
    )
    return replace(advice, table=tuple(tried), gemms=gemm_losses(shape, kernels))


def gemm_losses(shape: LayerShape, kernels: Kernels) -> tuple[ProductLoss, ...]:
    """The layer's products on one rank, [tokens, in] x [in, out]: what alignment and what tiles and
    waves cost against a product that fills the GPU."""
    tokens = float(shape.micro_batch * shape.seq_len)
    kv = 2 * shape.width * shape.kv_heads / shape.heads
    up = (1 + shape.gated) * shape.ffn / shape.tp
    sizes = {
        "attention in": ((shape.width + kv) / shape.tp, float(shape.hidden)),
        "attention out": (float(shape.hidden), shape.width / shape.tp),
        "mlp in": (up, float(shape.hidden)),
        "mlp out": (float(shape.hidden), shape.ffn / shape.tp),
    }
    losses = []
    for name, (out, into) in sizes.items():
        m, n, k = np.array([tokens]), np.array([out]), np.array([into])
        skew = float((misalignment(n) + misalignment(k))[0])
        aligned = max(0.25, 1.0 - kernels.coefficients["align"] * skew)
        sms = np.array([float(kernels.device.sms)])
        area = tile_waves(m, n, sms=sms, wave=kernels.coefficients["wave"])[0]
        losses.append(
            ProductLoss(
                name=name,
                tokens=int(tokens),
                out=out,
                into=into,
                alignment_loss_pct=100.0 * (1.0 - aligned),
                wave_loss_pct=100.0 * (1.0 - 2.0 * tokens * out / float(area)),
            )
        )
    return tuple(losses)


def _core_loss(c: Columns, kernels: Kernels) -> Floats:
    """Seconds of the attention core against the fastest, on a full GPU: few sequences of flash
    kernels fill it better with many small heads, which is no merit of a head size."""
    micro = c.micro * (FILLING if kernels.attention == "flash" else 1.0)
    forward, backward = attention_s(c, kernels.coefficients, micro=micro)
    both = forward + backward
    return both / both.min()


def heads_advice(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    """Head counts that divide their width and tp; the attention core is judged beside the layer."""
    width, ratio = shape.width, max(1, shape.heads // shape.kv_heads)
    even = [n for n in divisors(width) if n % shape.tp == 0]
    counts = sorted({shape.heads, *(n for n in even if 32 <= width // n <= 320)})
    kv_heads = {n: max(1, n // ratio) for n in counts}
    shapes = [replace(shape, heads=n, kv_heads=kv_heads[n], head_dim=width // n) for n in counts]
    rates = layer_rates(shapes, kernels)
    c = kernels.columns(shapes)
    core = _core_loss(c, kernels)
    own = counts.index(shape.heads)
    notes = []
    size = shape.head_size
    if size % 8:
        notes.append(f"head size {size} is not a multiple of 8: tensor cores need that alignment")
    elif size % 32:
        notes.append(f"head size {size} is padded to {-(-size // 32) * 32} by flash kernels")
    if shape.heads % shape.tp:
        notes.append(f"heads {shape.heads} are not divisible by tp {shape.tp}")
    if kernels.attention == "flash":
        plain = layer_rates(shapes, replace(kernels, attention="fused-softmax"))
        loss = float(plain.max() / plain[own])
        if loss > WORTH_SAYING:
            notes.append(f"with Megatron's fused softmax instead of flash: {loss:.2f}x the layer")
    advice = judged(shape.heads, counts, rates, notes)
    tried = (
        replace(row, head_size=width // row.value, attention_loss=float(loss))
        for row, loss in zip(advice.table, core, strict=True)
    )
    is_slow = core[own] >= SLOW_ATTENTION or rates[own] * WORTH_SAYING < rates.max()
    good = [n for n, loss in zip(counts, core, strict=True) if loss < 1.0 + (core[own] - 1.0) / 2]
    closest = min(good, key=lambda n: abs(n - shape.heads), default=shape.heads)
    gain = float(rates[counts.index(closest)] / rates[own])
    better = advice.better
    if is_slow and better is None and gain > WORTH_SAYING:
        better = BetterSize(value=closest, gain=gain)
    return replace(
        advice,
        better=better,
        table=tuple(tried),
        verdict="slow" if is_slow else "fine",
        head_size=size,
        attention_loss=float(core[own]),
    )


def ffn_advice(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    sizes = near(shape.ffn, int(np.lcm(64, shape.tp)))
    rates = layer_rates([replace(shape, ffn=f) for f in sizes], kernels)
    return judged(shape.ffn, sizes, rates, _alignment("ffn", shape.ffn, shape.tp))


def vocab_advice(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    """Padding a vocabulary costs work and may still save time; only padding upwards is safe."""
    step = 64 * shape.tp
    padded = -(-shape.vocab // step) * step
    sizes = sorted({shape.vocab, padded, -(-shape.vocab // (2 * step)) * 2 * step})
    c = kernels.columns([replace(shape, vocab=v) for v in sizes])
    seconds, *_ = ends_s(c, kernels.coefficients, c.micro)
    # The useful work is that of the asked vocabulary whatever the padding.
    rates = 6.0 * c.micro * c.seq * shape.vocab * c.hidden / c.tp / seconds
    return judged(shape.vocab, sizes, rates, _alignment("vocabulary", shape.vocab, shape.tp))


def micro_advice(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    """Micro batches up to 16 by rate; tokens fill tiles and waves in steps."""
    sizes = sorted({*range(1, 17), shape.micro_batch})
    rates = layer_rates([replace(shape, micro_batch=m) for m in sizes], kernels)
    notes = []
    per_rank = shape.heads // shape.tp * shape.micro_batch
    if per_rank % 4:
        notes.append(
            f"(heads/tp) x micro batch = {per_rank} is not a multiple of 4: Megatron's fused "
            "softmax falls back to separate kernels (flash attention is not affected)"
        )
    advice = judged(shape.micro_batch, sizes, rates, notes)
    return replace(advice, kernel_rule=per_rank % 4 == 0)
