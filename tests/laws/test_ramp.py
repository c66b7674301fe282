"""A batch ramp-up, step by step: Megatron's rule, whole steps, no sequence twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec.batch import Batch, Ramp


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    start, increment = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    stages, samples = draw(st.integers(0, 60)), draw(st.integers(1, 5000))
    return ramped(start, increment, samples, start + stages * increment)


def ramped(start: int, increment: int, samples: int, full: int) -> Batch:
    ramp = Ramp(start=start, increment=increment, samples=samples)
    return Batch(seq_len=8, global_batch=full, ramp=ramp)


def by_hand(batch: Batch, steps: int) -> list[int]:
    """Global batch of each step, one after another, by the rule as it is written."""
    ramp, sizes, seen = batch.ramp, [], 0
    assert ramp
    increments = (batch.global_batch - ramp.start) // ramp.increment
    for _ in range(steps):
        size = ramp.start + ramp.increment * (seen * increments // ramp.samples)
        sizes.append(batch.global_batch if seen >= ramp.samples else size)
        seen += sizes[-1]
    return sizes


@given(batches(), st.integers(1, 400))
def test_every_step_follows_the_rule(batch: Batch, steps: int) -> None:
    sizes = by_hand(batch, steps)
    assert [batch.global_batch_at(step) for step in range(steps)] == sizes
    assert [batch.at(step).global_batch for step in range(steps)] == sizes
    before = [batch.sequences_before(step) for step in range(steps)]
    assert before == [0, *itertools.accumulate(sizes)][:steps]


@given(batches())
def test_stages_are_the_sizes_that_steps_have(batch: Batch) -> None:
    ramp, stages = batch.ramp, batch.stages()
    assert ramp
    steps = sum(count for _, count in stages)
    runs = [(size, len(list(same))) for size, same in itertools.groupby(by_hand(batch, steps))]
    assert stages == (*runs, (batch.global_batch, 0))
    sizes = [size for size, _ in stages]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == ramp.start


@given(batches())
def test_the_full_batch_begins_within_a_step_after_the_samples(batch: Batch) -> None:
    ramp, stages = batch.ramp, batch.stages()
    assert ramp
    if ramp.start == batch.global_batch:
        assert stages == ((batch.global_batch, 0),)
        return
    steps = sum(count for _, count in stages)
    taken = batch.sequences_before(steps)
    assert taken == sum(size * count for size, count in stages)
    assert ramp.samples <= taken < ramp.samples + stages[-2][0]
    assert batch.global_batch_at(steps - 1) < batch.global_batch == batch.global_batch_at(steps)


@given(st.integers(1, 4096), st.integers(0, 10**9))
def test_without_a_ramp_every_step_is_the_global_batch(size: int, step: int) -> None:
    batch = Batch(seq_len=8, global_batch=size)
    assert (batch.global_batch_at(step), batch.sequences_before(step)) == (size, step * size)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "full", "taken", "steps"),
    [
        (4, 4, 20, 12, 20, 4),  # 4, 4, 4, then 8
        (32, 32, 10_000, 2048, 11_808, 26),  # stages shorter than a step are left out
        (192, 16, 9_765_625, 2048, 9_765_808, 12_658),  # BLOOM
        (1, 1, 3, 10_001, 3335, 2),  # fewer samples than stages
    ],
)
def test_rounding_does_not_add_up(start, increment, samples, full, taken, steps) -> None:
    batch = ramped(start, increment, samples, full)
    assert batch.global_batch_at(steps - 1) < full == batch.global_batch_at(steps)
    assert batch.sequences_before(steps) == taken


def test_text_forms() -> None:
    assert Ramp.parse("192, 16,9765625") == Ramp(start=192, increment=16, samples=9_765_625)
    for text in ("4,4", "4,4,x", "4,4,-20", "4,4,20,1", ""):
        with pytest.raises(UserError, match=r"three whole numbers.*192,16,9765625"):
            Ramp.parse(text)
    with pytest.raises(
        UserError, match=r"b 4,4,20 must be a table.*b=\{start=4,increment=4,samples=20\}"
    ):
        Ramp.from_plain("4,4,20", "b")
