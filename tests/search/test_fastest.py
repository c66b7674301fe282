"""Branch and bound drops nothing that can be listed: against the whole enumeration, point by point,
of sampled questions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fourfold import search
from fourfold.cost.fit.interval import choices
from fourfold.cost.fit.machine import calibration_of
from fourfold.cost.memory.peak import (
    FRAGMENTS,
    FSDP2_FRAGMENTS,
    REFUSED,
    SURE,
    fit_chance,
    lean_coefficients,
    memory,
    memory_bounds,
)
from fourfold.cost.step.estimate import estimate
from fourfold.events import Bar, ignore
from fourfold.result.profile import cluster_of
from fourfold.search import near
from fourfold.search.bounds import bounds_of, gathering_s
from fourfold.search.candidates import candidates
from fourfold.search.explain import explain
from fourfold.search.fastest import AT_ONCE, fastest
from fourfold.search.listed import PLAYED_SURE, best_points, layout_numbers, sure_points
from fourfold.search.peaks import peaks
from fourfold.search.query import PlanQuery, usual_cluster, usual_policy
from fourfold.search.ranking import ASIDE, Ranking, rank_layouts
from fourfold.search.space import may_fit, space_of, widest_half
from fourfold.search.table import Pool
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.engine import engine_of
from fourfold.spec.expression import parse
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest
from tests.result.test_cpu_profile import profile
from tests.sampling import examples
from tests.search.asking import ask, by_engine, on_cluster

PLAIN = {"policy": Policy(), "evidence": {}}
FIXED = ({}, {"pp": 2}, {"cp": 2}, {"recompute": "full"}, {"micro_batch": 3}, {"sharding": "zero3"},
         {"cp_kind": "ulysses", "tp": 2}, {"schedule": "1f1b"}, {"replicate": 1})  # fmt: skip
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "mpt-125m", "llama-3.1-70b", "mixtral-8x7b",
          "olmoe-1b-7b", "deepseek-v2-lite", "qwen3-30b-a3b")  # fmt: skip
# How the choices begin that a fixed field decides: asked for, they need no measured run.
DECIDES = {"recompute": "recompute", "micro_batch": "more than one sequence", "sharding": "zero",
           "cp_kind": "context parallel", "schedule": "schedule"}  # fmt: skip
WHERE = ((), ("tp <= 4",), ("mem_gib < 60",), ("step_s < 5 and micro_batch == 1",), ("pp > 64",))


@st.composite
def questions(draw: st.DrawFn, most_gpus: int = 24) -> PlanQuery:
    gpus = draw(st.sampled_from([n for n in (1, 4, 6, 8, 12, 16, 24, 48, 64) if n <= most_gpus]))
    device = draw(st.sampled_from(["h100-80gb", "a100-40gb", "a100-80gb", "b200"]))
    stack = draw(st.sampled_from(["generic", "megatron", "fourfold", "torchtitan", "nanotron"]))
    model = draw(st.sampled_from(MODELS))
    compute = draw(st.sampled_from([None, None, "fp8"]))
    schedule = draw(st.sampled_from(["1f1b", "1f1b", "zero-bubble", "gpipe"]))
    policy = Policy(compute_dtype=compute, schedule=schedule, compile=draw(st.booleans()))
    fixed = dict(draw(st.sampled_from(FIXED)))
    if "schedule" not in fixed and schedule != "1f1b":
        fixed["schedule"] = schedule
    seq_len, global_batch = draw(st.sampled_from([1024, 4096, 32768])), draw(st.integers(1, 200))
    query = ask(
        model,
        gpus,
        stack,
        cluster=usual_cluster(catalog.device(device), gpus),
        batch=Batch(seq_len=seq_len, global_batch=global_batch),
        policy=usual_policy(engine_of(stack), policy, {"compile"}),
        fixed=fixed,
        where=tuple(parse(text) for text in draw(st.sampled_from(WHERE))),
        explore=draw(st.booleans()),
        safe=draw(st.sampled_from([False, False, True])),
    )
    return query if draw(st.booleans()) else replace(query, evidence={})


def few(pool: Pool, mask: np.ndarray) -> Pool:
    return {name: column[mask] for name, column in pool.items()}


def whole(query: PlanQuery) -> Pool:
    """Every legal point, each priced on its own."""
    table = candidates(query).table
    points = table.points(np.flatnonzero(table.legal))
    c, limit, entry = query.columns(points), query.limit_bytes, query.resolved.entry
    points["peak_bytes"] = peak = memory(c, entry.coefficients).worst_bytes
    points["step_s"] = estimate(c, entry.coefficients).step_s
    points["fits"] = peak < limit
    points["chance"] = fit_chance(c, entry)
    lean = lean_coefficients(entry)
    half = np.where(c.fsdp2 > 0, FSDP2_FRAGMENTS, FRAGMENTS)
    wasteless = memory(c, lean).worst_bytes * entry.coefficients["room"] / lean["room"]
    points["close"] = (peak >= limit) & (np.minimum(peak, wasteless) * np.exp(-half) < limit)
    points["unproven"] = np.zeros(len(c), dtype=bool)
    decided = ("precision", *(start for field, start in DECIDES.items() if field in query.fixed))
    for name, made in choices(c).items() if query.evidence else ():
        if not query.evidence.get(name, 0) and not name.startswith(decided):
            points["unproven"] |= made
    return points


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
    close = meeting(query, few(every, every["close"]))
    fitting = few(every, every["fits"])
    pool = meeting(query, fitting)
    if not len(pool["pp"]):
        fitting = few(every, every["chance"] >= REFUSED)
        pool = meeting(query, fitting)
    assert ranking.fitting == len(fitting["pp"])
    assert ranking.dropped == len(fitting["pp"]) - len(pool["pp"])
    use_all = query.explore or bool(pool["unproven"].all())
    proven = few(pool, ~pool["unproven"])
    # What was never measured is still better than what may not fit.
    use_all |= not query.safe and not (proven["chance"] >= 1.0 - query.risk).any()
    ranked = few(pool, use_all | ~pool["unproven"])
    if not use_all:
        same(ranking.unproven_best, best_points(few(pool, pool["unproven"]), ASIDE, 1))
    assert ranking.set_aside == len(pool["pp"]) - len(ranked["pp"])
    if query.safe:
        sure = ranked["chance"] >= SURE
        ranked = few(ranked, sure | ~sure.any())
    assert ranking.ways == len(ranked["pp"])
    check_fastest(ranking, ranked)
    check_beside(ranking, ranked, few(close, use_all | ~close["unproven"]))


@given(questions(64), st.sampled_from([1, 3, 10]))
@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
def test_points_too_slow_to_be_listed_are_not_missed(query: PlanQuery, least: int) -> None:
    """Left out before their memory is counted, as of very many points. What is listed and surely
    fits is as fast; of its variants another may be played through and be better."""
    query = replace(by_engine(query, "fourfold"), where=())
    every = rank_layouts(query, least=least, whole=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near, "MANY", 0)
        found = rank_layouts(query, least=least)
    count = min(least, len(every))
    assert every.slower == 0

    def sure_s(ranking: Ranking) -> list[float]:
        fits = ranking.fits[:count] >= 1.0 - query.risk
        return sorted(ranking.step_s[:count][fits].tolist())

    limit_s, listed_s = sure_s(every), sure_s(found)
    assert len(listed_s) >= len(limit_s)
    assert all(one <= s * (1.0 + 1e-9) for one, s in zip(listed_s, limit_s, strict=False))
    if count and not limit_s:
        assert found.step_s[:count].min() <= every.step_s[:count].min() * (1.0 + 1e-9)
    # Where none was left out, all that is said is the same.
    assert found.slower or (found.fitting, found.ways) == (every.fitting, every.ways)


@pytest.mark.slow
def test_of_millions_with_experts_none_that_is_listed_is_missed() -> None:
    """Of our own engine, whose tensors are counted."""
    request = PlanRequest(
        model="qwen3-235b-a22b", gpu="h100-80gb", gpus=512, seq_len=4096, global_batch=2048,
        stack="fourfold",
    )  # fmt: skip
    query, _ = resolved(request)
    found, every = (rank_layouts(query, whole=one) for one in (False, True))
    assert found.slower > every.fitting
    for name in every.points:
        # Seconds that the user measured are NaN where there are none.
        np.testing.assert_array_equal(found.points[name][:10], every.points[name][:10], name)


def check_beside(ranking: Ranking, ranked: Pool, close: Pool) -> None:
    """What is named beside the first choice: nothing faster of its kind is left out."""
    first_s = ranked["step_s"].min() if len(ranked["pp"]) else 0.0
    same(ranking.near_miss, best_points(few(close, close["step_s"] < first_s), ASIDE, 1))
    sure = few(ranked, ranked["chance"] >= SURE)
    found = sure_points(ranking.bounds, ranking.ranked, np.zeros_like(ranking.ranked), np.inf)
    wanted = best_points(sure, PLAYED_SURE, 1)
    same({name: found[name] for name in found if name != "unproven"}, wanted)


def check_fastest(ranking: Ranking, ranked: Pool) -> None:
    numbers = layout_numbers(ranked)
    fewest = {n: ranked["step_s"][numbers == n].min() for n in np.unique(numbers).tolist()}
    assert ranking.fastest_ways() == fewest
    assert ranking.layouts == len(fewest)
    space = ranking.bounds.table
    for keep, variants in ((300, 3), (7, 1), (20, 10)):
        index, step_s = fastest(ranking.bounds, ranking.ranked, keep=keep, variants=variants)
        found = {"step_s": step_s, "peak_bytes": space.peak_bytes(index)}
        some = best_points(space.points(index) | found, keep, variants)
        same(some, best_points(ranked, keep, variants))


SAMPLED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@settings(SAMPLED, max_examples=examples(12))
@given(questions())
def test_nothing_that_can_be_listed_is_dropped(query: PlanQuery) -> None:
    check(query)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_nothing_is_dropped_on_more_machines(part: int) -> None:
    """200 questions in parts: each has minutes."""

    @seed(part)
    @settings(SAMPLED, max_examples=examples(20))
    @given(questions(most_gpus=64))
    def check_some(query: PlanQuery) -> None:
        check(query)

    check_some()


@settings(SAMPLED, max_examples=examples(12))
@given(questions())
def test_no_point_is_faster_than_its_bound(query: PlanQuery) -> None:
    check_bounds(query)


@pytest.mark.parametrize("model", ["llama-mini", "llama-3.2-1b"])
@pytest.mark.parametrize("bytes_per_s", [1e8, 1e10])
def test_no_point_on_cores_is_faster_than_its_bound(model: str, bytes_per_s: float) -> None:
    """A CPU's operations have rates of their own."""
    known = profile(bytes_per_s=bytes_per_s)
    cluster = cluster_of(known, 8)
    made = calibration_of(known, cluster)
    policy = usual_policy(engine_of("fourfold"), Policy(precision="fp32"), set())
    batch = Batch(seq_len=128, global_batch=16)
    machine = {"known": made, "cluster": cluster, "evidence": {}}
    query = ask(model, 8, "fourfold", batch=batch, policy=policy, **machine)
    assert "cpu_start_s" in query.resolved.entry.coefficients
    check_bounds(query)


@pytest.mark.parametrize("stack", ["generic", "fourfold"])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "gpt-oss-20b", "gemma-2-2b"])
def test_no_point_of_layers_that_differ_is_faster_than_its_bound(model: str, stack: str) -> None:
    """Stages hold other shares of each kind of layer than the model has."""
    check_bounds(ask(model, 8, stack, batch=Batch(seq_len=4096, global_batch=6)))


def check_bounds(query: PlanQuery) -> None:
    bounds = bounds_of(candidates(query).table)
    index = np.flatnonzero(bounds.table.legal)
    bound, points = bounds.of(index), bounds.table.points(index)
    is_host = "cpu_start_s" in query.resolved.entry.coefficients
    if len(index):
        entry = query.resolved.entry
        step_s = estimate(query.columns(points), entry.coefficients).step_s
        assert (bound <= step_s).all()
        gathers = (points["zero"] == 3) & (points["shard"] > 1)
        assert is_host or (gathering_s(query, points)[:, gathers] > 0.0).all()


@settings(SAMPLED, max_examples=examples(12))
@given(questions(), st.sampled_from([1.0, 8.0, 60.0]))
def test_halves_of_memory_add_up_to_the_whole(query: PlanQuery, gib: float) -> None:
    """Of every legal point: bytes of the state and of all else, and the three verdicts on them."""
    device = replace(query.resolved.cluster.device, memory_bytes=int(gib * 2**30))
    query = on_cluster(query, device=device)
    space = space_of(candidates(query).table, Bar(ignore, ""), every=True)
    peak_bytes, rows = peaks(space, query.resolved.entry.coefficients), np.arange(len(space.legal))
    found = peak_bytes.of(rows, 0.0, np.inf)
    index = np.flatnonzero(space.legal)
    if not len(index):
        return
    wanted = space.peak_bytes(index)
    assert np.allclose(found.reshape(-1)[index], wanted, rtol=1e-12)
    assert np.isinf(found[~space.legal]).all()
    # Nothing is left out that is below what is asked about, and nothing else is called small.
    for least, most in itertools.pairwise(np.quantile(wanted, [0.0, 0.1, 0.5, 0.9])):
        some = peak_bytes.of(rows, least, most)
        between, small = (found >= least) & (found < most), found < least
        assert np.array_equal(some[between], found[between])
        assert np.array_equal(some < least, small)
        assert peak_bytes.may_be_below(most)[(found < most).any(axis=1)].all()
    chance = space.priced(index, lambda c: fit_chance(c, query.resolved.entry))
    likely, roomy, close = (
        mask.reshape(-1)[index] for mask in (space.likely, space.roomy, space.close)
    )
    assert np.array_equal(likely, wanted < query.limit_bytes)
    assert not (chance >= SURE)[~roomy].any()
    assert (chance[close] >= REFUSED - 1e-3).all()
    assert not close[likely].any()
    # No interval is wider than the widest, so that nothing is refused unasked.
    low = space.priced(index, lambda c: memory_bounds(c, query.resolved.entry)[0])
    assert (np.log(wanted / low) <= widest_half(query.resolved.entry) + 1e-9).all()
    assert np.array_equal(may_fit(space).reshape(-1)[index], chance >= REFUSED)


@settings(SAMPLED, max_examples=examples(12))
@given(questions())
def test_what_does_not_fit_is_explained_in_its_smallest_variant(query: PlanQuery) -> None:
    device = replace(query.resolved.cluster.device, memory_bytes=2**28)
    query = replace(on_cluster(query, device=device), where=(), fixed={})
    layout = Layout(pp=1, shard=query.gpus)
    said = explain(query, layout)
    if said.smallest is None:
        return
    every = whole(replace(query, fixed=layout.sizes | {"replicate": 1}))
    assert said.smallest.peak_bytes == every["peak_bytes"].min()


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, function: Any, result: str) -> list[int]:
    """Of how many points a module asks a function, call by call."""
    sizes: list[int] = []

    def noted(c, coefficients):
        found = function(c, coefficients)
        sizes.append(len(getattr(found, result)))
        return found

    monkeypatch.setattr(module, function.__name__, noted)
    return sizes


def test_bounds_of_memory_leave_few_points_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own engine, whose tensors are counted one by one."""
    sizes = counted(monkeypatch, search.peaks, memory, "worst_bytes")
    query = ask(gpus=64, stack="fourfold", batch=Batch(seq_len=8192, global_batch=256), **PLAIN)
    space = space_of(candidates(query).table, Bar(ignore, ""), every=True)
    assert 0.1 < space.likely.sum() / space.legal.sum() < 0.9
    assert 0 < sum(sizes) < 0.2 * space.legal.sum()


def test_a_large_search_times_few_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is worth having: of a million points fewer than one in a hundred is timed."""
    sizes = counted(monkeypatch, search.fastest, estimate, "step_s")
    query = ask("llama-3.1-70b", 1024, batch=Batch(seq_len=8192, global_batch=1024), **PLAIN)
    ranking = rank_layouts(query)
    assert ranking.ways > 100 * AT_ONCE
    assert sum(sizes) < 0.01 * ranking.ways
