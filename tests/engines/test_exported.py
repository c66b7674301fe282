"""Engines accept what is exported for them, and make of it the model and the run that was priced.

Their own parsers, configuration classes and models are asked, in environments of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.sampled import EXPERTS, MODELS, expected, read_back, sampled


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


@pytest.mark.parametrize("count", [14, pytest.param(210, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", MODELS)
def test_layouts_are_accepted_and_read_back_equal(engine: str, count: int, tmp_path) -> None:
    compare(engine, count, tmp_path)


@pytest.mark.parametrize("count", [11, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", EXPERTS)
def test_layouts_with_experts_are_read_back_equal(engine: str, count: int, tmp_path) -> None:
    compare(engine, count, tmp_path, EXPERTS[engine])
