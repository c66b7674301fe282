"""What a plan says an engine runs, --export writes for it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fourfold
from fourfold import PlanRequest
from fourfold.errors import UserError
from fourfold.search.export import USUAL, runs_in, writers
from fourfold.search.plan_answer import Choice
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking, rank_layouts
from fourfold.spec.engine import EXPORTS, engine_of
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.verbs.question import SEARCHED, resolved
from tests.sampling import examples
from tests.specs import shape_of

DENSE: tuple[str | ModelShape, ...] = (
    "llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "gemma-2-2b", "nemotron-4-15b", "mistral-7b",
    shape_of({"of": "mistral-7b", "name": "windowed", "window": 1024}),
)  # fmt: skip
EXPERTS: tuple[str | ModelShape, ...] = (
    "qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "deepseek-v2-lite", "deepseek-v3",
    "gpt-oss-20b", "llama4-scout",
    shape_of({"of": "mixtral-8x7b", "name": "drops", "moe": {"ffn": 14336, "capacity": 1.5}}),
)  # fmt: skip
# Values of every lever of a policy; those of experts are drawn for models with experts alone.
LEVERS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16-pure", "fp16", "fp8", "fp4"),
    "param_dtype": ("bf16",),
    "grad_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("bf16", "fp32"),
    "optimizer_dtype": ("bf16",),
    "scaling": ("tensor", "delayed", "block", "mx", "row"),
    "sharding": ("zero0", "zero1", "zero2", "zero3"),
    "sequence_parallel": (True, False),
    "cp_kind": ("ring", "allgather", "ulysses"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "virtual_stages": (1, 2, 3),
    "recompute": ("none", "selective", "norm+mlp", "full", "every-2", "block-1"),
    "attention": ("flash", "cudnn", "unfused", "fused-softmax"),
    "optimizer": ("adamw-plain", "muon"),
    "compile": (True, False),
    "cuda_graph": (True,),
    "async_tp": (True,),
    "prefetch": (0,),
    "overlap_grad_reduce": (False,),
    "overlap_param_gather": (False,),
    "fused_projections": (False,),
    "loss_chunks": (4,),
    "loss": ("torch", "lean"),
    "offload": ("activations",),
    "env": ({"NCCL_DEBUG": "WARN"},),
}
EXPERT_LEVERS: dict[str, tuple[Any, ...]] = {
    "dispatcher": ("local", "alltoall", "allgather", "deepep", "hybridep", "ncclep"),
    "routing": ("natural", "forced"),
    "imbalance": (0.5,),
    "overlap_exchange": (True,),
    "overlap_kind": ("combined-1f1b", "dualpipe", "two-batch", "shared-expert"),
    "recompute": ("moe", "moe-act"),
}
STACKS = (None, "megatron", "torchtitan", "accelerate", "deepspeed", "fourfold", "generic",
          "megatron-bridge-2026", "megatron-lm-2025", "torchtitan-2024", "hai-llm")  # fmt: skip


def drawn(dice: Random) -> PlanRequest:
    """Return a question with a few levers set, most of them as nobody asks for them."""
    model = dice.choice((*DENSE, *EXPERTS))
    levers = {**LEVERS}
    has_experts = model in EXPERTS
    if has_experts:
        levers |= EXPERT_LEVERS | {"recompute": (*LEVERS["recompute"], *EXPERT_LEVERS["recompute"])}
    names = dice.sample(sorted(levers), dice.choice((0, 1, 1, 2, 3)))
    if "overlap_kind" in names:
        names.append("overlap_exchange")
    policy = {name: dice.choice(levers[name]) for name in names}
    axes = {"tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (2,)} | (
        {"ep": (1, 4, 8)} if has_experts else {}
    )
    fixed = {axis: dice.choice(sizes) for axis, sizes in axes.items() if dice.random() < 0.25}
    return PlanRequest(
        model=model,
        gpu=dice.choice(("h100-80gb", "h100-80gb", "b200", "a100-80gb")),
        gpus=dice.choice((8, 16, 32)),
        seq_len=2048,
        global_batch=dice.choice((64, 96, 128)),
        stack=dice.choice(STACKS),
        layout=" ".join(f"{axis}{size}" for axis, size in fixed.items()),
        policy=policy,
        explore=dice.random() < 0.3,
    )


def answered(dice: Random) -> tuple[PlanRequest, Ranking]:
    """Return the next drawn question that has an answer."""
    while True:
        request = drawn(dice)
        try:
            ranking = rank_layouts(resolved(request)[0], least=2)
        except UserError:
            continue
        if len(ranking):
            return request, ranking


def refusal(request: PlanRequest, engine: str, choice: Choice, policy: Mapping[str, Any]) -> str:
    """Return why --export writes no settings for a layout of a plan, '' where it does."""
    rules = engine_of(EXPORTS[engine].export.predicted_as).rules.name
    keeps_stack = request.stack is not None and engine_of(request.stack).rules.name == rules
    asked = replace(
        request,
        stack=request.stack if keeps_stack else None,
        export=engine,
        layout=codec_layout(choice),
        micro_batch=choice.micro_batch,
        policy=dict(policy),
    )
    try:
        written = fourfold.export(asked)
    except UserError as error:
        return str(error)
    assert written.choice.layout == choice.layout
    assert written.choice.micro_batch == choice.micro_batch
    assert {name: getattr(written.choice.policy, name) for name in SEARCHED} == {
        name: getattr(choice.policy, name) for name in SEARCHED
    }
    return ""


def codec_layout(choice: Choice) -> dict[str, object]:
    layout = choice.layout
    return {
        name: getattr(layout, name)
        for name in ("pp", "replicate", "shard", "cp", "tp", "ep", "etp")
    }


def listed(query: PlanQuery, spec: RunSpec) -> tuple[str, ...]:
    """Return titles of what can be written: of older releases where the newer one cannot be."""
    can = writers(query, spec)
    names = [n for n in can if n in (*USUAL, query.resolved.engine.rules.name)]
    return tuple(EXPORTS[n].title for n in names if EXPORTS[n].export.before not in names)


# 300 in all, in parts that each end well within a test's time where other work takes the cores.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))]


@pytest.mark.parametrize("part", PARTS)
@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_engines_named_by_plan_are_those_export_writes(part: int, seed: int) -> None:
    request, ranking = answered(Random(f"{part} {seed}"))
    query, choice, spec = ranking.query, ranking.choice(0), ranking.spec(0)
    searched = {name: getattr(choice.policy, name) for name in SEARCHED}
    assert runs_in(query, spec) == listed(query, spec)
    for engine in EXPORTS:
        why = refusal(request, engine, choice, {**request.policy, **searched})
        if why.startswith("nothing to export: no layout fits"):
            continue  # priced as the export's engine, it needs more memory
        assert (engine in writers(query, spec)) == (not why), (request, str(choice), engine, why)
