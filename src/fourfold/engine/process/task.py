"""What does one rank know while it works on one task of a job?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold import files
from fourfold.engine.parallel import host_group
from fourfold.engine.process.heartbeat import Heartbeat
from fourfold.result.job import answer_file
from fourfold.spec import codec
from fourfold.spec.job import Job
from fourfold.spec.run import RunSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the others, in torchrun's words; not `by_address`: they meet by a file."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    cores: int = 1
    by_address: bool = False
    started_at: float = 0.0
    variables: tuple[tuple[str, str], ...] = ()


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
            enough = torch.cuda.is_available() and (
                torch.cuda.device_count() >= self.place.local_world
            )
            wanted = "cuda" if enough else "cpu"
        if wanted != "cuda":
            return torch.device("cpu")
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
        if self.place.by_address:
            dist.init_process_group(backend, rank=self.rank, world_size=self.place.world, **where)
            return
        store = dist.FileStore(str(self.folder / f"store-{self.index}"), self.place.world)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.place.world, **where
        )

    def leave(self) -> None:
        self.heartbeat.enter("leave")
        if dist.is_initialized():
            dist.destroy_process_group()

    def answer(self, value: Any, part: int | None = None) -> None:
        """What the command asked for. One rank answers, or several give numbered parts."""
        plain = value if isinstance(value, dict) else codec.dump(value)
        path = answer_file(self.folder, self.index, part)
        files.write_text(path, json.dumps(plain, indent=2) + "\n")
