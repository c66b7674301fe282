"""Each rule of legality refuses what it should, with field, rule and way out, and nothing else."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.search.legal import REASONS, RULES, Target, why_not
from fourfold.spec import catalog
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.engine import ENGINES, MeasuredAs, engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from tests.specs import shape_of

LLAMA = catalog.model("llama-3.1-8b")  # 32 layers, 32 heads, 8 kv heads, ffn 14336
GPT3 = catalog.model("gpt-3-175b")  # 96 layers, 96 heads, learned positions 2048
BATCH = Batch(seq_len=2048, micro_batch=1, global_batch=64)


def reasons(
    model=LLAMA, layout="dp1", *, batch=BATCH, stack="generic", gpus=None, device=None, **policy
):
    target = Target(engine=engine_of(stack), gpus=gpus, device=device)
    refused = why_not(model, Layout.parse(layout), batch, Policy(**policy), target)
    for refusal in refused:
        assert refusal.rule
        assert refusal.field
        assert str(refusal.value) in str(refusal)
        assert "use " in refusal.hint or refusal.reason in ("family", "async-tp")
    return [refusal.reason for refusal in refused]


KINDS = {"model": shape_of, "device": catalog.device, "batch": lambda said: replace(BATCH, **said)}


def decoded(run: dict[str, Any]) -> dict[str, Any]:
    """Of the table, with what its words name."""
    return {name: KINDS.get(name, lambda said: said)(value) for name, value in run.items()}


CASES = tomllib.loads(Path(__file__).with_name("legal.toml").read_text())["cases"]


@pytest.mark.parametrize(("reason", "run", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_rule_refuses_the_bad_and_only_that(reason: str, run: dict, bad: dict, good: dict) -> None:
    assert reasons(**decoded(run), **decoded(bad)) == [reason]
    assert reasons(**decoded(run), **decoded(good)) == []


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
    refused = why_not(
        LLAMA, Layout.parse("dp32"), ramp, Policy(), Target(engine=engine_of("megatron"))
    )
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
    assert engine_of("megatron-deepspeed-2022b").rules.name == "megatron"
    assert engine_of("nemo-2025").rules.name == "megatron"
    assert engine_of("llm-foundry-2023").rules.name == "llm-foundry"
    assert engine_of("somebody-elses").rules.name == "generic"
    assert {engine.rules.name for engine in ENGINES.values()} == {
        "generic", "fourfold", "megatron", "torchtitan", "nanotron", "llm-foundry", "accelerate",
        "deepspeed",
    }  # fmt: skip
    assert MeasuredAs.of("megatron-deepspeed-2022b") == MeasuredAs("megatron-deepspeed", "2022b")
    assert MeasuredAs.of("megatron-bridge-26.04").year == 2026
    assert str(MeasuredAs("nemo", "2024").with_experts()) == "nemo with experts"
    assert MeasuredAs.of("nemo with experts") == MeasuredAs("nemo", experts=True)


def test_habits_of_a_year_begin_with_those_of_today() -> None:
    old, new = engine_of("torchtitan-2024").habits, engine_of("torchtitan").habits
    assert (old.flash2, old.compiles_loss) == (True, False)
    assert replace(old, flash2=False, compiles_loss=True, plain_norms=False) == new
    assert engine_of("acme-torchtitan-2024").habits == old
