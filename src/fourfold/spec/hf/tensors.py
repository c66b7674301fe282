"""Places of our tensors in a Hugging Face model: names, fusions and transposes as tables.

Ours are the published tensors of cost/count/params.py, matrices [out, in]. Several of ours in one
of theirs lie one after the other along `out`. Rotary halves are paired alike in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf.expert_tensors import (
    EXPERT_MODULES,
    EXPERTS_COMPUTED,
    Q_FROM_LATENT,
    expert_facts,
    same,
)
from fourfold.spec.model import VARIANTS, ModelShape

_LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj",
    "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj",
    "attention.out": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "mlp.gate": "model.layers.{}.mlp.gate_proj",
    "mlp.up": "model.layers.{}.mlp.up_proj",
    "mlp.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_QWEN3 = _LLAMA | {
    "attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{}.self_attn.k_norm",
}
_OLMO2 = _QWEN3 | {
    "attention_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_norm": "model.layers.{}.post_feedforward_layernorm",
}
_QKV = ("attention.q", "attention.k", "attention.v")
_PHI3 = _LLAMA | {
    **dict.fromkeys(_QKV, "model.layers.{}.self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate", "mlp.up"), "model.layers.{}.mlp.gate_up_proj"),
}
_STARCODER2 = {module: name for module, name in _LLAMA.items() if module != "mlp.gate"} | {
    "mlp.up": "model.layers.{}.mlp.c_fc",
    "mlp.down": "model.layers.{}.mlp.c_proj",
}
_GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "attention_norm": "transformer.h.{}.ln_1",
    **dict.fromkeys(_QKV, "transformer.h.{}.attn.c_attn"),
    "attention.out": "transformer.h.{}.attn.c_proj",
    "mlp_norm": "transformer.h.{}.ln_2",
    "mlp.up": "transformer.h.{}.mlp.c_fc",
    "mlp.down": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_MPT = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",  # llm-foundry's own files; transformers knows only ALiBi
    "attention_norm": "transformer.blocks.{}.norm_1",
    **dict.fromkeys(_QKV, "transformer.blocks.{}.attn.Wqkv"),
    "attention.out": "transformer.blocks.{}.attn.out_proj",
    "mlp_norm": "transformer.blocks.{}.norm_2",
    "mlp.up": "transformer.blocks.{}.ffn.up_proj",
    "mlp.down": "transformer.blocks.{}.ffn.down_proj",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
}
# model_type -> our module -> theirs. Mistral's files are Llama's, and so are Qwen 2's.
MODULES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "olmo2": _OLMO2,
    "phi3": _PHI3,
    "starcoder2": _STARCODER2,
    "gpt2": _GPT2,
    "mpt": _MPT,
    **{kind: (_LLAMA if "_v" in kind else _QWEN3) | own for kind, own in EXPERT_MODULES.items()},
}
# What the implementations of transformers compute, in the words of a ModelShape.
_GATED: dict[str, object] = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "heads divide hidden": True,
}  # fmt: skip
_COMPUTED: dict[str, dict[str, object]] = {
    "llama": {**_GATED, "attention biases alike": True},
    "mistral": {**_GATED, "bias": False, "attention biases alike": True, "window": "of all layers"},
    "qwen2": {**_GATED, "bias": False, "qkv bias": True, "output bias": False},
    "qwen3": {**_GATED, "bias": False, "attention biases alike": True, "qk_norm": "head"},
    "olmo2": {
        **_GATED, "bias": False, "attention biases alike": True, "qk_norm": "width",
        "norms": "after",
    },
    "gpt2": {
        "norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True,
        "kv_heads = heads": True, "heads x head size = hidden": True,
    },
    "mpt": {
        "norm": "layernorm-nobias", "activation": "gelu", "positions": "alibi", "bias": False,
        "kv_heads = heads": True, "heads x head size = hidden": True, "ffn = 4 x hidden": True,
    },
    **EXPERTS_COMPUTED,
    "starcoder2": {
        "norm": "layernorm", "activation": "gelu", "positions": "rope", "one bias for all": True,
    },
}  # fmt: skip
# Where a config.json names the form of its GELU, with the type's default; ours is the exact one.
_GELU = {
    "gpt2": ("activation_function", "gelu_new"),
    "starcoder2": ("hidden_act", "gelu_pytorch_tanh"),
}
# In older files beside the weights; made anew by every implementation.
_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_OURS = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias|choice_bias)")
_EXPERT = re.compile(r"(mlp\.experts)\.(\d+)(\..+)")


@dataclass(frozen=True, slots=True)
class Spot:
    """One of our tensors is rows `start` onwards of theirs (columns, if `transposed`)."""

    name: str
    start: int
    transposed: bool


def spot_of(kind: str, model: ModelShape, ours: str) -> Spot:
    """Where the published tensor `ours` lies in a model of type `kind`."""
    parts = _OURS.fullmatch(ours)
    assert parts is not None, ours
    layer, module, leaf = parts.groups()
    table = MODULES[kind]
    routed = _EXPERT.fullmatch(module)
    if routed is not None:
        module, which = f"{routed[1]}{routed[3]}", routed[2]
        return Spot(f"{table[module].format(layer, which)}.{leaf}", 0, transposed=False)
    if leaf == "choice_bias":
        leaf = "e_score_correction_bias"
    if module == "attention.q" and model.latent is not None and model.latent.q_rank:
        return Spot(f"{Q_FROM_LATENT.format(layer)}.{leaf}", 0, transposed=False)
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
    return Spot(name, start, transposed)


def approximation(kind: str, config: dict[str, Any]) -> str:
    """How a model's own activation differs from ours; '' if it does not."""
    if kind not in _GELU:
        return ""
    key, default = _GELU[kind]
    form = config.get(key) or default
    if form in ("gelu", "gelu_python"):
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
    if model.window is not None and model.local_layers is None:
        facts["window"] = "of all layers"
    wanted = {
        "embedding_norm": False, "qk_norm": "none", "norms": "before", "block": "sequential",
        "window": "none", "variants": "none", "rotary share": 1.0, "head bias": False,
        "experts": "none", "latent": "none", **_COMPUTED[kind],
    }  # fmt: skip
    wrong = (pair for pair in wanted.items() if not same(pair[0], facts.get(pair[0]), pair[1]))
    return [f"{fact} is {want}" for fact, want in wrong]
