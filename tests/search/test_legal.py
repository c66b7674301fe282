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
        assert "use " in refusal.hint or refusal.reason in ("family", "async-tp")
    return [refusal.reason for refusal in refused]


def batch(**fields):
    return replace(BATCH, **fields)


# Rule -> what both runs have in common, what is refused, what is not.
CASES = [
    ("world", {"gpus": 8}, {"layout": "dp2 tp2"}, {"layout": "dp4 tp2"}),
    ("family", {"model": catalog.model("nemotron-4-15b")},
     {"stack": "fourfold"}, {"stack": "megatron"}),
    ("precision", {"stack": "fourfold"}, {"precision": "fp4"}, {"precision": "fp16"}),
    ("device-precision", {"precision": "fp8"},
     {"device": A100}, {"device": catalog.device("h100-80gb")}),
    ("scaling", {"precision": "fp8", "scaling": "mx", "stack": "megatron"},
     {"device": catalog.device("h200")}, {"device": catalog.device("b200")}),
    ("scaling", {"stack": "megatron", "scaling": "block"},
     {"precision": "bf16-mixed"}, {"precision": "fp8"}),
    ("axis", {"stack": "llm-foundry"}, {"layout": "tp2"}, {"layout": "dp2", "sharding": "zero3"}),
    ("cp-kind", {"layout": "cp2", "stack": "torchtitan", "sharding": "zero3"},
     {"cp_kind": "ring"}, {"cp_kind": "allgather"}),
    ("schedule", {"layout": "pp2", "stack": "nanotron"},
     {"schedule": "zero-bubble"}, {"schedule": "gpipe"}),
    ("recompute", {"stack": "nanotron"}, {"recompute": "every-2"}, {"recompute": "full"}),
    ("sharding", {"layout": "dp2", "stack": "nanotron"},
     {"sharding": "zero3"}, {"sharding": "zero1"}),
    ("zero-pipeline", {"layout": "pp2 dp2", "sharding": "zero3"},
     {"stack": "megatron"}, {"stack": "fourfold"}),
    ("hybrid", {"layout": "dp2x2"}, {"sharding": "zero0"}, {"sharding": "zero1"}),
    ("hybrid", {"stack": "nanotron"}, {"layout": "dp2x2"}, {"layout": "dp4"}),
    ("positions", {"model": GPT3}, {"batch": batch(seq_len=4096)}, {}),
    ("heads", {}, {"model": replace(GPT3, ffn=49150), "layout": "tp5", "sequence_parallel": False},
     {"model": GPT3, "layout": "tp32"}),
    ("kv-heads", {"layout": "tp16"}, {"stack": "torchtitan", "sharding": "zero0"}, {}),
    ("ffn", {"layout": "tp4"}, {"model": replace(LLAMA, ffn=14338)}, {}),
    ("ulysses-heads", {"cp_kind": "ulysses"},
     {"layout": "cp3 tp4", "batch": batch(seq_len=12288)}, {"layout": "cp4 tp4"}),
    ("ulysses-heads", {"cp_kind": "ulysses", "stack": "megatron"},
     {"layout": "cp4 tp4"}, {"layout": "cp2 tp4"}),
    # Megatron wants two pieces a rank whatever the kind.
    ("seq-cp", {"layout": "cp4", "cp_kind": "ulysses", "stack": "megatron"},
     {"batch": batch(seq_len=2052)}, {"batch": batch(seq_len=2056)}),
    ("seq-cp", {"layout": "cp4", "batch": batch(seq_len=2052)}, {}, {"cp_kind": "ulysses"}),
    ("seq-tp", {"layout": "tp8", "batch": batch(seq_len=1001)}, {}, {"sequence_parallel": False}),
    ("async-tp", {"layout": "tp2", "async_tp": True}, {"sequence_parallel": False}, {}),
    ("stages", {}, {"layout": "pp33"}, {"layout": "pp32"}),
    ("virtual-stages", {"layout": "pp16", "schedule": "interleaved"},
     {"virtual_stages": 3}, {"virtual_stages": 2}),
    ("needs-interleaving", {"layout": "pp2", "virtual_stages": 2}, {}, {"schedule": "zero-bubble"}),
    ("needs-virtual-stages", {"layout": "pp2", "schedule": "interleaved"},
     {}, {"virtual_stages": 2}),
    ("needs-virtual-stages", {"layout": "pp2", "schedule": "zero-bubble", "stack": "torchtitan"},
     {}, {"virtual_stages": 2}),
    # 80 layers: 36 chunks of 3 are too many.
    ("stage-layers", {"model": DEEP, "layout": "pp4", **LOOPED, "stack": "megatron"},
     {"virtual_stages": 9}, {"virtual_stages": 5}),
    # 126 + embedding + loss = 16 x 8.
    ("stage-layers", {"model": DEEPER, "layout": "pp16", **LOOPED},
     {"virtual_stages": 3, "stack": "megatron"}, {"virtual_stages": 4, "stack": "nemo"}),
    # 24 stages of 2 are too many, 12 of 3 (1 at the ends) not.
    ("stage-layers", {"stack": "megatron"}, {"layout": "pp24"}, {"layout": "pp12"}),
    # 12 stages of 3 layers: the twelfth would be empty.
    ("stage-layers", {"stack": "torchtitan", "sharding": "zero3"},
     {"layout": "pp12"}, {"layout": "pp11"}),
    ("tied-stages", {"model": TIED, "stack": "torchtitan", "sharding": "zero3"},
     {"layout": "pp2"}, {"layout": "dp2"}),
    ("plain-dp", {"stack": "torchtitan", "sharding": "zero0"},
     {"layout": "dp2 tp2"}, {"layout": "dp2"}),
    ("needs-pipeline", {"schedule": "zero-bubble"}, {}, {"layout": "pp2"}),
    ("compiled-zero-bubble", {"layout": "pp2", "schedule": "zero-bubble", "stack": "fourfold"},
     {"compile": True}, {}),
    ("virtual-stages", {"layout": "pp2 dp2", "schedule": "zero-bubble", "stack": "fourfold",
                        "recompute": "full", "sharding": "zero3"},
     {"virtual_stages": 17}, {"virtual_stages": 2}),
    ("fp8-sizes", {"layout": "cp2", "precision": "fp8", "stack": "fourfold"},
     {"batch": batch(seq_len=2064)}, {"batch": batch(seq_len=2080)}),
    # ffn / tp is 24.
    ("fp8-sizes", {"model": NARROW, "precision": "fp8", "stack": "fourfold"},
     {"layout": "tp4"}, {"layout": "tp2"}),
    ("fp8-zero-bubble", {"layout": "pp2", "schedule": "zero-bubble", "stack": "fourfold"},
     {"precision": "fp8"}, {}),
    # zero3 keeps gradients in the weights' format, fp32.
    ("unbuilt", {"layout": "dp2", "grad_dtype": "bf16", "stack": "fourfold"},
     {"sharding": "zero3"}, {"sharding": "zero1"}),
    ("unbuilt", {"async_tp": True, "stack": "fourfold"}, {"layout": "tp2"}, {"layout": "dp2"}),
    ("unbuilt", {"layout": "dp2", "optimizer_dtype": "fp8"}, {"stack": "fourfold"}, {}),
    ("unbuilt", {"overlap_exchange": True, "stack": "fourfold", "model": MIXTRAL},
     {"layout": "dp2 ep2"}, {"layout": "dp2"}),
    ("expert-dense", {"layout": "dp2 ep2"}, {}, {"model": MIXTRAL}),
    ("expert-dense", {"layout": "dp2 etp2"}, {}, {"model": MIXTRAL}),
    ("expert-dense", {"recompute": "moe"}, {}, {"model": MIXTRAL}),
    ("expert-dense", {"routing": "forced"}, {}, {"model": MIXTRAL}),
    ("expert-dense", {"imbalance": 0.5}, {}, {"model": MIXTRAL}),
    ("expert-tp", {"model": QWEN_MOE, "stack": "torchtitan", "sharding": "zero3"},
     {"layout": "dp4 tp2"}, {"layout": "dp4 tp2 ep4"}),
    ("experts", {"model": MIXTRAL}, {"layout": "dp3 ep3"}, {"layout": "dp4 ep4"}),
    ("expert-ranks", {"model": MIXTRAL}, {"layout": "dp2 ep4"}, {"layout": "dp2 tp2 ep4"}),
    # Each copy holds all experts.
    ("expert-ranks", {"model": MIXTRAL}, {"layout": "dp2x2 ep4"}, {"layout": "dp2x2 ep2"}),
    ("expert-ranks", {"model": MIXTRAL}, {"layout": "dp4 ep4 etp2"}, {"layout": "dp4 ep2 etp2"}),
    ("expert-width", {"model": MIXTRAL}, {"layout": "dp3 etp3"}, {"layout": "dp7 etp7"}),
    ("shared-width", {"layout": "tp2"},
     {"model": replace(SHARING, moe=replace(SHARING.moe, shared_ffn=2815))}, {"model": SHARING}),
    ("moe-tp", {"model": MIXTRAL, "layout": "tp2"}, {"sequence_parallel": False}, {}),
    ("dispatcher", {"model": MIXTRAL, "dispatcher": "local"},
     {"layout": "dp2 ep2"}, {"layout": "dp2"}),
    # Counts of tokens come to the host.
    ("dispatcher", {"model": MIXTRAL, "cuda_graph": True, "stack": "fourfold"},
     {"layout": "dp2 ep2"}, {"layout": "dp2"}),
    ("dp-batch", {}, {"layout": "dp65"}, {"layout": "dp63"}),
    ("equal-shares", {"stack": "llm-foundry", "sharding": "zero3"},
     {"layout": "dp3"}, {"layout": "dp4", "batch": batch(micro_batch=11)}),
    ("micro-divides", {"layout": "dp4", "batch": batch(micro_batch=3)},
     {"stack": "megatron"}, {"stack": "fourfold"}),
    ("fill", {"layout": "pp4 dp32", "sharding": "zero2"},
     {"stack": "torchtitan"}, {"stack": "fourfold"}),
    ("whole-rounds", {"stack": "megatron", "schedule": "interleaved", "virtual_stages": 2},
     {"layout": "pp4 dp32"}, {"layout": "pp4 dp16"}),
    # 9 micro batches on 4 ranks: two rounds, of 4 and 5.
    ("whole-rounds", {"layout": "pp4", **TITAN},
     {"batch": batch(global_batch=9)}, {"batch": batch(global_batch=10)}),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "run", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_rule_refuses_the_bad_and_only_that(reason: str, run: dict, bad: dict, good: dict) -> None:
    assert reasons(**run, **bad) == [reason]
    assert reasons(**run, **good) == []


def test_every_rule_has_a_name_of_its_own_and_a_case() -> None:
    assert len(set(REASONS)) == len(RULES)
    assert {case[0] for case in CASES} == set(REASONS)


def test_all_broken_rules_are_named_at_once() -> None:
    refused = reasons(layout="pp33 tp5 dp100", stack="megatron", gpus=8)
    assert refused == ["world", "heads", "ffn", "seq-tp", "stages", "dp-batch", "micro-divides"]


def test_every_stage_of_a_ramp_is_asked() -> None:
    growth = Ramp(start=192, increment=32, samples=10**6)
    ramp = Batch(seq_len=2048, micro_batch=2, global_batch=2048, ramp=growth)
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
        "generic", "fourfold", "megatron", "torchtitan", "nanotron", "llm-foundry", "accelerate",
        "deepspeed",
    }  # fmt: skip
