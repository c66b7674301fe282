"""Many runs, none lost: resuming, repeats, refusals and what a killed campaign left behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from fourfold.launch.batch_script import BatchJob
from fourfold.launch.campaign import Campaign, Runner
from fourfold.launch.folder import end_processes_of
from fourfold.launch.identity import VARIABLE, new_mark
from fourfold.launch.queue import Queue, Work
from fourfold.launch.slurm import Slurm
from fourfold.result.files.run_file import WORK
from fourfold.result.files.store import Store, Stored
from fourfold.result.job import REPORT_FILE, Job, JobReport
from fourfold.result.report import Outcome, Prediction, Remedy, RunReport, StepReport
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.site import Site
from tests.specs import run_spec


def spec(micro_batch: int = 1) -> RunSpec:
    sizes = {"seq_len": 64, "micro_batch": micro_batch, "global_batch": 4}
    return run_spec("llama-tiny", device="cpu", **sizes)


class Fake:
    """A runner that counts, and ends as it is told."""

    def __init__(self, outcome: Outcome = "ok") -> None:
        self.calls: list[int] = []
        self.outcome: Outcome = outcome

    def __call__(self, spec: RunSpec, folder: Path, say: object) -> RunReport:
        self.calls.append(spec.batch.micro_batch)
        assert folder.is_dir()
        return RunReport(spec=spec, outcome=self.outcome, steps=(StepReport(step=0, seconds=1.0),))


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    fake = Fake()
    for round_ in range(3):
        campaign = Campaign(Store(tmp_path), runner=fake)
        done = [campaign.run(spec(n)) for n in (1, 2, 3)]
        assert [one.resumed for (one,) in done] == [round_ > 0] * 3
    assert fake.calls == [1, 2, 3]
    assert len(Store(tmp_path).runs()) == 3


def test_two_campaigns_of_one_store_measure_each_run_once(tmp_path: Path) -> None:
    running, said, fakes = [], [], (Fake(), Fake())

    def alone(fake: Fake) -> Runner:
        def run(spec: RunSpec, folder: Path, say: object) -> RunReport:
            running.append(spec.run_id)
            assert running.count(spec.run_id) == 1
            time.sleep(0.05)
            running.remove(spec.run_id)
            return fake(spec, folder, say)

        return run

    def campaign(fake: Fake) -> None:
        own = Campaign(Store(tmp_path), runner=alone(fake), say=said.append)
        for n in (1, 2, 3):
            own.run(spec(n))

    threads = [threading.Thread(target=campaign, args=(fake,)) for fake in fakes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fakes[0].calls + fakes[1].calls) == [1, 2, 3]
    assert len(Store(tmp_path).runs()) == 3
    assert {text.partition(" into")[0] for text in said} == {
        "waiting for another command that measures the same run"
    }
    assert [*(tmp_path / WORK).iterdir()] == []


@pytest.mark.parametrize("outcome", ["oom", "crashed", "hung", "nonfinite"])
def test_failures_are_results_until_asked_again(tmp_path: Path, outcome: Outcome) -> None:
    fake = Fake(outcome)
    assert Campaign(Store(tmp_path), runner=fake).run(spec())[0].outcome == outcome
    assert Campaign(Store(tmp_path), runner=fake).run(spec())[0].resumed
    again = Campaign(Store(tmp_path), runner=fake, again=[outcome]).run(spec())
    assert [(one.resumed, one.stored.summary.repeat) for one in again] == [(False, 1)]


def test_interrupted_runs_are_run_again(tmp_path: Path) -> None:
    Campaign(Store(tmp_path), runner=Fake("cancelled")).run(spec())
    fake = Fake()
    assert Campaign(Store(tmp_path), runner=fake).run(spec())[0].outcome == "ok"
    assert fake.calls == [1]


def test_repeats_are_filled_up(tmp_path: Path) -> None:
    fake = Fake()
    Campaign(Store(tmp_path), runner=fake).run(spec())
    done = Campaign(Store(tmp_path), runner=fake).run(spec(), repeats=3)
    assert [one.resumed for one in done] == [True, False, False]
    assert len(fake.calls) == 3


def test_another_torch_or_machine_runs_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    elsewhere = (("device", "Other CPU"), ("torch", "9.9"), ("host", "elsewhere"))
    store.keep(RunReport(spec=spec(), outcome="ok", environment=elsewhere))
    fake = Fake()
    Campaign(store, runner=fake).run(spec())
    assert fake.calls == [1]


def test_ctrl_c_leaves_nothing_half_done(tmp_path: Path) -> None:
    def stopped(spec: RunSpec, folder: Path, say: object) -> RunReport:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Campaign(Store(tmp_path), runner=stopped).run(spec())
    assert Store(tmp_path).runs() == []
    assert list((tmp_path / WORK).iterdir()) == []


def test_an_illegal_run_is_stored_once(tmp_path: Path) -> None:
    for _ in range(2):
        done = Campaign(Store(tmp_path), runner=Fake()).refuse(spec(), "tp=3: no")
    (stored,) = Store(tmp_path).runs()
    assert (done.outcome, stored.summary.failure) == ("illegal", "tp=3: no")


class Seer:
    """Says the same of every run."""

    def predicted(self, spec: RunSpec) -> Prediction:
        return Prediction(
            step_s=2.0, step_s_low=1.0, step_s_high=4.0, peak_bytes=10.0, basis="a seer"
        )

    def remedies(self, report: RunReport) -> tuple[Remedy, ...]:
        return (Remedy(change="less", fits=True, peak_bytes=1.0, step_s=3.0, slower_pct=50.0),)


def test_what_was_predicted_is_kept(tmp_path: Path) -> None:
    for number, outcome in enumerate(("ok", "oom"), start=1):
        fake = Fake("ok" if outcome == "ok" else "oom")
        (done,) = Campaign(Store(tmp_path), runner=fake, predictor=Seer()).run(spec(number))
        report = done.stored.report()
        assert report.predicted == Seer().predicted(spec())
        assert len(report.remedies) == (outcome == "oom")
        assert done.stored.summary.predicted.basis == "a seer"
        assert [path.name for path in done.stored.folder.iterdir()] == ["run.json"]


def test_a_killed_campaign_keeps_what_was_predicted(tmp_path: Path) -> None:
    """The launcher's report is whole, and then the campaign dies before the run is stored."""

    class KilledError(BaseException):
        pass

    def runner(spec: RunSpec, folder: Path, say: object) -> RunReport:
        report = RunReport(spec=spec, outcome="ok", steps=(StepReport(step=0, seconds=1.0),))
        job = JobReport(job="run", outcome="ok", seconds=1.0, runs=(report,))
        (folder / REPORT_FILE).write_text(codec.to_json(job))
        folder.rename(tmp_path / "moved")  # what a dead process leaves is out of its reach
        raise KilledError

    store = Store(tmp_path)
    with pytest.raises(KilledError):
        Campaign(store, runner=runner, predictor=Seer()).run(spec())
    kept = store.recover(tmp_path / "moved")
    assert kept.report().predicted == Seer().predicted(spec())


def test_workers_of_a_killed_campaign_are_ended(tmp_path: Path) -> None:
    store = Store(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = os.uname().nodename
    owner = json.dumps({"host": host, "pid": gone.pid, "born": "1"})
    place, finished = (tmp_path / WORK / f"{host}-{gone.pid}-0000000{i}" for i in range(2))
    for folder in (place, finished):
        folder.mkdir(parents=True)
        (folder / "owner.json").write_text(owner)
    report = RunReport(spec=spec(), outcome="ok", steps=(StepReport(step=0, seconds=1.0),))
    job = JobReport(job="run", outcome="ok", seconds=1.0, runs=(report,))
    (finished / REPORT_FILE).write_text(codec.to_json(job))
    sleeper = "import time; time.sleep(600)"
    mark = new_mark(place)
    worker, other = (
        subprocess.Popen([sys.executable, "-c", sleeper], env={**os.environ, VARIABLE: one})
        for one in (mark, f"{'0' * 32}{mark[32:]}")
    )
    said: list[str] = []
    kept = Campaign(store, runner=Fake(), say=said.append).clear_up()
    try:
        assert worker.wait(timeout=120) == -9
        assert other.poll() is None
        assert len(kept) == 1
        assert any("ended 1 process of" in line for line in said)
        assert list((tmp_path / WORK).iterdir()) == []
        assert end_processes_of(place) == 0
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


class Nobody:
    """A scheduler that takes everything and does nothing."""

    def __init__(self) -> None:
        self.site = Site(name="here")
        self.folders: list[Path] = []
        self.cancelled: list[str] = []

    def knows(self, job: Job, folder: Path) -> bool:
        return folder in self.folders

    def submit(self, batch: BatchJob) -> None:
        self.folders += batch.folders

    def cancel(self, *job_ids: str) -> None:
        self.cancelled += job_ids

    def wait_until_gone(self, job_ids: object) -> None:
        pass


@pytest.mark.parametrize("locks", [True, False])
def test_a_run_that_two_commands_follow_is_kept_once(tmp_path, locks, monkeypatch) -> None:
    """With locks the second waits for the first; without, the first to keep it has it."""
    slurm, store = Nobody(), Store(tmp_path)
    work = lambda spec, place: Work(Job(job="run", specs=(spec,)))  # noqa: E731
    kept: list[Stored] = []
    waits = threading.Event()
    if not locks:

        def refuse(handle: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("fcntl.flock", refuse)

    def campaign(runner: Runner) -> Campaign:
        queue = Queue(store.root, cast(Slurm, slurm), work)
        return Campaign(store, runner=runner, queue=queue, say=lambda text: waits.set())

    other = threading.Thread(target=lambda: kept.append(campaign(Fake()).run_new(spec())))

    def first(spec: RunSpec, folder: Path, say: object) -> RunReport:
        report = Fake()(spec, folder, say)
        other.start()
        if locks:
            waits.wait()
        else:  # the other is sooner
            other.join()
        return report

    mine = campaign(first).run_new(spec())
    other.join()
    assert [one.folder for one in kept] == [mine.folder]
    assert [one.name for one in Store(tmp_path).runs()] == [mine.name]
    assert slurm.cancelled == []


def test_what_an_engine_has_no_settings_for_is_stored_once_as_illegal(tmp_path: Path) -> None:
    slurm = Nobody()
    work = lambda spec, place: Work(Job(job="run", specs=(spec,)))  # noqa: E731
    for resumed in (False, True):
        campaign = Campaign(
            Store(tmp_path),
            runner=Fake(),
            engine="mine",
            unsupported=lambda spec: "it has no such setting",
            queue=Queue(tmp_path, cast(Slurm, slurm), work),
        )
        with campaign.queued([spec()]):
            (done,) = campaign.run(spec())
        assert (done.outcome, done.resumed) == ("illegal", resumed)
    assert slurm.folders == []
