"""What of a model does our engine not run, and what does the planner only approximate?"""

from __future__ import annotations

from fourfold.spec.model import VARIANTS, ModelShape

# What engine/model computes; everything else of a shape is only counted and planned.
RUN_ACTIVATIONS = ("gelu", "relu2", "swiglu")
RUN_QK_NORMS = ("none", "head", "width")


def windowed(model: ModelShape, seq_len: int) -> bool:
    """Whether a window hides any token of such sequences."""
    return model.window is not None and model.window < seq_len


def not_run(model: ModelShape, seq_len: int) -> tuple[str, ...]:
    """Words for what the engine does not run; empty: it runs the model on such sequences."""
    facts = (
        (model.activation not in RUN_ACTIVATIONS, f"{model.activation} activations"),
        (model.norm == "layernorm-noweight", "norms without weights"),
        (model.qk_norm not in RUN_QK_NORMS, "norms of queries and keys with weights per head"),
        (model.qk_norm != "none" and model.norm != "rmsnorm", "LayerNorms of queries and keys"),
        (model.norms == "around", "norms before and after attention and MLP"),
        (model.block != "sequential", "parallel attention and MLP"),
        (model.head_bias, "a bias in the output layer"),
        (_partial(model), "partial rotary positions"),
        (windowed(model, seq_len), f"windows of {model.window} tokens in longer sequences"),
    )
    found = [words for is_so, words in facts if is_so]
    return (*found, *(VARIANTS[variant] for variant in model.variants))


def remarks(model: ModelShape, seq_len: int) -> tuple[str, ...]:
    """Sentences for what a prediction of seconds and memory leaves out or takes for something else;
    parameters are exact all the same."""
    said = []
    if windowed(model, seq_len):
        some = "all layers" if model.local_layers is None else f"{model.local_layers} layers"
        said.append(
            f"attention of {some} is timed with a window of {model.window} tokens, but all keys "
            "and values are sent"
        )
    if model.block != "sequential":
        said.append("parallel attention and MLP are timed as sequential")
    untimed = [VARIANTS[variant] for variant in model.variants]
    if model.norms == "around":
        untimed.insert(0, "norms after attention and MLP")
    if model.qk_norm != "none":
        untimed.insert(0, "norms of queries and keys")
    if untimed:
        said.append(f"not timed: {', '.join(untimed)}")
    return tuple(said)


def _partial(model: ModelShape) -> bool:
    """Nemotron turns half of a head; its presets have always been written without saying so."""
    return model.positions.partial != 1 or model.family == "nemotron"
