"""Chances of layouts to fit and to be best, and what each is expected to lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.predict import Predictions
from fourfold.search import chances as drawing
from fourfold.search.chances import ALIKE, Chances, chances, lost_try
from fourfold.search.query import usual_cluster
from fourfold.search.ranking import Ranking, rank_layouts
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from tests.search.test_plan import ask


def test_chances_are_those_of_draws_and_the_first_loses_least() -> None:
    ranking = rank_layouts(ask(gpus=16))
    found = ranking.chances
    assert np.all((found.near_best >= 0.0) & (found.near_best <= found.fits))
    assert found.regret[0] <= found.regret.min() + ALIKE
    assert chances(ranking.predicted, ranking.query.entry, lost=0.05).near_best.sum() >= 1.0


def _with_room(ranking: Ranking, rooms: list[float]) -> tuple[Predictions, FittedStack]:
    """The first runs with nothing open of their seconds, on devices of these times their bytes."""
    entry = replace(ranking.query.entry, noise=0.0, spread=(), values={})
    predicted = ranking.predicted.take(np.arange(len(rooms)))
    bytes_each = predicted.room.worst_bytes * np.array(rooms)
    return replace(predicted, columns=replace(predicted.columns, capacity=bytes_each)), entry


def test_a_run_that_may_not_fit_is_charged_a_try_and_the_surest_instead() -> None:
    ranking = rank_layouts(ask(gpus=16))
    step_s = ranking.step_s[:3]
    predicted, entry = _with_room(ranking, [1e3, 1e3, 1e3])
    free = chances(predicted, entry, lost=0.05)
    assert np.allclose(free.fits, 1.0)
    assert free.regret == pytest.approx(step_s / step_s.min() - 1.0, abs=0.02)
    # The first cannot fit: a try is lost, and the fastest of the others runs.
    none = chances(*_with_room(ranking, [0.2, 1e3, 1e3]), lost=0.05)
    then_s = step_s[1:].min()
    assert none.near_best[0] == 0.0
    assert none.regret[0] == pytest.approx(0.05, abs=0.02)
    assert none.regret[1:] == pytest.approx(step_s[1:] / then_s - 1.0, abs=0.02)
    # As its chance falls, what it is expected to lose grows from the one to the other.
    rooms = [0.9, 0.95, 1.0, 1.03, 1.06, 1.2, 5.0]
    drawn = [chances(*_with_room(ranking, [room, 1e3, 1e3]), lost=0.05) for room in rooms]
    fits = [float(one.fits[0]) for one in drawn]
    assert fits == sorted(fits)
    assert fits[0] < 0.3
    assert fits[-1] > 0.99
    for one in drawn:
        near = one.fits[0] * free.near_best[0]
        assert one.near_best[0] == pytest.approx(near, abs=0.06)
        lost = one.fits[0] * free.regret[0] + (1.0 - one.fits[0]) * none.regret[0]
        assert one.regret[0] == pytest.approx(lost, abs=0.02)


def test_what_a_profile_leaves_open_of_all_layouts_changes_no_order() -> None:
    ranking = rank_layouts(ask(gpus=16))
    known = replace(ranking.query.entry, rows_time=0, spread=(), values={})
    sure, unsure = (
        chances(ranking.predicted, replace(known, noise=n), lost=0.05) for n in (0.3, 0.7)
    )
    assert np.array_equal(sure.regret, unsure.regret)
    assert np.array_equal(sure.near_best, unsure.near_best)
    # What rows left unexplained is of each layout.
    measured = chances(ranking.predicted, replace(known, rows_time=50, noise=0.7), lost=0.05)
    assert measured.regret.min() > 2 * sure.regret.min()


def test_where_one_layout_fits_smaller_ones_do() -> None:
    """The engine that needs more than predicted needs more of all: the surest is best where the
    others do not fit, and only there is it worth more than its seconds."""
    ranking = rank_layouts(ask(gpus=16))
    predicted, entry = _with_room(ranking, [1.03, 1.03, 1.2])
    slow = predicted.times.step_s * np.array([1.0, 1.0, 1.5])
    times = replace(predicted.times, step_s=slow)
    found = chances(replace(predicted, times=times), entry, lost=0.05)
    assert found.fits[0] == pytest.approx(found.fits[1], abs=0.05)
    # Half as fast, it is best exactly where neither of the others fits, which they do together.
    assert found.near_best[2] == pytest.approx(found.fits[2] - found.fits[:2].max(), abs=0.02)


def test_a_layout_is_near_the_best_only_where_it_fits() -> None:
    """On 4 x 40 GB nothing is sure to fit; the surest is not the best where it does not fit."""
    cluster = usual_cluster(catalog.device("a100-40gb"), 4)
    ranking = rank_layouts(ask(gpus=4, cluster=cluster, batch=Batch(seq_len=4096, global_batch=32)))
    assert ranking.chances.fits.max() < 0.9
    assert np.all(ranking.chances.near_best <= ranking.chances.fits + 0.01)


def _by_hand(step_s: list[float], chance: list[float], lost: float) -> list[list[float]]:
    """Of each run tried first, what is lost by the best orders of further tries: all that are
    expected to take as few seconds."""
    runs, most = range(len(step_s)), max(chance)
    edges = sorted({0.0, *chance})

    def mean(order: tuple[int, ...], each: Callable[[float, float, int], float]) -> float:
        total = 0.0
        for room, end in pairwise(edges):
            tries = next(at for at, i in enumerate(order) if chance[i] > room)
            total += (end - room) * each(room, step_s[order[tries]], tries)
        return total / most

    def seconds(order: tuple[int, ...]) -> float:
        return mean(order, lambda _, s, tries: s + tries * lost * min(step_s))

    def loss(order: tuple[int, ...]) -> float:
        return mean(order, lambda room, s, tries: s / _best(step_s, chance, room) + tries * lost)

    found = []
    for i in runs:
        orders = [(i, *others) for n in runs for others in permutations(set(runs) - {i}, n)]
        orders = [one for one in orders if any(chance[k] == most for k in one)]
        fewest = min(map(seconds, orders))
        found.append([loss(one) - 1.0 for one in orders if seconds(one) < fewest + 1e-12])
    return found


def _best(step_s: list[float], chance: list[float], room: float) -> float:
    return min(s for s, c in zip(step_s, chance, strict=True) if c > room)


@given(
    st.lists(
        st.tuples(st.integers(100, 200), st.integers(1, 20)), min_size=1, max_size=5, unique=True
    ),
    st.sampled_from([0.0, 0.001, 0.01, 0.05]),
)
def test_further_tries_are_the_best_of_all_orders(runs: list[tuple[int, int]], lost: float) -> None:
    runs.sort(key=lambda run: (-run[1], run[0]))
    step_s, chance = [s / 100 for s, _ in runs], [c / 20 for _, c in runs]
    step = np.array([step_s])
    best = np.minimum.accumulate(step, axis=1)
    found = drawing._regret(step, best, np.array(chance), lost)
    for one, by_hand in zip(found, _by_hand(step_s, chance, lost), strict=True):
        assert any(one == pytest.approx(other, abs=1e-9) for other in by_hand)
    rooms = [(room + 0.5) / 20 for room in range(20)]
    near = [
        sum(c > r and s <= drawing.NEAR * _best(step_s, chance, r) for r in rooms) / len(rooms)
        for s, c in zip(step_s, chance, strict=True)
    ]
    assert drawing._near_best(step, best, np.array(chance)) == pytest.approx(near, abs=1e-9)


def test_draws_leave_a_fifth_open_of_what_counts_as_alike(monkeypatch) -> None:
    ranking = rank_layouts(ask("llama-3.1-70b", 64, batch=Batch(seq_len=8192, global_batch=256)))
    few = chances(ranking.predicted, ranking.query.entry, lost=0.001)
    monkeypatch.setattr(drawing, "DRAWS", 16 * drawing.DRAWS)
    many = chances(ranking.predicted, ranking.query.entry, lost=0.001)
    apart = (few.regret - few.regret[0]) - (many.regret - many.regret[0])
    assert 0.0 < np.abs(apart[few.regret < few.regret.min() + 0.05]).max() < ALIKE / 5


def test_a_lost_try_is_an_hour_of_the_training() -> None:
    query = ask("llama-3.1-70b", 64, batch=Batch(seq_len=8192, global_batch=256), tokens=1e12)
    step_s = 36.0
    assert lost_try(query, step_s) == pytest.approx(100 * query.batch.tokens / 1e12)
    lossy = lost_try(replace(query, lost=0.2), step_s)
    assert lossy == pytest.approx(0.8 * lost_try(query, step_s))
    # Of a training that nobody described: 20 tokens a parameter.
    usual = lost_try(replace(query, tokens=None), step_s)
    assert usual == pytest.approx(lost_try(replace(query, tokens=20 * 70.55e9), step_s), rel=1e-3)
    assert lost_try(replace(query, tokens=1e6), step_s) == drawing.MOST_LOST


def test_of_losses_that_are_alike_the_surest_is_chosen() -> None:
    """Of all layouts, and of the ways to run each."""
    regret = np.array([0.08, 0.024, 0.021, 0.023, 0.041, 0.044, 0.06])
    fits = np.array([1.0, 0.92, 0.5, 0.99, 0.6, 0.7, 1.0])
    layouts = np.array([0, 0, 1, 1, 2, 2, 2])
    found = Chances(fits, np.zeros(7), regret)
    # 3 and 1 are as sure as it takes, and 3 loses less; 5 is surer than 4.
    assert found.order(layouts, np.zeros(7)).tolist() == [3, 1, 5, 2, 4, 6, 0]
    nothing = Chances(*np.zeros((3, 0)))
    assert nothing.order(np.zeros(0, dtype=np.int64), np.zeros(0)).tolist() == []
