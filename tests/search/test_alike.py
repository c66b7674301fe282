"""One run has one price: the planner's columns and seconds are those of bench, sweep and report."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fourfold.cost.columns import NAMES, Columns
from fourfold.cost.memory.peak import memory
from fourfold.cost.run import columns_of
from fourfold.search.candidates import candidates
from fourfold.search.explain import explain
from fourfold.search.predict import predict
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import rank_layouts
from fourfold.spec.batch import Batch
from fourfold.spec.engine import engine_of
from fourfold.spec.expression import parse
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from tests.cli import Cli
from tests.search.asking import ask, by_engine
from tests.specs import run_spec

POLICIES = [
    Policy(),
    Policy(attention="fused"),
    Policy(attention="unfused"),
    Policy(async_tp=True),
    Policy(compute_dtype="fp8"),
    Policy(precision="fp8", loss_chunks=4),
    Policy(schedule="zero-bubble", virtual_stages=2, recompute="full"),
    Policy(schedule="interleaved", virtual_stages=4),
    Policy(schedule="gpipe", recompute="every-2"),
    Policy(precision="bf16-pure", reduce_dtype="fp32", overlap_grad_reduce=False),
]


def _asked(policy: Policy, stack: str = "fourfold") -> tuple[PlanQuery, RunSpec]:
    """A question that leaves nothing open, and the run it asks about."""
    sizes = {"seq_len": 2048, "global_batch": 32, "micro_batch": 1}
    spec = run_spec(ask().model, "pp4 dp2 tp2", policy=policy, **sizes)
    searched = ("sharding", "cp_kind", "schedule", "virtual_stages", "recompute")
    fixed = {"pp": 4, "cp": 1, "tp": 2, "dp": 2, "replicate": 1, "micro_batch": 1}
    one = replace(
        ask(gpus=16, stack=stack),
        policy=policy,
        batch=replace(spec.batch, micro_batch=0),
        fixed=fixed | {name: getattr(policy, name) for name in searched},
        explore=True,
    )
    return one, spec


def _planned(one: PlanQuery) -> Columns:
    """The only point of the grid. Laid out for an engine that runs everything, seen by the one that
    was asked for: what an engine refuses is another question."""
    grid = candidates(by_engine(one, "generic"))
    points = grid.table.points(np.flatnonzero(grid.table.legal))
    assert len(points["pp"]) == 1
    return one.columns(points)


@pytest.mark.parametrize("stack", ["fourfold", "torchtitan", "megatron-bridge-2026"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.attention}-{p.schedule}")
def test_plan_and_bench_see_the_same_run(policy: Policy, stack: str) -> None:
    """Every fact the cost model looks at, under every engine."""
    one, spec = _asked(policy, stack)
    mine, theirs = (
        _planned(one),
        columns_of([spec], cluster=one.resolved.cluster, engine=engine_of(stack)),
    )
    for name in NAMES:
        a, b = getattr(mine, name), getattr(theirs, name)
        np.testing.assert_allclose(a, b, err_msg=name)
    assert mine.sequences == theirs.sequences


def test_torchs_fused_kernels_keep_no_scores_and_megatrons_softmax_does() -> None:
    one, spec = _asked(Policy(attention="fused"))
    kinds = ("auto", "flash", "cudnn", "efficient", "fused", "fused-softmax")
    specs = [replace(spec, policy=Policy(attention=kind)) for kind in kinds]  # type: ignore[arg-type]
    c = columns_of(specs, cluster=one.resolved.cluster, engine=engine_of("generic"))
    *torch_bytes, megatron_bytes = memory(c, one.resolved.entry.coefficients).worst_bytes.tolist()
    assert len(set(torch_bytes)) == 1
    assert megatron_bytes > 1.2 * torch_bytes[0]


def test_what_was_asked_stands_over_the_stacks_habits() -> None:
    """torchtitan does not overlap tp traffic unless told to; Megatron-Bridge does anyway."""
    one, _ = _asked(Policy(async_tp=True), "torchtitan")
    assert _planned(one).overlap_tp[0] == 1
    assert _planned(replace(one, policy=Policy())).overlap_tp[0] == 0
    assert _planned(by_engine(one, "megatron-bridge-2026")).overlap_tp[0] == 1


def test_a_compute_format_is_priced_as_its_bundle() -> None:
    one, spec = _asked(Policy(precision="fp8"))
    specs = [
        spec,
        replace(spec, policy=Policy(compute_dtype="fp8")),
        replace(spec, policy=Policy()),
    ]
    fp8, as_fp8, bf16 = predict(specs, cluster=one.resolved.cluster)
    assert as_fp8 == fp8
    assert fp8.step_s < 0.95 * bf16.step_s


def test_explain_names_the_recompute_that_was_asked(cli: Cli) -> None:
    argv = ["plan", "--model", "llama-3.1-405b", "--gpu", "h100-80gb", "--gpus", "32",
            "--seq-len", "8192", "--global-batch", "32", "--stack", "generic",
            "--explain", "pp1 dp4 tp8"]  # fmt: skip
    for kind in ("none", "every-3", "full"):
        assert f"recompute {kind} its fullest rank" in " ".join(
            cli(*argv, "--recompute", kind, status=1).split()
        )


def test_no_explained_layout_is_ahead_of_the_best() -> None:
    """Also where nothing like it was ever measured, and where --where leaves it out."""
    plain = ask(gpus=16, stack="megatron")
    asked = replace(plain, fixed={"cp_kind": "allgather"})
    for one, text in (
        (asked, "dp2 cp4 tp2"),
        (plain, "pp2 dp4 tp2"),
        (replace(plain, where=(parse("tp == 8"),)), "pp2 dp4 tp2"),
    ):
        said = explain(one, Layout.parse(text))
        assert said.fits, text
        assert said.row.step_s >= said.best.step_s * (1 - 1e-9)
        assert 1 <= said.rank <= said.of


def test_place_counts_the_layouts_that_have_a_faster_way_to_run() -> None:
    one = ask(gpus=16, stack="megatron")
    table = rank_layouts(one)
    fastest_s: dict[str, float] = {}
    for i in range(len(table)):
        layout = str(table.layout(i))
        fastest_s[layout] = min(float(table.step_s[i]), fastest_s.get(layout, math.inf))
    places = []
    for layout in [table.layout(i) for i in range(8)]:
        explained = explain(one, layout)
        assert explained.row is not None
        faster = [s for name, s in fastest_s.items() if s < explained.row.step_s]
        own = fastest_s[str(layout)] < explained.row.step_s  # by another way to run it
        at_least = 1 + len(faster) - own
        assert explained.rank is not None
        assert at_least <= explained.rank <= at_least + table.layouts - len(fastest_s), str(layout)
        places.append((explained.row.step_s, explained.rank))
    assert [rank for _, rank in sorted(places)] == sorted(rank for _, rank in places)


def test_every_layout_has_a_fastest_way_to_run() -> None:
    ranking = rank_layouts(ask(gpus=16, stack="megatron"))
    ways = ranking.fastest_ways()
    assert len(ways) == ranking.layouts
    assert min(ways.values()) == ranking.closed_s.min()


def test_zero_bubble_with_virtual_stages_from_the_command_line(cli: Cli) -> None:
    argv = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "16", "--seq-len",
            "8192", "--global-batch", "64", "--stack", "fourfold", "--micro-batch", "1",
            "--pp", "4", "--tp", "2", "--dp", "2", "--schedule", "zero-bubble",
            "--virtual-stages", "2", "--explore"]  # fmt: skip
    row = cli.json(*argv, "--sharding", "zero1", "--recompute", "full")["ranked"][0]
    policy = Policy(schedule="zero-bubble", virtual_stages=2, recompute="full", sharding="zero1")
    batch = Batch(seq_len=8192, global_batch=64, micro_batch=1)
    spec = run_spec(ask().model, "pp4 dp2 tp2", batch=batch, policy=policy)
    (told,) = predict([spec], cluster=ask(gpus=16).resolved.cluster)
    assert told.step_s == pytest.approx(row["step_s"], rel=1e-9)
