"""Same, different or can't tell; what to doubt about a measurement; when warm-up is over."""

from __future__ import annotations

import pytest

from fourfold.result.quality import between_runs, compare, differences, flags, straggler
from fourfold.result.report import (
    DeviceSample,
    ProbeReport,
    RankMemory,
    RankSteps,
    RunReport,
    StepReport,
)
from fourfold.result.timing import drifting, timing
from fourfold.spec import codec
from fourfold.spec.run import RunSpec

SPEC = codec.load(RunSpec, {"model": "llama-tiny", "gpus": 1})


def test_verdicts() -> None:
    assert compare([1.0], [1.2], None).verdict == "can't tell"
    assert compare([1.0, 1.001, 0.999], [1.2, 1.201, 1.199], None).verdict == "different"
    assert compare([1.0, 1.1, 0.9], [1.02, 1.12, 0.93], None).verdict == "same"
    assert compare([1.0], [1.2], (0.01, 10)).verdict == "different"
    assert compare([1.0], [1.01], (0.01, 10)).verdict == "same"
    assert compare([], [1.0], (0.01, 10)).verdict == "can't tell"
    assert compare([1.0], [2.0], None).ratio == pytest.approx(2.0)


def test_spread_is_pooled_over_groups() -> None:
    assert between_runs([[1.0], [2.0]]) is None
    spread = between_runs([[1.0, 1.1], [2.0, 2.2]])
    assert spread is not None
    assert (spread[0], spread[1]) == (pytest.approx(0.0674, abs=1e-3), 2)


def test_differences_are_named_by_path() -> None:
    one = {"layout": {"tp": 1, "pp": 2}, "seed": 0}
    other = {"layout": {"tp": 2, "pp": 2}, "tag": "x", "seed": 0}
    assert differences(one, other) == [("layout.tp", 1, 2), ("tag", None, "x")]


def test_warmup_ends_when_steps_no_longer_get_faster() -> None:
    assert drifting([5.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 2
    assert drifting([1.0] * 10) == 0
    assert drifting([1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 0  # one slow step is no drift
    known = timing([5.0, 3.0, 2.0, *[1.0] * 9])
    assert known is not None
    assert (known.step_s, known.dropped) == (1.0, 2)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 30, 999, 1000, 5000])
def test_the_interval_holds_the_median(count: int) -> None:
    known = timing([1.0 + 0.001 * (n % 17) for n in range(count)])
    assert known is not None
    assert known.low_s <= known.step_s <= known.high_s
    assert known.samples + known.dropped == count
    assert timing([]) is None


def test_flags_name_what_happened_in_the_window() -> None:
    quiet = RunReport(
        spec=SPEC,
        outcome="ok",
        steps=tuple(StepReport(step=i, seconds=1.0) for i in range(8)),
        window_s=8.0,
    )
    assert flags(quiet) == []
    loud = RunReport(
        spec=SPEC,
        outcome="ok",
        steps=tuple(StepReport(step=i, seconds=1.0 + i) for i in range(8)),
        memory=(RankMemory(rank=0, stage=0, peak_bytes=1, retries=2),),
        ranks=(RankSteps(rank=0, recompiles=1),),
        samples=(
            DeviceSample(at_s=0, clock_hz=1, power_w=1, temperature_c=1, throttle="sw_power_cap"),
        ),
        probes=(
            ProbeReport(when="before", flops_per_s=100, bytes_per_s=10),
            ProbeReport(when="after", flops_per_s=80, bytes_per_s=10),
        ),
        window_s=80.0,
    )
    text = "; ".join(flags(loud))
    for word in ("throttled", "2 allocator retries", "1 recompile in", "GEMMs -20%", "wall clock"):
        assert word in text


def test_the_straggler_waits_least() -> None:
    ranks = (
        RankSteps(rank=0, step_s=(1.0, 1.0), busy_s=(0.5, 0.5)),
        RankSteps(rank=1, step_s=(1.0, 1.0), busy_s=(0.9, 0.9)),
    )
    assert straggler(RunReport(spec=SPEC, outcome="ok", ranks=ranks)) == (1, 0.9)
    assert straggler(RunReport(spec=SPEC, outcome="ok", ranks=ranks[:1])) is None
