"""A question without any legal layout is answered with the choice that is to blame."""

from __future__ import annotations

import pytest

from fourfold import PlanRequest, explain, plan
from fourfold.errors import UserError
from fourfold.show.plan import page

ASK = {"gpu": "h100-80gb", "gpus": 64, "seq_len": 4096, "global_batch": 512, "stack": "megatron"}
CASES = [
    ("qwen3-30b-a3b", {"layout": "ep7"},
     "no layout has --ep 7: layout.ep=7 must divide experts=128; use --ep 4 or --ep 8"),
    ("qwen3-30b-a3b", {"layout": "ep128"},
     "no layout has --ep 128: layout.ep=128 must divide dp x cp x tp = 64, the ranks of a stage; "
     "use --ep 64 or --gpus 128"),
    ("qwen3-30b-a3b", {"layout": "ep8 etp3"},
     "no layout has --etp 3: layout.ep=8 x etp=3 = 24 must divide dp x cp x tp of a stage = 64; "
     "use --etp 2 or --etp 4"),
    ("llama-3.1-70b", {"micro_batch": 3},
     "no layout has --micro-batch 3: batch.micro_batch=3 times dp = 3 must divide global_batch 512 "
     "for megatron; use --micro-batch 2 or --micro-batch 4"),
    ("llama-3.1-70b", {"layout": "pp4", "policy": {"virtual_stages": 9}},
     "no layout has --virtual-stages 9: policy.virtual_stages=9 is not possible: megatron cannot "
     "split 80 layers into 4 stages of 9 virtual stages; use --virtual-stages 7 or "
     "--virtual-stages 10"),
    ("llama-3.1-70b", {"layout": "cp2", "policy": {"cp_kind": "ring"}, "stack": "torchtitan"},
     "no layout has --cp-kind ring: policy.cp_kind=ring is not supported by torchtitan; "
     "use --cp-kind allgather"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "changes", "reason"), CASES)
def test_plan_names_the_choice_that_no_layout_has(model: str, changes: dict, reason: str) -> None:
    answer = plan(PlanRequest(model=model, **{**ASK, **changes}))
    assert (answer.best, answer.reason) == (None, reason)


@pytest.mark.parametrize(
    ("model", "policy", "words"),
    [
        ("qwen3-30b-a3b", {"precision": "fp8"}, "is not supported by torchtitan for models with"),
        ("qwen3-30b-a3b", {"overlap_exchange": True}, "is not supported by torchtitan; use over"),
        ("llama-3.1-8b", {"recompute": "block-1"}, "recompute=block-N is not supported by torch"),
        ("qwen3-30b-a3b", {"dispatcher": "ncclep"}, "dispatcher=ncclep is not supported by torch"),
    ],
)
def test_plan_refuses_a_policy_no_layout_changes(model: str, policy: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(PlanRequest(model=model, policy=policy, **{**ASK, "stack": "torchtitan"}))


def test_scaling_is_refused_by_the_gpu_that_lacks_it() -> None:
    policy = {"precision": "fp8", "scaling": "mx"}
    with pytest.raises(UserError, match="needs tensor cores with mx scales: h100-80gb has none"):
        plan(PlanRequest(model="llama-3.1-8b", policy=policy, **ASK))
    answer = plan(PlanRequest(model="llama-3.1-8b", policy=policy, **{**ASK, "gpu": "b300"}))
    assert answer.best is not None


def test_explain_fills_dp_from_the_gpus() -> None:
    request = PlanRequest(model="llama-3.1-70b", **ASK)
    assert str(explain(request, "tp4 pp2").explanation.layout) == "pp2 dp8 cp1 tp4"


def test_plan_names_a_rounder_batch_where_it_is_clearly_faster() -> None:
    ask = ASK | {"model": "llama-3.1-70b", "gpus": 128}
    odd, even = (plan(PlanRequest(**ask | {"global_batch": size})) for size in (250, 256))
    rounder = odd.rounder_batch
    assert even.rounder_batch is None
    assert rounder is not None
    assert odd.best is not None
    assert even.best is not None
    assert (rounder.global_batch, rounder.step_s) == (256, even.best.step_s)
    faster = even.best.tokens_s_gpu / odd.best.tokens_s_gpu - 1
    assert rounder.faster_pct == pytest.approx(100 * faster)
    assert rounder.faster_pct > 3
    line = f"--global-batch 256: {rounder.step_s:.2f} s per step, {rounder.faster_pct:+.0f}% tokens"
    assert any(line in part for part in page(odd) if isinstance(part, str))
