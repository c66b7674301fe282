"""A config.json gives an exact shape or a refusal. Counts were checked against transformers 5.22
(models built on the meta device, tied weights counted once)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.count.flops import FlopsQuery, convention
from fourfold.cost.count.params import model_params
from fourfold.errors import UserError
from fourfold.spec import catalog, codec
from fourfold.spec.hf.shapes import shape_from_config
from fourfold.spec.hf.written import config_of
from fourfold.spec.layout import Layout
from fourfold.spec.model import RopeScaling
from fourfold.spec.policy import Policy
from fourfold.spec.supported import not_run

# Configurations of each base, with what is changed in them: exact counts, refusals, notes.
CASES = json.loads(Path(__file__).with_name("hf_cases.json").read_text())
LLAMA, GPT2, BLOOM, MPT, _ = CASES["bases"].values()
EXACT, REFUSED, NOTED = (
    [(CASES["bases"].get(base, {}) | changes, *said) for base, changes, *said in CASES[name]]
    for name in ("exact", "refused", "noted")
)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(("config", "params"), EXACT)
def test_counts_are_exact(config, params):
    assert model_params(shape_from_config(config, "x"), 2048) == params


# Those whose published file is not among the samples.
PRESETS = {
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": (16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_config_is_the_preset(name):
    hidden, ffn, layers, heads, kv_heads, vocab = PRESETS[name]
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_act": "silu",
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": name.startswith("llama-3.2"), "attention_dropout": 0.0,
        "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "pretraining_tp": 1,
        "rope_theta": 10000.0,
    }  # fmt: skip
    if name.startswith("llama-3"):
        factor = 32.0 if name.startswith("llama-3.2") else 8.0
        config |= {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"factor": factor}}
    assert shape_from_config(config, name) == catalog.model(name)


def test_old_and_new_rope_forms_agree():
    old = LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    new = LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}
    assert shape_from_config(old) == shape_from_config(new)
    assert shape_from_config(new).positions.scaling == RopeScaling(kind="llama3", factor=8.0)
    linear = shape_from_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (linear.positions.scaling.kind, linear.positions.scaling.factor) == ("linear", 4.0)
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    length = {"original_max_position_embeddings": 4096}
    assert shape_from_config(LLAMA | {"rope_scaling": yarn | length}).positions.scaling == (
        RopeScaling(
            kind="yarn", factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707
        )
    )
    uneven = shape_from_config(LLAMA | {"rope_scaling": yarn | length | {"truncate": False}})
    assert uneven.positions.scaling.truncate is False
    for other in (yarn, yarn | length | {"attention_factor": 1.5}):
        shape = shape_from_config(LLAMA | {"rope_scaling": other})
        assert (shape.positions.scaling, shape.variants) == (None, ("other-rope",))
    plain = shape_from_config(
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    )
    assert (plain.positions.theta, plain.positions.scaling) == (7.0, None)


def test_mpt_as_llm_foundry_reads_it():
    alibi = shape_from_config(MPT)
    assert (alibi.positions.kind, alibi.norm, alibi.bias) == ("alibi", "layernorm-nobias", False)
    learned = shape_from_config(
        MPT | {"attn_config": {"alibi": False}, "max_seq_len": 512, "no_bias": False}
    )
    assert (learned.positions.length, learned.norm, learned.bias) == (512, "layernorm", True)
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "sliding_window_size": -1}
    assert shape_from_config(MPT | {"attn_config": grouped}).kv_heads == 2
    assert shape_from_config(MPT | {"attn_config": {"attn_type": "multiquery_attention"}}).kv_heads


@pytest.mark.parametrize(("config", "words"), NOTED)
def test_what_changes_no_count_is_read_and_named(config, words):
    """It is planned, and not run."""
    shape = shape_from_config(config, "x")
    assert words in ", ".join(not_run(shape, 128))


def test_windows_count_only_where_they_hide_something():
    shape = shape_from_config(LLAMA | {"model_type": "mistral", "sliding_window": 64}, "x")
    assert not_run(shape, 64) == ()
    (near, full), (near_64, full_64) = (
        [
            FlopsQuery.of(model=model, seq_len=seq_len, layout=Layout(), policy=Policy())
            for model in (shape, replace(shape, window=None))
        ]
        for seq_len in (256, 64)
    )
    count = convention("full-attention").count
    gap = count(full).model - count(near).model
    assert gap == 12 * 3 * 64 * (256 - 64 * (2 - 64 / 256))
    assert count(near_64) == count(full_64)


def test_qwen_windows_need_their_switch():
    base = LLAMA | {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}
    assert shape_from_config(base).window is None
    shape = shape_from_config(base | {"use_sliding_window": True})
    assert (shape.window, shape.mixers) == (64, ("full", "full", "window"))


@pytest.mark.parametrize(("config", "field", "reason"), REFUSED)
def test_refusals_name_field_and_reason(config, field, reason):
    with pytest.raises(UserError) as caught:
        shape_from_config(config, "x")
    assert caught.value.field == field
    assert reason in str(caught.value)


def test_a_path_stands_for_a_name(tmp_path: Path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shape = catalog.model(str(folder / "config.json"))
    assert (shape.name, model_params(shape, 1)) == ("my-model", 177_088)
    assert catalog.model(str(folder)) == shape
    (folder / "other.json").write_text(json.dumps(LLAMA))
    assert catalog.model(str(folder / "other.json")).name == "other"


SAMPLES = Path(__file__).parent.parent / "samples" / "configs"


@pytest.mark.parametrize("name", sorted(
    {path.stem for path in SAMPLES.glob("*.json")} & set(catalog.model_names())
    - {"mpt-7b", "nemotron-4-340b"}))  # fmt: skip
def test_a_preset_is_its_published_file(name):
    """But for MPT, whose published file has ALiBi and a larger vocabulary than its throughput
    tables, and Nemotron, whose preset does not say that half of a head turns. Presets with experts
    are pretrained: without the long context that comes later, with the losses of their papers."""
    shape = shape_from_config(json.loads((SAMPLES / f"{name}.json").read_text()), name)
    preset = catalog.model(name)
    if preset.moe is not None and shape.moe is not None:
        trained = ("balance", "balance_weight", "z_weight")
        losses = {name: getattr(preset.moe, name) for name in trained}
        shape = replace(shape, moe=replace(shape.moe, **losses), variants=preset.variants)
        if preset.positions.scaling is None:
            shape = replace(shape, positions=replace(shape.positions, scaling=None))
    assert replace(shape, head_dim=preset.head_dim) == preset
    assert shape.head_size == preset.head_size


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_KEYS = sorted(
    {key for config, _ in EXACT for key in config}
    | {"rope_scaling", "rope_parameters", "rope_theta", "attn_config", "layer_types", "no_bias"}
)


@given(st.sampled_from([config for config, _ in EXACT]), st.dictionaries(
    st.sampled_from(_KEYS) | st.text(max_size=12), _JSON, max_size=4))  # fmt: skip
def test_garbage_is_a_user_error_or_a_shape(config, changes):
    try:
        shape = shape_from_config(config | changes, "x")
    except UserError:
        return
    assert model_params(shape, 2048) > 0


@given(_JSON)
def test_any_json_is_handled(data):
    with pytest.raises(UserError):
        shape_from_config(data, "x")


def test_the_switches_of_blooms_own_file_are_no_dropout():
    switches = {"bias_dropout_fusion": True, "masked_softmax_fusion": True, "skip_bias_add": True}
    assert shape_from_config(BLOOM | switches) == shape_from_config(BLOOM)
    assert shape_from_config(BLOOM | switches | {"hidden_dropout": 0.1}).variants == ("dropout",)


def test_a_name_of_the_hub_is_a_downloaded_model_a_preset_or_advice(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert catalog.model("meta-llama/Llama-3.1-8B") == catalog.model("llama-3.1-8b")
    with pytest.raises(UserError, match=r"hf download .* config.json.* preset 'llama-3.1-8b'"):
        catalog.model("meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(UserError, match="No such file"):
        catalog.model("meta-llama/config.json")
    folder = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "0e9e39f"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = catalog.model("meta-llama/Llama-3.1-8B-Instruct")
    assert found == shape_from_config(LLAMA, "Llama-3.1-8B-Instruct")


def test_the_longest_sequence_is_written_as_it_was_read_and_is_no_other_model() -> None:
    shape = shape_from_config(LLAMA | {"max_position_embeddings": 512})
    written = config_of(shape, seq_len=128, dtype="float32")
    assert written["max_position_embeddings"] == 512
    assert config_of(shape, seq_len=1024, dtype="float32")["max_position_embeddings"] == 1024
    other = shape_from_config(LLAMA)
    assert shape == other
    assert codec.encode(shape, sparse=True) == codec.encode(other, sparse=True)  # as runs are named
