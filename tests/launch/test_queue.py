"""Queued runs and what a stopped, failed or second command does to them, by stand-ins for Slurm's
commands that keep the state of every job in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.errors import MachineError, UserError
from fourfold.launch.batch_script import EXIT_FILE, BatchJob
from fourfold.launch.local import JobError
from fourfold.launch.permit import Permit
from fourfold.launch.queue import Make, Queue, Work
from fourfold.launch.slurm import Slurm, script_of, submitted
from fourfold.launch.slurm_ranks import started
from fourfold.output import submitted as shown
from fourfold.output import text_of
from fourfold.result.job import Job
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.site import Site
from fourfold.verbs.engines import EngineTemplate, TemplateRuns
from fourfold.verbs.machine import Predictor
from fourfold.verbs.run_requests import BenchRequest
from fourfold.verbs.sites import left_to, submission, work_folder
from tests.cli import Cli
from tests.specs import run_spec

COMMANDS = {
    "sbatch": 'number=$(($(ls {jobs} | wc -l) + 101)); echo PENDING >{jobs}/$number; echo $number',
    "scontrol": 'job=${{4%%_*}}; [ -e {jobs}/$job ] || {{ echo "Invalid job id" >&2; exit 1; }}\n'
    'echo "JobId=$job JobState=$(cat {jobs}/$job) Reason=None"',
    "scancel": 'for job in "$@"; do echo CANCELLED >{jobs}/${{job%%[_.]*}}; done',
    "squeue": "true",
    "sacct": "exit 1",
}  # fmt: skip


class StandIn:
    """What the stand-ins have been told."""

    def __init__(self, jobs: Path) -> None:
        self.jobs = jobs

    def states(self) -> dict[str, str]:
        return {path.name: path.read_text().strip() for path in sorted(self.jobs.iterdir())}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    folder, jobs = tmp_path / "bin", tmp_path / "slurm-jobs"
    folder.mkdir()
    jobs.mkdir()
    for name, text in COMMANDS.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text.format(jobs=jobs)}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return StandIn(jobs)


def spec(micro_batch: int = 1) -> RunSpec:
    sizes = {"seq_len": 64, "micro_batch": micro_batch, "global_batch": 4}
    return run_spec("llama-tiny", device="cpu", **sizes)


def work(spec: RunSpec, place: Path) -> Work:
    return Work(Job(job="run", specs=(spec,)))


def queue_in(root: Path, **site: object) -> Queue:
    return Queue(root / "runs", Slurm(codec.load(Site, {"name": "here", **site})), work)


def finish(place: Path, slurm: StandIn) -> None:
    known = submitted(place)
    (place / EXIT_FILE).write_text("0 0\n")
    (slurm.jobs / known.id).write_text("COMPLETED\n")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_stopped_command_cancels_what_it_submitted_and_loses_no_result(tmp_path, slurm) -> None:
    (earlier,) = queue_in(tmp_path).detach([spec(1)])
    queue = queue_in(tmp_path)
    with contextlib.suppress(KeyboardInterrupt), queue.queued([spec(1), spec(2), spec(4)]):
        finished, running = (queue.take(spec(size)).place for size in (2, 4))
        finish(finished, slurm)
        raise KeyboardInterrupt
    assert slurm.states() == {"101": "PENDING", "102": "COMPLETED", "103": "CANCELLED"}
    assert earlier.is_dir()
    assert not running.exists()
    again = queue_in(tmp_path)
    assert [again.take(spec(size)).place for size in (1, 2)] == [earlier, finished]
    assert len(slurm.states()) == 3, "both are found again"
    again.cancel()
    assert finished.is_dir()


def test_a_job_that_was_only_followed_goes_on(tmp_path: Path, slurm: StandIn) -> None:
    (place,) = queue_in(tmp_path).detach([spec()])
    job = work(spec(), place).job
    started(Slurm(Site()), job, [0], place).stop()
    assert slurm.states() == {"101": "PENDING"}
    assert Slurm(Site()).knows(job, place)


def test_how_a_job_ended_that_the_user_stopped_is_no_result(tmp_path: Path, slurm: StandIn) -> None:
    queue = queue_in(tmp_path)
    place, job = queue.take(spec()).place, Job(job="run", specs=(spec(),))
    started(queue.slurm, job, [0], place).stop()
    (place / EXIT_FILE).write_text("0 143\n")  # srun's, when it was cancelled
    assert slurm.states() == {"101": "CANCELLED"}
    assert not queue.slurm.knows(job, place)
    queue.cancel()
    assert not place.exists()


@pytest.mark.parametrize("way", ["each", "array", "allocation"])
def test_the_script_of_a_submitted_run_is_printed_and_nothing_is_written(
    tmp_path: Path, slurm: StandIn, way: str
) -> None:
    specs = [spec(1), spec(2)]
    places = queue_in(tmp_path, queue=way).detach(specs)
    (places[0] / "facts-0-0.json").write_text("measured")
    before = [content(place) for place in places]
    scripts = queue_in(tmp_path, queue=way).prepare(specs)
    assert len(scripts) == (2 if way == "each" else 1)
    assert all(str(place) in "".join(scripts) for place in places)
    assert [content(place) for place in places] == before


CALIBRATE = Job(job="calibrate", ranks=2, options=(("device", "cpu"),))


def test_the_answer_of_a_detached_job_survives_a_printed_launch(tmp_path, slurm) -> None:
    site = Site(shared=str(tmp_path))
    (job,) = left_to(site, CALIBRATE, only_print=False).jobs
    folder = Path(job.folder)
    (folder / "answer-0.json").write_text("measured")
    before = content(folder)
    (script,) = left_to(site, CALIBRATE, only_print=True).scripts
    assert script == (folder / "slurm.sh").read_text()
    assert content(folder) == before


def test_an_error_of_the_command_loses_no_answer(tmp_path: Path, slurm: StandIn) -> None:
    site = Site(shared=str(tmp_path))
    (job,) = left_to(site, CALIBRATE, only_print=False).jobs
    folder = Path(job.folder)
    (folder / "answer-0.json").write_text("measured")
    for error in (MachineError("scontrol is not installed"), KeyboardInterrupt()):
        with pytest.raises(type(error)), work_folder(CALIBRATE, site):
            raise error
        assert (folder / "answer-0.json").read_text() == "measured"
    with pytest.raises(JobError), work_folder(CALIBRATE, site):
        raise JobError("calibrate crashed")
    assert not folder.exists(), "its end is told"
    with pytest.raises(MachineError), work_folder(CALIBRATE, site) as folder:
        raise MachineError("the disk is full")
    assert not folder.exists(), "nothing was submitted there"


@pytest.mark.parametrize("flag", ["--out", "--cluster-out", "--calibration-out"])
def test_a_calibration_is_not_submitted_where_its_file_cannot_be_written(
    tmp_path: Path, slurm: StandIn, flag: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path in ("file/deeper/mine", "."):
        assert "cannot be written" in cli(
            "calibrate", "--on", "slurm", "--detach", flag, path, "--force", status=2
        )
    assert slurm.states() == {}


def by_engine(name: str) -> Make:
    def work(spec: RunSpec, place: Path) -> Work:
        return Work(Job(job="engine", specs=(spec,), options=(("engine", name),)))

    return work


def test_the_same_spec_by_two_engines_or_on_two_sites_works_in_two_folders(tmp_path, slurm) -> None:
    root, here, there = tmp_path / "runs", Site(name="here"), Site(name="there")
    asked = [(here, "a"), (here, "b"), (there, "a")]
    made = [Queue(root, Slurm(site), by_engine(name)).detach([spec()]) for site, name in asked]
    places = [place for (place,) in made]
    assert len(set(places)) == 3
    assert slurm.states() == {"101": "PENDING", "102": "PENDING", "103": "PENDING"}
    for place, (site, name) in zip(places, asked, strict=True):
        assert Queue(root, Slurm(site), by_engine(name)).take(spec()).place == place
    assert len(slurm.states()) == 3


def test_the_folder_of_a_living_job_is_never_emptied(tmp_path: Path, slurm: StandIn) -> None:
    (place,) = queue_in(tmp_path).detach([spec()])
    (place / "job.json").write_text("{}")  # so it is not recognised
    before = content(place)
    for act in ("detach", "prepare", "take"):
        queue = queue_in(tmp_path)
        asked = spec() if act == "take" else [spec()]
        with pytest.raises(UserError, match=f"job 101 works in {place}; wait for it, or scancel"):
            getattr(queue, act)(asked)
        queue.cancel()
        assert content(place) == before
    (slurm.jobs / "101").write_text("FAILED\n")
    assert queue_in(tmp_path).detach([spec()]) == [place]


def test_an_engines_job_is_the_same_from_any_folder(tmp_path, monkeypatch) -> None:
    template = EngineTemplate(name="mine", command=("bash", "{settings}/run.sh"))
    runs = TemplateRuns(template, Predictor(), Permit(), Site())
    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        jobs.append(runs.work(spec(), tmp_path).job)
    assert jobs[0] == jobs[1]
    other = replace(runs, template=replace(template, env=(("A", "1"),)))
    assert other.work(spec(), tmp_path).job != jobs[0]


def test_runs_that_are_submitted_are_taken_before_others(tmp_path: Path, slurm: StandIn) -> None:
    """The follower of three was killed when it had stored the first."""
    places = queue_in(tmp_path).detach([spec()] * 3)
    shutil.rmtree(places[0])
    queue = queue_in(tmp_path)
    with queue.queued([spec()] * 2):
        assert [queue.take(spec()).place for _ in range(2)] == places[1:]
        assert len(slurm.states()) == 3
        assert queue.take(spec()).place == places[0]
        assert len(slurm.states()) == 4


@pytest.mark.parametrize(("way", "why"), [("each", ""), ("array", ", one array at a time")])
def test_a_detached_command_says_how_many_runs_wait(tmp_path, slurm, way, why) -> None:
    """And submits them when it is called again after the first have run."""
    specs, request = [spec(size) for size in (1, 2, 4)], BenchRequest(engine="mine")
    site = {"queue": way, "most_queued": 2}
    first = submission(queue_in(tmp_path, **site), specs, request)
    assert len(first.jobs) == 2
    said = f"1 more waits: most_queued = 2{why}; the same command submits them"
    assert first.waiting == said
    assert said in text_of(shown(first), "text")
    assert submission(queue_in(tmp_path, **site), specs, request) == first
    for job in first.jobs:
        (Path(job.folder) / EXIT_FILE).write_text("0 0\n")
    second = submission(queue_in(tmp_path, **site), specs, request)
    assert (len(second.jobs), second.waiting) == (3, "")


def test_a_script_that_is_being_written_is_not_cleared_away(tmp_path, slurm, monkeypatch) -> None:
    """By another command, which ends before the runs of the script name it."""
    write = Slurm.write_script

    def meanwhile(self: Slurm, batch: BatchJob) -> Path:
        with queue_in(tmp_path, queue="array").queued([]):
            pass
        assert batch.logs.is_dir()
        return write(self, batch)

    monkeypatch.setattr(Slurm, "write_script", meanwhile)
    places = queue_in(tmp_path, queue="array").detach([spec(1), spec(2)])
    assert [script_of(place).count("#SBATCH --array=0-1") for place in places] == [1, 1]
    with queue_in(tmp_path, queue="array").queued([]):
        pass
    assert script_of(places[0]), "its runs name it"
    for place in places:
        shutil.rmtree(place)
    with queue_in(tmp_path, queue="array").queued([]):
        pass
    assert not (tmp_path / "runs" / ".jobs").exists(), "none does any more"


def test_the_script_of_a_submitted_training_is_printed(tmp_path, slurm, cli, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", "llama-tiny", "--gpus", "2", "--seq-len", "32", "--steps", "2"]
    words += ["--global-batch", "4", "--out", "trained", "--on", "slurm", "--set", "device=cpu"]
    cli(*words, "--detach")
    script = (tmp_path / "trained" / "job" / "slurm.sh").read_text()
    assert cli(*words, "--print-launch").strip() == script.strip()
    assert slurm.states() == {"101": "PENDING"}
