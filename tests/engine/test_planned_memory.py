"""The planner's bytes of our own engine are the dry run's: formulas against the engine itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from fourfold.cost.memory.unseen import unseen_parts
from fourfold.engine import compat
from fourfold.engine.jobs.dryrun import count_rank
from fourfold.engine.observe.operators import gpu_kernels
from fourfold.errors import UserError
from fourfold.search.legal import Target, why_not
from fourfold.search.predict import anywhere, predict
from fourfold.search.query import usual_cluster
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from tests.specs import run_spec

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-2-7b", "llama-3.1-405b", "llama-2-13b", "mpt-30b")
WITHIN = 0.05


def run(model: str, layers: int, layout: Layout, batch: Batch, **policy: Any) -> RunSpec:
    return run_spec(replace(catalog.model(model), layers=layers), layout, batch=batch, **policy)


def dry_bytes(spec: RunSpec) -> int:
    """Of the fullest rank on a GPU, as `fourfold dryrun --stages` prints it."""
    compat.quiet()
    pp, stride = spec.layout.pp, spec.layout.stride("pp")
    # Of the stages between, the second holds most: it has most layers and micro batches.
    places = {0, min(1, pp - 1), pp - 1}
    with gpu_kernels():
        peak = max(count_rank(replace(spec, device="cpu"), at * stride).peak_bytes for at in places)
    return peak + sum(part.bytes for part in unseen_parts(anywhere(spec)))


def planned_bytes(spec: RunSpec) -> float:
    cluster = usual_cluster(catalog.device("h100-80gb"), spec.gpus)
    return predict([spec], cluster=cluster)[0].peak_bytes


def assert_alike(spec: RunSpec) -> None:
    dry, planned = dry_bytes(spec), planned_bytes(spec)
    policy, batch = spec.policy, spec.batch
    said = (
        f"{spec.model.name}, {spec.model.layers} layers, {spec.layout}, {batch.seq_len} tokens, "
        f"micro {batch.micro_batch} of {batch.global_batch}, {policy}: "
        f"dry run {dry / 2**30:.2f} GiB, planned {planned / 2**30:.2f}"
    )
    assert abs(planned / dry - 1) < WITHIN, said


CHOSEN = [
    run("llama-3.1-8b", 2, Layout(shard=4, tp=8), Batch(seq_len=4096, global_batch=8,
        micro_batch=2), sharding="zero3", recompute="full"),
    run("llama-3.1-70b", 2, Layout(shard=2, tp=8), Batch(seq_len=4096, global_batch=4,
        micro_batch=1), sharding="zero1", recompute="selective"),
    run("llama-2-7b", 4, Layout(pp=2, shard=2, tp=4), Batch(seq_len=2048, global_batch=8,
        micro_batch=1), sharding="zero2", recompute="every-2"),
    # A single round of virtual stages, a single micro batch, a split backward: each frees early.
    run("llama-3.1-405b", 4, Layout(pp=2, shard=2, tp=8), Batch(seq_len=2048, global_batch=4,
        micro_batch=1), sharding="zero0", recompute="full", schedule="interleaved",
        virtual_stages=2),
    run("llama-2-7b", 4, Layout(pp=2, shard=2, tp=8), Batch(seq_len=8192, global_batch=8,
        micro_batch=4), sharding="zero0", recompute="selective", sequence_parallel=False),
    run("llama-3.1-405b", 6, Layout(pp=2, shard=2, cp=2, tp=4), Batch(seq_len=4096,
        global_batch=10, micro_batch=1), sharding="zero3", recompute="full", prefetch=2,
        schedule="zero-bubble", loss_chunks=4, cp_kind="allgather"),
]  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, marks=[] if n in (0, 3) else pytest.mark.slow) for n, s in enumerate(CHOSEN)],
    ids=lambda s: f"{s.model.name} {s.layout} {s.policy.zero}",
)
def test_the_planner_and_the_dry_run_agree(spec: RunSpec) -> None:
    assert_alike(spec)


def sampled(rng: random.Random) -> RunSpec:
    """A legal run with tensor parallelism and recompute, of true width, small in depth."""
    while True:
        pp, virtual = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2])
        schedules = ["1f1b", "1f1b", "gpipe", "zero-bubble"]
        looped = pp > 1 and virtual > 1
        layout = Layout(
            pp=pp,
            replicate=rng.choice([1, 1, 1, 2]),
            shard=rng.choice([1, 2, 4, 8, 32]),
            cp=rng.choice([1, 1, 1, 2]),
            tp=rng.choice([2, 4, 8]),
        )
        micro, micros = rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 8)
        try:
            spec = run(
                rng.choice(MODELS),
                rng.randint(2, 8),
                layout,
                Batch(
                    seq_len=rng.choice([2048, 4096, 8192]),
                    global_batch=layout.dp * micro * micros,
                    micro_batch=micro,
                ),
                sharding=f"zero{rng.choice([0, 1, 1, 2, 3, 3])}",
                recompute=rng.choice(["full", "full", "selective", "every-2"]),
                schedule="interleaved" if looped else rng.choice(schedules) if pp > 1 else "1f1b",
                virtual_stages=virtual if looped else 1,
                precision=rng.choice(["bf16-mixed", "bf16-mixed", "fp8", "bf16-pure", "fp16"]),
                sequence_parallel=rng.random() < 0.8,
                loss_chunks=rng.choice([1, 1, 4]),
                cp_kind=rng.choice(["ring", "allgather", "ulysses"]),
                prefetch=rng.choice([0, 1, 1, 2]),
                fused_projections=rng.random() < 0.8,
            )
        except UserError:
            continue
        target = Target(gpus=spec.gpus)
        if not why_not(spec.model, spec.layout, spec.batch, spec.policy, target):
            return spec


# Of these, 238, 247, 249 and 300 have copies of whole weights, a loss in parts under GPipe, one
# micro batch through virtual stages, whole sequences between stages of one layer.
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n in (249, 300) else pytest.mark.slow) for n in range(301)],
)
def test_they_agree_on_sampled_runs(seed: int) -> None:
    assert_alike(sampled(random.Random(seed)))


def whole(model: str, layout: Layout, seq_len: int, micro: int, micros: int, **policy: Any):
    batch = Batch(seq_len=seq_len, global_batch=layout.dp * micro * micros, micro_batch=micro)
    return run(model, catalog.model(model).layers, layout, batch, **policy)


FULL_SIZE = [
    whole("llama-3.1-70b", Layout(shard=32, tp=8), 8192, 2, 2, sharding="zero3", recompute="full"),
    whole("llama-3.1-8b", Layout(pp=2, shard=4, tp=8), 8192, 1, 8, recompute="selective"),
    whole("llama-2-13b", Layout(shard=8, tp=4), 4096, 2, 4, sharding="zero2", recompute="every-2"),
    whole("llama-3.1-405b", Layout(pp=16, shard=8, tp=8), 8192, 1, 16, recompute="full"),
    whole("llama-3.1-70b", Layout(pp=4, shard=4, cp=2, tp=4), 8192, 1, 8, recompute="full",
          schedule="interleaved", virtual_stages=5),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spec", FULL_SIZE, ids=lambda s: f"{s.model.name} {s.layout}")
def test_they_agree_on_runs_of_full_size(spec: RunSpec) -> None:
    assert_alike(spec)
