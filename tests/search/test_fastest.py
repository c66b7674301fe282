"""Branch and bound drops nothing that can be listed: against the whole enumeration, point by point,
of sampled questions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.interval import choices
from fourfold.cost.memory.peak import SURE, fit_chance, memory, memory_bounds
from fourfold.cost.step.estimate import estimate
from fourfold.events import Bar, ignore
from fourfold.search.candidates import candidates
from fourfold.search.fastest import CELLS, cells_of, fastest
from fourfold.search.query import PlanQuery, entry_for, evidence_for, usual_cluster, usual_policy
from fourfold.search.ranking import Ranking, _best, layout_numbers, rank_layouts
from fourfold.search.space import WIDEST, Pool, space_of
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.expression import parse
from fourfold.spec.policy import Policy

SHIPPED = calibrations.shipped()
FIXED = ({}, {"pp": 2}, {"cp": 2}, {"recompute": "full"}, {"micro_batch": 3}, {"sharding": "zero3"},
         {"cp_kind": "ulysses", "tp": 2}, {"schedule": "1f1b"}, {"replicate": 1})  # fmt: skip
WHERE = ((), ("tp <= 4",), ("mem_gib < 60",), ("step_s < 5 and micro_batch == 1",), ("pp > 64",))


@st.composite
def questions(draw: st.DrawFn, most_gpus: int = 24) -> PlanQuery:
    gpus = draw(st.sampled_from([n for n in (1, 4, 6, 8, 12, 16, 24, 48, 64) if n <= most_gpus]))
    device = draw(st.sampled_from(["h100-80gb", "a100-40gb", "a100-80gb", "b200"]))
    stack = draw(st.sampled_from(["generic", "megatron", "fourfold", "torchtitan", "nanotron"]))
    model = draw(st.sampled_from(["llama-3.2-1b", "llama-3.1-8b", "mpt-125m", "llama-3.1-70b"]))
    compute = draw(st.sampled_from([None, None, "fp8"]))
    schedule = draw(st.sampled_from(["1f1b", "1f1b", "zero-bubble", "gpipe"]))
    cluster = usual_cluster(catalog.device(device), gpus)
    entry, why = entry_for(SHIPPED, stack, cluster)
    policy = Policy(compute_dtype=compute, schedule=schedule, compile=draw(st.booleans()))
    fixed = dict(draw(st.sampled_from(FIXED)))
    if "schedule" not in fixed and schedule != "1f1b":
        fixed["schedule"] = schedule
    return PlanQuery(
        model=catalog.model(model),
        cluster=cluster,
        gpus=gpus,
        batch=Batch(
            seq_len=draw(st.sampled_from([1024, 4096, 32768])),
            global_batch=draw(st.integers(1, 200)),
        ),
        policy=usual_policy(stack, policy, {"compile"}),
        stack=stack,
        entry=entry,
        calibration="shipped",
        no_rows=why,
        evidence=evidence_for(SHIPPED, entry) if draw(st.booleans()) else {},
        fixed=fixed,
        where=tuple(parse(text) for text in draw(st.sampled_from(WHERE))),
        explore=draw(st.booleans()),
        safe=draw(st.sampled_from([False, False, True])),
    )


def few(pool: Pool, mask: np.ndarray) -> Pool:
    return {name: column[mask] for name, column in pool.items()}


def whole(query: PlanQuery) -> Pool:
    """Every legal point that may fit, each priced on its own."""
    grid = candidates(query)
    points: Pool = dict(grid.points(np.arange(len(grid.legal_micros))))
    c, limit, entry = query.columns(points), query.limit_bytes, query.entry
    points["peak_bytes"] = peak = memory(c, entry.coefficients).worst_bytes
    points["step_s"] = estimate(c, entry.coefficients).step_s
    points["sure"] = fit_chance(c, entry) >= SURE
    points["unproven"] = np.zeros(len(c), dtype=bool)
    for name, made in choices(c).items():
        points["unproven"] |= made & bool(query.evidence and not query.evidence.get(name, 0))
    low = memory_bounds(c, entry)[0]
    return few(points, (peak < limit) | ((peak < WIDEST * limit) & (low < limit)))


def meeting(query: PlanQuery, points: Pool) -> Pool:
    """Those for which every condition holds, asked one by one."""
    names = {"virtual_stages": "vp", "micro_batch": "micro_batch"} | {n: n for n in ("pp", "tp")}
    held = np.ones(len(points["pp"]), dtype=bool)
    for i in range(len(held) if query.where else 0):
        values = {word: int(points[name][i]) for name, word in names.items()}
        values |= {"mem_gib": points["peak_bytes"][i] / 2**30, "step_s": points["step_s"][i]}
        held[i] = all(one.holds(values) for one in query.where)
    return few(points, held)


def same(found: Pool, wanted: Pool) -> None:
    for name in found:
        assert found[name].tolist() == wanted[name].tolist(), name


def check(query: PlanQuery) -> None:
    """All that a ranking says against all points."""
    every, ranking = whole(query), rank_layouts(query)
    pool = meeting(query, every)
    assert ranking.fitting == len(every["pp"])
    assert ranking.dropped == len(every["pp"]) - len(pool["pp"])
    fits = pool["peak_bytes"] < query.limit_bytes
    over = few(pool, ~fits & (query.explore | ~pool["unproven"]) & fits.any())
    pool = few(pool, fits | ~fits.any())
    same(ranking.near_miss, _best(over, 1, 1))
    use_all = query.explore or bool(pool["unproven"].all())
    ranked = few(pool, use_all | ~pool["unproven"])
    if not use_all:
        same(ranking.unproven_best, _best(few(pool, pool["unproven"]), 1, 1))
    assert ranking.set_aside == len(pool["pp"]) - len(ranked["pp"])
    if query.safe:
        ranked = few(ranked, ranked["sure"] | ~ranked["sure"].any())
    assert ranking.ways == len(ranked["pp"])
    check_fastest(ranking, ranked)


def check_fastest(ranking: Ranking, ranked: Pool) -> None:
    numbers = layout_numbers(ranked)
    fewest = {n: ranked["step_s"][numbers == n].min() for n in np.unique(numbers).tolist()}
    assert ranking.fastest_ways() == fewest
    assert ranking.layouts == len(fewest)
    space = ranking.cells.space
    for keep, variants in ((300, 3), (7, 1), (20, 10)):
        index, step_s = fastest(ranking.cells, ranking.ranked, keep=keep, variants=variants)
        found = {"step_s": step_s, "peak_bytes": space.peak_bytes(index)}
        some = _best(space.points(index) | found, keep, variants)
        same(some, _best(ranked, keep, variants))


SAMPLED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@settings(SAMPLED, max_examples=12)
@given(questions())
def test_nothing_that_can_be_listed_is_dropped(query: PlanQuery) -> None:
    check(query)


@pytest.mark.slow
@settings(SAMPLED, max_examples=200)
@given(questions(most_gpus=64))
def test_nothing_is_dropped_on_more_machines(query: PlanQuery) -> None:
    check(query)


@settings(SAMPLED, max_examples=12)
@given(questions())
def test_no_point_is_faster_than_its_bound(query: PlanQuery) -> None:
    cells = cells_of(space_of(query, candidates(query), Bar(ignore, "")))
    mask = cells.space.legal
    cell = cells.holding(mask)
    index, place = cells.points(cell, mask)
    assert np.array_equal(np.sort(index), np.flatnonzero(mask))
    bound = cells.least_s.reshape(-1)[cell][place]
    points = cells.space.points(index)
    if len(index):
        step_s = estimate(query.columns(points), query.entry.coefficients).step_s
        assert (bound <= step_s).all()


def test_a_large_search_times_few_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is worth having: of a million points fewer than one in twenty is timed."""
    import fourfold.search.fastest as module

    timed = 0

    def counted(c, coefficients):
        nonlocal timed
        found = estimate(c, coefficients)
        timed += len(found.step_s)
        return found

    monkeypatch.setattr(module, "estimate", counted)
    cluster = usual_cluster(catalog.device("h100-80gb"), 1024)
    entry, why = entry_for(SHIPPED, "generic", cluster)
    query = PlanQuery(
        model=catalog.model("llama-3.1-70b"), cluster=cluster, gpus=1024,
        batch=Batch(seq_len=8192, global_batch=1024), policy=Policy(), stack="generic",
        entry=entry, calibration="shipped", no_rows=why, evidence={}, fixed={},
    )  # fmt: skip
    ranking = rank_layouts(query)
    assert ranking.ways > 100 * CELLS
    assert timed < 0.05 * ranking.ways
