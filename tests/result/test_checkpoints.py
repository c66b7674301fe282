"""Folders of checkpoints: only whole ones are found, old ones go, leftovers too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.errors import UserError
from fourfold.result import checkpoints, curve
from fourfold.result.checkpoints import CheckpointState
from fourfold.result.curve import Point
from fourfold.result.training import TrainingFolder, changes, must_continue
from fourfold.spec import Batch, Layout, Policy, RunSpec
from fourfold.spec.catalog import model
from fourfold.spec.train import TrainSettings


def spec(**fields) -> RunSpec:
    plain = {
        "model": model("llama-tiny"),
        "gpus": 1,
        "batch": Batch(seq_len=32, global_batch=4),
        "policy": Policy(precision="fp32"),
    }
    return RunSpec(**(plain | fields))


def state(step: int) -> CheckpointState:
    return CheckpointState(step=step, updates=step, sequences=4 * step, spec=spec())


def made(root: Path, step: int, keep: int = 0) -> Path:
    folder = checkpoints.saving_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * step)
    return checkpoints.publish(root, state(step), keep=keep)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000):
        made(tmp_path, step)
    assert [found.step for found in checkpoints.whole(tmp_path)] == [5, 10, 100_000_000]
    assert (tmp_path / "latest").read_text() == "step-100000000\n"
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert newest.state.sequences == 400_000_000


@pytest.mark.parametrize("harm", ["truncate", "remove", "state", "garbage"])
def test_a_torn_one_is_passed_over(tmp_path: Path, harm: str) -> None:
    made(tmp_path, 5)
    torn = made(tmp_path, 10)
    if harm == "truncate":
        (torn / "__0_0.distcp").write_bytes(b"x")
    elif harm == "remove":
        (torn / "__0_0.distcp").unlink()
    elif harm == "state":
        (torn / "state.json").unlink()
    else:
        (torn / "state.json").write_text('{"step": 10')
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert newest.step == 5
    ((name, error),) = checkpoints.torn(tmp_path)
    assert (name, bool(error.rule)) == ("step-00000010", True)
    assert not isinstance(error, checkpoints.ForeignError)
    with pytest.raises(UserError):
        checkpoints.read(torn)


@pytest.mark.parametrize("more", ['"format": 99, ', '"of_tomorrow": 1, '])
def test_one_of_a_newer_fourfold_is_not_taken_for_torn(tmp_path: Path, more: str) -> None:
    text = (made(tmp_path, 5) / "state.json").read_text()
    text = text.replace('"format": 1,', "").replace('"step"', f'{more}"step"', 1)
    text = text.replace(',\n  "format": 1', "")
    (tmp_path / "step-00000005" / "state.json").write_text(text)
    ((_, error),) = checkpoints.torn(tmp_path)
    assert isinstance(error, checkpoints.ForeignError)
    assert "update fourfold" in error.way_out


def test_old_ones_go_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made(tmp_path, step)
    (tmp_path / "step-00000003" / "__0_0.distcp").unlink()
    made(tmp_path, 4, keep=2)
    assert [found.step for found in checkpoints.whole(tmp_path)] == [2, 4]
    assert (tmp_path / "step-00000003").exists()


def test_leftovers_of_killed_saves_are_removed(tmp_path: Path) -> None:
    made(tmp_path, 1)
    half = checkpoints.saving_folder(tmp_path, 2)
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert checkpoints.newest(tmp_path).step == 1  # type: ignore[union-attr]
    assert checkpoints.clear_leftovers(tmp_path) == 1
    assert not half.exists()


def test_the_same_step_again_replaces_the_old(tmp_path: Path) -> None:
    made(tmp_path, 5)
    made(tmp_path, 5)
    assert [found.step for found in checkpoints.whole(tmp_path)] == [5]


def test_what_trains_something_else_is_refused() -> None:
    old = state(5)
    must_continue(old, spec(gpus=4, layout=Layout.parse("dp2 tp2")))
    must_continue(old, spec(policy=Policy(precision="bf16-mixed", sharding="zero3")))
    must_continue(old, spec(batch=Batch(seq_len=32, global_batch=4, micro_batch=2)))
    wrong = {
        "batch.global_batch": spec(batch=Batch(seq_len=32, global_batch=8)),
        "batch.seq_len": spec(batch=Batch(seq_len=64, global_batch=4)),
        "seed": spec(seed=1),
        "model.layers": spec(model=replace(model("llama-tiny"), layers=5)),
        "policy.param_dtype": spec(policy=Policy(precision="bf16-pure")),
    }
    for field, asked in wrong.items():
        with pytest.raises(UserError) as caught:
            must_continue(old, asked)
        assert caught.value.field == field
        assert caught.value.way_out


def test_changes_are_said() -> None:
    old = replace(state(5), settings=TrainSettings(steps=10))
    asked = TrainSettings(steps=20, lr=1e-3, keep=7)
    layout = spec(gpus=2, layout=Layout.parse("dp2"))
    assert changes(old, layout, asked) == [
        "layout pp1 dp1 cp1 tp1 -> pp1 dp2 cp1 tp1",
        "lr 0.0003 -> 0.001",
    ]


def point(step: int) -> Point:
    return Point(
        step=step, loss=2.0 / step, lr=1e-3, tokens=step, sequences=step, step_s=0.1,
        tokens_per_s=10.0,
    )  # fmt: skip


def test_the_curve_is_cut_and_a_torn_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(curve.lines(map(point, range(1, 8))) + '{"step": 8, "lo')
    assert [p.step for p in curve.read(path)] == list(range(1, 8))
    assert curve.last(path) == point(7)
    assert curve.cut(path, 5) == 2
    assert curve.read(path) == [point(step) for step in range(1, 6)]
    assert curve.cut(tmp_path / "none.jsonl", 5) == 0


def test_a_skipped_step_has_a_norm_of_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(curve.lines([point(1)]))
    assert '"grad_norm": null' in path.read_text()
    assert curve.read(path) == [point(1)]


def test_one_training_at_a_time(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path / "out")
    with (
        folder.locked(),
        pytest.raises(UserError, match="another training uses this folder"),
        TrainingFolder(tmp_path / "out").locked(),
    ):
        pass
    with folder.locked():
        pass


def test_the_description_is_a_spec(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.describe(spec(), TrainSettings(steps=9))
    table = folder.described()
    assert table.pop("train")["steps"] == 9
    from fourfold.spec import codec

    assert codec.load(RunSpec, table) == spec()


def test_damage_that_keeps_the_size_is_seen(tmp_path: Path) -> None:
    folder = made(tmp_path, 5)
    assert checkpoints.damage(checkpoints.read(folder)) == ""
    (folder / "__0_0.distcp").write_bytes(b"xxyxx")
    found = checkpoints.read(folder)
    assert "has changed since it was written" in checkpoints.damage(found)
    assert checkpoints.damage(found, (1, 2)) == ""  # another reader's share
    older = replace(found, state=replace(found.state, sums=()))
    assert checkpoints.damage(older) == ""
    checkpoints.keep_apart(folder, "a reason")
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.kept_apart(tmp_path) == {"damaged-step-00000005": "a reason"}
