"""Schedules x sharding x formats x recompute x families, as users combine them: whatever the rules
call legal must train, and its losses must be those of one process."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import UserError
from fourfold.search.legal import Target, why_not
from fourfold.spec.batch import Batch
from fourfold.spec.catalog import TINY, model
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.verbs.verify_cases import layouts
from tests.engine.verified import verified
from tests.specs import run_spec

SEED = 20261115
# The formats that the engine runs; the last three mix them by hand.
FORMATS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32"},
    {"precision": "fp64"},
    {"precision": "bf16-pure"},
    {"precision": "bf16-mixed"},
    {"precision": "fp16"},
    {"precision": "fp8"},
    {"precision": "bf16-mixed", "param_dtype": "bf16"},
    {"precision": "bf16-mixed", "optimizer_dtype": "bf16"},
    {"precision": "bf16-mixed", "reduce_dtype": "bf16", "grad_dtype": "bf16"},
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "sharding": ("zero0", "zero1", "zero2", "zero3"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "virtual_stages": (1, 2),
    "recompute": ("none", "full", "selective", "every-2"),
    "cp_kind": ("ring", "allgather", "ulysses"),
    "sequence_parallel": (True, False),
    "fused_projections": (True, False),
    "loss_chunks": (1, 2),
    "offload": ("none", "none", "activations"),
    "optimizer": ("adamw", "adamw-plain"),
    "prefetch": (0, 1, 2),
    "attention": ("auto", "flash", "fused", "unfused"),
}


def draw(chance: random.Random, gpus: int) -> RunSpec | None:
    """A run at random; None if the rules refuse it."""
    choices = {name: chance.choice(values) for name, values in CHOICES.items()}
    # Three in four have a pipeline: without one a schedule means nothing.
    pipelined = chance.random() < 0.75
    layout = chance.choice([one for one in layouts(gpus) if (one.pp > 1) == pipelined])
    if not pipelined:
        choices |= {"schedule": "1f1b", "virtual_stages": 1}
    elif choices["schedule"] != "zero-bubble":
        choices["virtual_stages"] = 2 if choices["schedule"] == "interleaved" else 1
    batch = Batch(
        seq_len=32, global_batch=chance.choice((8, 7, 4)), micro_batch=chance.choice((1, 2, 3))
    )
    try:
        policy = Policy(**chance.choice(FORMATS), **choices)
    except UserError:
        return None
    shape = model(TINY[chance.choice(list(TINY))])
    if why_not(shape, layout, batch, policy, Target(gpus=gpus)):
        return None
    return run_spec(shape, layout, batch=batch, policy=policy, device="cpu", steps=3, warmup=0)


def sample(count: int, gpus: int, seed: int) -> list[RunSpec]:
    chance = random.Random(f"{seed} {gpus}")
    found: dict[str, RunSpec] = {}
    while len(found) < count:
        spec = draw(chance, gpus)
        if spec is not None:
            found.setdefault(spec.run_id, spec)
    return list(found.values())


def pairs(specs: list[RunSpec]) -> set[tuple[str, str]]:
    """What meets what, among the five choices that touch gradients."""
    met = set()
    for spec in specs:
        policy = spec.policy
        words = (policy.schedule, policy.sharding, policy.precision, policy.recompute)
        met |= set(itertools.combinations((*words, spec.model.family), 2))
    return met


def failures(specs: list[RunSpec], folder: Path) -> list[str]:
    return [
        f"{spec.model.name} {spec.layout} {spec.batch} {spec.policy}: {row}"
        for spec, row in zip(specs, verified(specs, folder), strict=True)
        if not row["pass"]
    ]


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_split_backward_with_gradients_of_two_formats(share, tmp_path):
    # Norms and biases have their gradients after the first part, in the format of accumulation.
    specs = [
        run_spec(
            TINY[family], layout, device="cpu", steps=3, warmup=0, seq_len=32, global_batch=4,
            micro_batch=micro, sharding=sharding, schedule="zero-bubble", sequence_parallel=False,
        )
        for layout in layouts(2) if layout.pp == 2
        for family in TINY
        for sharding, micro in (("zero3", 1), ("zero2", 4))
    ]  # fmt: skip
    assert failures(specs[::share], tmp_path) == []


TWO, FOUR = sample(80, 2, SEED), sample(240, 4, SEED)
PARTS = [some[at : at + 16] for some in (TWO, FOUR) for at in range(0, len(some), 16)]


def test_the_sample_has_every_pair_of_choices():
    met = pairs(TWO + FOUR)
    wanted = {
        (schedule, sharding) for schedule in CHOICES["schedule"] for sharding in CHOICES["sharding"]
    }
    wanted |= {
        (sharding, each["precision"]) for sharding in CHOICES["sharding"] for each in FORMATS
    }
    wanted |= {(each["precision"], kind) for each in FORMATS for kind in CHOICES["recompute"]}
    assert wanted <= met


@pytest.mark.slow
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_no_legal_combination_crashes_and_every_loss_is_one_process(part, tmp_path):
    bad = failures(PARTS[part], tmp_path)
    assert bad == [], f"{len(bad)} of {len(PARTS[part])}:\n" + "\n".join(bad)
