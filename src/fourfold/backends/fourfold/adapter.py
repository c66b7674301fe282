"""fourfold's own engine, by the same interface as the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Case, Look
from fourfold.conformance.ranks.reference import ADAMW, CLIP, Part, batch
from fourfold.engine import compat
from fourfold.engine.parallel.groups import World
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.training.trainer import Trainer
from fourfold.engine.verify.faults import FAULTS
from fourfold.engine.verify.naming import canonical
from fourfold.search.legal import Target, why_not
from fourfold.spec import Batch, Layout, Policy, RunSpec
from fourfold.spec.experts import Moe
from fourfold.spec.model import ModelShape, Positions


class Batches:
    """The reference's batches as a source of the engine."""

    waited_s = 0.0

    def __init__(self, case: Case) -> None:
        self.case = case

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        case = self.case
        x, y, m = batch(case.tiny, first // case.tiny.batch, case.seed)
        rows, columns = sequences.cpu()[:, None].clamp(min=0), positions.cpu()
        y = torch.where(m > 0, y, torch.full_like(y, -100))[rows, columns]
        y[sequences.cpu() < 0] = -100
        return x[rows, columns].to(case.device), y.to(case.device)

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None: ...


def run_of(case: Case) -> RunSpec:
    t, cell = case.tiny, case.cell
    model = ModelShape(
        family="llama",
        layers=t.layers,
        hidden=t.hidden,
        ffn=t.ffn,
        heads=t.heads,
        kv_heads=t.kv_heads,
        vocab=t.vocab,
        positions=Positions(kind="rope", theta=t.theta),
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=t.tied,
        norm_eps=t.eps,
        head_dim=t.head_dim,
        experts=t.experts,
        top_k=t.top_k if t.experts else 0,
        moe=Moe(ffn=t.ffn, normalised=t.renorm, balance="none") if t.experts else None,
    )
    sharding: Any = next((w for w in ("zero1", "zero2", "zero3") if cell.has(w)), "zero0")
    policy = Policy(
        precision="fp32",
        sharding="zero3" if cell.has("fsdp") else sharding,
        sequence_parallel=cell.has("sp"),
        virtual_stages=cell.virtual,
        schedule="interleaved" if cell.virtual > 1 else "1f1b",
        recompute="full" if cell.has("recompute") else "none",
        dispatcher="allgather" if cell.has("allgather") else "auto",
    )
    layout = Layout(
        pp=cell.pp,
        replicate=cell.replicas if cell.shards > 1 else 1,
        shard=cell.shards if cell.shards > 1 else cell.replicas,
        cp=cell.cp,
        tp=cell.tp,
        ep=cell.ep,
        etp=max(1, cell.etp),
    )
    sizes = Batch(seq_len=t.seq, micro_batch=case.micro_rows, global_batch=t.batch)
    return RunSpec(
        model=model,
        gpus=cell.world,
        layout=layout,
        batch=sizes,
        policy=policy,
        steps=3,
        device="cuda" if case.device.type == "cuda" else "cpu",
        warmup=0,
    )


class Own(Adapter):
    trainer_class: type[Trainer] = Trainer
    modules = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")

    @staticmethod
    def legal(cell: Cell) -> str:
        other = {"sinks", "overlap", "per-micro", "cp-tokens"}
        refused = sorted(cell.options & other)
        if cell.has("experts") and cell.tp > 1 and not cell.has("sp"):
            return "experts with tp need sp: every rank routes its own tokens"
        return f"{refused[0]} is no option here" if refused else ""

    @classmethod
    def plant(cls, fault: str) -> None:
        """Its own faults replace the trainer; those of any engine are planted below it."""
        if fault in FAULTS:
            cls.trainer_class = FAULTS[fault]
        else:
            super().plant(fault)

    @staticmethod
    def decays(name: str) -> bool:
        return "norm" not in name

    def build(self) -> None:
        compat.quiet()
        spec = run_of(self.case)
        refusals = why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus))
        if refusals:
            raise ValueError(str(refusals[0]))
        self.trainer = self.trainer_class(
            spec,
            World.create(spec.layout, self.case.device.type),
            device=self.case.device,
            settings=OptimizerSettings(max_norm=CLIP, **ADAMW),
            source=Batches(self.case),
        )
        self.shards = [
            (self._numbers(shard), shard)
            for shard in self.trainer.shards
            if shard.name.endswith(".weight")  # not what a router counts
        ]
        for numbers, shard in self.shards:
            self.elements.fill(shard.values, numbers)

    def _numbers(self, shard: Any) -> Tensor:
        name, expert = canonical(shard.name)
        whole = self.elements.start[name]
        whole = whole[expert] if whole.ndim == 3 else whole
        rows, columns = slice(*shard.rect.rows), slice(*shard.rect.columns)
        return whole[rows] if whole.ndim == 1 else whole[rows, columns]

    def owned(self) -> list[Part]:
        return [(numbers, shard.values) for numbers, shard in self.shards]

    def gradients(self) -> list[Part]:
        return [(n, shard.grad.clone()) for n, shard in self.shards if shard.grad is not None]

    def step(self, step: int, look: Look) -> tuple[float, float]:
        done = self.trainer.reduce(self.trainer.accumulate(step))
        look()
        self.trainer.update(done.grad_norm)
        return float(done.loss + done.router_loss), float(done.grad_norm)


ENGINE = Own
