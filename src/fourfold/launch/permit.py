"""What a job may do on this host: what it has room for, what the command line allows beyond, and
whether others measure here meanwhile, which makes the seconds of both too high."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.job import Job
from fourfold.result.machine import host_memory_bytes, lacks_instructions, listed_gpus
from fourfold.spec import RunSpec, check
from fourfold.spec.site import Env, require_plain
from fourfold.units import counted, show_bytes


def core_count() -> int:
    """Cores this process may run on; a container may give fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count() -> int:
    """CUDA_VISIBLE_DEVICES where it is set, else what the driver's tool lists; 0 without either."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [word.strip() for word in visible.split(",") if word.strip()]
        return len(ids[: ids.index("-1")] if "-1" in ids else ids)
    return listed_gpus()


def kind_of(spec: RunSpec) -> str:
    """Where a run will be: `auto` takes GPUs where there are enough."""
    if spec.device != "auto":
        return spec.device
    return "cuda" if gpu_count() >= spec.gpus else "cpu"


def emulated(spec: RunSpec) -> str:
    """What to know of a run on this host whose dtype its CPU has no instructions for; else ''."""
    dtype = spec.policy.dtypes.compute
    if kind_of(spec) == "cuda" or not lacks_instructions(dtype):
        return ""
    return f"this CPU has no {dtype} instructions, torch emulates them slowly: try --precision fp32"


def require_gpus(
    device: str, ranks: int, *, hint: str = "device = cpu", shared: bool = False
) -> None:
    """Every rank computes on a GPU of its own, or (`shared`) there is one for all of them; said
    before ranks start, not by one that falls."""
    if device != "cuda" or (gpus := gpu_count()) >= (1 if shared else ranks):
        return
    wanted = "a GPU" if shared else f"{counted(ranks, 'GPU')}, one per rank"
    rule = f"needs {wanted}, but this machine has {gpus}"
    hint = f"use {counted(gpus, 'rank')}, or {hint}" if gpus else f"use {hint}"
    raise UserError(rule, field="device", value=device, hint=hint)


# A rank of the smallest model, forked from a worker that has imported torch: 80 to 90 MB of its
# own, measured with torch 2.13 on CPU.
RANK_BYTES = 96 * 2**20
# Many small ranks on few cores are of use (verify, a look at a large layout); thousands are not.
_RANKS_PER_CORE, _ALWAYS = 16, 64


@dataclass(frozen=True, slots=True)
class Permit:
    """`env`: variables that no file may set, with these very values. `oversubscribe`: more ranks
    than the host has room for."""

    env: Env = ()
    oversubscribe: bool = False

    def require(self, specs: Iterable[RunSpec], *, ranks: int = 1) -> None:
        """Refuse what asks for more, before anything of it starts. `ranks`: the most at once."""
        for spec in specs:
            require_plain(spec.policy.env, granted=self.env)
        self.require_room(ranks)

    def require_job(self, job: Job) -> None:
        self.require(job.specs, ranks=max(job.processes(task) for task in range(job.tasks)))

    def require_room(self, ranks: int) -> None:
        if self.oversubscribe or ranks <= 1:
            return
        most, why = most_ranks()
        rule = f"is too many: this host has room for {counted(most, 'rank')} ({why})"
        check.that(ranks <= most, "gpus", ranks, rule, "use fewer, or pass --oversubscribe")


def most_ranks() -> tuple[int, str]:
    memory_bytes, cores, gpus = host_memory_bytes(), core_count(), gpu_count()
    by_memory = max(1, memory_bytes // RANK_BYTES)
    by_cores = max(_ALWAYS, _RANKS_PER_CORE * cores, gpus)
    if by_memory < by_cores:
        room = f"{show_bytes(memory_bytes)} of memory, and a rank takes {show_bytes(RANK_BYTES)}"
        return by_memory, f"{room} before its model"
    return by_cores, f"{counted(cores, 'core')} and {counted(gpus, 'GPU')}"


T = TypeVar("T")
_LOCK = "fourfold-measures.lock"


@contextlib.contextmanager
def measuring() -> Iterator[bool]:
    """Whether this process is the only one of the host that measures; of whichever user."""
    path = os.path.join(tempfile.gettempdir(), _LOCK)
    with contextlib.ExitStack() as stack:
        is_alone = True
        # OSError: no folder for temporary files, or one without locks, where nobody can know.
        with contextlib.suppress(OSError):
            lock = files.try_lock(path, mode=0o666)
            is_alone = lock is not None
            if lock is not None:
                stack.callback(lock.release)
        yield is_alone


def warned_if_shared(run: Callable[..., T], warn: Callable[[str], None]) -> Callable[..., T]:
    """`run`, with a word when another command measures at the same time; once is enough."""
    said: list[bool] = []

    def watched(*args: object) -> T:
        with measuring() as is_alone:
            if not is_alone and not said:
                said.append(True)
                warn("another fourfold command measures on this host: seconds of both are too high")
            return run(*args)

    return watched
