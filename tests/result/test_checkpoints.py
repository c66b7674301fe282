"""Folders of checkpoints: only whole ones are found, old ones go, leftovers too."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.errors import UserError
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import CheckpointState
from fourfold.result.files import curve
from fourfold.result.files.curve import Point
from fourfold.result.files.stored import NotWholeError, UnreadableError, seal
from fourfold.result.files.training_folder import (
    TrainingFolder,
    changes,
    contradiction,
    must_continue,
)
from fourfold.spec import codec
from fourfold.spec.batch import Ramp
from fourfold.spec.catalog import model
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings
from tests.specs import run_spec


def spec(**fields) -> RunSpec:
    plain = {"model": "llama-tiny", "seq_len": 32, "global_batch": 4, "precision": "fp32"}
    return run_spec(**(plain | fields))


def state(step: int) -> CheckpointState:
    return CheckpointState(step=step, updates=step, sequences=4 * step, spec=spec())


def made(root: Path, step: int, keep: int = 0) -> Path:
    folder = checkpoints.saving_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * step)
    return checkpoints.publish(root, state(step), keep=keep)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    for step in (5, 10, 10, 100_000_000):  # the same again takes the place of the first
        made(tmp_path, step)
    assert [found.step for found in checkpoints.whole(tmp_path)] == [5, 10, 100_000_000]
    assert (tmp_path / "latest").read_text() == "step-100000000\n"
    newest = checkpoints.newest(tmp_path)
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
    assert newest.step == 5
    ((name, error),) = checkpoints.damaged(tmp_path)
    assert (name, bool(error.rule)) == ("step-00000010", True)
    assert isinstance(error, NotWholeError)
    with pytest.raises(UserError):
        checkpoints.read(torn)


@pytest.mark.parametrize("more", [{"format": 99}, {"of_tomorrow": 1}])
def test_one_of_a_newer_fourfold_is_not_taken_for_torn(tmp_path: Path, more: dict) -> None:
    resealed(made(tmp_path, 5), **more)
    ((_, error),) = checkpoints.damaged(tmp_path)
    assert isinstance(error, UnreadableError)
    assert "damaged" not in str(error)
    assert "update fourfold" in error.hint


def resealed(folder: Path, **fields: object) -> None:
    """Change a state and give it a checksum that fits, as somebody could."""
    plain = json.loads((folder / "state.json").read_text())
    del plain["crc32"]
    (folder / "state.json").write_bytes(seal(json.dumps(plain | fields)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": 41}, "step 41 in state.json, 40 in the folder's name"),
        ({"updates": 4}, "4 updates and 0 skipped make not 40 steps"),
        ({"updates": 41}, "41 updates and 0 skipped"),
        ({"skipped": 1}, "40 updates and 1 skipped"),
        ({"sequences": 161}, "161 sequences, where 40 steps have 160"),
        ({"sums": {}}, "not every file has a size and a checksum"),
        ({"step": -5}, "must be from 0"),
        ({"scalars": {"loss_scale": "nan"}}, "must be a number"),
        ({"scalars": {"loss_scale": "x"}}, "must be a number"),
        ({"files": {"../a": "1"}, "sums": {"../a": "00000000"}}, "not in its folder"),
        ({"files": {"/dev/zero": "1"}, "sums": {"/dev/zero": "00000000"}}, "not in its folder"),
        ({"files": {"state.json": "1"}, "sums": {"state.json": "00000000"}}, "not in its folder"),
        ({"files": {"__0_0.distcp": "x"}}, "is malformed"),
        ({"format": 1}, "was written by another fourfold"),
    ],
)
def test_what_contradicts_itself_is_refused_whatever_its_checksum(tmp_path, fields, words) -> None:
    folder = made(tmp_path, 40)
    resealed(folder, **fields)
    with pytest.raises(UserError) as caught:
        checkpoints.read(folder)
    assert words in str(caught.value.rule)
    assert "--fresh" not in str(caught.value)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_changed_bit_of_a_state_is_seen(tmp_path: Path, every: int) -> None:
    """Of every third byte one, or all of all; always all of the last, where the checksum is."""
    folder = made(tmp_path, 5)
    content = (folder / "state.json").read_bytes()
    for place in range(len(content)):
        whole = every == 1 or place > len(content) - 30
        for bit in range(8) if whole else (place % 8,) if place % every == 0 else ():
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            (folder / "state.json").write_bytes(changed)
            with pytest.raises(UserError):
                checkpoints.read(folder)
    (folder / "state.json").write_bytes(content)
    assert checkpoints.read(folder).step == 5


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_of_the_folder_are_read(tmp_path: Path, name: str, kind: str) -> None:
    path = made(tmp_path, 5) / name
    copy = tmp_path / "elsewhere"
    path.rename(copy)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UnreadableError, match="is not a regular file"):
        checkpoints.read(path.parent)


def test_checkpoints_may_lie_behind_links(tmp_path: Path) -> None:
    """On another disk, say. What goes is the link; nobody asked for the other folder's end."""
    elsewhere = made(tmp_path / "elsewhere", 5)
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / elsewhere.name).symlink_to(elsewhere)
    assert checkpoints.newest(root).step == 5
    made(root, 6, keep=1)
    assert [checkpoint.step for checkpoint in checkpoints.whole(root)] == [6]
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000006"]
    assert checkpoints.read(elsewhere).step == 5


def test_a_missing_permission_is_not_called_damage(tmp_path: Path, monkeypatch) -> None:
    folder = made(tmp_path, 5)
    opened = os.open

    def refuses(path, *rest):
        if str(path).endswith("state.json"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(UnreadableError, match="Permission denied") as caught:
        checkpoints.read(folder)
    assert "damaged" not in str(caught.value)
    assert "nothing is lost" in caught.value.hint


def test_what_is_kept_apart_is_never_written_over(tmp_path: Path) -> None:
    for number in range(3):
        folder = made(tmp_path, 5)
        checkpoints.move_apart(folder, f"reason {number}")
    kept = checkpoints.set_apart(tmp_path)
    assert kept == {
        "damaged-step-00000005": "reason 0",
        "damaged-step-00000005.2": "reason 1",
        "damaged-step-00000005.3": "reason 2",
    }


def test_a_torn_one_of_the_same_step_stays_when_another_is_saved(tmp_path: Path) -> None:
    (made(tmp_path, 5) / "__0_0.distcp").write_bytes(b"x")
    made(tmp_path, 5)
    assert [found.step for found in checkpoints.whole(tmp_path)] == [5]
    assert (tmp_path / "damaged-step-00000005" / "__0_0.distcp").read_bytes() == b"x"


def test_links_are_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "latest").symlink_to(outside / "file")
    (root / ".saving-step-00000009").symlink_to(outside)
    (root / ".pruned-step-00000009").symlink_to(outside)
    assert checkpoints.clear_leftovers(root) == 2
    made(root, 5)
    assert (outside / "file").read_text() == "mine"
    assert (root / "latest").read_text() == "step-00000005\n"


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


def test_what_trains_something_else_is_refused() -> None:
    old = state(5)
    must_continue(old, spec(layout="dp2 tp2"))
    must_continue(old, spec(precision="bf16-mixed", sharding="zero3"))
    must_continue(old, spec(micro_batch=2))
    wrong = {
        "batch.global_batch": spec(global_batch=8),
        "batch.seq_len": spec(seq_len=64),
        "seed": spec(seed=1),
        "model.layers": spec(model=replace(model("llama-tiny"), layers=5)),
        "policy.param_dtype": spec(precision="bf16-pure"),
        "batch.ramp": replace(spec(), batch=replace(spec().batch, ramp=Ramp.parse("2,2,8"))),
    }
    for field, asked in wrong.items():
        with pytest.raises(UserError) as caught:
            must_continue(old, asked)
        assert caught.value.field == field
        assert caught.value.hint
        assert "Ramp(" not in str(caught.value)
    with pytest.raises(UserError, match=r"data /b has other tokens .* with: synthetic tokens"):
        must_continue(old, replace(spec(), data="/b"), "0123abcd")


def test_changes_are_said() -> None:
    old = replace(state(5), settings=TrainSettings(steps=10))
    asked = TrainSettings(steps=20, lr=1e-3, keep=7)
    assert changes(old, spec(layout="dp2"), asked) == [
        "layout pp1 dp1 cp1 tp1 -> pp1 dp2 cp1 tp1",
        "lr 0.0003 -> 0.001",
        "steps 10 -> 20: step 6 has lr 0.000839, not 0.000124",
    ]
    kept = replace(old, settings=TrainSettings(steps=10, lr_schedule="constant"))
    assert changes(kept, spec(), TrainSettings(steps=20, lr_schedule="constant")) == []


def point(step: int) -> Point:
    return Point(
        step=step, loss=2.0 / step, lr=1e-3, tokens=step, sequences=step, step_s=0.1,
        tokens_per_s=10.0,
    )  # fmt: skip


def test_the_curve_is_cut_and_a_torn_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(curve.lines(map(point, range(1, 8))) + '{"step": 8, "lo')
    assert [p.step for p in curve.parse(path).points] == list(range(1, 8))
    assert curve.last(path) == point(7)
    cut = curve.cut(path, 5)
    assert (cut.steps, cut.unreadable) == (2, 1)
    assert cut.aside.read_text() == '{"step": 8, "lo\n'
    assert list(curve.parse(path).points) == [point(step) for step in range(1, 6)]
    assert curve.cut(tmp_path / "none.jsonl", 5) == curve.Cut()


def test_a_changed_byte_costs_its_own_lines_only(tmp_path: Path) -> None:
    """A newline that is none any more joins two lines; all others stay."""
    content = curve.lines(map(point, range(1, 41))).encode()
    chance = random.Random(5)
    for byte in range(256):
        path = tmp_path / f"{byte}" / "metrics.jsonl"
        path.parent.mkdir()
        place = chance.randrange(len(content)) if byte % 2 else content.index(b"\n", 700 + byte)
        changed = bytearray(content)
        changed[place] = byte
        path.write_bytes(changed)
        read = curve.parse(path)
        assert len(read.points) >= 38
        assert set(read.points) <= set(map(point, range(1, 41)))
        cut = curve.cut(path, 40)
        assert (cut.steps, cut.unreadable) == (0, len(read.bad))
        assert list(curve.parse(path).points) == list(read.points)
        kept = path.read_bytes() + (cut.aside.read_bytes() if cut.aside else b"")
        assert sorted(kept.split()) == sorted(bytes(changed).split())


def test_lines_without_a_checksum_are_read(tmp_path: Path) -> None:
    """As somebody's own script may write them."""
    path = tmp_path / "metrics.jsonl"
    texts = [
        line.split(', "crc32"')[0] for line in curve.lines(map(point, range(1, 5))).split("\n")
    ]
    path.write_text("".join(f"{text}}}\n" for text in texts if text))
    read = curve.parse(path)
    assert [one.step for one in read.points] == [1, 2, 3, 4]
    assert not read.bad


def test_a_skipped_step_has_a_norm_of_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(curve.lines([point(1)]))
    assert '"grad_norm": null' in path.read_text()
    assert list(curve.parse(path).points) == [point(1)]


@pytest.mark.parametrize("name", ["out", "other/../other"])
def test_one_training_at_a_time_by_whatever_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "out")
    folder = TrainingFolder(tmp_path / "out")
    with (
        folder.locked(),
        pytest.raises(UserError, match="is in use by another training run"),
        TrainingFolder(tmp_path / name).locked(),
    ):
        pass
    with folder.locked():
        pass


def told(step: int, **fields: object) -> CheckpointState:
    return replace(state(step), **({"skipped": 0} | fields))  # type: ignore[arg-type]


def seen(step: int, norm: float | None = 1.0) -> Point:
    return replace(point(step), sequences=4 * step, grad_norm=norm)


def test_a_checkpoint_that_the_curve_contradicts_is_refused() -> None:
    full = curve.Curve(tuple(map(seen, range(1, 11))))
    assert contradiction(told(10), full) == ""
    assert contradiction(told(5), full) == ""
    assert contradiction(told(11), curve.Curve()) == ""
    assert "step 11, where the curve ends with step 10" in contradiction(told(11), full)
    assert contradiction(told(11), replace(full, ends_bad=True)) == ""
    wrong = told(10, updates=8, skipped=2)
    assert "8 updates, where 0 of 10 steps were skipped" in contradiction(wrong, full)
    skipping = curve.Curve((seen(1, None), seen(2, None), *full.points[2:]))
    assert contradiction(wrong, skipping) == ""
    assert "10 updates, where 2 of 10" in contradiction(told(10), skipping)
    holes = curve.Curve(full.points[2:])
    assert contradiction(wrong, holes) == contradiction(told(10), holes) == ""
    other = curve.Curve(tuple(replace(one, sequences=7) for one in full.points))
    assert "has seen 7 sequences in the curve, 40 in the checkpoint" in contradiction(
        told(10), other
    )


def test_the_description_is_a_spec(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.describe(spec(), TrainSettings(steps=9))
    table = folder.described()
    assert table.pop("train")["steps"] == 9
    assert codec.load(RunSpec, table) == spec()
