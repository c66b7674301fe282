"""What train refuses before anything starts, and what --show says."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery
from fourfold.errors import UserError
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.files import curve
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings
from fourfold.verbs import train as command
from tests.result.test_checkpoints import made, seen, spec


def words(text: str) -> list[str]:
    return text.split()


RUN = words("--model llama-tiny --gpus 1 --seq-len 16 --global-batch 4 --precision fp32")


def test_a_folder_that_cannot_be_used(cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = cli("train", *RUN, "--steps", "3", "--out", tmp_path / "file" / "out", status=2)
    assert "cannot be used" in said
    folder = TrainingFolder(tmp_path / "out")
    with folder.locked():
        said = cli("train", *RUN, "--steps", "3", "--out", tmp_path / "out", status=2)
    assert "is in use by another training run (process " in said
    assert "has no intact checkpoint" in cli(
        "train", *RUN, "--steps", "3", "--resume", "--out", tmp_path / "out", status=2
    )


@pytest.mark.parametrize(
    ("step", "step_s", "said"),
    [(99, 0.5, "0:00:01 left"), (10, 1000.0, "1 day, 1:00:00 left"), (100, 1.0, "saving")],
)
def test_the_time_that_is_left_reads_as_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, step_s: float, said: str
) -> None:
    point = curve.Point(
        step=step, loss=2.5, lr=1e-3, tokens=100, sequences=10, step_s=step_s, tokens_per_s=50.0
    )
    monkeypatch.setattr(curve, "last", lambda path: point)
    shown: list[str] = []
    settings = TrainSettings(steps=100, warmup_steps=1)
    command._progress(TrainingFolder(tmp_path), settings, lambda one: shown.append(one.text))(
        "9 steps done, now forward"
    )
    assert shown == [f"step {step} of 100, loss 2.5000, lr 0.001, 50 tokens/s, {said}"]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_first(cli, monkeypatch, tmp_path, package) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flag = ["--wandb", "project"] if package == "wandb" else ["--tensorboard"]
    said = cli("train", *RUN, "--steps", "3", "--out", tmp_path, *flag, status=2)
    assert f"needs the package {package}" in said
    assert f"pip install {package}" in said


def test_show_reads_a_folder(cli, tmp_path: Path) -> None:
    assert "no train.toml" in cli("train", "--show", tmp_path, status=2)
    assert "--steps cannot be combined" in cli(
        "train", "--show", tmp_path, "--steps", "3", status=2
    )
    folder = TrainingFolder(tmp_path)
    folder.describe(spec(), TrainSettings(steps=50))
    points = [
        replace(seen(step), loss=5.0 - step / 10, tokens=64 * step, mfu_pct=40.0)
        for step in range(1, 41)
    ]
    folder.metrics.write_text(curve.lines(points))
    picture = tmp_path / "loss.png"
    plain = cli.json("train", "--show", tmp_path, "--plot", picture)
    assert plain["outcome"] == "not finished"
    assert (plain["steps_done"], plain["steps"], plain["tokens"]) == (40, 50, 2560)
    assert (plain["first_loss"], plain["best_step"]) == (4.9, 40)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (plain["mfu_pct"], plain["convention"]) == (40.0, "causal")
    out = cli("train", "--show", tmp_path, "--convention", "6n")
    assert "of 50" in out
    assert "by 6n" in out
    counted = {name: rule.count(asked(spec())).model for name, rule in CONVENTIONS.items()}
    assert f"{40.0 * counted['6n'] / counted['causal']:.2f} %" in out
    assert "unknown convention" in cli("train", "--show", tmp_path, "--convention", "7n", status=2)


def asked(spec: RunSpec) -> FlopsQuery:
    return FlopsQuery.of(
        model=spec.model, seq_len=spec.batch.seq_len, layout=spec.layout, policy=spec.policy
    )


def checkpoint(folder: TrainingFolder, step: int) -> Path:
    folder.describe(spec(), TrainSettings(steps=step))
    folder.metrics.write_text(curve.lines(map(seen, range(1, step + 1))))
    return made(folder.checkpoints, step)


def fails(*_: object, **__: object) -> None:
    raise UserError("no such device", field="device")


def test_a_trace_of_steps_that_are_done_says_so(cli, monkeypatch, tmp_path: Path) -> None:
    checkpoint(TrainingFolder(tmp_path), 5)
    monkeypatch.setattr(command, "run_job", fails)
    said = cli("train", "--out", tmp_path, "--steps", "9", "--trace-steps", "3:4", status=2)
    assert "nothing is traced: steps 6 to 9 are to come" in said


def test_fresh_gives_back_what_it_could_not_replace(cli, monkeypatch, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    checkpoint(folder, 5)
    described = folder.description.read_text()

    def fails(*_: object, **__: object) -> None:
        assert folder.newest() is None
        assert (folder.aside / "checkpoints" / "step-00000005").is_dir()
        folder.metrics.write_text(curve.lines([seen(1)]))
        raise UserError("no such device", field="device")

    monkeypatch.setattr(command, "run_job", fails)
    words = [*RUN, "--steps", "9", "--fresh", "--out", str(tmp_path)]
    for _ in range(2):
        said = cli("train", *words, status=2)
        assert "no such device" in said
        assert "is restored" in said
        found = folder.newest()
        assert found.step == len(curve.parse(folder.metrics).points) == 5
        assert folder.description.read_text() == described
        assert not folder.aside.exists()


def test_fresh_forgets_the_old_with_the_first_new_checkpoint(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    checkpoint(folder, 5)
    folder.set_aside()
    checkpoint(folder, 2)
    assert folder.finish_fresh() == ""
    assert not folder.aside.exists()
    assert [found.step for found in checkpoints.whole(folder.checkpoints)] == [2]


def test_a_killed_fresh_is_undone_by_the_next_start(cli, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    checkpoint(folder, 5)
    folder.set_aside()
    cli("train", "--out", tmp_path, "--steps", "5")
    assert "is restored" in cli.err


def test_torn_checkpoints_are_not_trained_over(cli, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    (checkpoint(folder, 5) / "__0_0.distcp").unlink()
    said = cli("train", *RUN, "--steps", "9", "--out", tmp_path, status=2)
    assert "has 1 checkpoint, none of them intact" in said
    assert "__0_0.distcp is missing" in said
    assert "--fresh" not in said
    assert len(curve.parse(folder.metrics).points) == 5


def test_a_curve_without_a_checkpoint_is_kept(cli, monkeypatch, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.metrics.write_text(curve.lines([seen(1), seen(2)]))

    monkeypatch.setattr(command, "run_job", fails)
    said = cli("train", *RUN, "--steps", "9", "--out", tmp_path, status=2)
    assert "starting over" in said
    assert len(curve.parse(tmp_path / "metrics.jsonl.old").points) == 2
    assert not folder.metrics.exists()


def test_weights_are_for_a_beginning(cli, tmp_path: Path) -> None:
    checkpoint(TrainingFolder(tmp_path), 5)
    said = cli("train", "--steps", "9", "--weights", "elsewhere", "--out", tmp_path, status=2)
    assert "contradicts this folder, which is at step 5" in said
    assert "--fresh" in said


def test_a_checkpoint_of_another_curve_is_refused(cli, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    checkpoint(folder, 5)
    folder.metrics.write_text(curve.lines([seen(1), seen(2)]))
    said = cli("train", "--steps", "9", "--out", tmp_path, status=2)
    assert "contradicts the loss curve: step 5, where the curve ends with step 2" in said
    assert "--fresh" not in said
    assert len(curve.parse(folder.metrics).points) == 2


def test_unreadable_lines_are_set_aside_with_a_word(cli, monkeypatch, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    checkpoint(folder, 5)
    content = folder.metrics.read_bytes().replace(b"\n", b"\x0b", 1)
    folder.metrics.write_bytes(content)

    monkeypatch.setattr(command, "run_job", fails)
    said = cli("train", "--steps", "9", "--out", tmp_path, status=2)
    assert "1 line of the curve can't be read, and kept in" in said
    assert [one.step for one in curve.parse(folder.metrics).points] == [3, 4, 5]
    aside = tmp_path / "metrics.jsonl.unreadable"
    assert aside.read_bytes() == content.split(b"\n")[0] + b"\n"
    assert main(["train", "--show", str(tmp_path)]) == 0


def test_a_training_s_file_describes_a_run_for_other_commands(cli, tmp_path: Path) -> None:
    run = 'model = "llama-tiny"\ngpus = 2\n[batch]\nseq_len = 32\n'
    (tmp_path / "train.toml").write_text(f"{run}[train]\nsteps = 3\n")
    (tmp_path / "sweep.toml").write_text(f"{run}[sweep]\ntp = [1, 2]\n")
    cli("flops", "--spec", tmp_path / "train.toml")
    assert "[train] of" in cli.err
    said = cli("train", "--spec", tmp_path / "sweep.toml", "--out", tmp_path / "out", status=2)
    assert "is a sweep, not a single run; run it by 'fourfold sweep" in said


def test_a_loss_has_the_same_name_on_the_page_and_in_json(cli, tmp_path: Path) -> None:
    checkpoint(TrainingFolder(tmp_path), 5)
    loss = cli.json("train", "--show", tmp_path)["recent_loss"]
    assert re.search(
        rf"recent loss +{loss:.4f} +of the last step\n", cli("train", "--show", tmp_path)
    )
