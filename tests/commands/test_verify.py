"""What does `verify` make of its words before any rank starts?"""

from __future__ import annotations

import json

import pytest

from fourfold.cli import main
from fourfold.verbs import verify


@pytest.fixture
def specs(monkeypatch):
    """The runs a command would make; none is made."""
    seen = []

    def carry_out(found, *rest):
        seen.extend(found)
        return [{"pass": True, "family": spec.model.family} for spec in found]

    monkeypatch.setattr(verify, "_carry_out", carry_out)
    return seen


@pytest.mark.parametrize("flag", ["--global-batch", "--micro-batch"])
def test_a_size_of_nothing_is_refused(specs, capsys, flag):
    assert main(["verify", "--world", "2", flag, "0"]) == 2
    assert f"{flag} 0 must be" in capsys.readouterr().err
    assert not specs


def test_more_ranks_than_gpus_are_refused_before_any_starts(specs, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["verify", "--world", "4", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "this machine has 2" in said
    assert "2 ranks, or --share-gpu, or --device cpu" in said
    assert not specs
    assert main(["verify", "--world", "2", "--device", "cuda", "--format", "json"]) == 0
    assert {spec.device for spec in specs} == {"cuda"}


@pytest.mark.parametrize(
    "words", [("--precision", "bf16"), ("--set", "policy.precision=bf16")], ids=["flag", "set"]
)
def test_the_report_names_the_precision_that_ran(specs, capsys, words):
    assert main(["verify", "--world", "2", "--format", "json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "bf16-mixed"
    assert {spec.policy.precision for spec in specs} == {"bf16-mixed"}


def test_a_table_given_as_a_policy_field_is_decoded(specs):
    words = ["--set", 'policy.env={NCCL_DEBUG="INFO"}', "--format", "json"]
    assert main(["verify", "--world", "2", *words]) == 0
    assert {spec.policy.env for spec in specs} == {(("NCCL_DEBUG", "INFO"),)}
