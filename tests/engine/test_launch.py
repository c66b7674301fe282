"""Ranks that fail for real: each ends in an outcome that names the rank, and leaves no process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.launch.command import stop_signals
from fourfold.launch.local import run_job
from fourfold.result.files.stored import unseal
from fourfold.result.job import Beat, Job, JobReport, beat_file, read_beat
from fourfold.result.machine import process_born
from fourfold.spec import codec
from fourfold.spec.run import Fault, RunSpec
from tests import warm
from tests.processes import children, wait_for
from tests.specs import run_spec

SOURCE = Path(__file__).parents[2] / "src"
FOREVER = 1_000_000


def spec(ranks: int = 2, **fields: object) -> RunSpec:
    plain: dict = {"steps": 2, "warmup": 1, "device": "cpu", "start_limit_s": 300.0} | fields
    return run_spec("llama-tiny", f"dp{ranks}", seq_len=32, global_batch=4, **plain)


def read_report(folder: Path) -> JobReport:
    return codec.from_json(JobReport, unseal((folder / "report.json").read_bytes(), "report.json"))


def hear_ctrl_c() -> None:
    """As from a terminal; where the tests run in the background, a shell lets SIGINT be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Launched:
    """A launcher in its own process, with ranks that have made steps."""

    def __init__(self, folder: Path, run: RunSpec, popen: type[subprocess.Popen] = warm.Popen):
        folder.mkdir()
        self.folder, self.run = folder / "job", run
        (folder / "run.toml").write_text(codec.to_toml(run))
        command = [sys.executable, "-m", "fourfold.launch", "--job", "ping"]
        self.process = popen(
            [*command, str(folder / "run.toml"), str(self.folder)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=hear_ctrl_c if popen is subprocess.Popen else None,
        )
        wait_for(lambda: all(beat and beat.steps > 2 for beat in self.beats()))
        self.ranks = [beat.pid for beat in self.beats() if beat]
        self.worker = int(
            Path(f"/proc/{self.ranks[0]}/stat").read_text().rsplit(")", 1)[1].split()[1]
        )

    def beats(self) -> list[Beat | None]:
        return [read_beat(beat_file(self.folder, rank)) for rank in range(self.run.gpus)]

    def report(self) -> JobReport:
        return read_report(self.folder)

    def all_gone(self) -> bool:
        return not any(process_born(pid) for pid in (self.worker, *self.ranks))


@pytest.mark.cold_start
def test_every_rank_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a torch.py too: what lies where a command is called is not imported."""
    here = tmp_path / "repository"
    here.mkdir()
    (here / "torch.py").write_text("raise SystemExit('not torch')\n")
    monkeypatch.chdir(here)
    report = run_job(Job(job="ping", specs=(spec(3),)), tmp_path)
    assert report.outcome == "ok"
    assert report.failure is None
    (run,) = report.runs
    assert [step.warmup for step in run.steps] == [True, False, False]
    assert len(run.ranks) == 3
    assert run.start_s > 0
    assert read_report(tmp_path) == report


@pytest.mark.parametrize(
    ("kind", "outcome", "words"),
    [
        ("crash", "crashed", "SIGSEGV"),
        ("oom", "oom", "allocate"),
        ("nonfinite", "nonfinite", "nan"),
        ("hang", "hung", "step limit 6 s"),
    ],
)
def test_a_fault_is_an_outcome(tmp_path: Path, kind, outcome, words) -> None:
    fault = Fault(kind=kind, rank=1, step=1)
    limit_s = 6.0 if kind == "hang" else 300.0
    report = run_job(Job(job="ping", specs=(spec(fault=fault, step_limit_s=limit_s),)), tmp_path)
    (run,) = report.runs
    assert run.outcome == report.outcome == outcome
    assert words in run.failure.message
    if kind != "nonfinite":  # the sum is NaN on every rank at once
        assert run.failure.rank == 1
        assert run.failure.phase == "prepare"
    if kind == "hang":
        assert (tmp_path / "stack-0.txt").exists()
        entries = json.loads((tmp_path / "flight-0.json").read_text())["entries"]
        assert entries[-1]["collective_seq_id"] == 2


def test_a_failed_run_does_not_cost_the_others(tmp_path: Path) -> None:
    bad = spec(fault=Fault(kind="crash", rank=0, step=0))
    report = run_job(Job(job="ping", specs=(spec(), bad, spec(3), spec())), tmp_path)
    assert [run.outcome for run in report.runs] == ["ok", "crashed", "ok", "ok"]
    assert [len(run.ranks) for run in report.runs] == [2, 0, 3, 2]
    assert (tmp_path / "failed-1").is_dir()


@pytest.mark.parametrize(
    ("who", "number", "outcome", "words"),
    [
        ("rank", signal.SIGKILL, "crashed", "SIGKILL"),
        ("worker", signal.SIGKILL, "crashed", "SIGKILL"),
        # By the limit for stopped processes, long before that of a step: 15 s, and more on a busy
        # machine.
        pytest.param(
            "rank", signal.SIGSTOP, "hung", r"\) has been suspended by SIGSTOP for \d\d s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "worker", signal.SIGSTOP, "hung", r", has been suspended for \d\d s",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_who_is_killed_or_stopped_is_named(tmp_path: Path, who, number, outcome, words) -> None:
    started_as_ever = subprocess.Popen if words == "SIGKILL" and who == "rank" else warm.Popen
    launched = Launched(tmp_path / "x", spec(3, steps=FOREVER), started_as_ever)
    pid = launched.worker if who == "worker" else launched.ranks[2]
    os.kill(pid, number)
    assert launched.process.wait(120) == 1
    failure = launched.report().failure
    assert launched.report().outcome == outcome
    assert failure is not None
    place = f"(pid {pid} on {socket.gethostname()}"
    if who == "worker":
        assert (failure.rank, failure.who) == (-1, "worker")
        assert failure.message.startswith(f"the worker {place})")
    else:
        assert failure.rank == 2
        assert failure.message.startswith(f"rank 2 {place}, stage 0, {failure.phase})")
    assert re.search(words, failure.message)
    assert (launched.folder / "rank-1.log").stat().st_mode & 0o777 == 0o644 & ~umask()
    # Of a killed worker nobody has waited for the ranks.
    wait_for(launched.all_gone, at_most_s=60.0 if who == "worker" else 0.0)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.slow
def test_a_rank_that_goes_on_again_is_forgiven(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "x", spec(2, steps=FOREVER))
    for _ in range(3):
        os.kill(launched.ranks[1], signal.SIGSTOP)
        time.sleep(8)
        os.kill(launched.ranks[1], signal.SIGCONT)
        time.sleep(1)
    before = [beat.steps for beat in launched.beats() if beat]
    wait_for(lambda: all(beat and beat.steps > before[0] + 5 for beat in launched.beats()))
    assert launched.process.poll() is None
    launched.process.kill()
    launched.process.wait()
    wait_for(launched.all_gone, at_most_s=60)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_the_user_stops_it(tmp_path: Path, sig) -> None:
    launched = Launched(tmp_path / "x", spec(2, steps=FOREVER))
    launched.process.send_signal(sig)
    assert launched.process.wait(120) == 130
    assert launched.report().outcome == "cancelled"
    assert launched.all_gone()


def test_ctrl_c_is_not_for_a_background_job(tmp_path: Path, monkeypatch) -> None:
    """A shell without job control starts `command &` with SIGINT ignored, and so it stays."""
    seen: list[object] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals(tmp_path / "stop"):
            seen.append(signal.getsignal(signal.SIGINT))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with stop_signals(tmp_path / "stop"):
            seen.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[0] is signal.SIG_IGN
    assert callable(seen[1])


@pytest.mark.parametrize("stopped", ["nobody", "rank", "worker", "worker and rank"])
def test_kill_of_the_launcher(tmp_path: Path, stopped: str) -> None:
    """Also when a rank, or who would end the ranks, is stopped at that moment."""
    launched = Launched(tmp_path / "x", spec(3, steps=FOREVER))
    if "rank" in stopped:
        os.kill(launched.ranks[1], signal.SIGSTOP)
    if "worker" in stopped:
        os.kill(launched.worker, signal.SIGSTOP)
    launched.process.kill()
    launched.process.wait()
    wait_for(launched.all_gone, at_most_s=60)


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_of_the_launcher_while_torch_is_imported(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "run.toml").write_text(codec.to_toml(spec(2, steps=FOREVER)))
    process = subprocess.Popen(
        [sys.executable, "-m", "fourfold.launch", "--job", "ping", "run.toml", "job"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: (tmp_path / "job" / "host.log").exists())
    wait_for(lambda: children(process.pid))
    workers = children(process.pid)
    if stopped:  # once it has asked the kernel to die with its launcher
        wait_for(lambda: "--launcher" in Path(f"/proc/{workers[0]}/cmdline").read_text())
        wait_for(lambda: "torch" in Path(f"/proc/{workers[0]}/maps").read_text())
        os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(process_born, workers)), at_most_s=60)


def test_a_job_that_can_not_start(tmp_path: Path) -> None:
    report = run_job(Job(job="ping", specs=(spec(device="cuda"),)), tmp_path)
    assert report.outcome == "crashed"
    assert "CUDA" in report.failure.message or "cuda" in report.failure.message
