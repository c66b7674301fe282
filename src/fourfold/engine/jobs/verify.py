"""The verify job: each layout is compared with one process; ranks live for many layouts."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.engine import compat
from fourfold.engine.data.source import Synthetic
from fourfold.engine.jobs.build import release
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.shards import InitRule
from fourfold.engine.process.task import Task
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.training.trainer import Trainer
from fourfold.engine.verify.expert_faults import EXPERT_FAULTS
from fourfold.engine.verify.faults import FAULTS
from fourfold.engine.verify.findings import Piece, RankFindings, verdict
from fourfold.engine.verify.muon_faults import MUON_FAULTS
from fourfold.engine.verify.naming import Answers, name_of
from fourfold.engine.verify.reference import Recipe, Truth, steady
from fourfold.spec import codec
from fourfold.spec.run import RunSpec

_STEPS = 3
# eps 1e-5: a key bias has no gradient in exact arithmetic, and rounding must not steer Adam. The
# norm of these models' gradients falls with the root of the batch, from 0.5 to 1 at 8 sequences to
# 0.2 to 0.5 at 48: clipping acts.
_SETTINGS = OptimizerSettings(lr=3e-3, eps=1e-5, max_norm=0.1)
_MASKED = 0.2
_VECTOR_STD = 0.1
_ROUTER_STD = 0.2  # scores far enough apart that rounding seldom chooses another expert
_world = functools.cache(World.create)  # groups are kept for the next layout with the same axes


def recipe(spec: RunSpec) -> Recipe:
    vocab, seq_len = spec.model.vocab, spec.batch.seq_len
    source = Synthetic(vocab=vocab, seq_len=seq_len, seed=spec.seed, masked=_MASKED)
    rule = InitRule(vector_std=_VECTOR_STD, router_std=_ROUTER_STD, idle=True)
    return Recipe(source=source, settings=_SETTINGS, rule=rule, steps=_STEPS)


def perform(task: Task) -> None:
    began = time.perf_counter()
    compat.quiet()
    torch.set_num_threads(1)
    spec = task.spec
    device = task.device(spec.device)
    if not dist.is_initialized():
        task.join(device)
    task.heartbeat.enter("reference")
    truth = reference(spec, task.folder, device)
    spec = replace(spec, seed=truth.seed)
    task.heartbeat.enter("groups")
    world = _world(spec.layout, device.type)
    task.heartbeat.enter("build")
    fault, how = task.job.option("break"), recipe(spec)
    trainer = (FAULTS | EXPERT_FAULTS | MUON_FAULTS)[fault] if fault else Trainer
    trainer = trainer(
        spec, world, device=device, settings=how.settings, source=how.source, rule=how.rule
    )
    findings, pieces = RankFindings(), {}
    for step in range(_STEPS):
        task.heartbeat.enter(f"step {step}")
        pieces |= _step(trainer, step, truth, findings)
        task.heartbeat.step_done()
    pieces["param"] = findings.look(trainer.shards, truth, at_grads=False)
    row = gathered(findings, pieces, truth, spec, device)
    del trainer
    release(device, compiled=spec.policy.compile)
    if row is not None:
        task.answer(row | {"seconds": round(time.perf_counter() - began, 3)})


def _step(
    trainer: Trainer, step: int, truth: Truth, findings: RankFindings
) -> dict[str, list[Piece]]:
    """A trainer's step, with a look at the gradients before they are clipped."""
    done = trainer.reduce(trainer.accumulate(step))
    pieces = {}
    if step == 0:
        scale = 1.0 if trainer.scaler is None else float(trainer.scaler.scale)
        pieces["grad"] = findings.look(trainer.shards, truth, at_grads=True, scale=scale)
    findings.look_at_routers(trainer)
    trainer.update(done.grad_norm)
    if step == 0:
        pieces["moved"] = [
            (shard.name, shard.rect.rows, shard.rect.columns, shard.values.cpu().clone())
            for shard in trainer.shards
            if not shard.param.requires_grad
        ]
    findings.losses.append(float(done.loss + done.router_loss))
    findings.norms.append(float(done.grad_norm))
    return pieces


def gathered(
    findings: RankFindings,
    pieces: dict[str, list[Piece]],
    truth: Truth,
    spec: RunSpec,
    device: torch.device,
) -> dict[str, Any] | None:
    """The row of the report on rank 0, None elsewhere. What differs gets a name."""
    found = _on_first(findings)
    row = None if found is None else verdict(found, truth, spec.policy)
    equal = [row is not None and row["pass"]]
    dist.broadcast_object_list(equal)
    if equal[0]:
        return row
    parts = _on_first(pieces)
    if row is not None and found is not None and parts is not None:
        answers = Answers(found, parts, truth, spec)
        row["signature"] = name_of(answers, recipe(spec), device)
    return row


def _on_first(mine: Any) -> list[Any] | None:
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone


def reference(spec: RunSpec, folder: Path, device: torch.device) -> Truth:
    """Made once for all layouts of a model, batch and precision, by rank 0, in a file."""
    plain = {
        "model": codec.encode(spec.model),
        "seq_len": spec.batch.seq_len,
        "global_batch": spec.batch.global_batch,
        "seed": spec.seed,
        "dtypes": codec.encode(spec.policy.dtypes),
        "optimizer": spec.policy.optimizer,
        "muon": codec.encode(replace(spec.policy.muon, placement="owner")),
    }
    name = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"reference-{name}.pt"
    if dist.get_rank() == 0 and not path.exists():
        truth = steady(spec, recipe, device)
        parts = [getattr(truth, field.name) for field in fields(truth)]
        torch.save(parts, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    dist.barrier()
    return _read(path)


@functools.cache
def _read(path: Path) -> Truth:
    return Truth(*torch.load(path, mmap=True))
