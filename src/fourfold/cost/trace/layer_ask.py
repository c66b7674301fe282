"""What is one decoder layer under a layout? Its sizes as symbols, and what cannot be traced.

Tokens are cut over cp, and over tp between the blocks (sequence parallel); matrices over tp.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.cost.trace.ask import check_ulysses, divided, kv_copies
from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.runnable import RUN_ACTIVATIONS, windowed
from fourfold.spec.words import CpKind, Dtype, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAsk:
    """One layer of `model`, one sequence of `tokens`; the `last` layer keeps gathered weights."""

    model: ModelShape
    tokens: int
    layout: Layout
    dtype: Dtype = "bf16"
    cp_kind: CpKind = "ring"
    sharding: Sharding = "zero1"
    rank: int = 0
    last: bool = False

    def __post_init__(self) -> None:
        check.whole(0, self.layout.world - 1, rank=self.rank)
        check.whole(1, 2**40, tokens=self.tokens)

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights: data and context parallel ones."""
        return self.layout.dp * self.layout.cp

    @property
    def rope(self) -> bool:
        return self.model.positions.kind == "rope"

    @property
    def kv_rank(self) -> int:
        """KV heads of a tensor-parallel rank; one is kept on several ranks if there are too few."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def kv_copies(self) -> int:
        """How often Ulysses sends a KV head of this rank."""
        if self.cp == 1 or self.cp_kind != "ulysses":
            return 1
        return kv_copies(self.model.heads // self.tp, self.kv_rank, self.cp)

    @property
    def wide(self) -> Dtype:
        """What sums are kept in."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    # Symbolic sizes, shared by forward and backward.
    @property
    def here(self) -> str:
        """Tokens inside a block."""
        return "tokens/cp"

    @property
    def part(self) -> str:
        """Tokens between blocks."""
        return "tokens/cp/tp"

    @property
    def kv(self) -> str:
        return "kv_heads/tp" if self.model.kv_heads >= self.tp else "1"

    @property
    def up_width(self) -> str:
        """Columns of the MLP's first product: gate and up side by side."""
        return "2*ffn/tp" if self.model.gated else "ffn/tp"


def check_layer(ask: LayerAsk) -> None:
    """Refuse what does not divide evenly, what no list has, and ALiBi's score bias beyond one
    context rank."""
    model, tp, cp = ask.model, ask.tp, ask.cp
    _refuse_unlisted(model, ask.tokens)
    if model.heads % tp:
        raise UserError(
            f"must divide heads={model.heads}",
            field="tp",
            value=tp,
            hint=f"such as {_below(model.heads, tp)}",
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise UserError(
            f"must divide kv_heads={model.kv_heads} or be a multiple of it",
            field="tp",
            value=tp,
            hint=f"such as {_below(model.kv_heads, tp)}",
        )
    divided("ffn", model.ffn, tp, "the MLP is cut over tp")
    if cp > 1 and ask.cp_kind == "ulysses":
        check_ulysses(model.heads // tp, cp)
    pieces = cp * (2 if cp > 1 and ask.cp_kind != "ulysses" else 1)
    divided("tokens", ask.tokens, pieces * tp, "tokens are cut over cp and tp")
    if model.positions.kind == "alibi" and cp > 1:
        raise UserError(
            "ALiBi's bias over a divided sequence is not traced",
            field="cp",
            value=cp,
            hint="cp = 1",
        )


def _refuse_unlisted(model: ModelShape, tokens: int) -> None:
    """The list has two norms before attention and MLP, which follow each other."""
    facts = (
        (model.qk_norm != "none", "norms of queries and keys"),
        (model.norms != "before", "norms after attention and MLP"),
        (model.block != "sequential", "attention and MLP side by side"),
        (windowed(model, tokens), "sliding windows"),
        (model.activation not in RUN_ACTIVATIONS, f"{model.activation} activations"),
    )
    lacking = [words for is_so, words in facts if is_so]
    if lacking:
        raise UserError(
            f"{', '.join(lacking)} are not traced",
            field="model",
            value=model.name,
            hint="a model of the families mpt, gpt or llama",
        )


def _below(number: int, limit: int) -> int:
    return max(n for n in range(1, limit + 1) if number % n == 0)
