"""A batch ramp-up, step by step: whole steps, sizes of the stages in order, no sequence twice."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.batch import Batch, Ramp


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    start, increment = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    stages, samples = draw(st.integers(0, 12)), draw(st.integers(1, 3000))
    ramp = Ramp(start=start, increment=increment, samples=samples)
    return Batch(seq_len=8, global_batch=start + stages * increment, ramp=ramp)


def by_hand(batch: Batch, steps: int) -> list[int]:
    """Global batch of each step, by counting what a stage still lacks."""
    sizes: list[int] = []
    for size, sequences in batch.stages()[:-1]:
        left = sequences
        while left > 0:
            sizes.append(size)
            left -= size
    return [*sizes, *([batch.global_batch] * steps)][:steps]


@given(batches(), st.integers(1, 400))
def test_every_stage_takes_the_fewest_whole_steps_that_hold_it(batch: Batch, steps: int) -> None:
    sizes = by_hand(batch, steps)
    assert [batch.global_batch_at(step) for step in range(steps)] == sizes
    before = [batch.sequences_before(step) for step in range(steps)]
    assert before == [0, *itertools.accumulate(sizes)][:steps]


@given(st.integers(1, 4096), st.integers(0, 10**9))
def test_without_a_ramp_every_step_is_the_global_batch(size: int, step: int) -> None:
    batch = Batch(seq_len=8, global_batch=size)
    assert (batch.global_batch_at(step), batch.sequences_before(step)) == (size, step * size)


def test_a_ramp_of_two_stages() -> None:
    batch = Batch(seq_len=8, global_batch=48, ramp=Ramp(start=16, increment=16, samples=100))
    # 50 sequences a stage: 4 steps of 16, then 2 of 32.
    assert [batch.global_batch_at(step) for step in range(8)] == [16] * 4 + [32] * 2 + [48] * 2
    before = [batch.sequences_before(step) for step in (0, 3, 4, 5, 6, 7)]
    assert before == [0, 48, 64, 96, 128, 176]
