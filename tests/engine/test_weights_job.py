"""Weights through the commands: a Hugging Face folder begins a training on another layout, and
what that training exports is the same, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed.checkpoint as dcp

from fourfold.spec import catalog
from tests.engine.test_hf_weights import exported

SEQ_LEN = 32


def tensors(out: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in out.glob("*.safetensors"):
        found |= safetensors.load_file(path)
    return found


def test_in_on_one_layout_and_out_again_is_the_same(tmp_path, cli):
    weights = tmp_path / "gpt"
    exported(catalog.model("gpt-tiny"), weights, file_bytes=200_000)
    trained = tmp_path / "trained"
    # A step that fp32 can't hold moves no weight, not even one that is 0.
    still = ("--lr", "1e-60", "--set", "train.weight_decay=0.0", "--set", "device=cpu")
    layout = ("--gpus", "2", "--tp", "2")
    sizes = ("--seq-len", SEQ_LEN, "--global-batch", "2", "--precision", "fp32", "--steps", "1")
    cli("train", "--weights", weights, "--out", trained, *layout, *sizes, *still)
    out = tmp_path / "out"
    said = cli.json("weights", "export", trained, out)
    assert said["model_type"] == "gpt2"
    assert said["files"] == ["config.json", "model.safetensors"]
    before, after = tensors(weights), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    config = json.loads((weights / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == config
    assert "use --force" in cli("weights", "export", trained, out, status=2)
    (out / "notes.txt").touch()
    assert "notes.txt" in cli("weights", "export", trained, out, "--force", status=2)

    # The checkpoint has its own weights: a resume does not need the folder any more.
    for path in weights.iterdir():
        path.unlink()
    cli("train", "--out", trained, "--gpus", "1", "--steps", "2")


def test_the_end_token_of_the_data_is_the_models(tmp_path, cli):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat. " * 40)
    cli("data", "make", "--out", tmp_path / "tokens", text)
    trained = tmp_path / "trained"
    words = ("--model", "llama-tiny", "--gpus", "1", "--seq-len", SEQ_LEN, "--global-batch", "2")
    words += ("--precision", "fp32", "--steps", "1", "--set", "device=cpu")
    cli("train", "--out", trained, "--data", tmp_path / "tokens", *words)
    cli("weights", "export", trained, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 256
    (tmp_path / "tokens.json").unlink()
    cli("weights", "export", trained, tmp_path / "later")
    assert "eos_token_id is left open" in cli.err
    assert json.loads((tmp_path / "later" / "config.json").read_text())["eos_token_id"] is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_export_in_its_own_format(tmp_path, cli):
    trained, out = tmp_path / "trained", tmp_path / "out"
    run_of = ("--model", "gpt-tiny", "--gpus", "2", "--tp", "2", "--set", "device=cpu")
    sizes = ("--seq-len", SEQ_LEN, "--global-batch", "2", "--precision", "fp32", "--steps", "2")
    cli("train", "--out", trained, *run_of, *sizes)
    said = cli.json("weights", "export", trained, out, "--format", "dcp")
    assert said["files"] == [".metadata", "__0_0.distcp"]
    step = trained / "checkpoints" / "step-00000002"
    stored = json.loads((step / "index.json").read_text())["tensors"]
    right = {name: torch.full(one["shape"], torch.nan) for name, one in stored.items()}
    for path in step.glob("*.safetensors"):
        for key, value in safetensors.load_file(path).items():
            name, _, ends = key.rstrip("]").partition("[")
            place = [slice(*map(int, one.split(":"))) for one in ends.split(", ") if one]
            right[name][tuple(place)] = value
    assert {name.partition(".")[0] for name in right} == {"model", "exp_avg", "exp_avg_sq"}
    found = {name: torch.zeros(one["shape"]) for name, one in stored.items()}
    dcp.load(found, checkpoint_id=str(out), no_dist=True)
    assert all(torch.equal(found[name], right[name]) for name in right)
    # Again, narrower: weights alone are converted.
    words = ("--format", "dcp", "--dtype", "bf16", "--force")
    cli("weights", "export", trained, out, *words)
    assert "torch.distributed.checkpoint" in cli.out
    name = "embedding.weight"
    found = {f"model.{name}": torch.zeros(1), f"exp_avg.{name}": torch.zeros(1)}
    found = {key: torch.zeros_like(right[key]) for key in found}
    dcp.load(found, checkpoint_id=str(out), no_dist=True)
    assert torch.equal(found[f"model.{name}"], right[f"model.{name}"].bfloat16().float())
    assert torch.equal(found[f"exp_avg.{name}"], right[f"exp_avg.{name}"])
    assert "contains files that are not of an export" in cli(
        "weights", "export", trained, out, "--force", status=2
    )


@pytest.mark.slow
def test_weights_of_another_model_end_the_training_with_the_reason(tmp_path, cli):
    weights = tmp_path / "llama"
    exported(catalog.model("llama-tiny"), weights, file_bytes=200_000)
    sizes = ("--gpus", "1", "--steps", "1", "--seq-len", SEQ_LEN, "--out", tmp_path / "trained")
    cli("train", "--weights", weights, "--model", "llama-mini", *sizes, status=1)
    said = cli.err
    assert "illegal" in said
    assert "the model 8" in said


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp=4", "--pp=4", "--pp=2 --cp=2", "--dp=2x2"])
def test_every_axis_begins_from_the_same_weights(tmp_path, cli, layout):
    shape = catalog.shape(
        "llama", layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, vocab=512, tied=True
    )
    weights = tmp_path / "llama"
    exported(shape, weights, file_bytes=200_000)
    trained, out = tmp_path / "trained", tmp_path / "out"
    sizes = ("--seq-len", SEQ_LEN, "--global-batch", "4", "--precision", "fp32", "--steps", "1")
    still = ("--lr", "1e-60", "--set", "train.weight_decay=0.0", "--set", "device=cpu")
    ranks = ("--gpus", "4", *layout.split())
    cli("train", "--weights", weights, "--out", trained, *ranks, *sizes, *still)
    cli("weights", "export", trained, out)
    before, after = tensors(weights), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
