"""Engines accept what is exported for them, and make of it the model and the run that was priced.

Their own parsers, configuration classes and models are asked, in environments of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.search.export.setup import Setup
from tests.engines.sampled import EXPERTS, MODELS, expected, read_back, sampled, verdict


def compare(engine: str, count: int, folder: Path, models=()) -> str:
    """Require that each is accepted and read as it was exported; return the verdict."""
    setups = sampled(engine, count, models)
    answers = read_back(engine, setups, folder)
    wrong = []
    for one, answer in zip(setups, answers, strict=True):
        want = expected(engine, one)
        if {name: answer.get(name) for name in want} != want:
            wrong.append((one.model.name, str(one.layout), one.policy, want, answer))
        elif "micro_batches" in answer:
            assert answer["micro_batches"] == one.batch.micro_count(one.layout.dp)
        if "fp8" in answer:
            assert answer["fp8"] == (one.policy.precision == "fp8")
        if "overlap_tp" in answer:
            assert answer["overlap_tp"] == one.overlaps_tp
    assert not wrong, f"{len(wrong)} of {count} differ, the first: {wrong[0]}"
    by = f"its parser, configuration and model ({'with experts' if models else 'dense'})"
    return verdict(engine, count, by, answers, sorted(left_of(engine, setups, answers)))


def left_of(engine: str, setups: list[Setup], answers: list[dict[str, Any]]) -> set[str]:
    """What a stand-in answers for: checks that ask one, kernels that need a GPU to import."""
    left = {what for answer in answers for what in answer.get("asked", {}).values()}
    if engine.startswith("torchtitan"):
        kernels = {"dispatcher deepep", "dispatcher hybridep"}
        left |= kernels & {f"dispatcher {one.dispatcher}" for one in setups}
        left |= {"precision fp8" for one in setups if one.policy.precision == "fp8"}
    return left


@pytest.mark.parametrize("count", [14, pytest.param(210, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", MODELS)
def test_layouts_are_accepted_and_read_back_equal(
    engine: str, count: int, tmp_path: Path, capsys
) -> None:
    said = compare(engine, count, tmp_path)
    with capsys.disabled():
        print(said)


@pytest.mark.parametrize("count", [11, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", EXPERTS)
def test_layouts_with_experts_are_read_back_equal(
    engine: str, count: int, tmp_path: Path, capsys
) -> None:
    said = compare(engine, count, tmp_path, EXPERTS[engine])
    with capsys.disabled():
        print(said)
