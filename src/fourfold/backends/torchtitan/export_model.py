"""torchtitan's models by our shapes: Llama 3, Qwen 3 and DeepSeek V3, the last two with experts. Of
release 0.3 parts of a Python file, of 0.2 arguments of a class."""

from __future__ import annotations

from typing import Any

from fourfold.search.export.setup import LLAMA_SHAPE, Setup, check_model, filled, no_setting
from fourfold.spec.engine import Engine
from fourfold.spec.experts import Moe
from fourfold.spec.model import ModelShape, Positions

# Qwen 3 has norms of queries and keys and a head size of its own.
_SHAPES = {
    **LLAMA_SHAPE,
    "family": ("llama", "qwen", "qwen-moe", "deepseek"),
    "qk_norm": ("none", "head"),
    "experts": (),
    "latent": (),
    "mtp": (),
}
_EXPERTS: dict[str, tuple[object, ...]] = {
    "score": ("softmax", "sigmoid"),
    "shared_gate": (False,),
    "router_bias": (False,),
    "expert_bias": (False,),
    "z_weight": (0.0,),
    "capacity": (0.0,),
}
# Of its models: package, what classes begin with, function, kind of rotary positions, and arguments
# of release 0.2.
_LLAMA = ("llama3", "Llama3", "parallelize_llama", "ComplexRoPE", "TransformerModelArgs")
_QWEN = ("qwen3", "Qwen3", "parallelize_qwen3", "CosSinRoPE", "Qwen3ModelArgs")
_DEEPSEEK = (
    "deepseek_v3",
    "DeepSeekV3",
    "parallelize_deepseekv3",
    "ComplexRoPE",
    "DeepSeekV3ModelArgs",
)
_SCALING_IMPORT = "from torchtitan.models.llama3.model.args import RoPEScalingArgs\n"
_EXPERTS_IMPORT = "from torchtitan.models.moe import MoEArgs\n"
_MAKERS = ("make_moe_config", "make_routed_experts_config", "make_router_config")
_SIZES = ("hidden", "vocab", "tied", "heads", "kv_heads", "head_size", "ffn", "layers")


def backend(setup: Setup) -> str:
    """Its word for the dispatcher; DeepEP and HybridEP need ep, without which tp cuts experts."""
    fused = setup.layout.ep > 1 and setup.dispatcher in ("deepep", "hybridep")
    return setup.dispatcher if fused else "standard"


def names(model: ModelShape) -> dict[str, str]:
    """What differs between its models."""
    plain = _QWEN if model.qk_norm == "head" or model.moe else _LLAMA
    package, title, parallelize, rope, arguments = _DEEPSEEK if model.latent else plain
    return {
        "package": package,
        "model": f"{title}Model",
        "block": f"{title}TransformerBlock",
        "parallelize": parallelize,
        "adapter": f"{title}StateDictAdapter",
        "rope": rope,
        "arguments": arguments,
    }


def check(model: ModelShape, engine: Engine) -> None:
    check_model(engine.name, model, _SHAPES)
    place, package = model.positions, names(model)["package"]
    if place.kind != "rope":
        raise no_setting(engine.name, "model.positions.kind", place.kind, "rope")
    if place.scaling and (place.scaling.kind != "llama3" or package != "llama3"):
        hint = "llama3, or none" if package == "llama3" else "none"
        raise no_setting(engine.name, "model.positions.scaling", place.scaling.kind, hint)
    if model.moe:
        _check_experts(model, model.moe, engine)
    elif model.latent:
        raise no_setting(engine.name, "model.latent", model.latent, "experts with it")
    if engine.export.before and package != "qwen3" and model.tied:
        raise no_setting(engine.name, "model.tied", True, "release 0.3 (--export torchtitan)")
    if engine.export.before and package == "llama3" and model.attention_width != model.hidden:
        raise no_setting(engine.name, "model.head_dim", model.head_dim, "hidden / heads")


def _check_experts(model: ModelShape, moe: Moe, engine: Engine) -> None:
    known = dict(_EXPERTS)
    if moe.groups > 1:
        known["group_score"] = ("best-two",)
    if engine.export.before:
        known["every"] = (1,)
        known |= {} if model.latent else {"dense_first": (0,)}
    for name, values in known.items():
        if (value := getattr(moe, name)) not in values:
            hint = " or ".join(str(one) for one in values)
            raise no_setting(engine.name, f"model.moe.{name}", value, hint)
    if engine.export.before and moe.shared_ffn % moe.ffn:
        hint = f"a multiple of moe.ffn={moe.ffn}"
        raise no_setting(engine.name, "model.moe.shared_ffn", moe.shared_ffn, hint)


def about(setup: Setup) -> tuple[str, ...]:
    moe, found = setup.model.moe, []
    if moe and moe.balance != "none":
        found.append("it has no balancing loss: a bias of the router's choice keeps experts even")
    if setup.model.mtp:
        found.append("without multi-token prediction, as the seconds are")
    return tuple(found)


def arguments(fields: dict[str, Any], depth: int) -> str:
    indent = "    " * depth
    return "".join(f"{indent}{name}={value!r},\n" for name, value in fields.items())


def _routing(model: ModelShape, moe: Moe) -> dict[str, Any]:
    """Both releases have these names."""
    fields: dict[str, Any] = {
        "top_k": model.top_k,
        "score_func": moe.score,
        "route_norm": moe.normalised,
        "route_scale": moe.scale,
    }
    if moe.groups > 1:
        fields |= {"num_expert_groups": moe.groups, "num_limited_groups": moe.group_top_k}
    return fields


def _bias_rate(moe: Moe) -> float | None:
    """Its only way to keep experts even."""
    return moe.bias_rate if moe.choice_bias or moe.balance != "none" else None


def _rope(setup: Setup) -> dict[str, Any]:
    model, place = setup.model, setup.model.positions
    fields: dict[str, Any] = {
        "dim": model.latent.rope if model.latent else model.head_size,
        "max_seq_len": max(setup.batch.seq_len, place.length or 0),
        "theta": place.theta,
    }
    return fields | ({"scaling": "llama"} | _scaling(place) if place.scaling else {})


_SCALED = (
    "scaling_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _scaling(place: Positions) -> dict[str, Any]:
    """Both releases have these names; {} without any."""
    if (scaling := place.scaling) is None:
        return {}
    values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    return dict(zip(_SCALED, (*values, scaling.original_length), strict=True))


def parts(setup: Setup, engine: Engine) -> dict[str, object]:
    """What its file of release 0.3 is filled with."""
    model, own = setup.model, names(setup.model)
    sizes: dict[str, object] = {name: getattr(model, name) for name in _SIZES}
    values = {**own, **sizes, "eps": repr(model.norm_eps)}
    return {
        **values,
        "parts": ", ".join((*(["Attention"] if model.latent else []), own["model"], own["block"])),
        "makers": "".join(
            f"    {name},\n"
            for name in (
                *([] if model.latent else ["make_gqa_config"]),
                *(_MAKERS if model.moe else ()),
            )
        ),
        "attention": _attention(setup, engine, values),
        **_experts(setup, engine),
    }


def _attention(setup: Setup, engine: Engine, values: dict[str, object]) -> str:
    model, latent = setup.model, setup.model.latent
    values = {**values, "rope_fields": arguments(_rope(setup), 3)}
    if latent is None:
        norm = f"norm({model.head_size})" if model.qk_norm == "head" else "None"
        return filled("attention.py.txt", engine, {**values, "qk_norm": norm})
    wide = model.attention_width
    products = {"wq": ("HIDDEN", wide)}
    if latent.q_rank:
        products = {"wq_a": ("HIDDEN", latent.q_rank), "wq_b": (latent.q_rank, wide)}
    lines = [f"        {name}=linear({n}, {m}),\n" for name, (n, m) in products.items()]
    more = {
        "q_rank": latent.q_rank,
        "kv_rank": latent.kv_rank,
        "nope": latent.nope,
        "rope_dim": latent.rope,
        "v": latent.v,
        "q_norm": latent.q_rank or 1,
        "queries": "".join(lines),
    }
    return filled("latent.py.txt", engine, {**values, **more})


def _experts(setup: Setup, engine: Engine) -> dict[str, object]:
    model, moe = setup.model, setup.model.moe
    if moe is None:
        return {"experts": "", "routed": "", "hook": None, "optimizer_imports": "default_adamw"}
    shared = "None"
    if moe.shared_ffn:
        inits = "w1_param_init=normal(0.02), w2w3_param_init=deep"
        shared = f"make_ffn_config(dim=HIDDEN, hidden_dim={moe.shared_ffn}, {inits})"
    hook = "register_moe_load_balancing_hook"
    values = {
        "experts": model.experts,
        "load_balance_coeff": _bias_rate(moe),
        "router": arguments(_routing(model, moe), 3),
        "expert_ffn": moe.ffn,
        "top_k": model.top_k,
        "comm_backend": backend(setup),
        "shared": shared,
    }
    kinds = enumerate(model.layer_kinds())
    first = next(layer for layer, kind in kinds if kind.feed_forward == "experts")
    layers = range(first, model.layers, moe.every)
    return {
        "experts": filled("experts.py.txt", engine, values),
        "routed": f'    if number in {layers!r}:\n        return {{"moe": experts(deep)}}\n',
        "hook": hook if _bias_rate(moe) else None,
        "optimizer_imports": f"default_adamw, {hook}" if _bias_rate(moe) else "default_adamw",
    }


def arguments_02(setup: Setup) -> dict[str, object]:
    """Of its model in release 0.2. A Llama's MLP width is a rounded multiple: one multiple, as wide
    as asked; a factor of 1 leaves the frequencies as they are."""
    model, place, own = setup.model, setup.model.positions, names(setup.model)
    imports, more, scaled = "", {} if model.latent else {"n_kv_heads": model.kv_heads}, ""
    length = max(setup.batch.seq_len, place.made_for or 0)
    if model.latent:
        more |= _latent_02(setup, length)
    elif own["package"] == "qwen3":
        more |= {"head_dim": model.head_size, "hidden_dim": model.ffn}
        more |= {"qk_norm": model.qk_norm == "head", "enable_weight_tying": model.tied}
        more |= {"moe_enabled": True, "moe_inter_dim": model.moe.ffn} if model.moe else {}
    else:
        imports = _SCALING_IMPORT
        multiplier = 0.5 * model.ffn / (2 * 4 * model.hidden // 3)
        more |= {"multiple_of": model.ffn, "ffn_dim_multiplier": multiplier}
        fields = _scaling(place) or dict(zip(_SCALED, (1.0, 1.0, 4.0, 8192), strict=True))
        scaled = f"    rope_scaling_args=RoPEScalingArgs(\n{arguments(fields, 2)}    ),\n"
    if model.moe:
        imports += _EXPERTS_IMPORT
        scaled += f"    moe_args=MoEArgs(\n{arguments(_experts_02(model, model.moe), 2)}    ),\n"
    return {
        **own,
        "imports": imports,
        "eps": repr(model.norm_eps),
        "theta": repr(place.theta),
        "length": length,
        "more": arguments(more, 1) + scaled,
        **{name: getattr(model, name) for name in _SIZES},
    }


def _latent_02(setup: Setup, length: int) -> dict[str, Any]:
    model = setup.model
    assert model.latent is not None
    assert model.moe is not None
    return {
        "inter_dim": model.ffn,
        "moe_inter_dim": model.moe.ffn,
        "n_dense_layers": model.moe.dense_first,
        "q_lora_rank": model.latent.q_rank,
        "kv_lora_rank": model.latent.kv_rank,
        "qk_nope_head_dim": model.latent.nope,
        "qk_rope_head_dim": model.latent.rope,
        "v_head_dim": model.latent.v,
        "original_seq_len": length,  # else YaRN stretches what is longer
    }


def _experts_02(model: ModelShape, moe: Moe) -> dict[str, Any]:
    return {
        "num_experts": model.experts,
        "num_shared_experts": moe.shared_ffn // moe.ffn,
        **_routing(model, moe),
        "score_before_experts": False,
        "load_balance_coeff": _bias_rate(moe),
    }
