"""Properties of schedules and of their simulation: order, memory, bubbles known in closed form."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.schedule import (
    Action,
    ChunkTimes,
    global_order,
    rank_actions,
    simulate,
    step_s,
)
from fourfold.cost.step.pipeline import in_flight
from fourfold.spec.words import SCHEDULES

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def fitting(schedule: str, virtual: int) -> int:
    return 1 if schedule in ("gpipe", "1f1b") else virtual


def chunk_times(forward: np.ndarray, last: np.ndarray | None = None) -> ChunkTimes:
    last = np.ones(forward.shape[1]) if last is None else last
    return ChunkTimes(forward=forward, backward=2 * forward, weights=forward, last=last)


@given(schedule=st.sampled_from(KINDS), shape=SHAPES)
def test_every_rank_runs_every_chunk_once_and_nobody_waits_in_a_circle(schedule, shape) -> None:
    stages, virtual, micros = shape
    virtual = fitting(schedule, virtual)
    order = global_order(schedule, stages=stages, virtual_stages=virtual, micros=micros)
    parts = ("F", "I", "W") if schedule == "zero-bubble" else ("F", "B")
    everything = {
        (chunk % stages, Action(kind, chunk, micro))
        for kind in parts
        for chunk in range(stages * virtual)
        for micro in range(micros)
    }
    assert len(order) == len(everything)
    assert set(order) == everything


def held_at_once(actions: list[Action]) -> int:
    """The most visits of a micro batch to a chunk whose activations a rank holds. A split backward
    lets go with its weights: until then inputs of all products are held."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, held)
    return most


@given(shape=SHAPES)
def test_1f1b_holds_at_most_the_stages_after_it_and_gpipe_all(shape) -> None:
    stages, _, micros = shape
    for rank in range(stages):
        run = {"stages": stages, "virtual_stages": 1, "micros": micros, "rank": rank}
        assert held_at_once(rank_actions("1f1b", **run)) == min(micros, stages - rank)
        assert held_at_once(rank_actions("gpipe", **run)) == (micros if stages > 1 else 1)
        # Weights wait in the drain: nobody holds more than the first rank of 1F1B.
        assert held_at_once(rank_actions("zero-bubble", **run)) <= min(micros, stages)


@given(
    schedule=st.sampled_from(KINDS),
    shape=st.tuples(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4)),
)
def test_equal_stages_have_the_textbook_bubble(schedule, shape) -> None:
    """Fill of (p-1) chunks of forward and backward; a third of it with split backwards (F=I=W)."""
    stages, virtual, rounds = shape
    virtual = fitting(schedule, virtual)
    micros = rounds * stages + stages  # zero-bubble needs a full pipeline to hide its weights in
    times = chunk_times(np.full((stages * virtual, 1), 0.5))
    run = {"stages": stages, "virtual_stages": virtual, "micros": micros}
    bubble = (stages - 1) * 1.5 / (3 if schedule == "zero-bubble" else 1)
    assert step_s(schedule, times, **run)[0] == pytest.approx(micros * virtual * 1.5 + bubble)


@given(
    schedule=st.sampled_from(KINDS),
    shape=SHAPES,
    seed=st.integers(0, 10**6),
)
def test_a_step_is_never_shorter_than_its_slowest_rank_or_one_pass(schedule, shape, seed):
    stages, virtual, micros = shape
    virtual = fitting(schedule, virtual)
    forward = np.random.default_rng(seed).uniform(0.5, 1.5, (stages * virtual, 3))
    times = chunk_times(forward)
    run = simulate(schedule, times, stages=stages, virtual_stages=virtual, micros=micros)
    ranks = forward.reshape(virtual, stages, 3).sum(axis=0)
    assert np.allclose(run.busy_s, 3 * micros * ranks)
    one_pass = 2 * forward.sum(axis=0) + forward[0]  # weights of other chunks hide elsewhere
    assert (run.step_s >= np.maximum(run.busy_s.max(axis=0), one_pass) - 1e-9).all()
    slower = simulate(
        schedule,
        chunk_times(forward * 1.5),
        stages=stages,
        virtual_stages=virtual,
        micros=micros,
    )
    assert (slower.step_s >= run.step_s - 1e-9).all()


@given(
    times=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6),
    more=st.integers(0, 40),
)
def test_1f1b_meets_the_closed_form_when_the_last_stage_is_slowest(times, more) -> None:
    """(m - 1) slowest + one pass is exact there, and else an upper bound: a slow early stage
    works on while the others wait for nothing."""
    times = np.array(times).reshape(-1, 1)
    stages, slow = len(times), int(times.argmax())
    micros = stages + more
    run = {"stages": stages, "virtual_stages": 1, "micros": micros}
    closed = 3 * ((micros - 1) * times.max() + times.sum())
    got = simulate("1f1b", chunk_times(times), **run).step_s[0]
    assert got <= closed * (1 + 1e-12)
    assert got >= 3 * (micros * times.max() + times[:slow].sum()) * (1 - 1e-12)
    last = np.append(np.delete(times, slow, axis=0), times[slow : slow + 1], axis=0)
    exact = step_s("1f1b", chunk_times(last), **run)[0]
    assert exact == pytest.approx(closed, rel=1e-9)


@given(
    schedule=st.sampled_from(KINDS),
    shape=st.tuples(st.integers(2, 5), st.integers(2, 3), st.integers(8, 12), st.integers(0, 4)),
    seed=st.integers(0, 10**6),
)
def test_long_steps_repeat_their_settled_rounds(schedule, shape, seed) -> None:
    stages, virtual, rounds, rest = shape
    virtual = fitting(schedule, virtual)
    micros = rounds * stages + rest % stages
    forward = np.random.default_rng(seed).uniform(0.9, 1.1, (stages * virtual, 4))
    run = {"stages": stages, "virtual_stages": virtual, "micros": micros}
    times = chunk_times(forward)
    whole = simulate(schedule, times, **run).step_s
    assert np.allclose(step_s(schedule, times, **run), whole, rtol=0.01)


def test_a_smaller_last_micro_batch_counts() -> None:
    small = chunk_times(np.ones((2, 1)), last=np.array([0.25]))
    run = {"stages": 2, "virtual_stages": 1, "micros": 4}
    assert simulate("1f1b", chunk_times(np.ones((2, 1))), **run).step_s[0] == 15.0
    assert simulate("1f1b", small, **run).step_s[0] == 12.5


def test_events_cover_the_step_without_overlap() -> None:
    times = chunk_times(np.ones((6, 1)))
    run = simulate("zero-bubble", times, stages=3, virtual_stages=2, micros=5, keep_events=True)
    assert len(run.events) == 3 * 6 * 5
    for rank in range(3):
        own = [event for event in run.events if event.rank == rank]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
    assert max(event.end_s for event in run.events) == run.step_s[0]


@given(
    schedule=st.sampled_from(KINDS),
    stages=st.integers(1, 8),
    virtual=st.integers(2, 4),
    micros=st.integers(1, 40),
)
def test_the_planners_memory_holds_what_the_lists_hold(schedule, stages, virtual, micros) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") or stages == 1 else virtual
    c = SimpleNamespace(
        schedule=np.array([SCHEDULES.index(schedule)]),
        pp=np.array([float(stages)]),
        vpp=np.array([float(virtual)]),
        hides_exchange=np.zeros(1),
        overlap=np.zeros(1),
    )
    closed = in_flight(c, np.array([float(micros)]))  # type: ignore[arg-type]
    lists = [
        held_at_once(
            rank_actions(schedule, stages=stages, virtual_stages=virtual, micros=micros, rank=rank)
        )
        for rank in range(stages)
    ]
    for value, rank in ((closed.first, 0), (closed.last, stages - 1)):
        said = round(float(value[0]) * virtual)
        assert lists[rank] <= said < lists[rank] + stages
        if micros % stages == 0 or virtual == 1:
            assert said == lists[rank]
    assert max(lists) <= max(closed.first[0], closed.last[0]) * virtual + 1e-9
