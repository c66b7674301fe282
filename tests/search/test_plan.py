"""The planner covers what it says, prices as the cost model does, and says how sure it is."""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

import fourfold
from fourfold.cost.fit.calibration import MEASURED
from fourfold.cost.memory.peak import REFUSED, SURE, memory, memory_bounds
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import estimate
from fourfold.errors import UserError
from fourfold.events import OnEvent
from fourfold.page.plan import facts
from fourfold.search import export
from fourfold.search.alternatives import deciding, reversals
from fourfold.search.candidates import MICRO_BATCHES, candidates
from fourfold.search.explain import explain
from fourfold.search.export.setup import Setup
from fourfold.search.legal import why_not
from fourfold.search.plan_answer import PlanAnswer
from fourfold.search.query import PlanQuery, usual_cluster
from fourfold.search.ranking import rank_layouts
from fourfold.search.resolve import default_engine, match_engine
from fourfold.search.rules.case import divisors
from fourfold.search.training import whole_training
from fourfold.show.plan import page
from fourfold.spec import catalog
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.engine import EXPORTS, engine_of
from fourfold.spec.expression import parse
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.policy import Policy
from fourfold.spec.words import RECOMPUTE, RECOMPUTE_KINDS
from fourfold.verbs.plan import plan
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest
from tests.sampling import PROFILE
from tests.search.asking import SHIPPED, ask, by_engine
from tests.specs import run_spec


@pytest.mark.parametrize(
    "stack",
    ["fourfold", "megatron"]
    + [pytest.param(s, marks=pytest.mark.slow) for s in ("torchtitan", "nanotron", "llm-foundry")],
)
def test_the_grid_holds_exactly_what_why_not_allows(stack: str) -> None:
    """Against a plain enumeration of 6 ranks, asked one run at a time."""
    one = ask(gpus=6, stack=stack, model="llama-3.2-1b", policy=Policy())
    one = replace(one, batch=Batch(seq_len=4096, global_batch=24))
    grid = candidates(one)
    points = grid.table.points(np.flatnonzero(grid.table.legal))
    names = ("pp", "replicate", "shard", "cp", "tp", "cp_kind", "virtual_stages", "zero",
             "recompute", "micro_batch")  # fmt: skip
    got = set(zip(*(points[name].tolist() for name in names), strict=True))
    wanted = set()
    for tp, cp, pp in itertools.product(divisors(6), repeat=3):
        if 6 % (tp * cp * pp):
            continue
        dp = 6 // (tp * cp * pp)
        for copies in divisors(dp)[:-1] or [1]:
            layout = Layout(pp=pp, replicate=copies, shard=dp // copies, cp=cp, tp=tp)
            wanted |= _legal_points(one, layout)
    assert got == wanted
    assert grid.looked_at == grid.legal + sum(grid.refused.values())


def _legal_points(one: PlanQuery, layout: Layout) -> set[tuple[int, ...]]:
    found = set()
    kinds = ("ring", "allgather", "ulysses") if layout.cp > 1 else ("ring",)
    zeros = range(4) if layout.shard * layout.cp > 1 else range(1)
    virtual = (1, 2, 3, 4, 6, 8, 16) if layout.pp > 1 else (1,)
    micros = [m for m in MICRO_BATCHES if m <= -(-24 // layout.dp)] or [1]
    recompute = {kind: RECOMPUTE_KINDS.index(kind) for kind in RECOMPUTE}
    for kind, zero, v, how, micro in itertools.product(kinds, zeros, virtual, recompute, micros):
        sizes = {-(-16 // (layout.pp * count)) for count in range(1, v)}
        if v > 1 and (v > 16 // layout.pp or -(-16 // (layout.pp * v)) in sizes):
            continue
        if layout.replicate > 1 and zero == 0:
            continue
        policy = Policy(
            cp_kind=kind,
            sharding=f"zero{zero}",
            virtual_stages=v,
            schedule="interleaved" if v > 1 else "1f1b",
            recompute=how,
        )
        batch = replace(one.batch, micro_batch=micro)
        if not why_not(one.model, layout, batch, policy, one.target):
            code = ("ring", "allgather", "ulysses").index(kind)
            found.add((layout.pp, layout.replicate, layout.shard, layout.cp, layout.tp, code, v,
                       zero, recompute[how], micro))  # fmt: skip
    return found


def test_ranked_layouts_are_legal_fit_and_cost_what_the_cost_model_says() -> None:
    one = ask(gpus=16)
    ranking = rank_layouts(one)
    assert len(ranking) > 10
    micros = ranking.points["micro_batch"].tolist()
    specs = [
        run_spec(
            one.model, ranking.layout(i), policy=ranking.choice(i).policy,
            batch=replace(one.batch, micro_batch=micro),
        )
        for i, micro in enumerate(micros)
    ]  # fmt: skip
    for spec in specs:
        assert not why_not(spec.model, spec.layout, spec.batch, spec.policy, one.target)
    columns = columns_of(specs, cluster=one.resolved.cluster, engine=engine_of("generic"))
    assert np.allclose(estimate(columns, one.resolved.entry.coefficients).step_s, ranking.closed_s)
    peaks = ranking.predicted.room.worst_bytes
    assert np.allclose(memory(columns, one.resolved.entry.coefficients).worst_bytes, peaks)
    sure = ranking.fits >= SURE
    assert (np.diff(ranking.step_s[sure]) >= 0).all()
    assert (ranking.step_s[~sure] < ranking.step_s[0]).all()
    assert np.allclose(sum(ranking.predicted.times.parts.values()), ranking.step_s)
    assert (peaks < one.resolved.cluster.device.memory_bytes).all()
    assert (ranking.predicted.low_s < ranking.step_s).all()
    assert (ranking.step_s < ranking.predicted.high_s).all()
    surely = [spec for spec, fits in zip(specs, sure, strict=True) if fits]
    keys = [(str(spec.layout), spec.policy.cp_kind) for spec in surely]
    assert len(set(keys)) == len(keys)


def test_what_is_over_the_memory_by_our_best_estimate_is_named_and_not_ranked() -> None:
    crowded = rank_layouts(ask(gpus=8))
    limit, near = crowded.query.limit_bytes, crowded.near_miss
    assert (crowded.predicted.room.worst_bytes < limit).all()
    assert near["peak_bytes"][0] >= limit
    assert near["step_s"][0] < crowded.closed_s.min()
    # Where nothing else is left, it is ranked, with its chance.
    fixed = {name: int(near[name][0]) for name in ("pp", "cp", "tp", "replicate", "micro_batch")}
    fixed |= {"virtual_stages": int(near["virtual_stages"][0])}
    fixed |= {"sharding": f"zero{int(near['zero'][0])}"}
    fixed |= {"recompute": RECOMPUTE_KINDS[int(near["recompute"][0])]}
    alone = rank_layouts(replace(crowded.query, fixed=fixed))
    assert (alone.predicted.room.worst_bytes >= limit).all()
    assert (alone.fits >= REFUSED).all()


def test_one_layout_is_listed_in_its_variants() -> None:
    alone = rank_layouts(ask(gpus=1, model="mpt-125m"), least=4)
    assert len(alone) == 4
    assert {str(alone.layout(i)) for i in range(4)} == {"pp1 dp1 cp1 tp1"}
    assert alone.step_s[0] <= 1.02 * alone.pace_s
    shortest = rank_layouts(ask(gpus=1, model="mpt-125m"), least=1)
    assert (shortest.fits[~shortest.points["tied"]] < SURE).all()
    assert shortest.choice(0) == alone.choice(0)


def test_flags_fix_an_axis_and_where_drops() -> None:
    one = ask(gpus=16)
    fixed = rank_layouts(replace(one, fixed={"tp": 4, "recompute": "full", "micro_batch": 3}))
    assert len(fixed)
    assert set(fixed.points["tp"].tolist()) == {4}
    assert set(fixed.points["micro_batch"].tolist()) == {3}
    assert {fixed.choice(i).policy.recompute for i in range(len(fixed))} == {"full"}
    where = (parse("dp % 4 == 0"), parse("step_s < 8 and mem_gib < 60"))
    few = rank_layouts(replace(one, where=where))
    assert len(few)
    assert few.dropped
    assert (few.predicted.columns.dp % 4 == 0).all()
    assert (few.closed_s < 8).all()
    assert (few.predicted.room.worst_bytes < 60 * 2**30).all()


def test_a_named_schedule_decides_the_virtual_stages() -> None:
    pipe = {"pp": 4, "tp": 2, "cp": 1}
    plain = rank_layouts(ask(gpus=16, fixed=pipe | {"schedule": "1f1b"}))
    assert set(plain.points["virtual_stages"].tolist()) == {1}
    looped = rank_layouts(ask(gpus=16, fixed=pipe | {"schedule": "interleaved"}))
    assert min(looped.points["virtual_stages"].tolist()) > 1
    named = {"fixed": pipe | {"schedule": "gpipe"}, "policy": Policy(schedule="gpipe")}
    gpipe = rank_layouts(ask(gpus=16, explore=True, **named))
    assert {gpipe.choice(i).policy.schedule for i in range(len(gpipe))} == {"gpipe"}


@pytest.mark.parametrize("part", ["every-2", "block-8"])
def test_recompute_of_some_layers_is_priced_between_none_and_full(part: str) -> None:
    fixed = {"tp": 2, "pp": 1, "cp": 1, "micro_batch": 1}
    more = {part: {"policy": Policy(recompute=part)}}
    steps = [
        rank_layouts(ask(fixed={"recompute": how} | fixed, **more.get(how, {})))
        for how in ("none", part, "full")
    ]
    times = [float(ranking.step_s[0]) for ranking in steps]
    assert times[0] < times[1] < times[2]
    assert steps[1].choice(0).policy.recompute == part


def test_what_no_row_backs_is_set_aside_unless_explored() -> None:
    cluster, batch = catalog.cluster("jean-zay"), Batch(seq_len=2048, global_batch=2048)
    stack = default_engine(cluster, SHIPPED).stack
    one = ask("gpt-3-175b", 384, stack, cluster=cluster, batch=batch)
    shy, bold = rank_layouts(one), rank_layouts(replace(one, explore=True))
    assert {shy.choice(i).policy.recompute for i in range(len(shy))} == {"full"}
    assert shy.set_aside > 0
    best_of_both = min(shy.unproven_best["step_s"][0], shy.closed_s.min())
    assert best_of_both == bold.closed_s.min()
    assert bold.set_aside == 0
    assert bold.ways == shy.ways + shy.set_aside


def test_played_pipelines_stay_near_the_closed_form() -> None:
    ranking = rank_layouts(ask("llama-3.1-70b", 64, batch=Batch(seq_len=4096, global_batch=100)))
    assert ranking.predicted.played > 20
    ratio = ranking.step_s / ranking.closed_s
    c = ranking.predicted.columns
    micros = np.ceil(np.ceil(c.batch / c.dp) / c.micro)
    plain = (c.vpp == 1) | ((micros % c.pp == 0) & (np.ceil(c.batch / c.dp) % c.micro == 0))
    assert np.all(np.abs(ratio[plain] - 1.0) < 0.1)
    # Interleaving goes in rounds; one that is cut short, or holds a smaller micro batch, saves
    # less than the closed form hopes.
    assert np.all((ratio > 0.9) & (ratio < 2.5))
    assert np.all(ratio[ranking.predicted.columns.pp == 1] == 1.0)
    assert np.any(ratio != 1.0)


def test_the_layout_bloom_was_trained_on_is_among_the_first() -> None:
    """TP 4, PP 12, DP 8, micro batch 2 on 384 A100; the calibration has no row with TP 4."""
    cluster = catalog.cluster("jean-zay")
    batch = Batch(seq_len=2048, global_batch=2048)
    stack = "megatron-deepspeed-2022"
    ranking = rank_layouts(ask("bloom-176b", 384, stack, cluster=cluster, batch=batch))
    found = [str(ranking.layout(i)) for i in range(len(ranking))].index("pp12 dp8 cp1 tp4")
    assert found < 10
    assert ranking.step_s[found] < 1.1 * ranking.step_s[0]
    assert ranking.points["micro_batch"][found] == 2


@pytest.mark.parametrize("gpus", [16, 64])
def test_a_longer_list_has_the_same_first_choice(gpus: int) -> None:
    one = ask(gpus=gpus, batch=Batch(seq_len=8192, global_batch=128))
    lists = [rank_layouts(one, least=least) for least in (1, 10, 40)]
    assert len({str((ranking.layout(0), ranking.choice(0).policy)) for ranking in lists}) == 1


def test_first_choice_is_the_fastest_that_is_likely_to_fit(cli) -> None:
    words = [
        "plan", "--model", "llama-3.1-70b", "--gpu", "a100-80gb", "--gpus", "256", "--seq-len",
        "8192", "--global-batch", "512", "--stack", "megatron",
    ]  # fmt: skip
    said = cli.json(*words)
    first, *others = said["ranked"]
    assert first["fit_chance"] >= SURE
    assert first["runs_in"][0] == "Megatron"
    for row in others:  # a row with fewer seconds says why it stands lower
        held = row["tied"] or row["fit_chance"] < SURE
        is_faster = row["step_s"] < first["step_s"]
        assert is_faster == ("less time" in row["note"])
        assert held or not is_faster
    likely = [row for row in said["ranked"] if row["fit_chance"] >= SURE and not row["tied"]]
    assert [row["step_s"] for row in likely] == sorted(row["step_s"] for row in likely)
    bold = cli.json(*words, "--risk", "50%")["ranked"][0]
    assert bold["step_s"] < first["step_s"]
    assert 0.5 <= bold["fit_chance"] < SURE


def test_without_an_engine_the_best_of_each_stands_side_by_side() -> None:
    request = PlanRequest(
        model="llama-2-7b", gpu="h100-80gb", gpus=8, seq_len=4096, global_batch=64, top=2
    )
    answer = plan(request)
    assert {one.engine for one in answer.engines} == {
        "megatron", "torchtitan", "accelerate", "deepspeed", "fourfold"
    }  # fmt: skip
    best = {one.engine: one.row for one in answer.engines}
    assert best["megatron"] == answer.best == answer.engines[0].row
    named = plan(replace(request, stack="torchtitan", top=1)).best
    assert best["torchtitan"] == named
    assert "The best of each engine" in "\n".join(map(str, page(answer)))


@pytest.mark.parametrize(
    ("model", "machines", "gpus"),
    [("mixtral-8x7b", {"gpu": "h100-80gb"}, 32), ("llama-3.1-70b", {"cluster": "nvidia-h100"}, 64),
     ("mpt-7b", {"cluster": "mosaic-a100"}, 8)],
)  # fmt: skip
def test_engines_table_starts_with_the_plan_and_says_what_keeps_faster_ones_back(
    model: str, machines: dict[str, str], gpus: int
) -> None:
    request = PlanRequest(
        model=model, gpus=gpus, seq_len=2048, global_batch=256, top=1, **machines
    )  # fmt: skip
    answer = plan(request)
    first, *others = [one for one in answer.engines if one.row is not None]
    assert first.row == answer.best is not None
    for one in others:
        assert one.row is not None
        assert (one.held_back != "") == (one.row.step_s < answer.best.step_s)
        assert one.held_back != "estimated" or one.row.provenance not in MEASURED


def test_a_cluster_like_one_of_the_catalogue_is_priced_like_it() -> None:
    known = catalog.cluster("nvidia-h100", 64)
    mine = replace(known, name="mine", gpus=64)
    request = PlanRequest(
        model="llama-3.1-8b", cluster=mine, gpus=64, seq_len=8192, global_batch=128,
        stack="megatron", top=1,
    )  # fmt: skip
    answer = plan(request)
    twin = plan(replace(request, cluster=known)).best
    assert (answer.like, answer.best) == ("nvidia-h100", twin)
    alone = plan(replace(request, cluster=replace(mine, like="none")))
    assert alone.like == ""
    assert alone.best != twin
    slow = replace(mine.links[-1], bytes_per_s=5e9)
    assert not plan(replace(request, cluster=replace(mine, links=(mine.links[0], slow)))).like


def test_racks_of_the_usual_kind_are_those_that_were_measured() -> None:
    """Of boards of four, in answers, settings and on pages, within a rack and beyond it."""
    for gpus in (64, 144):
        asked = {"model": "llama-3.1-8b", "gpus": gpus, "seq_len": 8192, "global_batch": 144 * 64,
                 "stack": "megatron", "top": 1}  # fmt: skip
        usual = PlanRequest(**asked, gpu="gb200")
        answer, known = plan(usual), plan(PlanRequest(**asked, cluster="nvidia-gb200"))
        rows = [(row.layout, row.step_s, row.peak_bytes) for row in (answer.best, known.best)]
        assert (answer.like, rows[0]) == ("nvidia-gb200", rows[1])
        said = dict(facts(answer, usual))
        assert f"{gpus // 4} hosts of 4 x NVIDIA GB200" in said["Machines"]
        assert said["Network"].startswith("900 GB/s per GPU within nvlink")
        assert ("1,600 Gbit/s per host" in said["Network"]) == (gpus > 72)
    hosts = [replace(catalog.device("a100-80gb"), domain=domain) for domain in (1, 8, 16, 32)]
    assert [device.usual_host_gpus for device in hosts] == [1, 8, 16, 4]


def test_where_no_layout_is_legal_the_answer_says_what_to_change() -> None:
    request = PlanRequest(
        model="llama-3.1-8b", gpu="h100-80gb", gpus=500, seq_len=8192, global_batch=1024,
        stack="megatron", top=1,
    )  # fmt: skip
    reason = plan(request).reason
    assert reason.startswith("no layout divides 500 GPUs and 1,024 sequences a step; use --gpus ")
    for gpus in re.findall(r"--gpus (\d+)", reason):
        assert plan(replace(request, gpus=int(gpus))).legal
    (batch,) = re.findall(r"--global-batch (\d+)", reason)
    assert plan(replace(request, global_batch=int(batch))).legal
    with pytest.raises(UserError, match="must divide heads=32"):
        plan(replace(request, gpus=8, layout="tp3"))


def test_flips_and_deciding_runs_name_other_layouts() -> None:
    ranking = rank_layouts(ask(gpus=16))
    for flip in reversals(ranking):
        assert flip.gain > 1
        assert ranking.layout(flip.winner) != ranking.layout(0)
    runs = deciding(ranking)
    assert runs[0] == 0
    assert 2 <= len(runs) <= 3
    apart = np.abs(np.log(ranking.step_s[runs] / ranking.step_s[0]))
    assert apart.max() <= np.abs(np.log(ranking.step_s / ranking.step_s[0])).max()
    low, high = memory_bounds(ranking.predicted.columns, ranking.query.resolved.entry)
    peaks = ranking.predicted.room.worst_bytes
    assert ((low < peaks) & (peaks < high)).all()


def test_a_ramp_is_legal_and_priced_in_every_stage() -> None:
    batch = Batch(seq_len=4096, global_batch=64, ramp=Ramp(start=16, increment=16, samples=4800))
    ranking = rank_layouts(ask(gpus=16, batch=batch, stack="megatron", tokens=4096 * 10_000.0))
    assert (16 % (ranking.predicted.columns.dp * ranking.predicted.columns.micro) == 0).all()
    train = whole_training(ranking, top=5)
    assert train.stages == 3
    by_hand = 0.0
    for size, steps in ((16, 100), (32, 50), (48, 34)):  # 1600 each, in whole steps
        sizes = {"global_batch": size, "micro_batch": int(ranking.points["micro_batch"][0])}
        batch = Batch(seq_len=4096, **sizes)
        where, policy = ranking.layout(0), ranking.choice(0).policy
        spec = run_spec(ranking.query.model, where, batch=batch, policy=policy)
        columns = columns_of(
            [spec], cluster=ranking.query.resolved.cluster, engine=engine_of("megatron")
        )
        by_hand += steps * float(predictions(columns, ranking.query.resolved.entry).step_s[0])
    assert train.ramp_s[0] == pytest.approx(by_hand)
    assert train.work_s[0] == pytest.approx(by_hand + (10_000 - 4832) / 64 * ranking.step_s[0])


@pytest.mark.parametrize(
    ("model", "layout", "full", "ramp", "tokens"),
    [
        ("bloom-176b", "pp12 dp4 tp8", 2048, Ramp(start=192, increment=16, samples=9_765_625), 366),
        ("gpt-3-175b", "pp12 dp4 tp8", 1536, Ramp(start=16, increment=16, samples=5_859_375), 300),
    ],
)
def test_a_ramp_takes_what_its_steps_take_one_by_one(model, layout, full, ramp, tokens) -> None:
    batch = Batch(seq_len=2048, global_batch=full, micro_batch=1, ramp=ramp)
    request = PlanRequest(
        model=model, cluster="jean-zay", gpus=384, seq_len=2048, global_batch=full, ramp=ramp,
        layout=layout, micro_batch=1, policy={"recompute": "full", "sharding": "zero1"},
        tokens=tokens * 10**9, lost=0.0, top=1,
    )  # fmt: skip
    (row,) = plan(request).ranked
    query, _ = resolved(request)
    sizes = [size for size, _ in batch.stages()]
    specs = [
        run_spec(
            query.model,
            row.layout,
            policy=row.policy,
            batch=replace(batch, ramp=None, global_batch=size),
        )
        for size in sizes
    ]
    columns = columns_of(specs, cluster=query.resolved.cluster, engine=query.resolved.engine)
    seconds = dict(
        zip(sizes, predictions(columns, query.resolved.entry).step_s.tolist(), strict=True)
    )
    left, step, by_hand = tokens * 10**9 / 2048, 0, 0.0
    while left > 0:
        size = batch.global_batch_at(step)
        by_hand += seconds[size] * min(1.0, left / size)
        left -= size
        step += 1
    assert row.training_s == pytest.approx(by_hand, rel=1e-3)
    assert by_hand > 1.002 * tokens * 10**9 / 2048 / full * seconds[full]  # small steps cost more


def test_explain_names_broken_rules_and_legal_neighbours() -> None:
    one = ask(gpus=16)
    said = explain(one, Layout.parse("pp1 dp1 cp1 tp16"))
    assert said.legal
    bad = explain(by_engine(one, "torchtitan"), Layout.parse("tp16"))
    assert [r["reason"] for r in bad.refusals] == ["kv-heads"]
    assert not bad.legal
    piped = explain(by_engine(one, "accelerate"), Layout.parse("pp2 dp8"))
    assert [r["reason"] for r in piped.refusals] == ["axis"]  # nobody asked for zero1
    assert bad.nearest[0] == "pp1 dp2 cp1 tp8"
    for text in bad.nearest:
        layout = Layout.parse(text)
        assert layout.world == 16
        policy = Policy(sharding="zero3", cp_kind="allgather")
        target = by_engine(one, "torchtitan").target
        assert not why_not(one.model, layout, one.batch, policy, target)
    alone = explain(one, Layout.parse("dp3 tp2"))
    assert [r["reason"] for r in alone.refusals] == ["world"]
    full = explain(one, Layout.parse("dp8 tp2"))
    assert full.fits
    assert 1 <= full.rank <= full.of
    assert full.row.step_s >= full.best.step_s * 0.999
    huge = ask("llama-3.1-405b", 16, batch=Batch(seq_len=4096, global_batch=48))
    big = explain(huge, Layout.parse("pp2 tp8"))
    assert big.legal
    assert not big.fits
    assert big.smallest.peak_bytes > big.smallest.limit_bytes


def test_stack_names_find_their_measured_kin() -> None:
    h100 = catalog.cluster("nvidia-h100")
    assert match_engine("nemo", h100, SHIPPED).stack == "nemo-2025"
    assert match_engine("nemo-2024", h100, SHIPPED).stack == "nemo-2024"
    # A newer one of which no step was measured says nothing.
    assert match_engine("megatron-deepspeed", None, SHIPPED).stack == "megatron-deepspeed-2022"
    with pytest.raises(UserError, match="unknown stack"):
        match_engine("mine", h100, SHIPPED)
    with pytest.raises(UserError, match="without --stack"):
        match_engine("megatron-0.16", h100, SHIPPED)
    assert default_engine(usual_cluster(catalog.device("h100-80gb"), 8), SHIPPED).stack == "generic"


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command prints is made of an answer that another test has asked for too."""
    monkeypatch.setattr(fourfold, "plan", _plan_once)


_PLANS: dict[str, PlanAnswer] = {}


def _plan_once(request: PlanRequest, *, on_event: OnEvent, second_process: bool) -> PlanAnswer:
    if repr(request) not in _PLANS:
        _PLANS[repr(request)] = plan(request, on_event=on_event, second_process=second_process)
    return _PLANS[repr(request)]


PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "16",
        "--seq-len", "4096", "--global-batch", "64"]  # fmt: skip


def test_command_json_has_the_promised_fields(cli) -> None:
    words = ["--top", "4", "--tokens", "1e12", "--lost", "0", "--stack", "megatron"]
    said = cli.json(*PLAN, *words)
    assert said["candidates"] == said["legal"] + sum(said["refused"].values())
    assert len(said["ranked"]) == 4
    first = said["ranked"][0]
    names = {"layout", "policy", "micro_batch", "step_s", "step_s_low", "step_s_high", "peak_bytes",
             "tflops_gpu", "gpu_hours"}  # fmt: skip
    assert names <= first.keys()
    steps = 1e12 / (64 * 4096)
    assert first["gpu_hours"] == pytest.approx(first["step_s"] * steps * 16 / 3600)
    assert sum(first["exposed_s"].values()) == pytest.approx(first["step_s"])
    assert sum(first["memory_bytes"].values()) == pytest.approx(first["peak_bytes"])


def test_command_text_begins_with_the_answer(cli) -> None:
    first = cli.json(*PLAN)["ranked"][0]
    sentence, _, rest = cli(*PLAN).partition("\n\n")
    assert "\n" not in sentence
    for words in (first["layout"], f"micro batch {first['micro_batch']}", "s per step (80%: ",
                  f"{first['tflops_gpu']:.0f} TFLOP/s and {first['mfu_pct']:.1f}% MFU", "80 GiB",
                  f"{100 * first['fit_chance']:.0f}% chance to fit"):  # fmt: skip
        assert words in sentence
    table, engines, remarks = (*rest.split("\n\n"), "")[:3]
    assert max(map(len, table.splitlines())) <= 100
    assert engines.startswith("The best of each engine")
    assert len(remarks.splitlines()) <= 6
    assert "Runs in " in sentence


@pytest.mark.parametrize(
    "words",
    [[], ["--tokens", "1T", "--price", "2.5", "--stack", "megatron"], ["--stack", "nanotron-2025"],
     ["--tokens", "1T", "--ramp", "16,16,4800", "--stack", "megatron"],
     ["--model", "bloom-176b", "--cluster", "jean-zay", "--gpus", "384", "--stack",
      "megatron-deepspeed-2022"]],
)  # fmt: skip
def test_command_table_is_at_most_100_wide(words: list[str], cli) -> None:
    table = cli(*(PLAN if "--cluster" not in words else ["plan", *PLAN[7:]]), *words).split("\n\n")[
        1
    ]
    assert table.lstrip().startswith("#")
    assert max(map(len, table.splitlines())) <= 100


def test_details_say_what_makes_it_believable(cli) -> None:
    text = cli(*PLAN, "--details")
    for words in ("evidence for #1", "to confirm the order, measure",
                  "searched", "rejected:", "80% interval", "not ranked", "compute s"):  # fmt: skip
        assert words in text
    assert "pp1 dp" in cli(*PLAN, "--format", "md")


def test_command_exports_the_first_choice(cli, tmp_path) -> None:
    assert "torchtitan 0.3.0" in cli(*PLAN, "--model", "llama-2-7b", "--export", "torchtitan")
    first = cli.json(*PLAN, "--stack", "megatron")["ranked"][0]
    out = tmp_path / "settings"
    cli(*PLAN, "--export", "megatron", "--out", out)  # implies --stack megatron
    told = cli.err
    words = (out / "engine.args").read_text().split()
    assert words[words.index("--micro-batch-size") + 1] == str(first["micro_batch"])
    script = (out / "run.sh").read_text()
    assert f", {first['layout']} " in script
    fits = f"{100 * first['fit_chance']:.0f}% chance to fit"
    assert fits in script
    assert fits in told
    assert os.access(out / "run.sh", os.X_OK)
    # Somebody may have edited it.
    assert "use --force" in cli(*PLAN, "--export", "megatron", "--out", out, status=2)
    cli(*PLAN, "--export", "megatron", "--out", out, "--force")


@pytest.mark.parametrize("release", EXPORTS)
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("llama-2-7b", "fp8"),
        ("llama-3.1-405b", "bf16-mixed"),
        pytest.param("llama-2-7b", "bf16-mixed", marks=pytest.mark.slow),
        pytest.param("llama-3.1-405b", "fp8", marks=pytest.mark.slow),
    ],
)
def test_what_is_ranked_for_a_release_it_has_settings_for(release, model, precision) -> None:
    asked = ask(model, 128, stack=export.stack_of(release), release=release, explore=True)
    asked = replace(asked, policy=replace(asked.policy, precision=precision))
    setup = Setup(model=asked.model, layout=Layout(), batch=asked.batch, policy=asked.policy,
                  host_gpus=8, engine=asked.resolved.engine)  # fmt: skip
    try:
        export.write(release, setup)
    except UserError:
        assert release in ("accelerate", "deepspeed")
        assert precision == "fp8"
        return
    ranking = rank_layouts(asked, least=300)
    assert len(ranking) > 20
    for place in range(0, len(ranking), 7):
        one = replace(
            setup,
            layout=ranking.layout(place),
            batch=replace(asked.batch, micro_batch=int(ranking.points["micro_batch"][place])),
            policy=ranking.choice(place).policy,
        )
        assert export.write(release, one)


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [(["--sharding", "fsdp"], "sharding", "zero3"), (["--recompute", "full"], "sharding", "zero1"),
     (["--cp", "2", "--cp-kind", "a2a"], "recompute", "none")],
)  # fmt: skip
def test_what_was_asked_for_is_ranked_though_nobody_measured_it(cli, asked, field, value) -> None:
    """Megatron is hardly ever run with FSDP: asked for it, a plan had one without data parallelism.
    What is left open keeps to what was measured."""
    found = cli.json(*PLAN, "--stack", "megatron", *asked)
    assert found["ranked"][0]["policy"][field] == value
    assert found["ranked"][0]["layout"].split()[1] != "dp1"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-pure", "fp8"])
def test_no_precision_is_faster_than_its_peak(cli, precision: str) -> None:
    row = cli.json(*PLAN, "--stack", "fourfold", "--precision", precision)["ranked"][0]
    assert 5 < row["mfu_pct"] < 90


def test_explain_reads_layouts_as_a_plan_prints_them() -> None:
    request = PlanRequest(
        model="llama-3.1-8b", gpu="h100-80gb", gpus=16, stack="megatron", seq_len=8192,
        global_batch=64, top=30,
    )  # fmt: skip
    names = [str(row) for row in plan(request).ranked]
    assert {" v" in name for name in names} == {" ring" in name for name in names} == {True, False}
    for name in names[:: 1 if PROFILE == "all" else 7]:
        explained = fourfold.explain(request, f"{name}, micro batch 1").explanation
        assert explained.row is not None
        assert {*name.split()} <= {*str(explained.row).split()}
        assert {row.micro_batch for row in explained.variants or ()} == {1}
        # Its place is among all that the plan ranks, not among layouts with its virtual stages.
        assert explained.with_unproven or str(explained.best) == names[0]
    fixed = replace(request, layout="pp2 tp1 v4", top=1)
    assert fixed.policy == {"virtual_stages": 4}
    assert str(plan(fixed).best).endswith(" v4")


def test_explain_says_that_it_knows_one_order_of_axes() -> None:
    heard: list[str] = []
    asked = PlanRequest(
        model="llama-3.1-8b", gpu="h100-80gb", seq_len=4096, global_batch=64, gpus=16
    )
    for words in ("tp8 dp2", "dp2 tp8"):
        found = fourfold.explain(asked, words, on_event=lambda event: heard.append(event.text))
        assert found.explanation.layout.order == AXES
    assert [text for text in heard if "order" in text] == [
        "read as: pp1 cp1 tp8 dp2 = pp1 dp2 cp1 tp8; rank order is fixed: tp fastest"
    ]


def test_explain_says_what_is_approximated(cli) -> None:
    argv = [word if word != "llama-3.1-8b" else "gemma-2-2b" for word in PLAN]
    for layout in ("tp2 dp8", "tp1 dp16"):
        assert "approximated: " in cli(*argv, "--explain", layout)
    assert "approximated" not in cli(*PLAN, "--explain", "tp2 dp8")


def test_safe_ranks_what_surely_fits(cli) -> None:
    words = (
        "plan --model llama-3.1-70b --cluster nvidia-h100 --gpus 64 --seq-len 8192"
        " --global-batch 128 --stack megatron"
    )
    ask = words.split()
    assert any(row["fit_chance"] < 0.9 for row in cli.json(*ask)["ranked"])
    rows = cli.json(*ask, "--safe")["ranked"]
    assert rows
    assert all(row["fit_chance"] >= 0.9 for row in rows)


@pytest.mark.parametrize(
    "words",
    ["--model llama-3.1-405b --stack megatron", "--where 'dp > 1000' --stack megatron"],
)
def test_where_nothing_is_left_the_answer_says_so(words: str, cli) -> None:
    assert cli(*PLAN, *shlex.split(words), status=1).startswith(("No layout ", "No legal layout "))


def test_plan_refuses_a_precision_the_gpu_lacks(cli) -> None:
    assert "--precision fp4 needs FP4 tensor cores: h100-80gb has none" in cli(
        *PLAN, "--precision", "fp4", status=2
    )


@pytest.mark.parametrize(
    "gpus", [8, 50_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (4096, 200_000))]
)
@pytest.mark.parametrize("name", catalog.cluster_names())
def test_a_known_cluster_is_a_kind_of_machine(name: str, gpus: int) -> None:
    """Its hosts, racks and links stay what they are; there are more of them, which is said."""
    known = catalog.cluster(name)
    request = PlanRequest(
        model="llama-3.1-8b", cluster=name, gpus=gpus, seq_len=4096, global_batch=gpus, top=1,
        layout="tp1 cp1 pp1", policy={"sharding": "zero3"}, micro_batch=1, stack="generic",
    )  # fmt: skip
    query, counts = resolved(request)
    assert counts == [gpus]
    assert query.resolved.cluster.gpus == max(known.gpus, gpus)
    assert query.resolved.cluster.hosts == -(-max(known.gpus, gpus) // known.host_gpus)
    assert [link.ranks for link in query.resolved.cluster.links[:-1]] == [
        x.ranks for x in known.links[:-1]
    ]
    assert [link.bytes_per_s for link in query.resolved.cluster.links] == [
        link.bytes_per_s for link in known.links
    ]
    found = plan(request)
    assert found.best is not None
    beyond = any(f"{known.gpus:,} GPUs at its source" in text for text in found.remarks)
    assert beyond == (gpus > known.gpus)


def test_csv_has_a_column_for_every_axis(cli) -> None:
    told = [*PLAN, "--top", "4", "--sharding", "hsdp"]
    rows = list(csv.reader(io.StringIO(cli(*told, "--format", "csv"))))
    headings = rows[0]
    ranked = cli.json(*told)["ranked"]
    for row, said in zip(rows[1:], ranked, strict=True):
        cell = dict(zip(headings, row, strict=True))
        layout = Layout.parse(said["layout"])
        sizes = {axis: int(cell[axis]) for axis in ("pp", "dp", "cp", "tp", "dp_replicate")}
        assert sizes == {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp,
                         "dp_replicate": layout.replicate}  # fmt: skip
        assert float(cell["step_s"]) == said["step_s"]
        assert float(cell["peak_bytes"]) == said["peak_bytes"]
        assert float(cell["fit_chance"]) == said["fit_chance"]


def test_text_keeps_to_the_columns(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    lines = cli(*PLAN).splitlines()
    assert max(map(len, lines)) <= 110
    assert "compute s" not in "\n".join(lines)
    assert "compute s" in cli(*PLAN, "--details")
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, cli(*PLAN).splitlines())) > 110
