"""What train refuses before anything starts, and what --show says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.result import curve
from fourfold.result.training import TrainingFolder
from fourfold.spec import Batch, Policy, RunSpec
from fourfold.spec.catalog import model
from fourfold.spec.train import TrainSettings


def words(text: str) -> list[str]:
    return text.split()


RUN = words("--model llama-tiny --gpus 1 --seq-len 16 --global-batch 4 --precision fp32")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 2
    return capsys.readouterr().err


def test_what_is_missing_is_named(capsys, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert "out: is missing" in refused(capsys, *RUN, "--steps", "3")
    assert "steps: is missing" in refused(capsys, *RUN, "--out", out)
    assert "model: is missing" in refused(capsys, "--steps", "3", "--gpus", "1", "--out", out)
    assert not (tmp_path / "out").exists()


def test_bad_settings_and_layouts_start_nothing(capsys, tmp_path: Path) -> None:
    words = [*RUN, "--out", str(tmp_path / "out"), "--steps", "3"]
    assert "train.lr=0.0: must be above 0" in refused(capsys, *words, "--lr", "0")
    assert "train.beta3: unknown field" in refused(capsys, *words, "--set", "train.beta3=0.9")
    assert "train.warmup_steps=4" in refused(capsys, *words, "--warmup-steps", "4")
    assert "tp" in refused(capsys, *words, "--gpus", "3", "--tp", "3")
    assert "plot=x.txt" in refused(capsys, *words, "--plot", "x.txt")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_used(capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capsys, *RUN, "--steps", "3", "--out", str(tmp_path / "file" / "out"))
    assert "can't be used" in said
    folder = TrainingFolder(tmp_path / "out")
    with folder.locked():
        said = refused(capsys, *RUN, "--steps", "3", "--out", str(tmp_path / "out"))
    assert "another training uses this folder (process " in said
    assert "holds no whole checkpoint" in refused(
        capsys, *RUN, "--steps", "3", "--resume", "--out", str(tmp_path / "out")
    )


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_first(capsys, monkeypatch, tmp_path, package) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flag = ["--wandb", "project"] if package == "wandb" else ["--tensorboard"]
    said = refused(capsys, *RUN, "--steps", "3", "--out", str(tmp_path), *flag)
    assert f"needs the package {package}" in said
    assert f"fourfold[{package}]" in said


def test_show_reads_a_folder(capsys, tmp_path: Path) -> None:
    assert "no train.toml" in refused(capsys, "--show", str(tmp_path))
    folder = TrainingFolder(tmp_path)
    spec = RunSpec(
        model=model("llama-tiny"), gpus=1, batch=Batch(seq_len=16), policy=Policy(precision="fp32")
    )
    folder.describe(spec, TrainSettings(steps=50))
    points = [
        curve.Point(
            step=step, loss=5.0 - step / 10, lr=1e-3, tokens=64 * step, sequences=4 * step,
            step_s=0.5, tokens_per_s=128.0, grad_norm=1.0,
        )
        for step in range(1, 41)
    ]  # fmt: skip
    folder.metrics.write_text(curve.lines(points))
    picture = tmp_path / "loss.png"
    assert main(["train", "--show", str(tmp_path), "--format", "json", "--plot", str(picture)]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["outcome"] == "not finished"
    assert (plain["steps_done"], plain["steps"], plain["tokens"]) == (40, 50, 2560)
    assert (plain["first_loss"], plain["best_step"]) == (4.9, 40)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["train", "--show", str(tmp_path)]) == 0
    assert "of 50" in capsys.readouterr().out
