"""How many FLOPs does a token take, by whose convention? Forward and backward, matrix products.

L layers, d hidden, w attention width (heads x head size, = d in most models), s sequence,
V vocabulary, N parameters. Every published figure follows one of these; for one run they differ by
up to 1.7x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fourfold.cost.count.params import layer_matmul_params, model_params
from fourfold.errors import UserError, nearest
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a convention may look at."""

    model: ModelShape
    seq_len: int
    layout: Layout
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPerToken:
    """`model` once forward and backward; `hardware` with what the policy runs again; `printed` is
    the figure that users of the convention print as TFLOPs."""

    model: float
    hardware: float
    printed: float


@dataclass(frozen=True, slots=True)
class Convention:
    id: str
    formula: str
    used_by: str
    count: Callable[[Question], FlopsPerToken]


def _attention(ask: Question) -> float:
    """Forward FLOPs of scores and their product with V over the full square: 4 L w s per token.

    A layer with a sliding window counts the tokens in it instead of s.
    """
    model = ask.model
    return 4.0 * model.layers * model.attention_width * model.reach(ask.seq_len)


def _again(ask: Question, layers_forward: float, attention_forward: float) -> float:
    """FLOPs run twice: whole layers under full or every-n, the attention core if selective."""
    if ask.policy.recompute == "selective":
        return attention_forward
    return ask.policy.recompute_share * layers_forward


def _mpt(ask: Question) -> FlopsPerToken:
    """6 N + 12 L d s; HFU is 8 N + 16 L d s with recompute (the embedding counted again too)."""
    forward = 2.0 * model_params(ask.model, ask.seq_len) + _attention(ask)
    hardware = 3 * forward + _again(ask, forward, _attention(ask))
    return FlopsPerToken(model=3 * forward, hardware=hardware, printed=3 * forward)


def _six_n(ask: Question) -> FlopsPerToken:
    forward = 2.0 * model_params(ask.model, ask.seq_len)
    hardware = 3 * forward + ask.policy.recompute_share * forward
    return FlopsPerToken(model=3 * forward, hardware=hardware, printed=3 * forward)


def _megatron(ask: Question, factor: float) -> float:
    """factor L h^2 (1 + s/(6h) + V/(16 L h)), Narayanan et al. 2021: MLP of 4h, no GQA."""
    layers, hidden = ask.model.layers, ask.model.hidden
    shape = 1 + ask.seq_len / (6 * hidden) + ask.model.vocab / (16 * layers * hidden)
    return factor * layers * hidden**2 * shape


def _megatron_recompute(ask: Question) -> FlopsPerToken:
    """The 96 form counts a second forward whatever the policy does: it prints hardware FLOPs."""
    hardware = _megatron(ask, 96)
    return FlopsPerToken(model=_megatron(ask, 72), hardware=hardware, printed=hardware)


def _megatron_norecompute(ask: Question) -> FlopsPerToken:
    model = _megatron(ask, 72)
    hidden, layers = ask.model.hidden, ask.model.layers
    again = _again(ask, _megatron(ask, 24), 4.0 * layers * hidden * ask.seq_len)
    return FlopsPerToken(model=model, hardware=model + again, printed=model)


def _megatron_old(ask: Question) -> FlopsPerToken:
    """8 P with P = 12 L h^2 + L (7 + 6 TP) h + 4 TP PP h: small tensors counted once per rank."""
    layers, hidden = ask.model.layers, ask.model.hidden
    tp, pp = ask.layout.tp, ask.layout.pp
    params = 12 * layers * hidden**2 + layers * (7 + 6 * tp) * hidden + 4 * tp * pp * hidden
    return FlopsPerToken(model=6.0 * params, hardware=8.0 * params, printed=8.0 * params)


def _matmuls(ask: Question, attention_forward: float) -> FlopsPerToken:
    """Matrix weights, logits and attention; recompute repeats layers, never the logits."""
    layers_forward = 2.0 * ask.model.layers * layer_matmul_params(ask.model) + attention_forward
    forward = layers_forward + 2.0 * ask.model.vocab * ask.model.hidden
    hardware = 3 * forward + _again(ask, layers_forward, attention_forward)
    return FlopsPerToken(model=3 * forward, hardware=hardware, printed=3 * forward)


def _full_attention(ask: Question) -> FlopsPerToken:
    return _matmuls(ask, _attention(ask))


def _causal(ask: Question) -> FlopsPerToken:
    return _matmuls(ask, _attention(ask) / 2)


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
            _full_attention,
        ),
        Convention(
            "causal",
            "6 (matmul weights + V d) + 6 L d s",
            "Megatron 2025 and later, maxtext",
            _causal,
        ),
    )
}
ALIASES = {"all-params-full-attention": "mpt"}


# What every command counts by unless it is told otherwise: what the hardware has to do.
DEFAULT = "causal"


def convention(name: str) -> Convention:
    key = ALIASES.get(name, name)
    if key not in CONVENTIONS:
        raise UserError(
            "unknown convention",
            field="convention",
            value=name,
            hint=nearest(name, [*CONVENTIONS, *ALIASES]),
        )
    return CONVENTIONS[key]


def utilisation_pct(
    flops_per_token: float, tokens_per_s_gpu: float, peak_flops_per_s: float
) -> float:
    """Share of the peak in percent: MFU from model FLOPs, HFU from hardware FLOPs."""
    return 100.0 * flops_per_token * tokens_per_s_gpu / peak_flops_per_s
