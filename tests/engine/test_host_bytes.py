"""What our engine's operators move on a CPU besides products: formulas against the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.cost.fit.coefficients import HOST, defaults
from fourfold.cost.run import columns_of
from fourfold.cost.step import host
from fourfold.cost.step.estimate import estimate
from fourfold.engine import compat
from fourfold.engine.microbench.host import Moved
from fourfold.engine.observe.operators import collective, is_collective
from fourfold.engine.observe.phases import mark_phases
from fourfold.engine.parallel.groups import fake_world
from fourfold.engine.process.task import CPU
from fourfold.engine.training.trainer import Trainer
from fourfold.search.predict import rough_cpu
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.words import CP_KINDS

WITHIN = 0.03


LLAMA = catalog.model("llama-mini")
MPT = replace(catalog.model("mpt-tiny"), hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=4096)


def run(
    layers: int, layout: Layout, model: ModelShape = LLAMA, micros: int = 1, **policy: Any
) -> RunSpec:
    return RunSpec(
        model=replace(model, layers=layers),
        gpus=layout.world,
        layout=layout,
        batch=Batch(seq_len=128, micro_batch=1, global_batch=micros * layout.dp),
        policy=Policy(precision="fp32", **policy),
        device="cpu",
    )


def moved(spec: RunSpec) -> Counter[str]:
    """Bytes by phase of one step of rank 0, on fake tensors."""
    compat.quiet()
    phases: list[tuple[str, int]] = []
    with fake_world(spec.layout, 0) as world:
        trainer = Trainer(spec, world, device=CPU, materialize=False)
        with compat.fake_mode(), Moved() as counted:
            trainer.materialize(initial=False)
            for parameter in trainer.optimizer.params:
                parameter.grad = torch.zeros_like(parameter)
            trainer.optimizer.step()
            mark_phases(trainer, lambda phase: phases.append((phase, counted.bytes)))
            trainer.step(1)
            phases.append(("end", counted.bytes))
    found: Counter[str] = Counter()
    for (phase, before), (_, after) in pairwise(phases):
        found[phase] += after - before
    return found


def of_a_layer(layout: Layout, **policy: Any) -> tuple[int, int]:
    """(forward, backward)"""
    two, three = (moved(run(layers, layout, **policy)) for layers in (2, 3))
    return three["forward"] - two["forward"], three["backward"] - two["backward"]


def counted(layout: Layout, **policy: Any) -> tuple[float, float]:
    c = columns_of([run(2, layout, **policy)], cluster=rough_cpu(layout.world, 2), stack="fourfold")
    forward, backward = host.layer_bytes(c, c.tokens)
    return forward[0], backward[0]


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        (Layout(), {}),
        (Layout(), {"fused_projections": False}),
        (Layout(tp=2), {}),
        (Layout(tp=2), {"sequence_parallel": False}),
        (Layout(), {"model": MPT}),
        (Layout(tp=2), {"model": MPT}),
        (Layout(tp=2), {"model": MPT, "sequence_parallel": False}),
    ],
    ids=[
        "alone",
        "projections apart",
        "tp2",
        "tp2 whole sequence",
        "biases",
        "biases tp2",
        "biases tp2 whole sequence",
    ],
)
def test_a_layer_moves_what_is_counted(layout: Layout, policy: dict[str, Any]) -> None:
    assert np.allclose(counted(layout, **policy), of_a_layer(layout, **policy), rtol=WITHIN)


@pytest.mark.parametrize("kind", CP_KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallelism_moves_what_is_counted(kind: str, ranks: int) -> None:
    """Beside what FSDP does with weights, as it does for as many ranks of data parallelism."""
    alone, wrapped = of_a_layer(Layout()), of_a_layer(Layout(shard=ranks))
    weights = np.subtract(wrapped, alone)
    found = np.subtract(of_a_layer(Layout(cp=ranks), cp_kind=kind), weights)
    assert np.allclose(counted(Layout(cp=ranks), cp_kind=kind), found, rtol=WITHIN)


class Sent(Moved):
    """Counts collectives and their bytes besides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and is_collective(func):
            sent = collective(func, args, kwargs or {}, out)
            if sent is not None:
                self.calls[sent[1]] += 1
                self.payload[sent[1]] += sent[2]
        return out


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_fsdp_sends_what_is_counted(sharding: str, tied: bool) -> None:
    """In as many pieces: embedding and head are one."""
    spec = run(3, Layout(shard=2), replace(LLAMA, tied=tied), micros=3, sharding=sharding)
    compat.quiet()
    with fake_world(spec.layout, 0) as world:
        trainer = Trainer(spec, world, device=CPU, materialize=False)
        with compat.fake_mode(), Sent() as sent:
            trainer.materialize(initial=False)
            trainer.step(1)
    c = columns_of([spec], cluster=rough_cpu(2, 2), stack="fourfold")
    free = defaults() | dict.fromkeys((*HOST, "fixed_s", "micro_s"), 0.0)
    free |= {"cpu_product": 1e30, "flash": 1e30}

    def counted(name: str) -> float:
        return float(estimate(c, free | {name: 1.0}).step_s[0])

    assert counted("cpu_gather_s") == pytest.approx(sent.calls["all-gather"], abs=1e-6)
    assert counted("cpu_scatter_s") == pytest.approx(sent.calls["reduce-scatter"], abs=1e-6)
    # Of two ranks each sends half of what is gathered; weights of norms are not counted.
    for name, op in (("gather", "all-gather"), ("scatter", "reduce-scatter")):
        assert 2.0 * counted(f"cpu_{name}_byte_s") == pytest.approx(sent.payload[op], rel=WITHIN)
