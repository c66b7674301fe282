"""Hugging Face weights: out and in again without a change, cut as any layout cuts; the logits of
transformers, where it is installed, are ours."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold.cost.count.params import tensors
from fourfold.engine.checkpoint import hf_read
from fourfold.engine.checkpoint.export import Export, export_hf
from fourfold.engine.checkpoint.hf_read import HfWeights, fill
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.shards import (
    InitRule,
    Rect,
    ShardPlace,
    initialize,
    shards_of,
    tp_rect,
)
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.hf import folder as hf
from fourfold.spec.hf.shapes import shape_from_config
from fourfold.spec.hf.tensors import approximation, export_type
from fourfold.spec.hf.written import config_of
from fourfold.spec.model import ModelShape, Positions
from fourfold.verbs import train
from tests.specs import shape_of

SEQ_LEN = 32
TABLE = tomllib.loads(Path(__file__).with_name("tiny.toml").read_text())
TINY = {name: shape_of(said) for name, said in TABLE.items()}


def built(shape: ModelShape, seed: int = 3) -> tuple[Decoder, dict[str, Tensor]]:
    """A model with all of its values spread, and its published tensors."""
    decoder = Decoder(shape, SEQ_LEN)
    held = shards_of(decoder, shape, SEQ_LEN, ShardPlace())
    initialize(held, seed=seed, layers=shape.layers, rule=InitRule(vector_std=0.1))
    return decoder, {shard.name: shard.values.clone() for shard in held}


def must_hold(folder: Path, shape: ModelShape, values: dict[str, Tensor]) -> None:
    """All of the model is in the folder, but what routers know of the batch before, which no other
    format has."""
    weights = HfWeights(folder)
    weights.require(shape, tensors(shape, SEQ_LEN))
    held = shards_of(Decoder(shape, SEQ_LEN, fused=False), shape, SEQ_LEN, ShardPlace())
    fill(held, weights, shape)
    assert {shard.name for shard in held} == set(values)
    stored = [shard for shard in held if not shard.name.endswith("router.load")]
    assert all(torch.equal(shard.values, values[shard.name]) for shard in stored)


def exported(shape: ModelShape, out: Path, **fields: object) -> dict[str, Tensor]:
    _, values = built(shape)
    what = Export(model=shape, seq_len=SEQ_LEN, **({"dtype": torch.float32} | fields))
    export_hf(lambda names: {name: values[name] for name in names}, what, out, lambda: None)
    return values


@pytest.mark.parametrize("name", TINY)
def test_out_and_in_again_changes_nothing(name: str, tmp_path: Path) -> None:
    shape = TINY[name]
    values = exported(shape, tmp_path / "out")
    must_hold(tmp_path / "out", shape, values)
    weights = HfWeights(tmp_path / "out")
    weights.require(weights.shape, tensors(weights.shape, SEQ_LEN))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["llama", "gpt", "mpt-alibi", "qwen3", "olmo2"])
def test_a_rank_reads_only_its_rectangles(name: str, tmp_path: Path) -> None:
    shape = TINY[name]
    values = exported(shape, tmp_path / "out", file_bytes=20_000)
    weights = HfWeights(tmp_path / "out")
    assert len(set(weights._files.values())) > 3
    for tensor in tensors(shape, SEQ_LEN):
        for rank in range(4):
            rect, _ = tp_rect(shape, tensor, 4, rank)
            matrix = len(tensor.shape) > 1
            part = weights.rectangle(shape, tensor.name, rect, matrix=matrix)
            whole = values[tensor.name][slice(*rect.rows)]
            assert torch.equal(part, whole[:, slice(*rect.columns)] if matrix else whole)


def test_values_are_written_in_the_asked_format_over_an_earlier_export(tmp_path: Path) -> None:
    exported(TINY["llama"], tmp_path / "out", file_bytes=20_000)
    values = exported(TINY["llama"], tmp_path / "out", dtype=torch.bfloat16)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [hf.CONFIG, hf.WHOLE]
    weights = HfWeights(tmp_path / "out")
    assert weights.config["torch_dtype"] == "bfloat16"
    rect = Rect((0, 512), (0, 64))
    found = weights.rectangle(TINY["llama"], "embedding.weight", rect, matrix=True)
    assert torch.equal(found, values["embedding.weight"].bfloat16())


def test_reading_in_small_parts_is_the_same(tmp_path: Path, monkeypatch) -> None:
    values = exported(TINY["gpt"], tmp_path / "out")
    monkeypatch.setattr(hf_read, "_READ_BYTES", 3000)
    must_hold(tmp_path / "out", TINY["gpt"], values)


@pytest.mark.parametrize("name", TINY)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    import transformers

    shape = TINY[name]
    values = exported(shape, tmp_path / "out", file_bytes=100_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    tokens = torch.randint(0, shape.vocab, (3, SEQ_LEN), generator=torch.manual_seed(0))
    decoder, _ = built(shape)
    tables = make_tables(shape, torch.arange(SEQ_LEN), range(shape.heads))
    with torch.no_grad():
        ours, wanted = decoder(tokens, tables), theirs.eval()(tokens).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert ours.std() > 0.05
    # And back: what transformers saves is what we read.
    theirs.save_pretrained(tmp_path / "again")
    must_hold(tmp_path / "again", shape, values)


@pytest.mark.parametrize("name", TINY)
def test_the_config_describes_the_shape(name: str) -> None:
    shape = TINY[name]
    config = config_of(shape, seq_len=SEQ_LEN, dtype="float32")
    found = shape_from_config(config, name=shape.name)
    rows = shape.positions.length or SEQ_LEN
    learned = shape.positions.kind == "learned"
    positions = replace(shape.positions, length=rows) if learned else shape.positions
    wanted = replace(
        shape,
        family=found.family,
        positions=positions,
        # Written out where the format has the field.
        head_dim=found.head_dim and shape.head_size,
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("bloom-176b", {}, "embedding_norm is False"),
        ("mpt-tiny", {"bias": False}, "gpt2 comes closest, but there bias is True"),
        ("mpt-tiny", {"kv_heads": 2}, "kv_heads = heads is True"),
        ("llama-tiny", {"positions": Positions(kind="alibi")}, "positions is rope"),
        ("llama-tiny", {"activation": "relu2"}, "activation is swiglu"),
        ("llama-tiny", {"window": 8, "mixers": ["window", "full"]}, "window is none"),
        ("qwen-tiny", {}, "qwen2 comes closest, but there qk_norm is none"),
        ("olmo2-tiny", {"qk_norm": "none"}, "llama comes closest, but there norms is before"),
        ("llama-tiny", {"variants": ("soft-caps",)}, "variants is none"),
    ],
)
def test_shapes_without_a_public_format_are_refused_with_the_reason(name, change, words) -> None:
    with pytest.raises(UserError, match=words):
        export_type(replace(catalog.model(name), **change))


def test_older_files_of_the_bare_model_are_read(tmp_path: Path) -> None:
    """GPT-2 as first published: names without 'transformer.', masks beside the weights."""
    from safetensors import torch as files

    shape, folder = TINY["gpt"], tmp_path / "out"
    values = exported(shape, folder)
    held = files.load_file(folder / hf.WHOLE)
    bare = {name.removeprefix("transformer."): value for name, value in held.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(shape.layers)}
    files.save_file(bare | masks, folder / hf.WHOLE)
    must_hold(folder, shape, values)
    files.save_file(bare | {"h.0.attn.q_norm.weight": torch.ones(4)}, folder / hf.WHOLE)
    with pytest.raises(UserError, match=r"does not have: h\.0\.attn\.q_norm\.weight"):
        HfWeights(folder).require(shape, tensors(shape, SEQ_LEN))


def test_phi3_has_its_projections_joined(tmp_path: Path) -> None:
    """Read, not written: the same values are a Llama."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, pad_token_id=0, sliding_window=SEQ_LEN,
    )  # fmt: skip
    theirs = transformers.Phi3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "phi")
    weights = HfWeights(tmp_path / "phi")
    decoder = Decoder(weights.shape, SEQ_LEN)
    weights.require(weights.shape, tensors(weights.shape, SEQ_LEN))
    fill(shards_of(decoder, weights.shape, SEQ_LEN, ShardPlace()), weights, weights.shape)
    tokens = torch.randint(0, 128, (2, SEQ_LEN))
    tables = make_tables(weights.shape, torch.arange(SEQ_LEN), range(4))
    with torch.no_grad():
        assert (decoder(tokens, tables) - theirs(tokens).logits).abs().max() < 1e-5
    assert export_type(weights.shape) == "mistral"


def test_another_form_of_gelu_is_said() -> None:
    assert "gelu_new" in approximation("gpt2", {})
    assert approximation("gpt2", {"activation_function": "gelu"}) == ""
    assert approximation("llama", {}) == approximation("mpt", {}) == ""


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    shape = TINY["llama"]
    exported(shape, tmp_path / "out")
    weights = HfWeights(tmp_path / "out")
    for change, words in (
        ({"hidden": 128, "head_dim": 16}, r"embed_tokens.weight of shape \[512, 64\]"),
        ({"kv_heads": 4}, "kv_heads = 2, the model 4"),
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"tied": True}, "tied"),
        ({"positions": Positions(kind="rope", theta=5.0)}, "positions"),
        ({"layers": 3}, r"does not have: model.layers.3"),
        ({"layers": 5}, r"no tensor model.layers.4"),
    ):
        other = replace(shape, **change)
        with pytest.raises(UserError, match=words):
            weights.require(other, tensors(other, SEQ_LEN))


@pytest.mark.parametrize(
    "routing", [{"top_k": 1}, {"scale": 2.0}, {"score": "softmax"}, {"normalised": False}]
)
def test_weights_of_another_routing_are_refused(routing: dict, tmp_path: Path) -> None:
    shape = TINY["deepseek-v3"]
    exported(shape, tmp_path / "out")
    assert shape.moe is not None
    (field,) = routing
    own = routing if field == "top_k" else {"moe": replace(shape.moe, **routing)}
    other = replace(shape, **own)
    with pytest.raises(UserError, match=f"{field} = "):
        HfWeights(tmp_path / "out").require(other, tensors(other, SEQ_LEN))


def test_train_refuses_weights_of_another_model_before_ranks_start(
    tmp_path: Path, cli, monkeypatch
) -> None:
    monkeypatch.setattr(train, "run_job", lambda *_, **__: pytest.fail("ranks started"))
    exported(TINY["llama"], tmp_path / "out")
    asked = ("train", "--weights", tmp_path / "out", "--gpus", "1", "--seq-len", SEQ_LEN)
    asked += ("--steps", "1", "--precision", "fp32", "--out", tmp_path / "trained")
    said = cli(*asked, "--model", "mpt-tiny", status=2)
    assert "has norm = rmsnorm, the model layernorm" in said
    assert "use its own model: omit --model" in said
    assert not (tmp_path / "trained" / "train.toml").exists()


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(UserError, match=r"not a Hugging Face folder: .* weights export"):
        HfWeights(folder)
    exported(TINY["llama"], folder)
    whole = (folder / hf.WHOLE).read_bytes()
    (folder / hf.WHOLE).write_bytes(whole[:-10])
    with pytest.raises(UserError, match="cannot be read"):
        HfWeights(folder)
    (folder / hf.WHOLE).unlink()
    os.mkfifo(folder / hf.WHOLE)  # would wait for a writer
    with pytest.raises(UserError, match="not a regular file"):
        HfWeights(folder)
    (folder / hf.WHOLE).unlink()
    with pytest.raises(UserError, match="has neither"):
        HfWeights(folder)
    config = json.loads((folder / hf.CONFIG).read_text())
    (folder / hf.CONFIG).write_text(json.dumps(config | {"model_type": "granite"}))
    with pytest.raises(UserError, match="unsupported model type 'granite'"):
        HfWeights(folder)
