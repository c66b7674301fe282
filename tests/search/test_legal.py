"""Each rule of legality refuses what it should, with field, rule and way out, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cost.stacks import ENGINES, stack_rules
from fourfold.search.legal import REASONS, RULES, Target, why_not
from fourfold.spec import catalog
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

LLAMA = catalog.model("llama-3.1-8b")  # 32 layers, 32 heads, 8 kv heads, ffn 14336
GPT3 = catalog.model("gpt-3-175b")  # 96 layers, 96 heads, learned positions 2048
NARROW = catalog.shape("llama", layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, vocab=64)
DEEP, DEEPER = catalog.model("llama-3.1-70b"), catalog.model("llama-3.1-405b")
TIED = catalog.model("llama-3.2-1b")
MIXTRAL = catalog.model("mixtral-8x7b")  # 8 experts, ffn 14336
QWEN_MOE = catalog.model("qwen3-30b-a3b")
SHARING = catalog.model("deepseek-v2-lite")  # shared experts of 2816 together
LOOPED = {"schedule": "interleaved"}
TITAN = {**LOOPED, "virtual_stages": 2, "stack": "torchtitan", "sharding": "zero3"}
BATCH = Batch(seq_len=2048, micro_batch=1, global_batch=64)
A100 = catalog.device("a100-80gb")


def reasons(
    model=LLAMA, layout="dp1", *, batch=BATCH, stack="generic", gpus=None, device=None, **policy
):
    target = Target(stack=stack, gpus=gpus, device=device)
    refused = why_not(model, Layout.parse(layout), batch, Policy(**policy), target)
    for refusal in refused:
        assert refusal.rule
        assert refusal.field
        assert str(refusal.value) in str(refusal)
    return [refusal.reason for refusal in refused]


def batch(**fields):
    return replace(BATCH, **fields)


CASES = [
    ("world", {"layout": "dp2 tp2", "gpus": 8}, {"layout": "dp4 tp2", "gpus": 8}),
    (
        "family",
        {"model": catalog.model("nemotron-4-15b"), "stack": "fourfold"},
        {"model": catalog.model("nemotron-4-15b"), "stack": "megatron"},
    ),
    (
        "precision",
        {"precision": "fp4", "stack": "fourfold"},
        {"precision": "fp16", "stack": "fourfold"},
    ),
    (
        "device-precision",
        {"precision": "fp8", "device": A100},
        {"precision": "fp8", "device": catalog.device("h100-80gb")},
    ),
    (
        "scaling",
        {
            "precision": "fp8",
            "scaling": "mx",
            "stack": "megatron",
            "device": catalog.device("h200"),
        },
        {
            "precision": "fp8",
            "scaling": "mx",
            "stack": "megatron",
            "device": catalog.device("b200"),
        },
    ),
    (
        "axis",
        {"layout": "tp2", "stack": "llm-foundry"},
        {"layout": "dp2", "stack": "llm-foundry", "sharding": "zero3"},
    ),
    (
        "cp-kind",
        {"layout": "cp2", "stack": "torchtitan", "cp_kind": "ring", "sharding": "zero3"},
        {"layout": "cp2", "stack": "torchtitan", "cp_kind": "allgather", "sharding": "zero3"},
    ),
    (
        "schedule",
        {"layout": "pp2", "stack": "nanotron", "schedule": "zero-bubble"},
        {"layout": "pp2", "stack": "nanotron", "schedule": "gpipe"},
    ),
    (
        "recompute",
        {"stack": "nanotron", "recompute": "every-2"},
        {"stack": "nanotron", "recompute": "full"},
    ),
    (
        "sharding",
        {"layout": "dp2", "stack": "nanotron", "sharding": "zero3"},
        {"layout": "dp2", "stack": "nanotron", "sharding": "zero1"},
    ),
    (
        "zero-pipeline",
        {"layout": "pp2 dp2", "stack": "megatron", "sharding": "zero3"},
        {"layout": "pp2 dp2", "stack": "fourfold", "sharding": "zero3"},
    ),
    ("hybrid", {"layout": "dp2x2", "sharding": "zero0"}, {"layout": "dp2x2", "sharding": "zero1"}),
    ("hybrid", {"layout": "dp2x2", "stack": "nanotron"}, {"layout": "dp4", "stack": "nanotron"}),
    ("positions", {"model": GPT3, "batch": batch(seq_len=4096)}, {"model": GPT3}),
    (
        "heads",
        {"model": replace(GPT3, ffn=49150), "layout": "tp5", "sequence_parallel": False},
        {"model": GPT3, "layout": "tp32"},
    ),
    (
        "kv-heads",
        {"layout": "tp16", "stack": "torchtitan", "sharding": "zero0"},
        {"layout": "tp16"},
    ),
    ("ffn", {"model": replace(LLAMA, ffn=14338), "layout": "tp4"}, {"layout": "tp4"}),
    (
        "ulysses-heads",
        {"layout": "cp3 tp4", "cp_kind": "ulysses", "batch": batch(seq_len=12288)},
        {"layout": "cp4 tp4", "cp_kind": "ulysses"},
    ),
    (
        "ulysses-heads",
        {"layout": "cp4 tp4", "cp_kind": "ulysses", "stack": "megatron"},
        {"layout": "cp2 tp4", "cp_kind": "ulysses", "stack": "megatron"},
    ),
    (
        "seq-cp",  # Megatron wants two pieces a rank whatever the kind
        {"layout": "cp4", "cp_kind": "ulysses", "batch": batch(seq_len=2052), "stack": "megatron"},
        {"layout": "cp4", "cp_kind": "ulysses", "batch": batch(seq_len=2056), "stack": "megatron"},
    ),
    (
        "seq-cp",
        {"layout": "cp4", "batch": batch(seq_len=2052)},
        {"layout": "cp4", "cp_kind": "ulysses", "batch": batch(seq_len=2052)},
    ),
    (
        "seq-tp",
        {"layout": "tp8", "batch": batch(seq_len=1001)},
        {"layout": "tp8", "batch": batch(seq_len=1001), "sequence_parallel": False},
    ),
    (
        "async-tp",
        {"layout": "tp2", "async_tp": True, "sequence_parallel": False},
        {"layout": "tp2", "async_tp": True},
    ),
    ("stages", {"layout": "pp33"}, {"layout": "pp32"}),
    (
        "virtual-stages",
        {"layout": "pp16", "schedule": "interleaved", "virtual_stages": 3},
        {"layout": "pp16", "schedule": "interleaved", "virtual_stages": 2},
    ),
    (
        "needs-interleaving",
        {"layout": "pp2", "virtual_stages": 2},
        {"layout": "pp2", "schedule": "zero-bubble", "virtual_stages": 2},
    ),
    (
        "needs-virtual-stages",
        {"layout": "pp2", "schedule": "interleaved"},
        {"layout": "pp2", "schedule": "interleaved", "virtual_stages": 2},
    ),
    (
        "needs-virtual-stages",
        {"layout": "pp2", "schedule": "zero-bubble", "stack": "torchtitan"},
        {"layout": "pp2", "schedule": "zero-bubble", "virtual_stages": 2, "stack": "torchtitan"},
    ),
    (
        "stage-layers",  # 80 layers: 36 chunks of 3 are too many
        {"model": DEEP, "layout": "pp4", **LOOPED, "virtual_stages": 9, "stack": "megatron"},
        {"model": DEEP, "layout": "pp4", **LOOPED, "virtual_stages": 5, "stack": "megatron"},
    ),
    (
        "stage-layers",  # 126 + embedding + loss = 16 x 8
        {"model": DEEPER, "layout": "pp16", **LOOPED, "virtual_stages": 3, "stack": "megatron"},
        {"model": DEEPER, "layout": "pp16", **LOOPED, "virtual_stages": 4, "stack": "nemo"},
    ),
    (
        "stage-layers",  # 24 stages of 2 are too many, 12 of 3 (1 at the ends) not
        {"layout": "pp24", "stack": "megatron"},
        {"layout": "pp12", "stack": "megatron"},
    ),
    (
        "stage-layers",  # 12 stages of 3 layers: the twelfth would be empty
        {"layout": "pp12", "stack": "torchtitan", "sharding": "zero3"},
        {"layout": "pp11", "stack": "torchtitan", "sharding": "zero3"},
    ),
    (
        "tied-stages",
        {"model": TIED, "layout": "pp2", "stack": "torchtitan", "sharding": "zero3"},
        {"model": TIED, "layout": "dp2", "stack": "torchtitan", "sharding": "zero3"},
    ),
    (
        "plain-dp",
        {"layout": "dp2 tp2", "stack": "torchtitan", "sharding": "zero0"},
        {"layout": "dp2", "stack": "torchtitan", "sharding": "zero0"},
    ),
    ("needs-pipeline", {"schedule": "zero-bubble"}, {"layout": "pp2", "schedule": "zero-bubble"}),
    (
        "compiled-zero-bubble",
        {"layout": "pp2", "schedule": "zero-bubble", "compile": True, "stack": "fourfold"},
        {"layout": "pp2", "schedule": "zero-bubble", "stack": "fourfold"},
    ),
    (
        "fp8-sizes",
        {"layout": "cp2", "precision": "fp8", "batch": batch(seq_len=2064), "stack": "fourfold"},
        {"layout": "cp2", "precision": "fp8", "batch": batch(seq_len=2080), "stack": "fourfold"},
    ),
    (
        "fp8-sizes",  # ffn / tp = 24
        {"model": NARROW, "layout": "tp4", "precision": "fp8", "stack": "fourfold"},
        {"model": NARROW, "layout": "tp2", "precision": "fp8", "stack": "fourfold"},
    ),
    (
        "fp8-zero-bubble",
        {"layout": "pp2", "schedule": "zero-bubble", "precision": "fp8", "stack": "fourfold"},
        {"layout": "pp2", "schedule": "zero-bubble", "stack": "fourfold"},
    ),
    (
        "unbuilt",  # zero3 keeps gradients in the weights' format, fp32
        {"layout": "dp2", "sharding": "zero3", "grad_dtype": "bf16", "stack": "fourfold"},
        {"layout": "dp2", "sharding": "zero1", "grad_dtype": "bf16", "stack": "fourfold"},
    ),
    (
        "unbuilt",
        {"layout": "tp2", "async_tp": True, "stack": "fourfold"},
        {"layout": "dp2", "async_tp": True, "stack": "fourfold"},
    ),
    (
        "unbuilt",
        {"layout": "dp2", "optimizer_dtype": "fp8", "stack": "fourfold"},
        {"layout": "dp2", "optimizer_dtype": "fp8"},
    ),
    ("expert-dense", {"layout": "dp2 ep2"}, {"model": MIXTRAL, "layout": "dp2 ep2"}),
    ("expert-dense", {"layout": "dp2 etp2"}, {"model": MIXTRAL, "layout": "dp2 etp2"}),
    ("expert-dense", {"recompute": "moe"}, {"model": MIXTRAL, "recompute": "moe"}),
    (
        "expert-tp",
        {"model": QWEN_MOE, "layout": "dp4 tp2", "stack": "torchtitan", "sharding": "zero3"},
        {"model": QWEN_MOE, "layout": "dp4 tp2 ep4", "stack": "torchtitan", "sharding": "zero3"},
    ),
    (
        "experts",
        {"model": MIXTRAL, "layout": "dp3 ep3"},
        {"model": MIXTRAL, "layout": "dp4 ep4"},
    ),
    (
        "expert-ranks",
        {"model": MIXTRAL, "layout": "dp2 ep4"},
        {"model": MIXTRAL, "layout": "dp2 tp2 ep4"},
    ),
    (
        "expert-ranks",  # each copy holds all experts
        {"model": MIXTRAL, "layout": "dp2x2 ep4"},
        {"model": MIXTRAL, "layout": "dp2x2 ep2"},
    ),
    (
        "expert-ranks",
        {"model": MIXTRAL, "layout": "dp4 ep4 etp2"},
        {"model": MIXTRAL, "layout": "dp4 ep2 etp2"},
    ),
    (
        "expert-width",
        {"model": MIXTRAL, "layout": "dp3 etp3"},
        {"model": MIXTRAL, "layout": "dp7 etp7"},
    ),
    (
        "shared-width",
        {"model": replace(SHARING, moe=replace(SHARING.moe, shared_ffn=2815)), "layout": "tp2"},
        {"model": SHARING, "layout": "tp2"},
    ),
    (
        "moe-tp",
        {"model": MIXTRAL, "layout": "tp2", "sequence_parallel": False},
        {"model": MIXTRAL, "layout": "tp2"},
    ),
    (
        "dispatcher",
        {"model": MIXTRAL, "layout": "dp2 ep2", "dispatcher": "local"},
        {"model": MIXTRAL, "layout": "dp2", "dispatcher": "local"},
    ),
    (
        "dispatcher",  # counts of tokens come to the host
        {"model": MIXTRAL, "layout": "dp2 ep2", "cuda_graph": True, "stack": "fourfold"},
        {"model": MIXTRAL, "layout": "dp2", "cuda_graph": True, "stack": "fourfold"},
    ),
    ("dp-batch", {"layout": "dp65"}, {"layout": "dp63"}),
    (
        "equal-shares",
        {"layout": "dp3", "stack": "llm-foundry", "sharding": "zero3"},
        {
            "layout": "dp4",
            "batch": batch(micro_batch=11),
            "stack": "llm-foundry",
            "sharding": "zero3",
        },
    ),
    (
        "micro-divides",
        {"layout": "dp4", "batch": batch(micro_batch=3), "stack": "megatron"},
        {"layout": "dp4", "batch": batch(micro_batch=3), "stack": "fourfold"},
    ),
    (
        "fill",
        {"layout": "pp4 dp32", "stack": "torchtitan", "sharding": "zero2"},
        {"layout": "pp4 dp32", "stack": "fourfold", "sharding": "zero2"},
    ),
    (
        "whole-rounds",
        {"layout": "pp4 dp32", "stack": "megatron", "schedule": "interleaved", "virtual_stages": 2},
        {"layout": "pp4 dp16", "stack": "megatron", "schedule": "interleaved", "virtual_stages": 2},
    ),
    (
        "whole-rounds",  # 9 micro batches on 4 ranks: two rounds, of 4 and 5
        {"layout": "pp4", "batch": batch(global_batch=9), **TITAN},
        {"layout": "pp4", "batch": batch(global_batch=10), **TITAN},
    ),
]


@pytest.mark.parametrize(("reason", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_rule_refuses_the_bad_and_only_that(reason: str, bad: dict, good: dict) -> None:
    assert reasons(**bad) == [reason]
    assert reasons(**good) == []


def test_every_rule_has_a_name_of_its_own_and_a_case() -> None:
    assert len(set(REASONS)) == len(RULES)
    assert {case[0] for case in CASES} == set(REASONS)


def test_all_broken_rules_are_named_at_once() -> None:
    refused = reasons(layout="pp33 tp5 dp100", stack="megatron", gpus=8)
    assert refused == ["world", "heads", "ffn", "seq-tp", "stages", "dp-batch", "micro-divides"]


def test_every_stage_of_a_ramp_is_asked() -> None:
    ramp = Batch(
        seq_len=2048,
        micro_batch=2,
        global_batch=2048,
        ramp=Ramp(start=192, increment=32, samples=10**6),
    )
    assert reasons(layout="dp32", batch=replace(ramp, ramp=None), stack="megatron") == []
    refused = why_not(LLAMA, Layout.parse("dp32"), ramp, Policy(), Target(stack="megatron"))
    assert [r.reason for r in refused] == ["micro-divides"]
    assert "ramp stage 224" in refused[0].rule
    assert reasons(layout="dp16", batch=ramp, stack="megatron") == []
    assert reasons(layout="dp32", batch=ramp, stack="fourfold") == []
    assert reasons(layout="dp193", batch=ramp, stack="fourfold") == ["dp-batch"]
    # Steps of 192, 576, 1792, 2048: none of 224.
    brief = replace(ramp, ramp=Ramp(start=192, increment=32, samples=874))
    assert reasons(layout="dp32", batch=brief, stack="megatron") == []


def test_way_out_of_a_bad_tp_is_legal() -> None:
    refused = why_not(GPT3, Layout.parse("tp5"), BATCH, Policy(sequence_parallel=False))
    assert refused[0].hint == "use tp 1, 2, 3, 4, 6, 8"


def test_stack_names_carry_years_and_flavours() -> None:
    assert stack_rules("megatron-deepspeed-2022b").name == "megatron"
    assert stack_rules("nemo-2025").name == "megatron"
    assert stack_rules("llm-foundry-2023").name == "llm-foundry"
    assert stack_rules("somebody-elses").name == "generic"
    assert set(ENGINES) == {
        "generic",
        "fourfold",
        "megatron",
        "torchtitan",
        "nanotron",
        "llm-foundry",
        "accelerate",
        "deepspeed",
    }
