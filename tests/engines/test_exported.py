"""Engines accept what is exported for them, and make of it the model and the run that was priced.

Their own parsers, configuration classes and models are asked, in environments of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sampled import EXPERTS, MODELS, expected, read_back, sampled


def compare(engine: str, count: int, folder: Path, models=()) -> None:
    setups = sampled(engine, count, models)
    wrong = []
    for one, answer in zip(setups, read_back(engine, setups, folder), strict=True):
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


@pytest.mark.parametrize("engine", MODELS)
def test_a_few_layouts_are_accepted_and_read_back_equal(engine: str, tmp_path) -> None:
    compare(engine, 2 * len(MODELS[engine]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", MODELS)
def test_200_layouts_are_accepted_and_read_back_equal(engine: str, tmp_path) -> None:
    compare(engine, 210, tmp_path)


@pytest.mark.parametrize("engine", EXPERTS)
def test_a_few_layouts_with_experts_are_read_back_equal(engine: str, tmp_path) -> None:
    compare(engine, len(EXPERTS[engine]), tmp_path, EXPERTS[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", EXPERTS)
def test_100_layouts_with_experts_are_read_back_equal(engine: str, tmp_path) -> None:
    compare(engine, 100, tmp_path, EXPERTS[engine])
