"""A CPU's profile as coefficients: a layer that takes what was measured, starts and bytes of
collectives."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.coefficients import HOST
from fourfold.cost.fit.machine import calibration_of, cpu_coefficients
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import Times, estimate, layer_times
from fourfold.errors import UserError
from fourfold.result.profile import (
    CollectivePoint,
    HardwareProfile,
    SharedPoint,
    cluster_of,
    measured_layer,
    read_profile,
)
from fourfold.search.predict import predict
from fourfold.spec import codec
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from fourfold.spec.words import CP_KINDS
from tests.result.test_profile import make
from tests.specs import run_spec


def shared_point(ranks: int, **fields: float) -> SharedPoint:
    """Every core more of them is a core less for each."""
    plain = {"flops_per_s": 1e11 / ranks, "bytes_per_s": 1e10 / ranks, "layer_s": 0.3 * ranks,
             "start_s": 1e-3 * ranks}  # fmt: skip
    return SharedPoint(ranks=ranks, dtype="fp32", **(plain | fields))


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


def profile(**fields: float) -> HardwareProfile:
    points = tuple(shared_point(n, **fields) for n in (1, 2, 4))
    return make(shared=points, collectives=tuple(collectives(2) + collectives(4)))


def spec(layout: Layout, batch: int = 8, **policy: object) -> RunSpec:
    fields = {"seq_len": 128, "global_batch": batch, "precision": "fp32", "device": "cpu"}
    return run_spec("llama-mini", layout, **fields, **policy)


def coefficients(ranks: int, known: HardwareProfile | None = None) -> dict[str, float]:
    known = known or profile()
    return cpu_coefficients(known, cluster_of(known, ranks))


# The bytes and products of four ranks' layer need 0.33 s at these rates, whatever was measured.
@given(st.floats(0.35, 3.0), st.sampled_from([1, 2, 4, 8]))
def test_the_measured_layer_takes_what_it_took(layer_s: float, ranks: int) -> None:
    """Twice as long on twice as many ranks as were measured at most."""
    known = profile(layer_s=layer_s)
    machine = cluster_of(known, ranks)
    c = columns_of([measured_layer()], cluster=machine, engine=engine_of("fourfold"))
    entry = calibration_of(known, machine).entries[0]
    took = layer_times(c, entry.coefficients, micro=c.micro).total[0]
    assert took == pytest.approx(layer_s * max(1, ranks / 4), rel=0.05)


def test_bytes_are_never_faster_than_a_copy() -> None:
    quick = coefficients(1, profile(layer_s=1e-6))
    assert quick["cpu_byte_s"] == pytest.approx(1e-10)


def test_coefficients_are_those_of_as_many_ranks() -> None:
    alone, four = coefficients(1), coefficients(4)
    assert set(alone) == set(four) >= {*HOST}
    assert four["cpu_start_s"] == pytest.approx(4 * alone["cpu_start_s"])
    assert four["cpu_byte_s"] == pytest.approx(4 * alone["cpu_byte_s"], rel=0.1)
    assert four["cpu_gather_s"] == pytest.approx(5e-4)
    assert four["cpu_gather_byte_s"] == pytest.approx(1e-9)
    assert four["cpu_send_s"] == pytest.approx(5e-4, rel=1e-4)


def test_more_ranks_than_measured_are_slower() -> None:
    four, eight = coefficients(4), coefficients(8)
    assert eight["cpu_start_s"] == pytest.approx(2 * four["cpu_start_s"])


def test_a_profile_of_a_cpu_has_layers() -> None:
    bare = tuple(replace(point, layer_s=0.0) for point in profile().shared)
    with pytest.raises(UserError, match="run 'fourfold calibrate' again"):
        read_profile(codec.to_json(make(shared=bare)))


def test_files_keep_them() -> None:
    known = profile()
    assert read_profile(codec.to_json(known)) == known
    made = calibration_of(known, cluster_of(known, 4))
    again = calibrations.from_json(calibrations.to_json(made), "a file")
    assert again.entries[0].coefficients["cpu_start_s"] == pytest.approx(4e-3)


def seconds_of(known: HardwareProfile, run: RunSpec) -> float:
    return predict([run], profile=known)[0].step_s


def test_nothing_hides_behind_anything() -> None:
    """Every layout pays its traffic on top of its share of the work."""
    known = profile(layer_s=0.1)

    def seconds(layout: Layout, **policy: object) -> float:
        return seconds_of(known, spec(layout, **policy))

    plain, third = seconds(Layout(shard=2)), seconds(Layout(shard=2), sharding="zero3")
    assert plain < third < seconds(Layout(shard=2), sharding="zero3", recompute="full")
    assert seconds(Layout(tp=2)) > seconds(Layout(tp=2), sequence_parallel=False)


def times_of(known: HardwareProfile, run: RunSpec) -> Times:
    machine = cluster_of(known, run.gpus)
    c = columns_of([run], cluster=machine, engine=engine_of("fourfold"))
    return estimate(c, calibration_of(known, machine).entries[0].coefficients)


def test_a_step_of_zero1_sends_once() -> None:
    """However many micro batches it has: a gather and a scatter of each layer, and of the ends."""
    some, more = (times_of(profile(), spec(Layout(shard=2), batch)) for batch in (8, 16))
    assert some.parts["dp_comm"][0] == pytest.approx(more.parts["dp_comm"][0])
    pieces = spec(Layout(shard=2)).model.layers + 1
    assert some.parts["dp_comm"][0] > 2 * pieces * (5e-4 + 0.6 * 2e-3)


def test_intervals_are_as_wide_as_readings_differed() -> None:
    def width(unsteady: float) -> float:
        said = predict([spec(Layout(tp=2))], profile=profile(unsteady=unsteady))[0]
        assert said.step_s_low < said.step_s < said.step_s_high
        return said.step_s_high / said.step_s

    assert width(0.0) == pytest.approx(exp(0.5), rel=1e-3)
    assert width(0.5) == pytest.approx(exp(hypot(0.5, log(1.5))), rel=1e-3)


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
        return float(times_of(known, spec(Layout(pp=4))).parts["bubble"][0])

    assert waiting_s(4) > 0.01
    assert waiting_s(4) == waiting_s(8)
    assert waiting_s(1) == pytest.approx(0.0, abs=1e-9)
    assert waiting_s(2) <= waiting_s(4) / 2
