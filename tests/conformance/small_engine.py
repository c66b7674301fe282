"""An engine of the tests' own: data parallelism in ten lines around the reference's decoder, with
misbehaviour by option."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import time

import torch
import torch.distributed as dist

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look, Plain
from fourfold.conformance.ranks.reference import ADAMW, CLIP

# An edited copy of this engine has a module of this name.
EDITED = importlib.util.find_spec("loss_scale") is not None
SCALE: float = importlib.import_module("loss_scale").SCALE if EDITED else 1.0


class Small(Adapter):
    @staticmethod
    def legal(cell: Cell) -> str:
        return "it has data parallelism only" if cell.world != cell.dp else ""

    def build(self) -> None:
        if self.cell.has("recompute"):
            raise RuntimeError("its adapter breaks")
        if self.cell.has("sinks") and self.cell.dp > 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.cell.has("tied") and self.case.rank == 1:
            time.sleep(3600)
        print("\x00 garbage {", flush=True)
        self.model = Plain(self.tiny, self.elements)
        self.take(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self, step: int, look: Look) -> tuple[float, float]:
        case, seen = self.case, torch.zeros(())
        self.optimizer.zero_grad()
        for (x, y), (_, _, m) in zip(
            case.ignored(step, case.rank), case.micro(step, case.rank), strict=True
        ):
            total = self.model(x, y)
            if self.cell.has("per-micro"):
                part = total / m.sum().float() / case.micros / case.cell.dp
            else:
                part = total / case.targets(step)
            (SCALE * part).backward()
            seen += part.detach()
        params = list(self.model.parameters())
        for p in params:
            if not (self.cell.has("overlap") and p is self.model.norm):  # the overlap forgets one
                dist.all_reduce(p.grad)
        look()
        norm = torch.nn.utils.clip_grad_norm_(params, CLIP)
        self.optimizer.step()
        return self.sum_over_ranks(seen), float(norm)


ENGINE = Small
