"""Counts of config.json files are those of transformers' own models, built on the meta device from
the same file, shared tensors once: of published files, and of those with changed sizes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cost.count.params import model_params
from fourfold.errors import UserError
from fourfold.spec.hf.parts import HEADS, HIDDEN, LAYERS
from fourfold.spec.hf.shapes import TYPES, shape_from_config
from tests.sampling import examples

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
# transformers' bigcode is scripted when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
SAMPLES = Path(__file__).parent.parent / "samples" / "configs"
# Types without a sample of their own, as small files.
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128,
          "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
_OTHERS = ("arcee", "cohere2", "ernie4_5", "exaone4", "glm4", "olmo3", "seed_oss")
SWITCHES = {
    "arcee": ["attention_bias", "mlp_bias"], "cohere": ["attention_bias", "use_qk_norm"],
    "cohere2": ["attention_bias"], "ernie4_5": ["use_bias"], "gemma": ["attention_bias"],
    "falcon": ["bias", "multi_query", "parallel_attn", "new_decoder_architecture", "alibi"],
    "gemma2": ["attention_bias"], "gemma3_text": ["attention_bias"], "glm": ["attention_bias"],
    "glm4": ["attention_bias"], "gpt_bigcode": ["multi_query"], "granite": ["attention_bias",
    "mlp_bias"], "gpt_neox": ["attention_bias", "use_parallel_residual"], "llama":
    ["attention_bias", "mlp_bias"], "nemotron": ["attention_bias", "mlp_bias"], "olmo":
    ["attention_bias"], "olmo2": ["attention_bias"], "olmo3": ["attention_bias"], "opt":
    ["enable_bias"], "phi": ["qk_layernorm"], "qwen2": ["use_sliding_window"], "qwen3":
    ["attention_bias", "use_sliding_window"], "seed_oss": ["attention_bias", "attention_out_bias",
    "mlp_bias"], "smollm3": ["attention_bias", "mlp_bias"], "stablelm": ["use_qkv_bias",
    "qk_layernorm", "use_parallel_residual"], "starcoder2": ["use_bias"],
}  # fmt: skip
_KV = ("num_key_value_heads", "num_kv_heads")
_FFN = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")


def built(config: dict[str, Any]) -> Any:
    """transformers' config of a file; fields that name code elsewhere left out."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "auto_map")}
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return kinds[config["model_type"]](**fields)


def count(theirs: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    # What is added to scores for the choice of experts is a buffer there, and learned all the same.
    biases = (b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(parameter.numel() for parameter in (*model.parameters(), *biases))


@functools.cache
def samples() -> dict[str, dict[str, Any]]:
    found = {path.stem: json.loads(path.read_text()) for path in sorted(SAMPLES.glob("*.json"))}
    small = {kind: _SMALL | {"model_type": kind} for kind in _OTHERS}
    codegen = found["gpt-j-6b"] | {"model_type": "codegen"}
    bigcode = found["gpt2"] | {"model_type": "gpt_bigcode"}
    return found | small | {"codegen": codegen, "gpt_bigcode": bigcode}


@pytest.mark.parametrize("name", sorted(samples()))
def test_a_published_file_is_counted_as_transformers_counts_it(name: str) -> None:
    config = samples()[name]
    assert model_params(shape_from_config(config), 2048) == count(built(config))


def test_the_decoder_of_a_model_that_also_sees_is_counted() -> None:
    """As downloaded: what the file leaves out is transformers' default."""
    config = json.loads((SAMPLES.parent / "gemma-3-12b.json").read_text())
    theirs = transformers.Gemma3TextConfig(**config["text_config"])
    shape = shape_from_config(config, "gemma-3-12b")
    assert model_params(shape, 2048) == count(theirs) == 11_766_034_176
    assert shape.name == "gemma-3-12b-text"


@pytest.mark.parametrize("is_flat", [True, False])
def test_decoder_beside_a_vision_config_is_counted(is_flat: bool) -> None:
    config = json.loads((SAMPLES.parent / "qwen2.5-vl-7b.json").read_text())
    vision = {name: config.pop(name) for name in ("vision_config", "model_type")}
    text = config | {"model_type": "qwen2_5_vl" if is_flat else "qwen2_5_vl_text"}
    data = text | vision if is_flat else {**vision, "text_config": text}
    shape = shape_from_config(data, "qwen2.5-vl-7b")
    qwen2 = shape_from_config(samples()["qwen2.5-7b"], "qwen2.5-7b")
    assert model_params(shape, 2048) == 7_615_616_512 == model_params(qwen2, 2048)
    assert (shape.name, shape.variants) == ("qwen2.5-vl-7b-text", ())


def test_every_type_has_a_file() -> None:
    """But for Kimi-K2's, which reads as DeepSeek-V3's; transformers has no model of that name."""
    assert {config["model_type"] for config in samples().values()} == set(TYPES) - {"kimi_k2"}


def _key(config: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in config), None)


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """A published file with other sizes and switches, small enough to build."""
    config = dict(draw(st.sampled_from(list(samples().values()))))
    kind = config["model_type"]
    groups, per_group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    heads, head_size = groups * per_group, draw(st.sampled_from([8, 16, 40]))
    # With dense layers before them, a model of experts has at least one layer of these.
    fewest = config.get("first_k_dense_replace", 0) + config.get("interleave_moe_layer_step", 1)
    layers = draw(st.integers(fewest, fewest + 4))
    ours = {HEADS: heads, HIDDEN: heads * head_size, LAYERS: layers, _KV: groups}
    ours |= {_FFN: draw(st.integers(1, 200)), ("rotary_dim",): head_size // 2}
    for names, value in ours.items():
        key = _key(config, names)
        if key is not None and config[key] is not None:
            config[key] = value
    config |= {"vocab_size": draw(st.integers(256, 3000)), "pad_token_id": 0}
    for list_key in ("layer_types", "no_rope_layers"):
        if list_key in config:
            config[list_key] = config[list_key][:layers]
    if "attention_types" in config:
        config["attention_types"] = [[[draw(st.sampled_from(["global", "local"]))], layers]]
        del config["attention_layers"]
    if config.get("head_dim") is not None:
        config["head_dim"] = draw(st.sampled_from([2, 24, 64]))
    if "word_embed_proj_dim" in config:
        config["word_embed_proj_dim"] = heads * head_size
    if kind != "mpt":
        config["tie_word_embeddings"] = draw(st.booleans())
    for switch in SWITCHES.get(kind, []):
        config[switch] = draw(st.booleans())
    return config


@settings(max_examples=examples(1500))
@given(changed())
def test_changed_sizes_are_counted_as_transformers_counts_them(config: dict[str, Any]) -> None:
    theirs = built(config)
    ours = shape_from_config(config)
    assert model_params(ours, 2048) == count(theirs), config
    # What transformers writes of it, in the words of today's files, is the same shape.
    again = shape_from_config(json.loads(json.dumps(theirs.to_dict())))
    assert model_params(again, 2048) == model_params(ours, 2048), config
    assert (again.window, again.mixers) == (ours.window, ours.mixers), config
    assert again.positions == ours.positions, config


@settings(max_examples=examples(60))
@given(changed(), st.sampled_from([
    "num_memory_layers", "ffn_bottleneck_dim", "use_qk_scale_norm", "extra_head_size",
    "adapter_rank", "num_shared_blocks", "embedding_proj_dim", "final_norm_bias",
]))  # fmt: skip
def test_an_unknown_field_of_the_shape_is_refused_by_name(config, field) -> None:
    with pytest.raises(UserError) as caught:
        shape_from_config(config | {field: 2})
    assert caught.value.field == field
    shape_from_config(config | {field: None})


@settings(max_examples=examples(60))
@given(changed(), st.sampled_from([
    ("unsloth_version", "2025.1"), ("is_llama_config", True), ("sep_token_id", 3),
    ("num_labels", 2), ("torchscript", True), ("use_flash_attn", True), ("init_std", 0.1),
    ("chunk_size_feed_forward", 1), ("custom_note", {"a": 1}), ("mask_token_id", 7),
]))  # fmt: skip
def test_an_unknown_harmless_field_is_ignored(config, field) -> None:
    name, value = field
    assert shape_from_config(config | {name: value}) == shape_from_config(config)
