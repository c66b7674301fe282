"""The processes of one start of a job: made, polled and always ended.

Nothing outlives the launcher: the worker gets a signal from the kernel when the launcher dies (a
closed pipe tells it elsewhere than Linux) and ends its ranks; the ranks get SIGKILL when the worker
dies; and whatever else they started is in the worker's process group, which is killed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fourfold
from fourfold.launch.devices import core_count
from fourfold.launch.outcomes import Scene, kernel_kills
from fourfold.result.job import JOB_FILE, beat_file, log_file, read_beat
from fourfold.spec.job import Job

# Of an outer torchrun or Slurm step: they describe other ranks than ours.
_OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
_END_S = 5.0
# Not SIGTERM: a batch system sends that to every process, and a training then saves first.
END_SIGNAL = signal.SIGUSR2


class Ranks:
    """One worker process and its ranks. Must be ended by the thread that made it."""

    def __init__(self, job: Job, tasks: list[int], folder: Path) -> None:
        self.scene = Scene(folder=folder, ranks=job.processes(tasks[0]))
        self._kills_before = kernel_kills()
        self._unread = b""
        # -P: a torch.py in the folder a command is called from is not torch.
        command = [sys.executable, "-P", "-m", "fourfold.engine.worker", str(folder / JOB_FILE)]
        command += ["--tasks", ",".join(map(str, tasks)), "--launcher", str(os.getpid())]
        with open(log_file(folder, -1), "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_env(job, tasks[0]),
                start_new_session=True,
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def all_ended(self) -> bool:
        return len(self.scene.exits) == self.scene.ranks

    def poll(self) -> bool:
        """Take in exits and beats; True when the worker itself is gone."""
        gone = self.process.poll() is not None  # asked first: its last lines are then in the pipe
        self._read_exits()
        for rank in range(self.scene.ranks):
            beat = read_beat(beat_file(self.scene.folder, rank))
            if beat is not None:
                self.scene.beats[rank] = beat
        return gone

    def _read_exits(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.process.stdout.fileno(), 65536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            end = json.loads(line)
            self.scene.exits.setdefault(end["rank"], (end["code"], end["at"]))
            self.scene.kernel_kills = kernel_kills() - self._kills_before

    def end(self) -> None:
        """Whatever state they are in, stopped ones too; returns when they are gone."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(END_SIGNAL)
                self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()


def worker_env(job: Job, task: int) -> dict[str, str]:
    """The caller's variables, what one host needs, and the run's own on top."""
    env = {name: value for name, value in os.environ.items() if name not in (*_OUTER, *_MEETING)}
    own = job.task_env(task)
    source = str(Path(fourfold.__file__).parent.parent)
    paths = [source, *filter(None, [own.get("PYTHONPATH", env.get("PYTHONPATH", ""))])]
    defaults = {
        # As torchrun: without a bound every rank would start a thread per core.
        "OMP_NUM_THREADS": str(max(1, core_count() // job.processes(task))),
        # Ranks of one host meet on the loopback device, whatever the host's name resolves to.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # torch keeps its last collectives, to be dumped when a limit passes.
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    return (
        defaults
        | env
        | own
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "FOURFOLD_STARTED_AT": repr(time.time()),
        }
    )
