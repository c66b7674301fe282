"""Every parameter by name, global shape and cut: what counts and what the engine holds. A tied
output layer is the embedding itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from fourfold.spec.experts import Latent, Moe
from fourfold.spec.layers import LayerKind
from fourfold.spec.model import ModelShape

# How tensor parallelism cuts a tensor: by rows (dim 0), by columns (dim 1), by whole KV heads
# (dim 0, a head is kept on several ranks when there are fewer heads than ranks), or not at all:
# `heads` is one weight for all heads, of which each rank has only some to learn from. Matrices of
# an expert lie on one expert-parallel rank, cut over the expert's own tensor ranks (etp).
Cut = Literal["rows", "columns", "kv", "whole", "heads", "expert-rows", "expert-columns"]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: `shape` is global, [out, in] for matrices."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "whole"
    expert: int | None = None

    @property
    def count(self) -> int:
        return prod(self.shape)


def layer_tensors(
    model: ModelShape, kind: LayerKind, *, experts: int | None = None
) -> Iterator[Param]:
    """Parameters of one decoder layer of this kind; names are relative to the layer. `experts`:
    those of the first so many routed experts alone."""
    yield from _norm(model, "attention_norm")
    yield from _latent(model, model.latent) if model.latent else _attention(model)
    if model.norms == "around":
        yield from _norm(model, "attention_post_norm")
    if model.block != "parallel-one-norm":
        yield from _norm(model, "mlp_norm")
    if model.moe is not None and kind.feed_forward == "experts":
        yield from _experts(model, model.moe, model.experts if experts is None else experts)
    else:
        yield from _mlp(model, "mlp", model.ffn, "rows", "columns", bias=model.biased("mlp"))
    if model.norms == "around":
        yield from _norm(model, "mlp_post_norm")


def _attention(model: ModelShape) -> Iterator[Param]:
    hidden, width, kv_width = model.hidden, model.attention_width, model.kv_width
    qkv = model.biased("qkv")
    yield from _linear("attention.q", width, hidden, "rows", bias=qkv)
    yield from _linear("attention.k", kv_width, hidden, "kv", bias=qkv)
    yield from _linear("attention.v", kv_width, hidden, "kv", bias=qkv)
    yield from _qk_norms(model)
    if model.sinks:
        yield Param("attention.sinks", (model.heads,), "rows")
    yield from _linear("attention.out", hidden, width, "columns", bias=model.biased("out"))


def _latent(model: ModelShape, latent: Latent) -> Iterator[Param]:
    """What every head reads stays whole on tensor ranks, which have only some heads to learn it
    from: the ways down to the latents, and their norms."""
    hidden, width = model.hidden, model.attention_width
    qkv = model.biased("qkv")
    if latent.q_rank:
        yield from _linear("attention.q_down", latent.q_rank, hidden, "heads", bias=qkv)
        yield Param("attention.q_norm.weight", (latent.q_rank,), "heads")
        yield from _linear("attention.q", width, latent.q_rank, "rows", bias=False)
    else:
        yield from _linear("attention.q", width, hidden, "rows", bias=False)
    down = latent.kv_rank + latent.rope
    yield from _linear("attention.kv_down", down, hidden, "heads", bias=qkv)
    yield Param("attention.kv_norm.weight", (latent.kv_rank,), "heads")
    both = model.heads * (latent.nope + latent.v)
    yield from _linear("attention.kv", both, latent.kv_rank, "rows", bias=False)
    yield from _linear(
        "attention.out", hidden, model.value_width, "columns", bias=model.biased("out")
    )


def _mlp(
    model: ModelShape, name: str, ffn: int, rows: Cut, columns: Cut, *, bias: bool
) -> Iterator[Param]:
    if model.gated:
        yield from _linear(f"{name}.gate", ffn, model.hidden, rows, bias=bias)
    yield from _linear(f"{name}.up", ffn, model.hidden, rows, bias=bias)
    yield from _linear(f"{name}.down", model.hidden, ffn, columns, bias=bias)


def _experts(model: ModelShape, moe: Moe, listed: int) -> Iterator[Param]:
    hidden = model.hidden
    yield from _linear("mlp.router", model.experts, hidden, "whole", bias=moe.router_bias)
    if moe.choice_bias:
        yield Param("mlp.router.choice_bias", (model.experts,))
    made = _mlp(model, "", moe.ffn, "expert-rows", "expert-columns", bias=moe.expert_bias)
    alike = [*made]  # once: a layer has hundreds of experts
    for expert in range(listed):
        name = f"mlp.experts.{expert}"
        yield from (Param(f"{name}{one.name}", one.shape, one.cut, expert) for one in alike)
    if moe.shared_ffn:
        bias = model.biased("mlp")
        yield from _mlp(model, "mlp.shared", moe.shared_ffn, "rows", "columns", bias=bias)
    if moe.shared_gate:
        yield from _linear("mlp.shared_gate", 1, hidden, "whole", bias=False)


def embedding_tensors(model: ModelShape, seq_len: int) -> Iterator[Param]:
    """What the first stage holds besides its layers."""
    yield Param("embedding.weight", (model.vocab, model.hidden), "rows")
    if model.positions.kind == "learned":
        yield Param("positions.weight", (model.positions.length or seq_len, model.hidden))
    if model.embedding_norm:
        yield from _norm(model, "embedding_norm")


def head_tensors(model: ModelShape) -> Iterator[Param]:
    """What the last stage holds besides its layers; a tied head has no tensor of its own."""
    yield from _norm(model, "final_norm")
    if not model.tied:
        yield Param("head.weight", (model.vocab, model.hidden), "rows")
    if model.head_bias:
        yield Param("head.bias", (model.vocab,), "rows")


def _norm(model: ModelShape, name: str) -> Iterator[Param]:
    if model.norm != "layernorm-noweight":
        yield Param(f"{name}.weight", (model.hidden,))
    if model.norm == "layernorm":
        yield Param(f"{name}.bias", (model.hidden,))


def _qk_norms(model: ModelShape) -> Iterator[Param]:
    if model.qk_norm == "none":
        return
    sides: tuple[tuple[str, int, Cut], ...] = (
        ("attention.q_norm", model.attention_width, "rows"),
        ("attention.k_norm", model.kv_width, "kv"),
    )
    for name, width, cut in sides:
        if model.qk_norm != "head":
            yield Param(f"{name}.weight", (width,), cut)
            continue
        yield Param(f"{name}.weight", (model.head_size,), "heads")
        if model.norm == "layernorm":
            yield Param(f"{name}.bias", (model.head_size,), "heads")


def _linear(name: str, outs: int, ins: int, cut: Cut, *, bias: bool) -> Iterator[Param]:
    yield Param(f"{name}.weight", (outs, ins), cut)
    if bias:
        # The bias of a column-cut matrix is added once, after the sum over ranks: it stays whole.
        yield Param(f"{name}.bias", (outs,), "whole" if cut.endswith("columns") else cut)
