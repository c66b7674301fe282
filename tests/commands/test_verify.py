"""What does `verify` make of its words before any rank starts?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.show.runs import _verification
from fourfold.verbs import verify


def passed(spec):
    """A layout that ran and equals one process."""
    return replace(verify._layout(0, spec, Path("nowhere"), None), passed=True, error=None)


@pytest.fixture
def specs(monkeypatch):
    """The runs a command would make; none is made."""
    seen = []

    def carry_out(found, *rest):
        seen.extend(found)
        return [passed(spec) for spec in found]

    monkeypatch.setattr(verify, "_carry_out", carry_out)
    return seen


def test_more_ranks_than_gpus_are_refused_before_any_starts(specs, cli, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said = cli("verify", "--world", "4", "--device", "cuda", status=2)
    assert "this machine has 2" in said
    assert "2 ranks, or --share-gpu, or --device cpu" in said
    assert not specs
    cli("verify", "--world", "2", "--device", "cuda", "--format", "json")
    assert {spec.device for spec in specs} == {"cuda"}


@pytest.mark.parametrize(
    "words", [("--precision", "bf16"), ("--set", "policy.precision=bf16")], ids=["flag", "set"]
)
def test_the_report_names_the_precision_that_ran(specs, cli, words):
    assert cli.json("verify", "--world", "2", *words)["precision"] == "bf16-mixed"
    assert {spec.policy.precision for spec in specs} == {"bf16-mixed"}


def test_a_table_given_as_a_policy_field_is_decoded(specs):
    words = ["--set", 'policy.env={NCCL_DEBUG="INFO"}', "--format", "json"]
    assert main(["verify", "--world", "2", *words]) == 0
    assert {spec.policy.env for spec in specs} == {(("NCCL_DEBUG", "INFO"),)}


@pytest.mark.parametrize(
    ("words", "has_experts"),
    [
        ([], False),
        (["--break", "norm-grad"], False),
        (["--axis", "ep"], True),
        (["--break", "router-sum"], True),
        (["--layout", "dp2 ep2"], True),
    ],
)
def test_families_have_experts_where_experts_are_asked_about(specs, words, has_experts):
    assert main(["verify", "--world", "2", "--format", "json", *words]) in (0, 1)
    expected = {"mixtral", "deepseek"} if has_experts else {"mpt", "gpt", "llama"}
    assert {spec.model.family for spec in specs} == expected


def test_a_fault_is_planted_where_it_can_exist(specs):
    words = ["verify", "--world", "2", "--break", "expert-norm-twice", "--format", "json"]
    main(words)
    assert {spec.policy.sharding for spec in specs} == {"zero0"}


def test_a_fault_without_effect_is_said(specs, cli, monkeypatch):
    answer = verify.verify(verify.VerifyRequest(layout="dp2", fault="norm-grad"))
    assert "has no effect in these layouts" in _verification(answer)
