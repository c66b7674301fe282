"""Muon in the cost model: its products by shape, its moments, its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cost.columns import Columns
from fourfold.cost.count.params import model_params
from fourfold.cost.count.tensors import layer_tensors
from fourfold.cost.fit.calibration import shipped
from fourfold.cost.kinds import kinds_of
from fourfold.cost.memory.stage import stage_weights, stages
from fourfold.cost.ops.muon import iterations, shapes
from fourfold.cost.ops.op import Op, of_one
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import once_ops
from fourfold.cost.step.rates import rates_of
from fourfold.engine.jobs.dryrun import count_rank
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import resolve
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.muon import IterationDtype, MatrixChoice, Muon, iteration_flops
from fourfold.spec.run import RunSpec
from tests.specs import run_spec


def run(model: str, layout: str, **named) -> RunSpec:
    return run_spec(model, layout, seq_len=64, global_batch=4, optimizer="muon", **named)


def columns(spec: RunSpec) -> Columns:
    cluster = usual_cluster(catalog.device("h100-80gb"), spec.gpus)
    return columns_of([spec], cluster=cluster, engine=engine_of("fourfold"))


def once(c: Columns) -> list[Op]:
    held = c.layers / c.pp
    return [op for kind in kinds_of(c) for op in iterations(c, held * kind.on_rank(c), kind)]


def flops(ops: list[Op]) -> float:
    return sum(of_one(2.0 * op.m * op.n * op.k * op.share) for op in ops if not op.axis)


MODELS = ("llama-3.1-8b", "mpt-7b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_those_that_a_checkpoint_publishes(name):
    shape = catalog.model(name)
    wanted = 0.0
    for kind, count in shape.layer_runs:
        for tensor in layer_tensors(shape, kind, experts=1):
            if Muon().updates(f"layers.0.{tensor.name}", tensor.shape):
                same = shape.experts if tensor.expert is not None else 1
                wanted += count * same * iteration_flops(*tensor.shape)
    c = columns(run(name, "dp1"))
    found = sum(
        of_one(one.count * (4.0 * one.short**2 * one.long + 2.0 * one.short**3))
        for kind in kinds_of(c)
        for one in shapes(c, kind)
    )
    assert found * shape.layers == pytest.approx(wanted, rel=2e-6)  # but for gates of shared ones
    assert flops(once(c)) == pytest.approx(5 * wanted, rel=2e-6)


@pytest.mark.parametrize("placement", ["blocks", pytest.param("owner", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("dp2 tp2", "tp4"))]
)
def test_flops_of_all_ranks_are_those_that_the_engine_does(layout, placement):
    muon = Muon(placement=placement)
    spec = run("llama-tiny", layout, muon=muon, sharding="zero1", device="cpu")
    plain = replace(spec, policy=replace(spec.policy, optimizer="adamw", muon=Muon()))
    done = sum(
        count_rank(spec, rank).flops - count_rank(plain, rank).flops for rank in range(spec.gpus)
    )
    assert flops(once(columns(spec))) * spec.gpus == pytest.approx(done, rel=0.02)


def test_an_owner_sends_each_part_there_and_back_in_the_iterations_format():
    c = columns(run("llama-3.1-8b", "dp8", sharding="zero1"))
    (sent,) = (op for op in once(c) if op.axis == "shard")
    matrices = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336)
    assert of_one(sent.bytes * sent.share) == pytest.approx(2 * matrices / 8 * 2)


def test_blocks_send_small_products_in_place_of_matrices():
    c = columns(run("mpt-7b", "tp8", muon=Muon(placement="blocks")))
    ops = [op for op in once(c) if op.axis]
    sums = [op for op in ops if op.name.endswith("sum")]
    assert {of_one(op.bytes) for op in sums} == {4.0 * 4096**2}
    (exchange,) = (op for op in ops if op.name.endswith("exchange"))
    # Keys and values are cut by heads.
    assert of_one(exchange.bytes * exchange.share) == pytest.approx(2 * 32 * 2 * 4096**2 / 8 * 2)


@pytest.mark.parametrize("layout", ["dp1", "dp4", "dp2 tp2"])
def test_one_moment_is_kept_of_matrices_and_two_of_the_ends(layout):
    def state(optimizer: str) -> float:
        spec = run_spec("llama-3.1-8b", layout, seq_len=4096, sharding="zero1", optimizer=optimizer)
        c = columns(spec)
        return of_one(stage_weights(c, stages(c, c.micros)[0], c.micros).state)

    shape = catalog.model("llama-3.1-8b")
    ends = 2 * shape.vocab * shape.hidden
    matrices = model_params(shape, 4096) - ends
    saved = state("adamw") - state("muon")
    assert saved == pytest.approx(4.0 * matrices / Layout.parse(layout).world, rel=1e-4)


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_moments_are_those_of_a_dry_run(layout):
    def moments(optimizer: str) -> tuple[int, float]:
        spec = run_spec(
            "llama-tiny", layout, seq_len=64, micro_batch=1, global_batch=4, device="cpu",
            optimizer=optimizer, sharding="zero1",
        )  # fmt: skip
        c = columns(spec)
        held = stage_weights(c, stages(c, c.micros)[0], c.micros).state
        kinds = {one.name: one.bytes for one in count_rank(spec, 0).kinds}
        return kinds["optimizer"], of_one(held)

    (counted, predicted), (of_adamw, all_of_adamw) = moments("muon"), moments("adamw")
    assert of_adamw - counted == pytest.approx(all_of_adamw - predicted, rel=1e-3)


def test_iterations_take_seconds_by_the_rate_of_their_format():
    """A GPU's fp32 products take several times as long as those in bf16; none beats its peak."""

    def seconds(dtype: IterationDtype) -> float:
        spec = run("llama-3.1-8b", "dp8", sharding="zero1", muon=Muon(dtype=dtype))
        c = columns(spec)
        cluster = usual_cluster(catalog.device("h100-80gb"), spec.gpus)
        entry = resolve(MeasuredAs.of("fourfold"), cluster, shipped()).entry
        rates = rates_of(c, entry.coefficients)
        done = [op for op in once(c) if op.kind == "iteration product"]
        ideal_s = flops(done) / of_one(c.peak * c.muon_peak)
        found = sum(of_one(rates.seconds(op)) for op in done)
        assert ideal_s < found < 4.0 * ideal_s
        return found

    assert seconds("fp32") > 3.0 * seconds("bf16")


def test_routers_left_to_adamw_have_no_iterations_and_both_moments():
    def run_of(matrices: MatrixChoice) -> Columns:
        muon = Muon(matrices=matrices)
        return columns(run("mixtral-8x7b", "dp8 ep8", sharding="zero1", muon=muon))

    everything, rest = run_of("layers"), run_of("no-router")
    shape = catalog.model("mixtral-8x7b")
    routers = shape.layers * shape.experts * shape.hidden
    saved = flops(updates(everything)) - flops(updates(rest))
    of_one_rank = 5 * shape.layers * iteration_flops(shape.experts, shape.hidden) / 8
    assert saved == pytest.approx(of_one_rank, rel=1e-6)
    sent = [sum(of_one(op.bytes * op.share) for op in updates(c) if op.axis == "shard")
            for c in (everything, rest)]  # fmt: skip
    assert sent[0] - sent[1] == pytest.approx(2 * 2 * routers / 8, rel=1e-6)
    states = [of_one(stage_weights(c, stages(c, c.micros)[0], c.micros).state)
              for c in (everything, rest)]  # fmt: skip
    assert states[1] - states[0] == pytest.approx(4 * routers / 8, rel=1e-6)


def updates(c: Columns) -> list[Op]:
    return once_ops(c)[1]
