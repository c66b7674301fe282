"""What of a shape our engine runs, and what a prediction of its seconds and bytes leaves out."""

from __future__ import annotations

from dataclasses import replace

from fourfold.spec.experts import Moe
from fourfold.spec.model import VARIANTS, ModelShape
from fourfold.units import counted

# What engine/model computes; everything else of a shape is only counted and planned.
_RUN_ACTIVATIONS = ("gelu", "relu2", "swiglu")
_RUN_QK_NORMS = ("none", "head", "width")


def windowed(model: ModelShape, seq_len: int) -> bool:
    """Whether a window hides any token of such sequences."""
    return model.window is not None and model.window < seq_len


def without_idle_window(model: ModelShape, seq_len: int) -> ModelShape:
    """A window at least as long as the sequence changes nothing: no engine has to know of it."""
    has_none = model.window is None and model.mixers is None
    if has_none or windowed(model, seq_len):
        return model
    return replace(model, window=None, mixers=None)


def not_run(model: ModelShape, seq_len: int) -> tuple[str, ...]:
    """Words for what the engine does not run; empty: it runs the model on such sequences."""
    # Nemotron turns half of a head; its presets have always been written without saying so.
    is_partial = model.positions.partial != 1 or model.family == "nemotron"
    scaling = model.positions.scaling
    facts = (
        (model.activation not in _RUN_ACTIVATIONS, f"{model.activation} activations"),
        (model.norm == "layernorm-noweight", "norms without weights"),
        (model.qk_norm not in _RUN_QK_NORMS, "norms of queries and keys with weights per head"),
        (model.qk_norm != "none" and model.norm != "rmsnorm", "LayerNorms of queries and keys"),
        (model.norms == "around", "norms before and after attention and MLP"),
        (model.block != "sequential", "parallel attention and MLP"),
        (model.head_bias, "a bias in the output layer"),
        (is_partial, "partial rotary positions"),
        (scaling is not None and scaling.kind == "yarn", "YaRN's rotary scaling"),
        (model.sinks, "attention sinks"),
        (model.latent is not None and model.bias, "biases in latent attention"),
        (windowed(model, seq_len), f"windows of {model.window} tokens in longer sequences"),
    )
    if model.moe is not None:
        facts += _experts_not_run(model, model.moe)
    variants = (VARIANTS[variant] for variant in model.variants)
    return (*(words for is_so, words in facts if is_so), *variants)


def left_out(model: ModelShape) -> str:
    """What the engine runs the model without; '' where it runs all of it."""
    named = counted(model.mtp or 0, "layer")
    return f"without multi-token prediction (MTP, {named})" if model.mtp else ""


def _experts_not_run(model: ModelShape, moe: Moe) -> tuple[tuple[bool, str], ...]:
    return (
        (model.activation != "swiglu", f"experts with {model.activation}"),
        (moe.score == "sqrtsoftplus", "sqrtsoftplus scores"),
        (moe.router_bias or moe.expert_bias, "biases of router and experts"),
        (model.biased("mlp"), "biases of the MLPs beside experts"),
    )


def remarks(model: ModelShape, seq_len: int, *, further: bool = False) -> tuple[str, ...]:
    """Sentences for what a prediction of seconds and memory leaves out or takes for something else;
    parameters are exact all the same. `further`: layers that predict further tokens are timed."""
    sentences = []
    if windowed(model, seq_len):
        count = model.count_layers("window")
        layers = "all layers" if count == model.layers else f"{count} layers"
        sentences.append(
            f"attention of {layers} is timed with a window of {model.window} tokens, but all keys "
            "and values are sent"
        )
    if model.block != "sequential":
        sentences.append("parallel attention and MLP are timed as sequential")
    untimed = [VARIANTS[variant] for variant in model.variants]
    if model.mtp and not further:
        untimed.insert(0, "multi-token prediction (MTP; Megatron's is)")
    if model.norms == "around":
        untimed.insert(0, "norms after attention and MLP")
    if model.qk_norm != "none":
        untimed.insert(0, "norms of queries and keys")
    if untimed:
        sentences.append(f"not timed: {', '.join(untimed)}")
    if model.mtp and further:
        sentences.append(
            "multi-token prediction (MTP) is in seconds and memory, not in TFLOP/s and MFU"
        )
    return tuple(sentences)
