"""The dryrun job: the trainer itself, as any rank of any world, on fake tensors without
hardware."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch

from fourfold.engine import compat, compat_modes
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.observe.operators import gpu_kernels
from fourfold.engine.observe.phases import count_of, mark_phases, watch
from fourfold.engine.parallel.groups import fake_world
from fourfold.engine.process.task import CPU, Task
from fourfold.engine.training.trainer import Trainer
from fourfold.result.one_rank import RankCount, extrapolated
from fourfold.spec.run import RunSpec


def perform(task: Task) -> None:
    """Option `ranks`: which ranks of the simulated world; real processes share them."""
    compat.quiet()
    torch.set_num_threads(1)
    ranks = [int(word) for word in task.job.option("ranks", "0").split(",")]
    for rank in ranks[task.rank :: task.place.world]:
        task.heartbeat.enter(f"counting rank {rank}")
        with gpu_kernels():
            task.answer(count_rank(task.spec, rank), part=rank)
        task.heartbeat.step_done()


def count_rank(spec: RunSpec, rank: int) -> RankCount:
    """One step of one rank. Nothing is compiled here: compiled code computes the same. Tokens are
    synthetic: fake tensors have no values that could be read from a file. Of a ramp-up the full
    batch counts."""
    batch = replace(spec.batch, ramp=None)
    loss = "lean" if spec.policy.is_loss_lean else "torch"
    policy = replace(spec.policy, compile=False, loss=loss)
    spec = replace(spec, data="", batch=batch, policy=policy)
    whole = spec.batch.micro_count(spec.layout.dp)
    # The fullest moment comes when gradients of one micro batch exist and pp full ones are in
    # flight; after that, and before an uneven last one, each adds only its own work and tokens.
    pp = spec.layout.pp
    few = pp + 2
    more = max(few + 1, 2 * pp)
    if spec.policy.virtual_stages > 1:  # up to 2 pp in flight, and rounds of pp that end alike
        few = 2 * pp + 2 + (whole - 2) % pp
        more = few + pp
    if whole <= more + 1:
        return _count(spec, rank)
    counts = [_count(with_micro_batches(spec, count), rank) for count in (few, more)]
    return extrapolated(*counts, micro_batches=whole)


def with_micro_batches(spec: RunSpec, count: int) -> RunSpec:
    """The same run with fewer full micro batches on every rank; an uneven rest is kept."""
    dropped = spec.batch.micro_count(spec.layout.dp) - count
    sequences = spec.batch.global_batch - dropped * spec.batch.micro_batch * spec.layout.dp
    return replace(spec, batch=replace(spec.batch, global_batch=sequences, ramp=None))


def _count(spec: RunSpec, rank: int) -> RankCount:
    """The model is built and cut outside the fake mode: FSDP's meshes need real integers."""
    began = time.perf_counter()
    with fake_world(spec.layout, rank) as world:
        trainer = Trainer(spec, world, device=CPU, materialize=False)
        with compat_modes.fake_mode(), Ledger() as ledger:
            trainer.materialize(initial=False)
            # The optimizer's state, which a run has from its second step on, without a first step.
            for parameter in trainer.optimizer.params:
                parameter.grad = torch.zeros_like(parameter)
            trainer.optimizer.step()
            watch(trainer, ledger)
            mark_phases(trainer, ledger.mark)
            gc.collect()
            ledger.begin()
            trainer.step(1)
            ledger.mark("end")
            return count_of(ledger, trainer, time.perf_counter() - began)
