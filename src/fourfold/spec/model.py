"""What is a model, to a planner and an engine? A handful of sizes; no weights, no code.

Counts follow from these fields alone (cost/params.py, cost/flops.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.errors import UserError
from fourfold.spec import check

Family = Literal["mpt", "gpt", "llama", "nemotron"]
FAMILIES: tuple[Family, ...] = ("mpt", "gpt", "llama", "nemotron")
Norm = Literal["layernorm", "layernorm-nobias", "rmsnorm"]
Activation = Literal["gelu", "swiglu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        check.positive(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
        )
        check.whole(original_length=self.original_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """`length` is the rows of a learned table; None: as long as the run's sequence (MPT)."""

    kind: Literal["learned", "rope", "alibi"]
    length: int | None = None
    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check.positive(theta=self.theta)
        if self.length is not None:
            check.whole(length=self.length)
        if self.kind != "rope" and self.scaling is not None:
            raise UserError("only rope can be scaled", field="scaling", value=self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer. `head_dim` None: hidden / heads."""

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

    def __post_init__(self) -> None:
        check.whole(1, 100_000, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads)
        check.whole(1, 2**32, hidden=self.hidden, ffn=self.ffn, vocab=self.vocab)
        check.positive(norm_eps=self.norm_eps)
        check.name(name=self.name)
        if self.experts or self.top_k:
            raise UserError(
                "mixture of experts is not modelled yet",
                field="experts",
                value=self.experts or self.top_k,
                way_out="use a dense model (experts = 0, top_k = 0)",
            )
        if self.head_dim is not None:
            check.whole(1, 2**20, head_dim=self.head_dim)
        elif self.hidden % self.heads:
            raise UserError(
                f"must divide hidden={self.hidden}",
                field="heads",
                value=self.heads,
                way_out="choose a divisor, or give head_dim",
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"must divide heads={self.heads}",
                field="kv_heads",
                value=self.kv_heads,
                way_out=f"kv_heads = {self.heads} is plain multi-head attention",
            )
        if self.positions.kind == "rope" and self.head_size % 2:
            raise UserError("rope needs an even head size", field="head_dim", value=self.head_size)

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Columns of the query projection, heads x head size; equals hidden in most models."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix beside its up matrix."""
        return self.activation == "swiglu"
