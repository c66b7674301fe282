"""Who was first? Exit codes, the ranks' words and silence -> outcome and rank; no processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fourfold.errors import UserError
from fourfold.launch import local
from fourfold.launch.outcomes import WORKER, JobScene, first_failure, missing_rank, stopped
from fourfold.launch.ranks import Silence, Standstill
from fourfold.result.job import (
    Beat,
    Job,
    Limits,
    RankFailure,
    beat_file,
    failure_file,
    log_file,
    padded,
    read_beat,
)
from fourfold.result.report import Failure
from fourfold.spec import codec
from fourfold.spec.batch import Batch
from fourfold.spec.catalog import model
from fourfold.spec.run import RunSpec


def beat(rank: int, **fields) -> Beat:
    plain: dict = {"pid": 1, "at": 100.0, "task": 0, "stage": rank, "phase": "forward"}
    return Beat(rank=rank, **(plain | {"steps": 1, "marks": 9} | fields))


def say(folder: Path, rank: int, outcome, message: str, at: float) -> None:
    failure = Failure(rank=rank, stage=0, phase="backward", message=message)
    record = RankFailure(outcome=outcome, failure=failure, at=at)
    failure_file(folder, rank).write_text(codec.to_json(record))


def test_lost_peers_are_consequences(tmp_path: Path) -> None:
    scene = JobScene(folder=tmp_path, ranks=3, beats={2: beat(2)})
    say(tmp_path, 0, "crashed", "RuntimeError: Connection closed by peer [127.0.0.1]", 9.0)
    say(tmp_path, 1, "crashed", "RuntimeError: Connection reset by peer", 9.5)
    scene.exits = {0: (1, 9.1), 1: (1, 9.6), 2: (-9, 10.0)}
    outcome, failure = first_failure(scene)
    assert (outcome, failure.rank, failure.stage, failure.phase) == ("crashed", 2, 2, "forward")
    assert "SIGKILL" in failure.message


def test_the_earliest_cause_wins(tmp_path: Path) -> None:
    log_file(tmp_path, 1).write_text("Traceback\n  last line\n")
    say(tmp_path, 0, "crashed", "ValueError: late", 9.0)
    say(tmp_path, 1, "oom", "MemoryLimitError: over", 8.0)
    scene = JobScene(folder=tmp_path, ranks=2, exits={0: (1, 9.0), 1: (1, 8.1)})
    outcome, failure = first_failure(scene)
    assert (outcome, failure.rank) == ("oom", 1)
    assert "last line" in failure.message


def test_the_kernel_ran_out_of_memory(tmp_path: Path) -> None:
    scene = JobScene(folder=tmp_path, ranks=1, exits={0: (-9, 1.0)}, kernel_kills=1)
    assert first_failure(scene)[0] == "oom"


def test_nobody_came_up(tmp_path: Path) -> None:
    log_file(tmp_path, -1).write_text("ImportError: libcudart\n")
    outcome, failure = first_failure(JobScene(folder=tmp_path, ranks=2))
    assert (outcome, failure.rank) == ("crashed", -1)
    assert "libcudart" in failure.message.partition("\n")[0]


def test_the_worker_was_killed(tmp_path: Path) -> None:
    scene = JobScene(folder=tmp_path, ranks=2, worker_exit=-9, pids={WORKER: 812})
    outcome, failure = first_failure(scene)
    assert (outcome, failure.rank, failure.who) == ("crashed", WORKER, "worker")
    assert "the worker (pid 812 on" in failure.message
    assert "SIGKILL" in failure.message
    scene.kernel_kills = 1
    assert first_failure(scene)[0] == "oom"


def test_who_is_stopped_and_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    scene = JobScene(folder=tmp_path, ranks=4, beats={3: beat(3)}, pids={3: 99})
    standstill = Standstill()

    def looks(seconds: float) -> int | None:
        found = None
        for _ in range(round(seconds * 10)):
            clock[0] += 0.1
            found = standstill.broken(scene)
        return found

    assert looks(100.0) is None
    scene.stopped = {3: 19}
    assert looks(14.0) is None
    scene.stopped = {}
    assert looks(0.1) is None
    scene.stopped = {3: 19, 1: 20}  # it begins anew
    assert looks(14.0) is None
    clock[0] += 3600.0  # this process itself was suspended: its ranks may go on in a moment
    assert standstill.broken(scene) is None or standstill.seconds(1) < 17
    scene.stopped = {3: 19}
    assert looks(2.0) == 3
    failure = stopped(scene, 3, standstill.seconds(3))
    assert (failure.rank, failure.stage, failure.phase) == (3, 3, "forward")
    assert failure.message.startswith(
        f"rank 3 (pid 99 on {socket.gethostname()}, stage 3, forward)"
    )
    assert missing_rank(scene) == (3, "is suspended")
    scene.stopped = {3: 19, WORKER: 0}
    assert looks(20.0) == WORKER  # who tells of the others
    assert stopped(scene, WORKER, 15.0).who == "worker"


@pytest.mark.parametrize(
    ("beats", "rank", "words"),
    [
        ({0: beat(0)}, 1, "never started"),
        ({0: beat(0, at=50.0), 1: beat(1), 2: beat(2)}, 0, "50 s old"),
        (
            {r: beat(r, groups=(("dp", str(7 - (r == 1))),)) for r in range(3)},
            1,
            "collective 7 of group dp",
        ),
        ({r: beat(r, marks=9 - (r == 2)) for r in range(3)}, 2, "fewest phases"),
    ],
)
def test_the_first_missing_rank(tmp_path: Path, beats, rank, words) -> None:
    found, how = missing_rank(JobScene(folder=tmp_path, ranks=3, beats=beats))
    assert found == rank
    assert words in how


def test_a_stack_outside_collectives_is_the_missing_one(tmp_path: Path) -> None:
    waits = 'Current thread 0x1:\n  File "heart"\n\nThread 0x2 (most recent call first):\n  File '
    for rank in range(3):
        where = '"data.py", line 3' if rank == 1 else '"/x/torch/distributed/c10d.py", line 9'
        (tmp_path / f"stack-{rank}.txt").write_text(waits + where)
    scene = JobScene(folder=tmp_path, ranks=3, beats={rank: beat(rank) for rank in range(3)})
    assert missing_rank(scene) == (1, "is busy outside any collective")


# The lines ranks of a real pipeline stood at when one of them did not come: their stacks end in
# our own code, since what waits below is compiled.
PIPELINE = """\
def _finish_sending(self):
    for work, _ in self.sending:
        work.wait()
def _exchange(self, exchange):
    dist.batch_isend_irecv(operations)
def strike():
    time.sleep(3600.0)
def _forward(self, action):
    output = self.passes.forward(chunk, action.micro)
"""
WAITS, POSTS, HANGS, COMPUTES = 3, 5, 7, 9


def stacks(folder: Path, lines: dict[int, int]) -> None:
    source = folder / "pipeline.py"
    source.write_text(PIPELINE)
    for rank, line in lines.items():
        (folder / f"stack-{rank}.txt").write_text(
            'Thread 0x00ff [heart] (most recent call first):\n  File "heart.py", line 9 in x\n\n'
            f'Thread 0x00aa (most recent call first):\n  File "{source}", line {line} in f\n'
            f'  File "{source}", line 4 in _exchange\n  File "/x/trainer.py", line 155 in step\n'
        )


def pipeline(folder: Path, hung: int, counts: tuple[int, ...], marks: tuple[int, ...]) -> JobScene:
    """A recorded pp4: sends and receives (older workers counted them) differ by stage."""
    beats = {
        rank: beat(rank, marks=marks[rank], groups=(("0", "4"), ("pp", str(counts[rank]))))
        for rank in range(4)
    }
    return JobScene(folder=folder, ranks=4, beats=beats)


@pytest.mark.parametrize(
    ("hung", "counts", "marks"),
    [
        (1, (18, 32, 33, 17), (28, 22, 22, 22)),
        (2, (35, 67, 65, 34), (45, 43, 42, 42)),
        (0, (16, 33, 33, 17), (22, 22, 22, 22)),
        (3, (20, 37, 36, 16), (28, 27, 25, 22)),
    ],
)
def test_a_hung_stage_is_not_taken_for_one_with_fewer_messages(
    tmp_path: Path, hung, counts, marks
) -> None:
    scene = pipeline(tmp_path, hung, counts, marks)
    stacks(tmp_path, {rank: HANGS if rank == hung else WAITS for rank in range(4)})
    assert missing_rank(scene)[0] == hung


def test_two_that_wait_for_nobody(tmp_path: Path) -> None:
    """A rank that still computes is not the one the others wait for in a collective."""
    counts = {0: 7, 1: 8, 2: 8}
    beats = {rank: beat(rank, groups=(("dp", str(count)),)) for rank, count in counts.items()}
    stacks(tmp_path, {0: HANGS, 1: POSTS, 2: COMPUTES})
    found, how = missing_rank(JobScene(folder=tmp_path, ranks=3, beats=beats))
    assert (found, how) == (0, "has not started collective 8 of group dp")


def test_without_stacks_the_first_stage_that_stands_still(tmp_path: Path) -> None:
    beats = {rank: beat(rank, marks=marks) for rank, marks in enumerate((28, 22, 22, 22))}
    assert missing_rank(JobScene(folder=tmp_path, ranks=4, beats=beats))[0] == 1


def test_silence_has_two_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    job = Job(job="calibrate", ranks=1, limits=Limits(start_s=10.0, step_s=3.0))
    silence = Silence(job)
    scene = JobScene(folder=tmp_path, ranks=1, beats={0: beat(0, steps=0)})
    assert silence.broken(scene) == ""
    clock[0] = 9.0
    assert silence.broken(scene) == ""
    clock[0] = 11.0
    assert silence.broken(scene) == "start limit 10 s"
    scene.beats[0] = beat(0, steps=1)
    assert silence.broken(scene) == ""
    clock[0] = 13.0
    scene.beats[0] = beat(0, steps=2)
    assert silence.broken(scene) == ""
    clock[0] = 16.5
    assert silence.broken(scene) == "step limit 3 s"


def test_a_beat_is_two_lines(tmp_path: Path) -> None:
    path = beat_file(tmp_path, 0)
    where = padded({"task": 0, "stage": 1, "phase": "build", "steps": 0, "marks": 2}, 256)
    path.write_bytes(where + padded({"rank": 0, "pid": 7, "at": 1.5, "groups": {"0": "4"}}, 1024))
    assert read_beat(path) == Beat(
        rank=0, pid=7, at=1.5, task=0, stage=1, phase="build", steps=0, marks=2,
        groups=(("0", "4"),),
    )  # fmt: skip
    path.write_bytes(path.read_bytes()[:300])
    assert read_beat(path) is None


def test_jobs_round_trip() -> None:
    run = RunSpec(model=model("llama-tiny"), gpus=1, batch=Batch(seq_len=8))
    job = Job(job="dryrun", specs=(run,), options=(("rank", "3"),))
    assert codec.from_json(Job, codec.to_json(job)) == job
    assert job.processes(0) == 1
    with pytest.raises(UserError, match="must have at least one run"):
        Job(job="run")


def test_missing_torch_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    local.require_torch.cache_clear()  # a test before this one found it
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install torch"):
        local.run_job(Job(job="calibrate"), tmp_path)


_SEGFAULT = """rank 1 was killed by signal 11 (SIGSEGV)
Fatal Python error: Segmentation fault

Current thread 0x00007f2c (most recent call first):
  File "health.py", line 170 in fail
Extension modules: numpy._core._multiarray_umath, torch._C (total: 24)"""
_TORCHRUN = """exited with code 1 on node2 (ranks 4-7)
[rank5]: Traceback (most recent call last):
[rank5]:   File "train.py", line 9, in <module>
[rank5]:     main()
[rank5]: RuntimeError: NCCL error: remote process exited
Traceback (most recent call last):
  File "torchrun", line 7, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================"""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (_SEGFAULT, "rank 1 was killed by signal 11 (SIGSEGV)"),
        (_TORCHRUN, "RuntimeError: NCCL error: remote process exited"),
        ("ValueError: odd\nloss 3.1\nloss 3.0", "ValueError: odd"),
        ("", ""),
    ],
)
def test_a_failure_in_one_line_is_its_exception_or_its_first_line(message: str, said: str) -> None:
    assert Failure(rank=1, stage=0, phase="train", message=message).said == said
