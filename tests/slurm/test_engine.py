"""Another engine on a real Slurm of two nodes: its own launcher on each, its log here, and the same
outcomes as on one host."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import with_words
from tests.slurm.user import User, taken_port

pytestmark = pytest.mark.slow
SAMPLES = Path(__file__).parent.parent / "samples" / "engine"
RUN = (Path(__file__).parent / "runs" / "engine.toml").read_text()


def engine(user: User, how: str, **more: Any) -> str:
    """A template whose torchrun is a stand-in for that and the engine."""
    torchrun = user.folder / "torchrun"
    program = shlex.join([sys.executable, str(SAMPLES / "fake_torchrun.py")])
    torchrun.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    torchrun.chmod(0o755)
    env = {"TORCHRUN": str(torchrun), "HOW": how, "SETTINGS": "{settings}", "SECONDS_EACH": "0.25"}
    words = ["bash", "{settings}/run.sh", "--train-iters", "{iterations}"]
    table = {"export": "megatron", "reader": "megatron", "command": words, **more}
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items()]
    lines += ["[env]", *(f"{name} = {json.dumps(value)}" for name, value in env.items())]
    path = user.folder / f"fake-{how}.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def words(user: User, how: str = "ok", **more: Any) -> list[str]:
    (user.folder / "run.toml").write_text(RUN)
    asked = ["bench", "--spec", "run.toml", "--cluster", "mosaic-a100"]
    return [*asked, "--engine", engine(user, how, **more)]


def at_work(user: User) -> bool:
    logs = (user.folder / "runs" / ".jobs").glob("*/engine-1.log")
    return any("iteration" in path.read_text() for path in logs)


def left_running() -> dict[int, str]:
    return with_words("fake_torchrun.py")


def test_a_run_over_two_nodes_is_measured_from_its_log(user: User) -> None:
    run = user.ask(*words(user))
    assert (run["outcome"], run["step_s"], run["timed_steps"]) == ("ok", 0.25, 4)
    assert run["predicted"]["step_s"] > 0
    (stored,) = user.runs()
    first, second = user.cluster.names
    known = stored["environment"]
    assert known["slurm.ranks"] == f"{first}: 0-1, {second}: 2-3"
    assert (known["engine"], known["site"]) == ("fake-ok", "site")
    assert not (user.folder / "runs" / ".jobs").exists()


@pytest.mark.parametrize(
    ("how", "outcome", "said"),
    [
        ("oom", "oom", "CUDA out of memory"),
        ("crash", "crashed", "no such kernel"),
        ("hang", "hung", "step limit of 10 s"),
    ],
)
def test_failures_are_outcomes_and_nothing_is_left(user, how, outcome, said) -> None:
    run = user.ask(*words(user, how), status=1)
    assert run["outcome"] == outcome
    (stored,) = user.runs()
    assert said in stored["failure"]["message"]
    assert stored["failure"]["rank"] == (-1 if outcome == "hung" else 3)
    if outcome != "hung":  # nobody knows which of two silent nodes is to blame
        second = user.cluster.names[1]
        assert f"exited with code 1 on {second} (ranks 2-3)" in stored["failure"]["message"]
    assert {path.name for path in Path(run["folder"]).glob("engine*")} == {
        "engine-0.log",
        "engine-1.log",
    }
    user.cluster.wait_for(lambda: not user.cluster.jobs(), "the job to be gone")
    assert not left_running()


def test_a_cancelled_job_is_cancelled_and_run_again(user: User) -> None:
    process = user.begin(*words(user, "hang"), "--set", "step_limit_s=600", "--format", "json")
    user.cluster.wait_for(lambda: at_work(user), "the first step")
    user.cluster.run(["scancel", *user.cluster.jobs()])
    run = json.loads(user.finish(process, status=1))
    assert run["outcome"] == "cancelled"
    assert "was cancelled (CANCELLED)" in user.runs()[0]["failure"]["message"]
    assert not left_running()


def test_ctrl_c_leaves_nothing_running(user: User) -> None:
    process = user.begin(*words(user, "hang"), "--set", "step_limit_s=600")
    user.cluster.wait_for(lambda: at_work(user), "the first step")
    user.interrupt(process)
    user.finish(process, status=130)
    assert user.cluster.jobs() == []
    assert not left_running()
    assert user.runs() == []


def test_an_engine_that_does_not_end_is_ended_after_enough_steps(user: User) -> None:
    run = user.ask(*words(user, "idle", ends_itself=False))
    assert (run["outcome"], run["timed_steps"]) == ("ok", 4)
    assert not left_running()


def test_a_script_is_submitted_by_hand_and_its_run_collected(user: User) -> None:
    text = user.call(*words(user), "--print-launch")
    (path,) = (user.folder / "runs" / ".jobs").glob("*/slurm.sh")
    assert path.read_text().strip() == text.strip()
    assert not left_running()
    job = user.cluster.run(["sbatch", "--parsable", "--job-name=by-hand", str(path)])
    user.cluster.wait_for(lambda: job not in user.cluster.jobs(), "the job to end")
    assert user.ask(*words(user))["outcome"] == "ok"
    (run,) = user.runs()
    assert run["environment"]["slurm.job"] == job


def test_what_a_first_submission_by_hand_left_is_not_of_the_second(user: User) -> None:
    user.call(*words(user), "--print-launch")
    (path,) = (user.folder / "runs" / ".jobs").glob("*/slurm.sh")
    for node in (0, 1):
        told = {"rank": node, "host": "x", "step": "0", "code": 1, "at": 1.0}
        (path.parent / f"news-{node}.jsonl").write_text(json.dumps(told) + "\n")
    (path.parent / "slurm-exit").write_text("0 1\n")
    job = user.cluster.run(["sbatch", "--parsable", str(path)])
    user.cluster.wait_for(lambda: job not in user.cluster.jobs(), "the job to end")
    assert user.ask(*words(user))["outcome"] == "ok"


def test_a_detached_run_is_followed_later(user: User) -> None:
    (job,) = user.ask(*words(user), "--detach")["jobs"]
    assert user.ask(*words(user))["outcome"] == "ok"
    (run,) = user.runs()
    assert run["environment"]["slurm.job"] == job["slurm_job"]


def test_a_detached_run_that_hangs_is_ended_by_its_script(user: User) -> None:
    (job,) = user.ask(*words(user, "hang"), "--detach")["jobs"]
    gone = lambda: job["slurm_job"] not in user.cluster.jobs()  # noqa: E731
    user.cluster.wait_for(gone, "the script to end its run")
    assert not left_running()
    assert user.ask(*words(user, "hang"), status=1)["outcome"] == "hung"
    (run,) = user.runs()
    assert "step limit of 10 s" in run["failure"]["message"]
    assert run["environment"]["slurm.job"] == job["slurm_job"]


@pytest.mark.parametrize("queue", ["each", "array", "allocation"])
def test_the_planners_choices_by_an_engine_on_a_site(user: User, queue: str) -> None:
    user.write_site(queue=queue)
    plan = ["sweep", "--from-plan", "2", "--model", "llama-2-7b", "--gpus", "4", "--seq-len",
            "2048", "--global-batch", "32", "--precision", "bf16", "--cluster",
            "mosaic-a100"]  # fmt: skip
    swept = user.ask(*plan, "--engine", engine(user, "ok"))
    assert (swept["total"], swept["ok"]) == (2, 2)
    jobs = {run["environment"]["slurm.job"].partition("_")[0] for run in user.runs()}
    assert len(jobs) == (2 if queue == "each" else 1)
    again = user.ask(*plan, "--engine", engine(user, "ok"))
    assert [row["resumed"] for row in again["runs"]] == [True, True]
    assert not (user.folder / "runs" / ".jobs").exists()


def gated(user: User, **site: Any) -> Path:
    """Nodes wait while this file is there."""
    gate = user.folder / "gate"
    gate.touch()
    waiting = 'while [ -e "$0" ]; do sleep 0.1; done; exec "$@"'
    user.write_site(wrapper=["sh", "-c", waiting, str(gate)], **site)
    return gate


def hear(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), f"it never said '{words}'"


def follow_as_second(user: User) -> subprocess.Popen[str]:
    process = user.begin(*words(user), "--format", "json")
    hear(process, "another command follows this run")
    return process


def test_of_two_commands_that_follow_a_run_one_keeps_it(user: User) -> None:
    gate = gated(user)
    first = user.begin(*words(user), "--format", "json")
    hear(first, "starting")
    second, third = follow_as_second(user), follow_as_second(user)
    user.interrupt(third)
    user.finish(third, status=130)
    (job,) = user.cluster.jobs()  # it was not the third one's to cancel
    gate.unlink()
    folders = [json.loads(user.finish(one))["folder"] for one in (first, second)]
    assert folders[0] == folders[1]
    (run,) = user.runs()
    assert run["environment"]["slurm.job"] == job


@pytest.mark.parametrize("kill", [True, False])
def test_the_second_command_goes_on_when_the_first_is_gone(user: User, kill: bool) -> None:
    """Killed, its job goes on and is followed; interrupted, it cancels it: the run is done anew."""
    gate = gated(user)
    first = user.begin(*words(user))
    hear(first, "starting")
    second = follow_as_second(user)
    (job,) = user.cluster.jobs()
    if kill:
        first.kill()
        first.communicate()
    else:
        user.interrupt(first)
        user.finish(first, status=130)
    gate.unlink()
    assert json.loads(user.finish(second))["outcome"] == "ok"
    (run,) = user.runs()
    assert (run["environment"]["slurm.job"] == job) == kill


SWEEP = RUN.replace("[layout]\ntp = 2\n", "") + "[sweep]\ntp = [1, 2]\n"


@pytest.mark.parametrize("queue", ["array", "allocation"])
@pytest.mark.parametrize("held", [True, False])
def test_a_script_of_many_runs_is_submitted_by_hand(user: User, queue: str, held: bool) -> None:
    """Followed while it waits, when it has no log yet, or collected when it is over."""
    user.write_site(queue=queue)
    (user.folder / "sweep.toml").write_text(SWEEP)
    sweep = ["sweep", "sweep.toml", "--cluster", "mosaic-a100", "--engine", engine(user, "ok")]
    user.call(*sweep, "--print-launch")
    (path,) = (user.folder / "runs" / ".jobs").glob("queue-*/slurm.sh")
    job = user.cluster.run(["sbatch", "--parsable", *["--hold"] * held, str(path)])
    if held:
        process = user.begin(*sweep, "--format", "json")
        hear(process, f"Slurm job {job}{'_0' if queue == 'array' else ''} is pending")
        user.cluster.run(["scontrol", "release", job])
        swept = json.loads(user.finish(process))
    else:
        user.cluster.wait_for(lambda: not user.cluster.jobs(), "the job to end")
        swept = user.ask(*sweep)
    assert (swept["total"], swept["ok"]) == (2, 2)
    jobs = {run["environment"]["slurm.job"].partition("_")[0] for run in user.runs()}
    assert jobs == {job}
    assert not (user.folder / "runs" / ".jobs").exists()


def test_a_port_that_is_taken_is_passed_over(user: User) -> None:
    with taken_port(user):
        assert user.ask(*words(user))["outcome"] == "ok"


def test_a_node_that_is_lost_before_the_engine_starts_there_is_named(user: User) -> None:
    with user.node_lost_before_srun() as lost:
        user.ask(*words(user), status=1)
    (run,) = user.runs()
    assert run["outcome"] == "cancelled"
    assert lost in run["failure"]["message"]
