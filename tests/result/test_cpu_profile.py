"""A CPU's profile as coefficients: costs of products, starts and bytes of collectives."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.coefficients import HOST
from fourfold.cost.fit.machine import calibration_of, host_coefficients, product_costs
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import estimate
from fourfold.result.profile import (
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    HardwareProfile,
    HostPoint,
    cluster_of,
    read_profile,
)
from fourfold.search.predict import predict
from fourfold.spec import codec
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from fourfold.spec.words import CP_KINDS
from tests.result.test_profile import make
from tests.specs import run_spec

SHAPES = ((256, 512, 512), (128, 1408, 512), (1408, 512, 128), (512, 1024, 1024))


def products(flop_s: float, byte_s: float) -> tuple[GemmPoint, ...]:
    return tuple(
        GemmPoint(
            dtype="fp32", m=m, n=n, k=k,
            seconds=2 * m * n * k * flop_s + 4 * (m * k + n * k + m * n) * byte_s,
        )
        for m, n, k in SHAPES
    )  # fmt: skip


def host_point(ranks: int, **fields: object) -> HostPoint:
    plain: dict = {
        "ranks": ranks,
        "products": products(1e-11 * ranks, 1e-10 * ranks),
        "attention": AttentionPoint(
            kernel="flash", dtype="fp32", batch=1, heads=8, head_size=64, seq_len=256,
            forward_s=1e-3 * ranks, backward_s=3e-3 * ranks,
        ),
        "element_bytes": 10**8,
        "element_s": 0.01 * ranks,
        "update_params": 10**6,
        "update_s": 4e-3 * ranks,
        "layer_s": 1e-3 * ranks,
        "wrapped_s": 0.0 if ranks == 1 else 20e-3,
        "called_s": 0.0 if ranks == 1 else 4e-3,
    }  # fmt: skip
    return HostPoint(**(plain | fields))


def collectives(ranks: int) -> list[CollectivePoint]:
    """Half a millisecond a hop, 1e-9 s a byte that a rank sends."""
    share = (ranks - 1) / ranks
    ways = {"all-gather": share, "reduce-scatter": share, "all-reduce": 2 * share, "p2p": 1.0}
    return [
        CollectivePoint(
            op=op, ranks=ranks, payload_bytes=size,
            seconds=5e-4 * (1 if op == "p2p" else ranks - 1) + way * size * 1e-9,
        )
        for op, way in ways.items() for size in (1, 2**24)
    ]  # fmt: skip


def profile() -> HardwareProfile:
    points = tuple(host_point(n) for n in (1, 2, 4))
    return make(hosts=points, collectives=tuple(collectives(2) + collectives(4)))


def spec(layout: Layout, **policy: object) -> RunSpec:
    fields = {"seq_len": 128, "global_batch": 8, "precision": "fp32", "device": "cpu"}
    return run_spec("llama-mini", layout, **fields, **policy)


@given(st.floats(1e-13, 1e-8), st.floats(1e-12, 1e-8))
def test_costs_of_products_are_found_again(flop_s: float, byte_s: float) -> None:
    found = product_costs(products(flop_s, byte_s))
    assert found == (pytest.approx(flop_s, rel=1e-4), pytest.approx(byte_s, rel=1e-4))


def test_products_that_only_multiply_have_no_cost_of_bytes() -> None:
    slower_when_small = [replace(p, seconds=p.seconds / p.m) for p in products(1e-11, 0.0)]
    flop_s, byte_s = product_costs(slower_when_small)
    assert flop_s > 0
    assert byte_s >= 0


def test_coefficients_are_those_of_as_many_ranks() -> None:
    alone, four = (host_coefficients(profile(), ranks) for ranks in (1, 4))
    assert set(alone) == set(four) == {*HOST, "flash", "cp_attention"}
    assert four["cpu_layer_s"] == pytest.approx(4 * alone["cpu_layer_s"])
    assert four["cpu_gather_s"] == pytest.approx(5e-4)
    assert four["cpu_gather_byte_s"] == pytest.approx(1e-9)
    # Twenty milliseconds less those of the layer alone, and less two gatherings and a scattering of
    # three hops each; a third for each of them.
    assert four["cpu_wrap_s"] == pytest.approx((20e-3 - 4e-3 - 9 * 5e-4) / 3, rel=1e-4)
    assert four["cpu_call_s"] == pytest.approx(4e-3 - 3 * 5e-4, rel=1e-4)


def test_more_ranks_than_measured_are_slower() -> None:
    four, eight = (host_coefficients(profile(), ranks) for ranks in (4, 8))
    assert eight["cpu_layer_s"] == pytest.approx(2 * four["cpu_layer_s"])


def test_an_older_profile_has_none() -> None:
    assert host_coefficients(make(), 4) == {}


def test_files_keep_them() -> None:
    known = profile()
    assert read_profile(codec.to_json(known)) == known
    made = calibration_of(known, cluster_of(known, 4))
    again = calibrations.from_json(calibrations.to_json(made), "a file")
    assert again.entries[0].coefficients["cpu_layer_s"] == pytest.approx(4e-3)


def test_nothing_hides_behind_anything() -> None:
    """Every layout pays its traffic on top of its share of the work."""
    known = profile()

    def seconds(layout: Layout, **policy: object) -> float:
        return predict([spec(layout, **policy)], profile=known)[0].step_s

    plain = seconds(Layout(shard=2))
    assert seconds(Layout(shard=2), sharding="zero3") > plain
    assert seconds(Layout(shard=2), sharding="zero3", recompute="full") > seconds(
        Layout(shard=2), sharding="zero3"
    )
    assert seconds(Layout(tp=2)) > seconds(Layout(tp=2), sequence_parallel=False)


def seconds_of(known: HardwareProfile, run: RunSpec) -> float:
    return predict([run], profile=known)[0].step_s


def with_points(known: HardwareProfile, **fields: object) -> HardwareProfile:
    return replace(known, hosts=tuple(replace(p, **fields) for p in known.hosts))  # type: ignore[arg-type]


def test_a_step_of_zero1_is_wrapped_twice() -> None:
    """Under zero1 a step gathers and scatters once, however many micro batches it has."""
    known, run = profile(), spec(Layout(shard=2))
    dearer = with_points(known, wrapped_s=26e-3)  # two milliseconds for each that is sent
    pieces = run.model.layers + 1
    more_s = seconds_of(dearer, run) - seconds_of(known, run)
    assert more_s == pytest.approx(2 * pieces * 2e-3, rel=0.01)


def test_intervals_are_as_wide_as_readings_differed() -> None:
    def width(unsteady: float) -> float:
        known = with_points(profile(), unsteady=unsteady)
        said = predict([spec(Layout(tp=2))], profile=known)[0]
        assert said.step_s_low < said.step_s < said.step_s_high
        return said.step_s_high / said.step_s

    assert width(0.0) == pytest.approx(exp(0.2), rel=1e-3)
    assert width(0.5) == pytest.approx(exp(hypot(0.2, log(1.5))), rel=1e-3)


def test_context_parallelism_pays_each_of_its_kinds() -> None:
    known = profile()
    whole = seconds_of(known, spec(Layout(shard=2)))
    for kind in CP_KINDS:
        assert seconds_of(known, spec(Layout(cp=2), cp_kind=kind)) > whole


def test_ranks_that_wait_leave_their_cores_to_others() -> None:
    """At the same rates of four ranks at work: with a core each they wait for each other, on one
    core somebody always works, and on two they wait at most half as long as with four."""

    def waiting_s(cores: int) -> float:
        known = replace(profile(), cores=cores)
        machine = cluster_of(known, 4)
        c = columns_of([spec(Layout(pp=4))], cluster=machine, stack="fourfold")
        coefficients = calibration_of(known, machine).entries[0].coefficients
        return float(estimate(c, coefficients).parts["bubble"][0])

    assert waiting_s(4) > 0.01
    assert waiting_s(4) == waiting_s(8)
    assert waiting_s(1) == pytest.approx(0.0, abs=1e-9)
    assert waiting_s(2) <= waiting_s(4) / 2
