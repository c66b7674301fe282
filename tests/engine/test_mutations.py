"""Every stored kind of a training's folder, changed at random: refused with a reason, or harmless.
Never a traceback, a path outside, or other tensors; with fixed counts and seeds.

`train` runs for real up to its ranks; these are replaced by what a rank does first, loading.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fourfold.cli import main
from fourfold.engine.checkpoint import checkpoint
from fourfold.engine.checkpoint.tensor_file import StateShard
from fourfold.result.checkpoint.folder import CheckpointState
from fourfold.result.files import curve
from fourfold.result.files.stored import seal
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.result.job import Job, JobReport, answer_file
from fourfold.spec.train import TrainSettings
from fourfold.verbs import train as command
from tests.fuzz import damaged, revalue
from tests.result.test_checkpoints import seen
from tests.specs import run_spec

SPEC = run_spec("llama-tiny", seq_len=16, global_batch=4, precision="fp32", device="cpu")
SHAPES = {"model.a": (7, 5), "model.b": (6,), "exp_avg.a": (7, 5), "exp_avg_sq.a": (7, 5)}
STEPS = (2, 4)


def tensors(step: int) -> dict[str, torch.Tensor]:
    chance = torch.manual_seed(step)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def cut_up(name: str, tensor: torch.Tensor) -> list[StateShard]:
    """Two chunks each, so that there is something to mix up."""
    shape, zeros = tuple(tensor.shape), (0,) * (tensor.ndim - 1)
    return [
        StateShard(name, shape, (0, *zeros), tensor[:3]),
        StateShard(name, shape, (3, *zeros), tensor[3:]),
    ]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original")
    folder = TrainingFolder(root)
    settings = TrainSettings(steps=6)
    for step in STEPS:
        items = [part for name, one in tensors(step).items() for part in cut_up(name, one)]
        state = CheckpointState(
            step=step, updates=step, sequences=4 * step, spec=SPEC, settings=settings
        )
        checkpoint.save(items, folder.checkpoints, state)
    folder.describe(SPEC, settings)
    folder.metrics.write_text(curve.lines(map(seen, range(1, 5))))
    (root / "lock").write_text("process 1 on host\n")
    (root / "job").mkdir()
    return root


class Watch:
    """Files that are opened outside of the folder in use; an audit hook can't be taken back."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.outside: list[str] = []
        # Modules that are imported late, and what Python itself looks at.
        self.known = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None or event not in ("open", "os.remove", "os.rename", "os.truncate"):
            return
        for path in args[: 2 if event == "os.rename" else 1]:
            if not isinstance(path, str | os.PathLike):
                continue
            text = os.path.abspath(os.fspath(path))  # type: ignore[type-var]
            allowed = (str(self.folder), "/proc", "/sys", *self.known)
            if isinstance(text, str) and not text.startswith(allowed):
                self.outside.append(f"{event} {text}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Loaded:
    """What a rank's trainer would hold after loading."""

    def __init__(self) -> None:
        self.optimizer = self
        self.updates = 0
        self.items = [StateShard(n, s, (0,) * len(s), torch.zeros(s)) for n, s in SHAPES.items()]

    def restore(self, updates: int) -> None:
        self.updates = updates

    def restore_scalars(self, scalars: dict[str, float]) -> None:
        assert not scalars


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, _alone: None) -> list[tuple[int, Loaded]]:
    """Stands in for the processes: loads as a rank does, adds the steps that are left."""
    done: list[tuple[int, Loaded]] = []

    def run_job(job: Job, folder: Path, **_: object) -> JobReport:
        loaded, out, first = Loaded(), Path(job.option("out")), 0
        if job.option("load"):
            found = checkpoint.load_intact(loaded, out / "checkpoints", job.option("load"))  # type: ignore[arg-type]
            first = found.step
            curve.cut(out / curve.METRICS_FILE, first)
        assert job.train is not None
        with open(out / curve.METRICS_FILE, "a") as stream:
            stream.write(curve.lines(map(seen, range(first + 1, job.train.steps + 1))))
        done.append((first, loaded))
        folder.mkdir(exist_ok=True)
        answer_file(folder, 0).write_text('{"step": 6, "stopped": false}')
        return JobReport(job="train", outcome="ok", seconds=1.0)

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(checkpoint, "state_shards", lambda trainer: trainer.items)
    return done


class Training:
    """A copy of the original in `root`, and what `train` makes of it."""

    def __init__(self, original: Path, root: Path, ranks: list, watch: Watch, capsys) -> None:
        self.original, self.root, self.ranks = original, root, ranks
        self.watch, self.capsys = watch, capsys

    def anew(self) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.original, self.root)
        return self.root

    def outcome(self) -> str:
        """'refused', or the step it went on from."""
        self.ranks.clear()
        self.watch.folder, self.watch.outside = self.root, []
        try:
            for words in (["--show", str(self.root)], ["--out", str(self.root), "--steps", "6"]):
                code = main(["train", *words])
                said = self.capsys.readouterr().err
                assert code in (0, 1, 2), said
                assert "Traceback" not in said
                assert "with --fresh" not in said or "trained with" in said, said
        finally:
            self.watch.folder = None
        assert not self.watch.outside
        return "refused" if code else str(self.ranks[-1][0]) if self.ranks else "nothing to do"

    def is_right(self) -> bool:
        """What was loaded is what was saved."""
        first, loaded = self.ranks[-1]
        right = tensors(first) if first else {name: torch.zeros(s) for name, s in SHAPES.items()}
        return loaded.updates == first and all(
            torch.equal(item.tensor, right[item.name]) for item in loaded.items
        )


@pytest.fixture
def training(original, tmp_path, ranks, watch, capsys) -> Training:
    made = Training(original, tmp_path / "t", ranks, watch, capsys)
    made.anew()
    return made


def resealed(path: Path, chance: random.Random) -> None:
    plain = json.loads(path.read_text())
    del plain["crc32"]
    for _ in range(chance.choice((1, 1, 2))):
        revalue(plain, chance)
    path.write_bytes(seal(json.dumps(plain)))


def sums_mended(folder: Path) -> None:
    """As somebody would who knows the format: the state's list fits what is there."""
    path = folder / "state.json"
    try:
        plain = json.loads(path.read_text())
        del plain["crc32"]
        for name in list(plain["files"]):
            content = (folder / name).read_bytes()
            plain["files"][name] = str(len(content))
            plain["sums"][name] = f"{zlib.crc32(content):08x}"
    except (ValueError, KeyError, TypeError, OSError):
        return
    path.write_bytes(seal(json.dumps(plain)))


NEWEST = Path("checkpoints") / "step-00000004"
KINDS = {
    "state": NEWEST / "state.json",
    "index": NEWEST / "index.json",
    "tensors": NEWEST / "tensors-00000.safetensors",
    "curve": Path("metrics.jsonl"),
    "description": Path("train.toml"),
    "lock": Path("lock"),
    "latest": Path("checkpoints") / "latest",
}


def plain_round(training: Training, kind: str, seed: int) -> str:
    """One change without checksums mended: refused, or everything that is loaded is right."""
    root = training.anew()
    path = root / KINDS[kind]
    path.write_bytes(damaged(path.read_bytes(), random.Random(f"{kind} {seed}")))
    was, now = (
        (one / "metrics.jsonl").read_bytes().split(b"\n") for one in (training.original, root)
    )
    good = [line for line in now if line in was]
    outcome = training.outcome()
    if outcome not in ("refused", "nothing to do"):
        assert training.is_right(), (kind, seed, outcome)
        left = curve.parse(root / "metrics.jsonl")
        assert [one.step for one in left.points][-2:] == [5, 6]
        held = set(left.lines)
        if good != [line for line in was if line in now]:  # out of order, some are set aside
            held |= set((root / "metrics.jsonl.unreadable").read_bytes().split(b"\n"))
        assert set(good) - {b""} <= held, (kind, seed)
    kept = [path for path in (root / "checkpoints").iterdir() if path.is_dir()]
    assert len(kept) >= 2, "a checkpoint is gone"
    return outcome


def forged_round(training: Training, kind: str, seed: int) -> str:
    """One change with all checksums mended: no traceback, nothing outside; refused, or right."""
    root = training.anew()
    resealed(root / KINDS[kind], random.Random(f"forged {kind} {seed}"))
    if kind == "index":
        sums_mended(root / NEWEST)
    outcome = training.outcome()
    if outcome not in ("refused", "nothing to do"):
        assert training.is_right(), (kind, seed, outcome)
    return outcome


@pytest.mark.parametrize(
    "count", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_each_kind_are_refused_or_harmless(training, kind, count) -> None:
    outcomes = Counter(plain_round(training, kind, seed) for seed in range(count))
    assert outcomes["2"] >= (count // 3 if kind in ("state", "index", "tensors") else 0), outcomes


@pytest.mark.parametrize(
    "count", [12, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
@pytest.mark.parametrize("kind", ["state", "index"])
def test_forged_changes_are_refused_or_harmless(training, kind, count) -> None:
    outcomes = Counter(forged_round(training, kind, seed) for seed in range(count))
    assert outcomes["refused"] >= count // 4, outcomes


def test_the_stand_in_trains_on(training) -> None:
    assert training.outcome() == "4"
    assert training.is_right()
    training.ranks[-1][1].items[0].tensor[0, 0] += 1
    assert not training.is_right()


READ = ["state", "index", "tensors", "curve", "description"]


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("to", ["zero", "pipe"])
def test_devices_and_pipes_are_not_waited_for(training, kind, to) -> None:
    path = training.root / KINDS[kind]
    path.unlink()
    os.mkfifo(path) if to == "pipe" else path.symlink_to("/dev/zero")
    assert training.outcome() == "refused"


def test_a_training_behind_links_goes_on(training, tmp_path) -> None:
    """Checkpoints on another disk, a curve in another folder."""
    for name in ("checkpoints", "metrics.jsonl"):
        elsewhere = tmp_path / name
        (training.root / name).rename(elsewhere)
        (training.root / name).symlink_to(elsewhere)
    assert training.outcome() == "4"
    assert training.is_right()


def test_a_step_that_name_state_and_curve_do_not_share_is_refused(training) -> None:
    """The state forged, the folder renamed with it, all sums mended: the curve still knows."""
    for fields, renamed in (
        ({"step": 5, "updates": 5, "sequences": 20}, "step-00000005"),
        ({"step": 5}, NEWEST.name),
        ({"updates": 3}, NEWEST.name),
        ({"updates": 3, "skipped": 1}, NEWEST.name),
        ({"step": -5}, NEWEST.name),
        ({"sequences": 4}, NEWEST.name),
    ):
        root = training.anew()
        path = root / KINDS["state"]
        plain = json.loads(path.read_text()) | fields
        del plain["crc32"]
        path.write_bytes(seal(json.dumps(plain)))
        path.parent.rename(path.parent.with_name(renamed))
        assert training.outcome() == "refused", fields
        assert len(curve.parse(root / "metrics.jsonl").points) == 4


def test_the_curve_is_not_needed_to_go_on(training) -> None:
    (training.root / "metrics.jsonl").unlink()
    assert training.outcome() == "4"
    assert training.is_right()


def test_going_back_twice_keeps_both(training) -> None:
    """Changed values are found by the ranks, changed sizes by the command; neither is lost."""
    root = training.root
    path = root / KINDS["tensors"]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert training.outcome() == "2"
    assert training.is_right()
    kept = root / "checkpoints" / "damaged-step-00000004"
    assert (kept / path.name).read_bytes() == content
    shutil.copytree(training.original / NEWEST, root / NEWEST)
    (root / KINDS["tensors"]).write_bytes(b"short")
    (root / "metrics.jsonl").write_text(curve.lines(map(seen, range(1, 5))))
    assert training.outcome() == "2"
    assert (kept / path.name).read_bytes() == content
    again = kept.with_name("damaged-step-00000004.2")
    assert (again / path.name).read_bytes() == b"short"


def test_another_version_is_not_called_damaged(training, cli) -> None:
    root = training.root
    path = root / KINDS["index"]
    plain = json.loads(path.read_text()) | {"version": 2}
    del plain["crc32"]
    path.write_bytes(seal(json.dumps(plain)))
    sums_mended(path.parent)
    said = cli("train", "--out", root, "--steps", "6", status=2)
    assert "update fourfold" in said
    assert "damaged" not in said
    assert not list((root / "checkpoints").glob("damaged-*"))


def test_an_export_stops_at_what_it_may_not_read(training, tmp_path, cli) -> None:
    """Going back is for changed bytes; a link is no reason to hand out older weights."""
    root = training.root
    (root / KINDS["tensors"]).unlink()
    (root / KINDS["tensors"]).symlink_to("/dev/zero")
    assert "is not a regular file" in cli(
        "weights", "export", root, tmp_path / "out", "--format", "dcp", status=2
    )
    assert not (tmp_path / "out").exists()
