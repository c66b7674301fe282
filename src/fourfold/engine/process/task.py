"""One rank's life: its tasks in order, what it knows while it works on one, facts or a failure left
behind as files."""

from __future__ import annotations

import faulthandler
import json
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold import files
from fourfold.engine.parallel import host_group
from fourfold.engine.process.health import Heartbeat, NonFiniteError, OomError, outcome_of
from fourfold.errors import UserError
from fourfold.result.job import Job, RankFacts, RankFailure, answer_file, facts_file, failure_file
from fourfold.result.machine import cpu_name, gpu_facts, host_memory_bytes
from fourfold.result.report import Failure, RankMemory, RankSteps
from fourfold.spec import codec
from fourfold.spec.run import RunSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the others, in torchrun's words; not `by_address`: they meet by a file.
    `start`: how often a batch system has started the job over."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    cores: int = 1
    by_address: bool = False
    started_at: float = 0.0
    variables: tuple[tuple[str, str], ...] = ()
    host: str = ""
    start: int = 0


@cache
def _meeting(rank: int, world: int) -> dist.Store:
    """Where ranks of several hosts meet, once for all tasks: no port is bound twice."""
    return next(iter(dist.rendezvous("env://", rank, world)))[0]


@dataclass(frozen=True, slots=True)
class Task:
    job: Job
    index: int
    place: Place
    folder: Path
    heartbeat: Heartbeat
    began_at: float

    @property
    def spec(self) -> RunSpec:
        return self.job.specs[self.index]

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks may share a GPU: NCCL refuses that, so they talk through host memory."""
        return self.job.option("share_gpu") == "true"

    def device(self, wanted: str) -> torch.device:
        """`auto` takes a GPU per local rank where there are enough."""
        if wanted == "auto":
            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            wanted = "cuda" if gpus >= self.place.local_world else "cpu"
        if wanted != "cuda":
            return CPU
        local = self.place.local_rank
        return torch.device("cuda", local % torch.cuda.device_count() if self.shares_gpu else local)

    def join(self, device: torch.device) -> None:
        """Meet the other ranks. By a file on one host: no port to be taken by somebody else."""
        self.heartbeat.enter("join")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        by_nccl = device.type == "cuda" and not self.shares_gpu
        backend = "nccl" if by_nccl else host_group.use() if self.shares_gpu else "gloo"
        where: dict[str, Any] = {"device_id": device} if by_nccl else {}
        world = self.place.world
        if self.place.by_address:
            where["store"] = dist.PrefixStore(f"{self.index}", _meeting(self.rank, world))
        else:
            where["store"] = dist.FileStore(str(self.folder / f"store-{self.index}"), world)
        dist.init_process_group(backend, rank=self.rank, world_size=world, **where)

    def leave(self) -> None:
        self.heartbeat.enter("leave")
        if dist.is_initialized():
            dist.destroy_process_group()

    def answer(self, value: Any, part: int | None = None) -> None:
        """What the command asked for. One rank answers, or several give numbered parts."""
        plain = value if isinstance(value, dict) else codec.dump(value)
        path = answer_file(self.folder, self.index, part)
        files.write_text(path, json.dumps(plain, indent=2) + "\n")


_MESSAGE_CHARS = 2000


def work(
    job: Job,
    tasks: Sequence[int],
    *,
    place: Place,
    folder: Path,
    perform: Callable[[Task], RankFacts | None],
) -> int:
    """The first failure ends it: the peers can't go on without this rank anyway."""
    faulthandler.enable()
    heartbeat = Heartbeat(folder, place.rank)
    heartbeat.start()
    try:
        for index in tasks:
            heartbeat.begin(index)
            # The first task's start includes that of the processes.
            began_at = place.started_at if index == tasks[0] else time.time()
            task = Task(job, index, place, folder, heartbeat, began_at)
            facts = perform(task) or _no_facts(place)
            files.write_text(facts_file(folder, index, place.rank), codec.to_json(facts))
        heartbeat.enter("done")
    except BaseException as error:
        _report_failure(folder, heartbeat, error)
        return 1
    heartbeat.stop()
    return 0


def _no_facts(place: Place) -> RankFacts:
    """The mark of a finished task that measures nothing by rank."""
    return RankFacts(
        memory=RankMemory(rank=place.rank, stage=0, peak_bytes=0),
        times=RankSteps(rank=place.rank, host=place.host),
    )


def _report_failure(folder: Path, heartbeat: Heartbeat, error: BaseException) -> None:
    """The failure as a file, the traceback in the rank's log; a bad request needs none."""
    at = time.time()
    report = error.report if isinstance(error, OomError) else None
    cause = error.__cause__ or error if isinstance(error, OomError) else error
    is_asked = isinstance(error, UserError)
    text = str(error) if is_asked else f"{type(cause).__name__}: {cause}"
    failure = Failure(
        rank=heartbeat.rank,
        stage=heartbeat.stage,
        phase=heartbeat.phase,
        message=text[:_MESSAGE_CHARS],
    )
    echo, outcome = isinstance(error, NonFiniteError) and not error.from_here, outcome_of(error)
    record = RankFailure(outcome=outcome, failure=failure, at=at, echo=echo, shortage=report)
    files.write_text(failure_file(folder, heartbeat.rank), codec.to_json(record))
    if is_asked:
        print(error, file=sys.stderr)
    else:
        traceback.print_exception(error)


def machine_facts(device: torch.device, cores: int) -> dict[str, Any]:
    """Fields of HardwareProfile that are read, not measured."""
    memory, units, power_w, name = host_memory_bytes(), cores, 0.0, cpu_name()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        memory, units, name = facts.total_memory, facts.multi_processor_count, facts.name
        limit = driver_facts(device).get("power.limit", "")
        power_w = float(limit) if limit.replace(".", "").isdecimal() else 0.0
    return {
        "device": device.type,
        "device_name": name,
        "host": socket.gethostname(),
        "torch": str(torch.__version__),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": cores,
        "units": units,
        "memory_bytes": memory,
        "power_w": power_w,
    }


def environment(device: torch.device, place: Place) -> tuple[tuple[str, str], ...]:
    """Everything of the surroundings that can change a number, as names and texts."""
    facts = {
        "host": place.host,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": cpu_name(),
        "cores": str(place.cores),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "allocator": torch.cuda.get_allocator_backend(),
        }
        facts |= {f"driver.{name}": text for name, text in driver_facts(device).items()}
    facts |= {f"env.{name}": text for name, text in place.variables}
    return tuple(sorted(facts.items()))


def driver_facts(device: torch.device) -> dict[str, str]:
    """What only the driver's own tool tells; empty where it is not installed."""
    names = ("driver_version", "power.limit", "clocks.max.sm", "pcie.link.gen.current")
    return gpu_facts(*names, uuid=uuid_of(device))


def uuid_of(device: torch.device) -> str:
    """As the driver's tool knows a GPU; '' for a CPU."""
    if device.type != "cuda":
        return ""
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
