"""accelerate: DDP and FSDP2 as it prepares them, around the reference's decoder; its accumulation,
backward and clipping."""

from __future__ import annotations

import os

import torch

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look, Plain
from fourfold.conformance.ranks.reference import ADAMW, CLIP, local

os.environ["TORCHDYNAMO_DISABLE"] = "1"


class Accelerate(Adapter):
    modules = ("accelerate",)

    @staticmethod
    def legal(cell: Cell) -> str:
        if max(cell.pp, cell.cp, cell.tp, cell.ep) > 1 or cell.etp:
            return "pp, cp, tp and ep need a model of transformers"
        if cell.replicas > 1 and cell.shards > 1:
            return "HSDP is not asked for here"
        other = sorted(cell.options - {"fsdp", "accumulate", "uneven", "tied", "experts", "sinks"})
        return f"{other[0]} is no option of it" if other else ""

    @classmethod
    def prepare(cls, cell: Cell) -> None:
        os.environ["ACCELERATE_USE_FSDP"] = str(cell.has("fsdp")).lower()
        os.environ["FSDP_VERSION"] = "2"

    def build(self) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = None
        if self.cell.has("fsdp"):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=True,
                cpu_ram_efficient_loading=False,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
            )
        self.accelerator = Accelerator(
            cpu=self.case.device.type == "cpu",
            fsdp_plugin=plugin,
            gradient_accumulation_steps=self.case.micros,
        )
        model = Plain(self.tiny, self.elements)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.take(self.model.parameters())

    def step(self, step: int, look: Look) -> tuple[float, float]:
        case, seen, norm = self.case, torch.zeros((), dtype=torch.float64), 0.0
        for x, y in case.ignored(step, case.rank):
            with self.accelerator.accumulate(self.model):
                part = self.model(x, y) / case.targets(step)
                seen += part.detach().double().cpu()
                # The mean over ranks is DDP's and FSDP's, that over micro batches accelerate's.
                self.accelerator.backward(part * case.cell.dp * case.micros)
                if self.accelerator.sync_gradients:
                    look()
                    clip = self.accelerator.clip_grad_norm_
                    norm = float(local(clip(self.model.parameters(), CLIP)))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self.sum_over_ranks(seen), norm


ENGINE = Accelerate
