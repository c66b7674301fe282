"""A store of runs as a sweep leaves it: layouts of a model on several numbers of GPUs, some of
which failed. Times follow from the layout by a formula here, so that every value is known.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from fourfold.result.files.store import Store
from fourfold.result.report import (
    Failure,
    OomReport,
    Prediction,
    RankMemory,
    RankSteps,
    RunReport,
    StepReport,
)
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from tests.specs import run_spec

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    '<a href="http://evil.example/x">click</a>',
    "<b>bold</b> & <i>it</i> %{x} $x$",
    "\"quoted\" 'both' \\ back",
)
GIB = 2**30
ENVIRONMENT = (
    ("device", "NVIDIA H100 80GB HBM3"),
    ("host", "node-1"),
    ("torch", "2.13.0"),
    ("NCCL_DEBUG", "WARN"),
)


def specs(count: int, *, model: str = "llama-3.2-1b") -> list[RunSpec]:
    """Different runs; the first ones are powers of two of every axis."""
    found = []
    sizes = itertools.product((1, 2, 4, 8), (8, 16, 32, 64), (1, 2, 4), (1, 2, 4), (1, 2))
    for steps, (micro, gpus, tp, pp, cp) in itertools.product(range(10, 40), sizes):
        used = tp * pp * cp
        if gpus % used or len(found) >= count:
            continue
        fields = {"seq_len": 8192, "micro_batch": micro, "global_batch": 256}
        fields |= {"precision": "bf16-mixed", "steps": steps, "warmup": 2}
        layout = Layout(pp=pp, cp=cp, tp=tp, shard=gpus // used)
        found.append(run_spec(model, layout, **fields))
    return found


def step_s(spec: RunSpec) -> float:
    layout, batch = spec.layout, spec.batch
    cost = 1.0 + 0.06 * (layout.tp - 1) + 0.04 * (layout.pp - 1) + 0.05 * (layout.cp - 1)
    size = spec.model.layers * spec.model.hidden**2 * batch.tokens
    return 2.4e-13 * size * cost * (1 + 0.1 / batch.micro_batch) / spec.gpus


def report(spec: RunSpec, number: int = 0, environment=ENVIRONMENT) -> RunReport:
    """Every 11th ran out of memory, every 29th crashed."""
    seconds = step_s(spec)
    noise = (0.004, -0.003, 0.001, 0.012, -0.005)
    peak = int((14 + 5.5 * spec.batch.micro_batch / spec.layout.tp / spec.layout.cp) * GIB)
    said = Prediction(
        step_s=seconds * (0.93 + 0.03 * (number % 6)), step_s_low=seconds * 0.84,
        step_s_high=seconds * 1.17, peak_bytes=1.05 * peak, limit_bytes=79.0 * GIB,
        basis="h100-80gb",
    )  # fmt: skip
    ranks = range(min(spec.gpus, 4 * spec.layout.pp))
    stage = {rank: rank * spec.layout.pp // len(ranks) for rank in ranks}
    memory = tuple(
        RankMemory(rank=r, stage=stage[r], peak_bytes=peak - stage[r] * GIB, reserved_bytes=peak)
        for r in ranks
    )
    hosts = tuple(RankSteps(rank=r, host=f"node-{r // 8 + 1}") for r in range(spec.gpus))
    whole = {"spec": spec, "environment": environment, "predicted": said, "ranks": hosts}
    at = f"2026-11-{1 + number % 28:02d}T10:{number % 60:02d}:00+00:00"
    if number % 11 == 10:
        why = Failure(rank=1, stage=0, phase="forward", message="OutOfMemoryError: 2.0 GiB asked")
        short = OomReport(live_bytes=78 * GIB, asked_bytes=2 * GIB, limit_bytes=79 * GIB)
        return RunReport(outcome="oom", failure=why, shortage=short, started_at=at, **whole)
    if number % 29 == 28:
        why = Failure(
            rank=3, stage=0, phase="backward", message="RuntimeError: NCCL error <b>x</b>"
        )
        return RunReport(outcome="crashed", failure=why, started_at=at, **whole)
    steps = [
        StepReport(
            step=i,
            seconds=seconds * (1 + noise[i % 5] + (0.3 if i == 0 else 0)),
            loss=11.0 - 0.05 * i,
            warmup=i < spec.warmup,
        )
        for i in range(spec.warmup + min(spec.steps, 10))
    ]
    return RunReport(
        outcome="ok", steps=tuple(steps), memory=memory, started_at=at, start_s=9.0, **whole
    )


def fill(root: Path, count: int) -> Store:
    store = Store(root)
    for number, spec in enumerate(specs(count)):
        store.keep(report(spec, number))
    return store


def fill_hostile(root: Path) -> Store:
    """Notes, tags, models and hosts that would like to be scripts."""
    store = Store(root)
    for number, (spec, text) in enumerate(zip(specs(5), HOSTILE, strict=True)):
        model = replace(spec.model, name=text, layers=4)
        environment = (("device", text), ("host", text), ("torch", "2.13.0"), ("NOTE", text))
        named = replace(spec, model=model, note=text, tag=f"tag {text}")
        store.keep(report(named, number, environment))
    why = Failure(rank=0, stage=0, phase="forward", message=HOSTILE[0])
    bad = replace(report(specs(6)[5], 28), failure=why)
    store.keep(bad)
    return store
