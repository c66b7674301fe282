"""Readers of config.json: Llama and what is built like it, a gated MLP and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.parts import (
    activation,
    biases,
    every,
    head_dim,
    kv_heads,
    rope,
    sizes,
    windows,
)

Reader = Callable[[Config], dict[str, Any]]


def _gated(
    config: Config,
    *,
    family: str = "llama",
    norm: str = "rmsnorm",
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    act: tuple[str, ...] = ("hidden_act",),
    default_act: str = "silu",
    default_kv: int | None = None,
    default_head: int | None = None,
    partial: float = 1.0,
    theta: float = 10000.0,
    tied: bool = False,
) -> dict[str, Any]:
    """What all of them have; biases, windows and norms of queries are each reader's own."""
    size = sizes(config)
    return {
        **size,
        "family": family,
        "kv_heads": kv_heads(config, default_kv or size["heads"]),
        "ffn": config.whole("ffn", "intermediate_size"),
        "head_dim": head_dim(config, default_head),
        "positions": rope(config, partial=partial, theta=theta),
        "norm": norm,
        "norm_eps": config.number("norm_eps", eps[0], default=eps[1]),
        "activation": activation(config, default_act, *act, gated=True),
        "bias": False,
        "tied": config.flag("tie_word_embeddings", default=tied),
    }


def _attention_bias(config: Config, *, default: bool = False) -> dict[str, Any]:
    """A switch for all four projections of attention; the MLP has none."""
    both = config.flag("attention_bias", default=default)
    return biases(qkv=both, out=both, mlp=False)


def _two_biases(config: Config) -> dict[str, Any]:
    both = config.flag("attention_bias", default=False)
    return biases(qkv=both, out=both, mlp=config.flag("mlp_bias", default=False))


def _llama(config: Config) -> dict[str, Any]:
    fields = _gated(config) | _two_biases(config)
    return fields | windows(config, fields["layers"])


def _mistral(config: Config) -> dict[str, Any]:
    fields = _gated(config, default_kv=8)
    return fields | windows(config, fields["layers"])


def _phi3(config: Config) -> dict[str, Any]:
    fields = _gated(config, eps=("rms_norm_eps", 1e-5))
    config.ignore("full_attn_mod", "interpolation_factor")
    return fields | windows(config, fields["layers"])


def _qwen_windows(config: Config, layers: int) -> dict[str, Any]:
    """The first `max_window_layers` see all."""
    first = config.data.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool):
        raise UserError("must be a whole number", field="max_window_layers", value=first)
    return windows(config, layers, local=lambda layer: layer >= first, default=4096, switched=True)


def _qwen2(config: Config) -> dict[str, Any]:
    fields = _gated(config, family="qwen", default_kv=32) | biases(qkv=True, out=False, mlp=False)
    return fields | _qwen_windows(config, fields["layers"])


def _qwen3(config: Config) -> dict[str, Any]:
    fields = _gated(config, family="qwen", default_kv=32, default_head=128)
    fields |= _attention_bias(config) | {"qk_norm": "head"}
    return fields | _qwen_windows(config, fields["layers"])


def _smollm3(config: Config) -> dict[str, Any]:
    fields = _gated(config, default_kv=4, tied=True, theta=2e6) | _two_biases(config)
    rotary = _rotary_layers(config, fields["layers"])
    if not all(rotary):
        config.variants.add("no-rope-layers")
    return fields | windows(
        config, fields["layers"], local=lambda layer: not rotary[layer], switched=True
    )


def _rotary_layers(config: Config, layers: int) -> list[bool]:
    """Which layers turn queries and keys: a list, or every n-th does not."""
    name, listed = config.find("no_rope_layers")
    step = config.whole("", "no_rope_layer_interval", default=4)
    if listed is None:
        return [(layer + 1) % step != 0 for layer in range(min(layers, 100_000))]
    if not isinstance(listed, list) or len(listed) != layers:
        raise UserError(
            f"must be a list of {layers} values, one per layer", field=name, value=listed
        )
    return [bool(one) for one in listed]


def _gemma(config: Config, *, act: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Norms multiply by 1 + weight, embeddings are scaled by the root of their width."""
    config.variants.update(("unit-offset-norm", "multipliers"))
    fields = _gated(
        config, family="gemma", act=act, default_act="gelu_pytorch_tanh", default_head=256,
        tied=True, **more,
    )  # fmt: skip
    return fields | _attention_bias(config)


def _gemma1(config: Config) -> dict[str, Any]:
    return _gemma(config, act=("hidden_activation", "hidden_act"), default_kv=16)


def _gemma2(config: Config) -> dict[str, Any]:
    fields = _gemma(config, act=("hidden_activation", "hidden_act"), default_kv=4)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if name not in config.data:
            config.variants.add("soft-caps")
    alternate = every(config, 2)
    return fields | {"norms": "around"} | windows(
        config, fields["layers"], default=4096, local=alternate
    )  # fmt: skip


def _gemma3(config: Config) -> dict[str, Any]:
    act = ("hidden_activation", "hidden_act")
    fields = _gemma(config, act=act, default_kv=4, theta=1e6)
    config.variants.add("two-ropes")
    found = windows(config, fields["layers"], default=4096, local=every(config, 6))
    return fields | {"norms": "around", "qk_norm": "head"} | found


def _olmo1(config: Config) -> dict[str, Any]:
    eps = ("layer_norm_eps", 1e-5)
    fields = _gated(config, family="olmo", norm="layernorm-noweight", eps=eps)
    return fields | _attention_bias(config)


def _olmo2(config: Config, theta: float = 10000.0) -> dict[str, Any]:
    fields = _gated(config, family="olmo", eps=("rms_norm_eps", 1e-5), theta=theta)
    return fields | _attention_bias(config) | {"norms": "after", "qk_norm": "width"}


def _olmo3(config: Config) -> dict[str, Any]:
    config.variants.add("two-ropes")
    fields = _olmo2(config, theta=5e5)
    return fields | windows(config, fields["layers"], default=4096, local=every(config, 4))


def _granite(config: Config) -> dict[str, Any]:
    return _gated(config) | _two_biases(config)


def _glm(config: Config) -> dict[str, Any]:
    config.variants.add("interleaved-rope")
    fields = _gated(
        config, eps=("rms_norm_eps", 1.5625e-7), default_kv=2, default_head=128, partial=0.5
    )
    qkv = config.flag("attention_bias", default=True)
    return fields | biases(qkv=qkv, out=False, mlp=False)


def _glm4(config: Config) -> dict[str, Any]:
    return _glm(config) | {"norms": "around"}


def _exaone4(config: Config) -> dict[str, Any]:
    fields = _gated(config, default_kv=32, eps=("rms_norm_eps", 1e-5))
    found = windows(config, fields["layers"], default=4096, local=every(config, 4))
    if found:
        config.variants.add("no-rope-layers")  # those that see all have no rotary positions
    return fields | {"norms": "after", "qk_norm": "head"} | found


def _seed_oss(config: Config) -> dict[str, Any]:
    fields = _gated(config, default_kv=8, default_head=128)
    return fields | biases(
        qkv=config.flag("attention_bias", default=True),
        out=config.flag("attention_out_bias", default=False),
        mlp=config.flag("mlp_bias", default=False),
    )


def _ernie(config: Config) -> dict[str, Any]:
    config.variants.add("interleaved-rope")
    eps = ("rms_norm_eps", 1e-5)
    fields = _gated(config, eps=eps, default_kv=2, default_head=128, tied=True, theta=5e5)
    every_linear = config.flag("use_bias", default=False)
    return fields | biases(qkv=every_linear, out=every_linear, mlp=every_linear)


def _stablelm(config: Config) -> dict[str, Any]:
    eps = ("layer_norm_eps", 1e-5)
    fields = _gated(config, norm="layernorm", eps=eps, default_kv=32, partial=0.25)
    fields |= biases(qkv=config.flag("use_qkv_bias", default=False), out=False, mlp=False)
    parallel = config.flag("use_parallel_residual", default=False)
    return fields | {
        "head_dim": None,
        "qk_norm": "heads" if config.flag("qk_layernorm", default=False) else "none",
        "block": "parallel-one-norm" if parallel else "sequential",
    }


def _cohere(config: Config, theta: float = 5e5) -> dict[str, Any]:
    """One norm, attention and MLP side by side; logits are scaled."""
    config.variants.update(("multipliers", "interleaved-rope"))
    eps = ("layer_norm_eps", 1e-5)
    fields = _gated(
        config, family="cohere", norm="layernorm-nobias", eps=eps, tied=True, theta=theta
    )
    norm = "heads" if config.flag("use_qk_norm", default=False) else "none"
    return fields | _attention_bias(config) | {"block": "parallel-one-norm", "qk_norm": norm}


def _cohere2(config: Config) -> dict[str, Any]:
    fields = _cohere(config, theta=10000.0)
    config.require(True, "use_gated_activation", "use_parallel_block", "use_embedding_sharing")
    config.ignore("order_of_interleaved_layers", "position_embedding_type", "layer_switch")
    found = windows(config, fields["layers"], default=4096, local=every(config, 4))
    config.variants.add("no-rope-layers")
    return fields | {"head_dim": None} | found


TYPES: dict[str, Reader] = {
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "olmo": _olmo1,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
}
