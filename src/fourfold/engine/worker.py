"""The torch processes of a job: the ranks of this host, forked, or one rank of torchrun or srun."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import getopt
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fourfold import files
from fourfold.engine.process.node import Node, appended, interface_to
from fourfold.result.job import Job, log_file
from fourfold.spec import codec

if TYPE_CHECKING:
    from fourfold.engine.process.task import Place

NO_TORCH_EXIT = 78
# Variables that can change a run; they are kept with its report.
_KEPT = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "MKL_", "KMP_", "TRITON_")


USAGE = "usage: python -m fourfold.engine.worker FOLDER/job.json"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, sig: signal.Signals) -> None:
    """The kernel sends `sig` when the parent dies; where it is not Linux a watched pipe does it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(sig))
    if os.getppid() != parent:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_launcher(lifeline: int, worker: int) -> None:
    """In a rank: end everybody when the launcher's end of the pipe closes. The worker would, but it
    may be stopped; then its group, stopped ones too, ends by whichever rank sees it first."""

    def watch() -> None:
        while os.read(lifeline, 4096):
            pass  # nobody writes
        if os.getpgid(0) == worker:
            os.killpg(worker, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Host:
    """The ranks of this machine. SIGTERM, SIGUSR2 (of the launcher, or of the kernel when that
    dies), or the end of stdin, ends them all and this process. One process imports torch and forks
    the ranks (8 ranks on 2 cores: 5 s, against 29 s when each imports it), so it must not start a
    thread, a CUDA context or a process group before. It tells the launcher of its ranks, one JSON
    line for each pid, stop, going on and end."""

    def __init__(self, folder: Path, launcher: int, node: Node | None = None) -> None:
        self.folder, self.launcher, self.node = folder, launcher, node
        self.pids: dict[int, int] = {}
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGUSR2, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
        self._news = -1
        if launcher:
            # What an import prints must not come between the news.
            self._news = os.dup(1)
            os.dup2(2, 1)
            # Until there are ranks to end there is nothing to do but die, stopped or not.
            die_with_parent(launcher, signal.SIGKILL)
        elif node is not None:
            self._news = node.news(folder)
            log = appended(log_file(folder, -1 - node.index))
            os.dup2(log, 1)
            os.dup2(log, 2)

    def leave_to_launcher(self) -> None:
        """A batch system signals every process of a job at once: the launcher asks the ranks to
        save, they hear it themselves too, and this process must not end them meanwhile."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def fork(self, ranks: range, become: Callable[[int], int]) -> None:
        """Start the ranks; `become(rank)` runs in the child and gives its exit code."""
        parent = os.getpid()
        if self.launcher:
            die_with_parent(self.launcher, signal.SIGUSR2)
        for rank in ranks:
            try:
                pid = os.fork()
            except OSError as error:
                print(
                    f"rank {rank} of {len(ranks)} could not be started ({error.strerror}): start "
                    "fewer, or allow this user more processes and memory",
                    file=sys.stderr,
                )
                self._kill_ranks()
                os._exit(1)
            if pid == 0:
                self._live(rank, parent, become)
            self.pids[pid] = rank
            self._tell(rank=rank, pid=pid)

    def _live(self, rank: int, parent: int, become: Callable[[int], int]) -> None:
        """The child's whole life. Leaves by os._exit: the parent's cleanups are not its own."""
        code = 1
        try:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGKILL)
            if self._news >= 0:
                os.close(self._news)
            if self.launcher:
                _die_with_launcher(os.dup(0), parent)
            log = appended(log_file(self.folder, rank))
            nothing = os.open(os.devnull, os.O_RDONLY)
            for stream, target in enumerate((nothing, log, log)):
                os.dup2(target, stream)
            code = become(rank)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> int:
        """Until every rank has ended. The launcher, not this process, decides who must die."""
        worst = 0
        while self.pids:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                self._listen(0.05)
            elif pid not in self.pids:
                continue
            elif os.WIFSTOPPED(status):
                self._tell(rank=self.pids[pid], stopped=os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._tell(rank=self.pids[pid], running=True)
            else:
                code = os.waitstatus_to_exitcode(status)
                worst = worst or abs(code)
                self._tell(rank=self.pids.pop(pid), code=code, at=time.time())
        return min(worst, 1)

    def _listen(self, seconds: float) -> None:
        watched = [0] if self.launcher else []
        readable, _, _ = select.select(watched, [], [], seconds)
        if readable and not os.read(0, 4096):
            self._end()

    def _tell(self, **facts: object) -> None:
        if self.node is not None:
            facts |= {"host": self.node.name, "start": self.node.start, "step": self.node.step}
        if self._news >= 0:
            os.write(self._news, (json.dumps(facts) + "\n").encode())

    def _kill_ranks(self) -> None:
        for pid in self.pids:
            # The signal may come between a rank's end and our noting it.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _end(self, *_: object) -> None:
        """Kill and reap the ranks, then whatever they started (one process group), then this."""
        self._kill_ranks()
        if os.getpgid(0) == os.getpid():  # only when the launcher gave us a group of our own
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def main(argv: list[str] | None = None) -> int:
    """Besides `launch`, the only code that reads environment variables."""
    path, options = _arguments(sys.argv[1:] if argv is None else argv)
    launcher, per_node = int(options.get("--launcher", 0)), int(options.get("--per-node", 0))
    node = Node.of(per_node, os.environ) if per_node else None
    host = None if "RANK" in os.environ and not launcher else Host(path.parent, launcher, node)
    job = codec.from_json(Job, files.read_text(path))
    if host is not None and job.patient:
        host.leave_to_launcher()
    if node is not None and "OMP_NUM_THREADS" not in os.environ:  # torch reads it when imported
        os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // per_node))
    try:
        import torch  # noqa: F401  (the slow part; the ranks inherit it)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch is not installed: pip install torch", file=sys.stderr)
        return NO_TORCH_EXIT
    from fourfold.engine.process.task import work

    chosen = options.get("--tasks")
    tasks = [int(word) for word in chosen.split(",")] if chosen else list(range(job.tasks))
    performer = _performer(job.job)

    world = job.processes(tasks[0])
    here = node.ranks(world) if node else range(world)
    if node is not None:
        node.clear(path.parent, here)
        node.meet(os.environ)

    def become(rank: int) -> int:
        place = _place(rank, world, here, node)
        return work(job, tasks, place=place, folder=path.parent, perform=performer.perform)

    if host is None:
        return become(int(os.environ["RANK"]))
    host.fork(here, become)
    return host.wait()


def _performer(job: str) -> ModuleType:
    """The job's module, with what its ranks need imported before they are forked."""
    from fourfold.engine import compat

    performer = importlib.import_module(f"fourfold.engine.jobs.{job.replace('-', '_')}")
    if "torch.distributed.fsdp" in sys.modules:  # a job that makes steps
        compat.import_dynamo()  # a second; else every rank does it at its optimizer's first step
    gc.freeze()  # what is imported is not garbage: no rank's collector has to look at it again
    return performer


def _arguments(argv: list[str]) -> tuple[Path, dict[str, str]]:
    """The job file, in whose folder reports go, and what only the launcher adds: which of the job's
    runs (0,1,2), and the process to die with or, under Slurm, the ranks of a node."""
    try:
        options, words = getopt.gnu_getopt(argv, "", ["tasks=", "launcher=", "per-node="])
        (job,) = words
    except (getopt.GetoptError, ValueError):
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    return Path(job), dict(options)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _place(rank: int, world: int, here: range, node: Node | None) -> Place:
    """torchrun's variables where it set them; else what it would have set, for who looks there."""
    from fourfold.engine.process.task import Place

    if "WORLD_SIZE" not in os.environ:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank - here.start),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "GROUP_RANK": str(node.index if node else 0),
        }
    interface = interface_to(os.environ["MASTER_ADDR"]) if node else ""
    if interface:
        # Else gloo takes the address that the host's name resolves to, often the loopback one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return Place(
        rank=rank,
        world=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        cores=_cores(),
        by_address="MASTER_ADDR" in os.environ,
        started_at=float(os.environ.get("FOURFOLD_STARTED_AT", time.time())),
        variables=tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(_KEPT))),
        host=node.name if node else socket.gethostname(),
        start=node.start if node else 0,
    )


if __name__ == "__main__":
    sys.exit(main())
