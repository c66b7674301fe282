"""Places of our tensors in a Hugging Face model: names, fusions and transposes, by tables; and the
type of model that computes what a shape says.

Ours are the published tensors of cost/count/params.py, matrices [out, in]. Several of ours in one
of theirs lie one after the other along `out`. Rotary halves are paired alike in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.experts import Moe
from fourfold.spec.hf.config import tables
from fourfold.spec.hf.parts import GELU
from fourfold.spec.hf.types import TYPES, ModelType
from fourfold.spec.model import VARIANTS, ModelShape

# model_type -> our module -> theirs, and what its implementation in transformers computes.
MODULES, _COMPUTED = (tables("hf_tensors.toml", part) for part in ("names", "computes"))
_Q_FROM_LATENT = "model.layers.{}.self_attn.q_b_proj"
# In older files beside the weights; made anew by every implementation.
_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_OURS = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias|choice_bias)")
_EXPERT = re.compile(r"(mlp\.experts)\.(\d+)(\..+)")


@dataclass(frozen=True, slots=True)
class Location:
    """One of our tensors is rows `start` onwards of theirs (columns, if `transposed`)."""

    name: str
    start: int
    transposed: bool


def locate(kind: str, model: ModelShape, ours: str) -> Location:
    """Where the published tensor `ours` lies in a model of type `kind`."""
    parts = _OURS.fullmatch(ours)
    assert parts is not None, ours
    layer, module, leaf = parts.groups()
    table = MODULES[kind]
    routed = _EXPERT.fullmatch(module)
    if routed is not None:
        module, which = f"{routed[1]}{routed[3]}", routed[2]
        return Location(f"{table[module].format(layer, which)}.{leaf}", 0, transposed=False)
    if leaf == "choice_bias":
        leaf = "e_score_correction_bias"
    if module == "attention.q" and model.latent is not None and model.latent.q_rank:
        return Location(f"{_Q_FROM_LATENT.format(layer)}.{leaf}", 0, transposed=False)
    widths = {
        "attention.q": model.attention_width,
        "attention.k": model.kv_width,
        "mlp.gate": model.ffn,
    }
    start = 0
    for other, name in table.items():  # those that come before it in the same tensor
        if other == module:
            break
        start += widths.get(other, 0) if name == table[module] else 0
    name = f"{table[module].format(layer)}.{leaf}"
    # GPT-2 keeps the matrices of a layer as [in, out].
    transposed = kind == "gpt2" and leaf == "weight" and module.startswith(("attention.", "mlp."))
    return Location(name, start, transposed)


def approximation(kind: str, config: dict[str, Any]) -> str:
    """How a model's own GELU differs from ours, which is the exact one; '' if it does not."""
    read = TYPES[kind]
    form = (config.get(read.act_keys[0]) or read.act) if isinstance(read, ModelType) else "gelu"
    if form not in GELU or form in ("gelu", "gelu_python"):
        return ""
    return f"it was trained with {form}; our exact GELU moves its logits by about 1e-3"


def is_buffer(name: str) -> bool:
    return _BUFFERS.fullmatch(name) is not None


def export_type(model: ModelShape) -> str:
    """The model_type whose transformers implementation computes what ours does, or why none."""
    wrong = {kind: _misfits(kind, model) for kind in _COMPUTED}
    for kind, reasons in wrong.items():
        if not reasons:
            return kind
    nearest = min(wrong, key=lambda kind: len(wrong[kind]))
    why = f"{nearest} comes closest, but there {' and '.join(wrong[nearest])}"
    rule = f"has a shape that no public format computes; {why}"
    hint = f"supported: {', '.join(_COMPUTED)}"
    raise UserError(rule, field="model", value=model.name, hint=hint)


def _misfits(kind: str, model: ModelShape) -> list[str]:
    """What of a shape a type cannot say."""
    facts: dict[str, object] = {
        "norm": model.norm,
        "activation": model.activation,
        "positions": model.positions.kind,
        "bias": model.biased("mlp"),
        "qkv bias": model.biased("qkv"),
        "output bias": model.biased("out"),
        "attention biases alike": model.biased("qkv") == model.biased("out"),
        "one bias for all": len({model.biased(part) for part in ("qkv", "out", "mlp")}) == 1,
        "qk_norm": model.qk_norm,
        "norms": model.norms,
        "block": model.block,
        "window": "none" if model.window is None else "of some layers",
        "variants": ", ".join(VARIANTS[variant] for variant in model.variants) or "none",
        "rotary share": model.positions.partial,
        "head bias": model.head_bias,
        "embedding_norm": model.embedding_norm,
        "heads divide hidden": model.hidden % model.heads == 0,
        "kv_heads = heads": model.kv_heads == model.heads,
        "heads x head size = hidden": model.attention_width == model.hidden,
        "ffn = 4 x hidden": model.ffn == 4 * model.hidden,
        **expert_facts(model),
    }
    if model.window is not None and model.mixers is None:
        facts["window"] = "of all layers"
    wanted = {
        "embedding_norm": False,
        "qk_norm": "none",
        "norms": "before",
        "block": "sequential",
        "window": "none",
        "variants": "none",
        "rotary share": 1.0,
        "head bias": False,
        "experts": "none",
        "latent": "none",
        **_COMPUTED[kind],
    }
    wrong = (pair for pair in wanted.items() if not same(pair[0], facts.get(pair[0]), pair[1]))
    return [f"{fact} is {want}" for fact, want in wrong]


def expert_facts(model: ModelShape) -> dict[str, object]:
    """What a type must be able to say of experts and latent attention."""
    moe = model.moe
    facts: dict[str, object] = {
        "experts": "yes" if moe else "none",
        "latent": "yes" if model.latent else "none",
    }
    if moe is None:
        return facts
    return facts | {
        "shared experts": _shared(model, moe),
        "every": moe.every,
        "dense first": moe.dense_first,
        "normalised": moe.normalised,
        "drops": "some" if moe.capacity else "none",
        "router": _router(moe),
        "experts as wide as ffn": moe.ffn == model.ffn,
    }


def _shared(model: ModelShape, moe: Moe) -> str:
    if not moe.shared_ffn:
        return "none"
    return "some" if moe.shared_ffn % moe.ffn == 0 and not moe.shared_gate else "odd"


def _router(moe: Moe) -> str:
    grouped = moe.groups > 1
    if moe.score == "softmax" and not moe.choice_bias:
        if not grouped:
            return "softmax" if moe.scale == 1 else "softmax, scaled"
        return "softmax, groups by their best" if moe.group_score == "best" else "other"
    two = not grouped or moe.group_score == "best-two"
    return "sigmoid and bias" if moe.choice_bias and two and moe.score == "sigmoid" else "other"


def same(fact: str, have: object, want: object) -> bool:
    """Of a router, softmax without groups is a case of softmax with them."""
    if want == "any" or have == want:
        return True
    groups = "softmax, groups by their best"
    return fact == "router" and want == groups and have in ("softmax", "softmax, scaled")
