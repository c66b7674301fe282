"""The shape of a model: sizes, no weights and no code; all counts follow from its fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, Literal, get_args

from fourfold.spec import check
from fourfold.spec.experts import Latent, Moe
from fourfold.spec.layers import FeedForward, LayerKind, LayerRun, Mixer, runs_of

Family = Literal[
    "mpt",
    "gpt",
    "llama",
    "nemotron",
    "qwen",
    "olmo",
    "gemma",
    "falcon",
    "cohere",
    "mixtral",
    "qwen-moe",
    "olmoe",
    "deepseek",
    "glm",
    "gpt-oss",
    "llama4",
    "granite-moe",
    "grok",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
Norm = Literal["layernorm", "layernorm-nobias", "layernorm-noweight", "rmsnorm"]
Activation = Literal["gelu", "relu", "relu2", "silu", "swiglu", "geglu", "reglu"]
GATED: tuple[Activation, ...] = ("swiglu", "geglu", "reglu")
# Norms of queries and keys: one weight per channel of a head, shared by all heads (Qwen3); the same
# for every head apart (Cohere); or over the whole projection (OLMo-2). Only the first has a bias,
# where the model's norm has one.
QkNorm = Literal["none", "head", "heads", "width"]
# What a model computes beyond the fields of its shape. None has parameters or takes much time.
Variant = Literal[
    "dropout",
    "soft-caps",
    "multipliers",
    "clipped-qkv",
    "unit-offset-norm",
    "no-rope-layers",
    "other-rope",
    "two-ropes",
    "interleaved-rope",
    "alibi-slopes",
    "residual-after-norm",
    "clipped-swiglu",
    "scored-inputs",
    "unweighted-qk-norm",
    "router-noise",
    "chunked-attention",
]
VARIANTS: dict[Variant, str] = {
    "dropout": "dropout",
    "soft-caps": "soft-capped logits",
    "multipliers": "scaled embeddings, residuals or logits",
    "clipped-qkv": "clipped queries, keys and values",
    "unit-offset-norm": "norms that multiply by 1 + weight",
    "no-rope-layers": "layers without rotary positions",
    "other-rope": "rotary scaling other than linear, llama3 and YaRN",
    "two-ropes": "rotary settings per kind of layer",
    "interleaved-rope": "adjacent rotary pairs",
    "alibi-slopes": "ALiBi with other slopes",
    "residual-after-norm": "residuals taken after the norm",
    "clipped-swiglu": "clipped and shifted SwiGLU",
    "scored-inputs": "scores that multiply an expert's input",
    "unweighted-qk-norm": "norms of queries and keys without weights",
    "chunked-attention": "chunked attention",
    "router-noise": "noise on a router's inputs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length; OF_SCALING: which numbers a
    kind has beside the factor. `truncate`: YaRN's range of stretched channels is widened to whole
    ones (GPT-OSS leaves it as it is)."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check.positive(factor=self.factor, low_freq_factor=self.low_freq_factor)
        check.positive(high_freq_factor=self.high_freq_factor)
        check.whole(original_length=self.original_length)
        check.positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow)


OF_SCALING = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_length"),
    "yarn": ("original_length", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """`length` is the rows of a learned table; None: as long as the run's sequence (MPT).
    `made_for`: the longest sequence of rotary positions, which exports say and nothing computes.

    `partial` is the share of a head's channels that rotary positions turn.
    """

    kind: Literal["learned", "rope", "alibi"]
    length: int | None = None
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    partial: float = 1.0
    made_for: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check.positive(theta=self.theta, partial=self.partial)
        check.whole(made_for=self.made_for)
        check.that(self.partial <= 1, "partial", self.partial, "must be at most 1")
        check.whole(length=self.length)
        plain = self.kind == "rope" or self.scaling is None
        check.that(plain, "kind", self.kind, "cannot be scaled, only rope can")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer. `head_dim` None: hidden / heads.

    `bias` is that of every linear in a layer; the three after `top_k` (None: the same) are those of
    a part. `norms` stand before attention and MLP, after them, or both. In a parallel `block` both
    read the layer's input, through a norm each or through one. `window`: tokens a query looks
    back, itself counted. `mixers` says in which layers, as a cycle from the first layer on (None:
    in all). `sinks`: a logit per head that takes a share of attention. `ffn` is the width of dense
    layers, `moe` what the others have in their place. `mtp`: layers that predict further tokens,
    counted apart and not run. What follows for each layer is `layer_runs`.
    """

    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    positions: Positions
    norm: Norm
    activation: Activation
    bias: bool
    tied: bool
    embedding_norm: bool = False
    head_dim: int | None = None
    experts: int = 0
    top_k: int = 0
    norm_eps: float = 1e-5
    name: str = "custom"
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    head_bias: bool = False
    qk_norm: QkNorm = "none"
    norms: Literal["before", "after", "around"] = "before"
    block: Literal["sequential", "parallel", "parallel-one-norm"] = "sequential"
    window: int | None = None
    mixers: tuple[Mixer, ...] | None = None
    variants: tuple[Variant, ...] = ()
    moe: Moe | None = None
    latent: Latent | None = None
    sinks: bool | None = None
    mtp: int | None = None

    def __post_init__(self) -> None:
        check.whole(1, 100_000, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads)
        check.whole(1, 2**32, hidden=self.hidden, ffn=self.ffn, vocab=self.vocab)
        check.positive(norm_eps=self.norm_eps)
        check.name(name=self.name)
        check.whole(1, 2**20, head_dim=self.head_dim)
        divides = self.head_dim is not None or self.hidden % self.heads == 0
        rule, hint = f"must divide hidden={self.hidden}", "use a divisor, or set head_dim"
        check.that(divides, "heads", self.heads, rule, hint)
        rule = f"must divide heads={self.heads}"
        hint = f"use kv_heads = {self.heads} for plain multi-head attention"
        check.that(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, rule, hint)
        even = self.positions.kind != "rope" or self.head_size % 2 == 0
        check.that(even, "head_dim", self.head_size, "must be even with rope")
        before = self.block == "sequential" or self.norms == "before"
        check.that(before, "norms", self.norms, "must be 'before' in a parallel block")
        self._check_window()
        self._check_experts()
        self._check_latent()

    def _check_experts(self) -> None:
        moe = self.moe
        if moe is None:
            experts, hint = self.experts or self.top_k, "add a table moe, with ffn = ..."
            check.that(not experts, "experts", experts, "needs the width of an expert", hint)
            return
        check.whole(1, 2**16, experts=self.experts)
        rule = f"must be from 1 to experts={self.experts}"
        check.that(1 <= self.top_k <= self.experts, "top_k", self.top_k, rule)
        rule = f"must divide experts={self.experts}"
        check.that(self.experts % moe.groups == 0, "moe.groups", moe.groups, rule)
        few = moe.group_top_k * self.experts // moe.groups
        rule = f"of {moe.groups} leaves {few} experts, but top_k={self.top_k}"
        check.that(self.top_k <= few, "moe.group_top_k", moe.group_top_k, rule)
        last = self.layers // moe.every * moe.every
        check.that(last > moe.dense_first, "moe.every", moe.every, "leaves no layer with experts")
        plain = self.block == "sequential"
        check.that(plain, "block", self.block, "must be sequential with experts")

    def _check_latent(self) -> None:
        check.whole(0, 64, mtp=self.mtp or 0)
        if self.latent is None:
            return
        plain = self.kv_heads == self.heads and self.qk_norm == "none"
        rule, hint = "must be heads, without norms of queries and keys, in latent attention", ""
        check.that(plain, "kv_heads", self.kv_heads, rule, hint)
        check.that(self.positions.kind == "rope", "positions", self.positions.kind, "must be rope")

    @property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """All layers in order. Layers that predict further tokens are no part of it."""
        return _layer_runs(self)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(chain.from_iterable(repeat(*run) for run in self.layer_runs))

    def count_layers(self, part: Mixer | FeedForward) -> int:
        """How many layers have such a mixer, or such a feed-forward part."""
        return sum(run.count for run in self.layer_runs if part in run.kind)

    def _check_window(self) -> None:
        check.whole(1, 2**40, window=self.window)
        if self.mixers is None:
            return
        has_window = "window" in self.mixers
        check.that(
            has_window, "mixers", self.mixers, "must have a window in some layers", "omit it"
        )
        check.that(self.window is not None, "mixers", self.mixers, "needs a window")

    @property
    def head_size(self) -> int:
        if self.latent is not None:
            return self.latent.nope + self.latent.rope
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Columns of the query projection, heads x head size; equals hidden in most models."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Columns of attention's output projection."""
        return self.heads * (self.latent.v if self.latent else self.head_size)

    @property
    def core_width(self) -> float:
        """Mean of the widths of scores and of their product with values."""
        return (self.attention_width + self.value_width) / 2

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix beside its up matrix."""
        return self.activation in GATED

    def biased(self, part: Literal["qkv", "out", "mlp"]) -> bool:
        """Whether the linears of a part have biases."""
        own = {"qkv": self.qkv_bias, "out": self.out_bias, "mlp": self.mlp_bias}[part]
        return self.bias if own is None else own

    def reach(self, mixer: Mixer, seq_len: int) -> float:
        """Tokens each token attends to in such a layer, the causal mask not counted: all s of the
        sequence, or of a window w as many as make the same causal area, w (2 - w/s)."""
        if mixer == "full" or self.window is None:
            return float(seq_len)
        seen = min(self.window, seq_len)
        return seen * (2.0 - seen / seq_len)


@lru_cache(1024)
def _layer_runs(model: ModelShape) -> tuple[LayerRun, ...]:
    mixers = model.mixers or ("full" if model.window is None else "window",)
    moe = model.moe

    def feed_forward(layer: int) -> FeedForward:
        has_experts = moe is not None and layer >= moe.dense_first and (layer + 1) % moe.every == 0
        return "experts" if has_experts else "dense"

    return runs_of(
        LayerKind(mixers[layer % len(mixers)], feed_forward(layer)) for layer in range(model.layers)
    )


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Return to how many ranks Ulysses sends each KV head: more than one where they do not deal out
    evenly, as many as are needed, at most to every query head."""
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads


def shape_of(model: object) -> Any:
    """Return the shape of an answer about a model, such as that of `fourfold.model`; a name, a
    table or a shape as it is."""
    shape = getattr(model, "shape", None)
    return shape if isinstance(shape, ModelShape) else model
