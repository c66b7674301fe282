"""The processes of one start of a job: started, polled and always ended. The kernel tells the
worker when the launcher dies; ranks die with the worker, and hear of the launcher by a pipe of
their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold.installed import SOURCE_FOLDER
from fourfold.launch.identity import VARIABLE, new_mark
from fourfold.launch.outcomes import WORKER, JobScene, kernel_kills
from fourfold.launch.permit import core_count
from fourfold.result import machine
from fourfold.result.job import JOB_FILE, SLOW_PHASES, Job, beat_file, log_file, read_beat
from fourfold.units import counted

# Of an outer torchrun or Slurm step: they describe other ranks than ours.
_OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
_END_S, _LAST_WORDS_S = 5.0, 2.0
POLL_S = 0.1  # often enough to be prompt, seldom enough not to take a core from the ranks
_LOOK_EVERY_S = 0.5
# Not SIGTERM: a batch system sends that to every process, and a training then saves first.
END_SIGNAL = signal.SIGUSR2


class Ranks:
    """One worker process and its ranks. Must be ended by the thread that made it. What else they
    started is in the worker's process group, which is killed at the end."""

    queued = ""  # starts at once
    environment: tuple[tuple[str, str], ...] = ()  # its own ranks say where they were

    def __init__(self, job: Job, tasks: list[int], folder: Path) -> None:
        self.scene = JobScene(folder=folder, ranks=job.processes(tasks[0]))
        self._kills_before = kernel_kills()
        self._unread, self._looked_at = b"", 0.0
        # -P: a torch.py in the folder a command is called from is not torch.
        command = [sys.executable, "-P", "-m", "fourfold.engine.worker", str(folder / JOB_FILE)]
        command += ["--tasks", ",".join(map(str, tasks)), "--launcher", str(os.getpid())]
        with open(log_file(folder, WORKER), "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_env(job, tasks[0]) | {VARIABLE: new_mark(folder)},
                start_new_session=True,
            )
        self.scene.pids[WORKER] = self.process.pid
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def all_ended(self) -> bool:
        return len(self.scene.exits) == self.scene.ranks

    def poll(self) -> bool:
        """Take in the worker's news and the beats; True when the worker itself is gone."""
        self.scene.worker_exit = self._worker_exit()  # first: its last lines are then in the pipe
        self._read_news()
        self._check_worker()
        for rank in range(self.scene.ranks):
            beat = read_beat(beat_file(self.scene.folder, rank))
            if beat is not None:
                self.scene.beats[rank] = beat
        return self.scene.worker_exit is not None

    def _worker_exit(self) -> int | None:
        """Its exit code, None while it lives. Not reaped before `end`: until then its number, which
        is that of its group, can't be given to others."""
        if not hasattr(os, "waitid"):
            return self.process.poll()
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        seen = os.waitid(os.P_PID, self.process.pid, how)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def _check_worker(self) -> None:
        """Every parent watches its own children: the worker its ranks, this process the worker."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if machine.is_suspended(self.process.pid):
            self.scene.stopped[WORKER] = 0
        else:
            self.scene.stopped.pop(WORKER, None)

    def _read_news(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.process.stdout.fileno(), 65536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, news: dict[str, Any]) -> None:
        self.scene.take(news)
        if "code" in news:
            self.scene.kernel_kills = kernel_kills() - self._kills_before

    def hear_out(self) -> bool:
        """After a bad exit: wait for what the others still say; nothing starts them over."""
        wait_for(lambda: self.poll() or self.all_ended, _LAST_WORDS_S)
        return False

    def stop(self) -> None:
        self.end()

    def end(self) -> None:
        """Whatever state they are in, stopped ones too; returns when they are gone."""
        try:
            # A stopped process does not handle signals.
            if self._worker_exit() is None and not machine.is_suspended(self.process.pid):
                os.kill(self.process.pid, END_SIGNAL)
                until = time.monotonic() + _END_S
                while time.monotonic() < until and self._worker_exit() is None:
                    time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()


def wait_for(done: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not done():
        time.sleep(POLL_S)


def worker_env(job: Job, task: int) -> dict[str, str]:
    """The caller's variables, what one host needs, and the run's own on top."""
    env = {name: value for name, value in os.environ.items() if name not in (*_OUTER, *_MEETING)}
    own = job.task_env(task)
    source = SOURCE_FOLDER
    paths = [source, *filter(None, [own.get("PYTHONPATH", env.get("PYTHONPATH", ""))])]
    defaults = {
        # As torchrun: without a bound every rank would start a thread per core.
        "OMP_NUM_THREADS": str(max(1, core_count() // job.processes(task))),
        # Ranks of one host meet on the loopback device, whatever the host's name resolves to.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # torch keeps its last collectives, to be dumped when a limit passes.
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    forced = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "FOURFOLD_STARTED_AT": repr(time.time()),
    }
    return defaults | env | own | forced


_SAY_EVERY_S = 2.0
# A stopped process does nothing until somebody lets it go on. Long enough for a look at it with a
# tool that stops it, and with what follows still within half a minute.
STOPPED_S = 15.0
# What one look counts for at most: time in which this process itself did not run proves nothing.
_LOOK_S = 2.0


class Standstill:
    """Seconds for which a rank, or the worker, was seen stopped at every look. A process that is
    only slow, busy or under a debugger is not in that state, however loaded the machine is."""

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}
        self._looked_at = time.monotonic()

    def seconds(self, rank: int) -> float:
        return self._seen_s.get(rank, 0.0)

    def broken(self, scene: JobScene) -> int | None:
        """The rank (or WORKER) that has been stopped for too long: the worker before its ranks,
        since it is who tells of them."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, _LOOK_S), now
        # One that was not stopped at the last look may have been so for a moment only.
        self._seen_s = {
            rank: self._seen_s[rank] + passed_s if rank in self._seen_s else 0.0
            for rank in sorted(scene.stopped)
        }
        return next((rank for rank, s in self._seen_s.items() if s >= STOPPED_S), None)


class Silence:
    """Seconds since any rank finished a step, by the launcher's own clock."""

    def __init__(self, job: Job, say: Callable[[str], None] | None = None) -> None:
        self._job, self._say = job, say
        self._progress: object = None
        self._changed_at = self._said_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._changed_at

    def wait(self, why: str) -> None:
        """Time in a queue is no silence."""
        self._changed_at = time.monotonic()
        if self._say is not None and time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(why)

    def broken(self, scene: JobScene) -> str:
        """The name of the limit that has passed, '' while all is well."""
        beats = scene.beats.values()
        progress = tuple(
            # Ranks mark how far a long save or load has come; other phases prove nothing.
            (beat.rank, beat.task, beat.steps, beat.marks if beat.phase in SLOW_PHASES else 0)
            for beat in beats
            if beat.steps or beat.phase in SLOW_PHASES
        )
        if progress != self._progress:
            self._progress, self._changed_at = progress, time.monotonic()
        task = max((beat.task for beat in beats), default=0)
        started = len(scene.beats) == scene.ranks and all(
            beat.steps or beat.rank in scene.exits for beat in beats if beat.task == task
        )
        limits = self._job.task_limits(task)
        self._tell(scene, task)
        if started and self.seconds > limits.step_s:
            return f"step limit {limits.step_s:g} s"
        if not started and self.seconds > limits.start_s:
            return f"start limit {limits.start_s:g} s"
        return ""

    def _tell(self, scene: JobScene, task: int) -> None:
        now = time.monotonic()
        if self._say is None or now - self._said_at < _SAY_EVERY_S:
            return
        self._said_at = now
        beats = scene.beats.values()
        busiest = max(beats, key=lambda beat: (beat.task, beat.marks), default=None)
        if busiest is None:
            self._say(f"starting {counted(scene.ranks, 'rank')}")
            return
        of = f"run {task + 1} of {self._job.tasks}, " if self._job.tasks > 1 else ""
        self._say(f"{of}{counted(busiest.steps, 'step')} done, now {busiest.phase}")
