"""FLOPs of a token under each published convention, matrix products of both passes: L layers, d
hidden, w attention width (= d in most models), s sequence, V vocabulary, N parameters. Of experts
those that a token meets count: shared ones, and top-k of the others; of latent attention (MLA) w is
the mean of the widths of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fourfold.cost.count.params import active_params, attended_tokens, matmul_params
from fourfold.errors import UserError, nearest
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy

if TYPE_CHECKING:
    from fourfold.cost.columns import Columns
    from fourfold.spec.run import RunSpec

Number = Any  # a number, or a NumPy array of them


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsQuery:
    """What a convention may look at: numbers of one model, or arrays of many runs."""

    layers: Number
    hidden: Number
    width: Number
    vocab: Number
    seq_len: Number
    attended: Number  # tokens each token attends to, over all layers, the causal mask not counted
    params: Number
    weights: Number  # of matrix products in all layers
    tp: Number = 1
    pp: Number = 1
    recompute_share: Number = 0.0
    is_selective: Number = False  # only the attention core runs again
    again_weights: Number = 0.0  # of the products in MLPs that run again, in all layers

    @classmethod
    def of(cls, *, model: ModelShape, seq_len: int, layout: Layout, policy: Policy) -> FlopsQuery:
        return cls(
            layers=model.layers,
            hidden=model.hidden,
            width=model.core_width,
            vocab=model.vocab,
            seq_len=seq_len,
            attended=attended_tokens(model, seq_len),
            params=active_params(model, seq_len).all,
            weights=matmul_params(model),
            tp=layout.tp,
            pp=layout.pp,
            recompute_share=policy.recompute_share(model.layers, layout.pp),
            is_selective=policy.recompute == "selective",
            again_weights=model.layers * (1 + model.gated) * model.hidden * model.ffn
            if policy.recompute == "norm+mlp"
            else 0.0,
        )

    @classmethod
    def of_spec(cls, spec: RunSpec) -> FlopsQuery:
        seq_len = spec.batch.seq_len
        return cls.of(model=spec.model, seq_len=seq_len, layout=spec.layout, policy=spec.policy)

    @classmethod
    def of_columns(cls, c: Columns, *, learned_positions: Number) -> FlopsQuery:
        """Ungated families have LayerNorm and biases (13 L d in all), gated ones RMSNorm and none;
        `learned_positions`: 1 where the model has a table of them, a row a token."""
        from fourfold.cost.kinds import KINDS, active_weights  # needs NumPy

        held = sum(kind.count(c) for kind in KINDS.values())
        small = c.gated * 2.0 * c.hidden + (1.0 - c.gated) * (9.0 * c.hidden + c.ffn)
        ends = (2.0 - c.tied) * c.vocab * c.hidden + (2.0 - c.gated) * c.hidden
        return cls(
            layers=c.layers,
            hidden=c.hidden,
            width=c.core_width,
            vocab=c.vocab,
            seq_len=c.seq,
            attended=c.layers * c.reach,
            params=c.layers * (held + small) + ends + learned_positions * c.seq * c.hidden,
            weights=c.layers * (active_weights(c) - c.routed * c.hidden * c.experts),
            tp=c.tp,
            pp=c.pp,
            recompute_share=c.full_ckpt,
            is_selective=c.attn_ckpt,
            again_weights=c.layers * c.mlp_ckpt * (1.0 + c.gated) * c.hidden * c.ffn,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPerToken:
    """`model` once forward and backward; `hardware` with what the policy runs again; `printed` is
    the figure that users of the convention print as TFLOPs."""

    model: Number
    hardware: Number
    printed: Number


@dataclass(frozen=True, slots=True)
class Convention:
    id: str
    formula: str
    used_by: str
    count: Callable[[FlopsQuery], FlopsPerToken]


def _attention(q: FlopsQuery) -> Number:
    """Forward FLOPs of scores and their product with V over the full square: 4 L w s per token."""
    return 4.0 * q.width * q.attended


def _again(q: FlopsQuery, layers_forward: Number, attention_forward: Number) -> Number:
    """FLOPs run twice: whole layers under full, every-n or block-n, the attention core if
    selective, the MLP's first product under norm+mlp."""
    parts = q.is_selective * attention_forward + 2.0 * q.again_weights
    return parts + q.recompute_share * layers_forward


def _three_passes(forward: Number, again: Number) -> FlopsPerToken:
    """A backward of twice the forward; what runs again is hardware's alone."""
    return FlopsPerToken(model=3 * forward, hardware=3 * forward + again, printed=3 * forward)


def _mpt(q: FlopsQuery) -> FlopsPerToken:
    """6 N + 12 L d s; HFU is 8 N + 16 L d s with recompute (the embedding counted again too)."""
    forward = 2.0 * q.params + _attention(q)
    return _three_passes(forward, _again(q, forward, _attention(q)))


def _six_n(q: FlopsQuery) -> FlopsPerToken:
    forward = 2.0 * q.params
    return _three_passes(forward, q.recompute_share * forward)


def _megatron(q: FlopsQuery, factor: float) -> Number:
    """factor L h^2 (1 + s/(6h) + V/(16 L h)), Narayanan et al. 2021: MLP of 4h, no GQA."""
    shape = 1 + q.seq_len / (6 * q.hidden) + q.vocab / (16 * q.layers * q.hidden)
    return factor * q.layers * q.hidden**2 * shape


def _megatron_recompute(q: FlopsQuery) -> FlopsPerToken:
    """The 96 form counts a second forward whatever the policy does: it prints hardware FLOPs."""
    hardware = _megatron(q, 96)
    return FlopsPerToken(model=_megatron(q, 72), hardware=hardware, printed=hardware)


def _megatron_norecompute(q: FlopsQuery) -> FlopsPerToken:
    model = _megatron(q, 72)
    again = _again(q, _megatron(q, 24), 4.0 * q.layers * q.hidden * q.seq_len)
    return FlopsPerToken(model=model, hardware=model + again, printed=model)


def _megatron_old(q: FlopsQuery) -> FlopsPerToken:
    """8 P with P = 12 L h^2 + L (7 + 6 TP) h + 4 TP PP h: small tensors counted once per rank."""
    small = q.layers * (7 + 6 * q.tp) * q.hidden + 4 * q.tp * q.pp * q.hidden
    params = 12 * q.layers * q.hidden**2 + small
    return FlopsPerToken(model=6.0 * params, hardware=8.0 * params, printed=8.0 * params)


def _matmuls(q: FlopsQuery, attention_forward: Number) -> FlopsPerToken:
    """Matrix weights, logits and attention; recompute repeats layers, never the logits."""
    layers_forward = 2.0 * q.weights + attention_forward
    forward = layers_forward + 2.0 * q.vocab * q.hidden
    return _three_passes(forward, _again(q, layers_forward, attention_forward))


CONVENTIONS = {
    convention.id: convention
    for convention in (
        Convention("mpt", "6 N + 12 L d s", "MPT tables, picotron", _mpt),
        Convention("6n", "6 N", "the MPT tables' mfu*, hfu*", _six_n),
        Convention(
            "megatron-recompute",
            "96 L h^2 (1 + s/(6h) + V/(16 L h))",
            "BLOOM notes from 02-21; hardware FLOPs with full recompute",
            _megatron_recompute,
        ),
        Convention(
            "megatron-norecompute",
            "72 L h^2 (1 + s/(6h) + V/(16 L h))",
            "the same without recompute",
            _megatron_norecompute,
        ),
        Convention(
            "megatron-old",
            "8 (12 L h^2 + (7+6TP) L h + 4 TP PP h)",
            "BLOOM notes of 02-17 and 02-20",
            _megatron_old,
        ),
        Convention(
            "full-attention",
            "6 (matmul weights + V d) + 12 L d s",
            "Megatron 2024, torchtitan, nanotron",
            lambda q: _matmuls(q, _attention(q)),
        ),
        Convention(
            "causal",
            "6 (matmul weights + V d) + 6 L d s",
            "Megatron 2025 and later, maxtext",
            lambda q: _matmuls(q, _attention(q) / 2),
        ),
    )
}
ALIASES = {"all-params-full-attention": "mpt"}
# What a published table may have printed, the likely ones of a topology table first.
TRIED = (
    "megatron-recompute",
    "megatron-old",
    "megatron-norecompute",
    "full-attention",
    "causal",
    "mpt",
)
# What every command counts by unless it is told otherwise: what the hardware has to do.
DEFAULT = "causal"


def convention(name: str) -> Convention:
    key = ALIASES.get(name, name)
    if key not in CONVENTIONS:
        hint = nearest(name, [*CONVENTIONS, *ALIASES])
        raise UserError("unknown convention", field="convention", value=name, hint=hint)
    return CONVENTIONS[key]


def utilisation_pct(
    flops_per_token: float, tokens_per_s_gpu: float, peak_flops_per_s: float
) -> float:
    """Share of the peak in percent: MFU from model FLOPs, HFU from hardware FLOPs."""
    return 100.0 * flops_per_token * tokens_per_s_gpu / peak_flops_per_s
