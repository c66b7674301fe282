"""A text learned by a model with experts: killed, resumed where experts lie elsewhere, exported."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.cli import main
from fourfold.engine.checkpoint.hf_read import HfWeights, fill
from fourfold.engine.data.source import source_of
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.shards import InitRule, ShardPlace, shards_of
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.verify.reference import Recipe, train_alone
from fourfold.result.files import curve
from fourfold.spec import catalog, codec
from tests.engine.test_train import ROOT, finish, newest, rank_pids, start, train, words
from tests.processes import wait_for
from tests.specs import run_spec

SEQ_LEN = 32
RUN = words(
    "--seq-len 32 --global-batch 8 --micro-batch 2 --precision fp64 --lr 3e-4 --warmup-steps 20 "
    "--lr-schedule constant --save-every 40"
)


def losses(out: Path) -> list[float]:
    points = list(curve.parse(out / curve.METRICS_FILE).points)
    assert [point.step for point in points] == list(range(1, len(points) + 1))
    return [point.loss for point in points]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("mixtral-tiny", "--gpus 2 --ep 2", "--gpus 4 --ep 4 --sharding zero3"),
        ("deepseek-tiny", "--gpus 2 --ep 2 --sharding zero2", "--gpus 2 --tp 2"),
    ],
)
def test_killed_and_resumed_elsewhere_a_text_is_learned_alike(tmp_path, model, first, second):
    tokens, steps = str(tmp_path / "license"), 300
    assert main(["data", "make", "--out", tokens, str(ROOT / "LICENSE")]) == 0
    run = [*RUN, "--model", model, "--data", tokens]
    train(tmp_path / "one", *run, *words(f"--gpus 1 --steps {steps}"), limit_s=1400)
    out = tmp_path / "out"
    process = start(out, *run, *words(first), "--steps", str(steps))
    wait_for(lambda: newest(out) is not None, process)
    os.kill(rank_pids(out, 2)[1], signal.SIGKILL)
    finish(process, 1)
    found = newest(out)
    assert found.step < steps
    said = train(out, *run, *words(second), "--steps", str(steps), limit_s=1400)
    assert f"continuing after step {found.step}" in said
    one, other = losses(tmp_path / "one"), losses(out)
    gap = max(abs(a - b) / a for a, b in zip(one, other, strict=True))
    print(f"{model}: loss {one[0]:.3f} to {one[-1]:.3f}, largest difference {gap:.1e}")
    assert one[-1] < one[0] - 1.5
    # Training amplifies rounding; once that has grown to the margin of a choice, it flips. At this
    # rate it does not.
    assert gap < 1e-8
    assert main(["weights", "export", str(out), str(tmp_path / "hf")]) == 0
    assert same_logits(model, tmp_path / "hf") < 1e-4


def same_logits(model: str, folder: Path) -> float:
    """The largest difference between transformers' logits and ours."""
    import transformers

    shape = catalog.model(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = Decoder(shape, SEQ_LEN)
    fill(shards_of(decoder, shape, SEQ_LEN, ShardPlace()), HfWeights(folder), shape)
    tables = make_tables(shape, torch.arange(SEQ_LEN), range(shape.heads))
    ids = torch.randint(0, 256, (3, SEQ_LEN), generator=torch.manual_seed(0))
    with torch.no_grad():
        ours, wanted = decoder(ids, tables), theirs.eval()(ids).logits
    assert ours.std() > 0.5
    return float((ours - wanted).abs().max())


def test_a_curve_shows_the_loss_of_targets_and_apart_that_of_routers(tmp_path: Path) -> None:
    """As other trainings show it; with both in one number, none could be compared."""
    run = run_spec("mixtral-tiny", "dp2 tp2 pp2 ep2", seq_len=32, global_batch=4, precision="fp64")
    asked = codec.to_toml(replace(run, device="cpu"))
    (tmp_path / "run.toml").write_text(asked)
    spec = ["--spec", str(tmp_path / "run.toml"), "--steps", "1"]
    assert main(["train", *spec, "--out", str(tmp_path / "out")]) == 0
    (point,) = curve.parse(tmp_path / "out" / curve.METRICS_FILE).points
    recipe = Recipe(source=source_of(run), settings=OptimizerSettings(), rule=InitRule(), steps=1)
    alone = train_alone(run, recipe, torch.device("cpu"))
    assert point.router_loss == pytest.approx(alone.balance[0], rel=1e-12)
    assert point.router_loss > 0.05
    assert point.loss == pytest.approx(alone.losses[0] - alone.balance[0], rel=1e-9)


def test_a_dry_run_of_experts_in_other_formats_shows_their_traffic(cli) -> None:
    words = "dryrun --model mixtral-tiny --gpus 4 --ep 2 --seq-len 16 --global-batch 4 --precision"
    formats = ("bf16", "fp32", "fp16")
    flops = {name: cli.json(*words.split(), name)["stages"][0]["flops"] for name in formats}
    assert flops["fp32"] == flops["fp16"] == flops["bf16"]
    assert "dp, ep, edp: payload" in cli(*words.split(), "fp16")
