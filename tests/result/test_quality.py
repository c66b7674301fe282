"""Every reason to doubt a row raises its own flag, and a clean run raises none."""

from __future__ import annotations

import pytest

from fourfold.result.quality import flags, straggler
from fourfold.result.report import (
    DeviceSample,
    ProbeReport,
    RankMemory,
    RankSteps,
    RunReport,
    StepReport,
)
from fourfold.result.timing import Warmup
from fourfold.spec.batch import Batch
from fourfold.spec.catalog import model
from fourfold.spec.run import RunSpec

SPEC = RunSpec(model=model("llama-tiny"), gpus=1, batch=Batch(seq_len=8))


def report(*, seconds: tuple[float, ...] = (1.0,) * 8, **fields: object) -> RunReport:
    plain: dict = {
        "steps": tuple(StepReport(step=i, seconds=s) for i, s in enumerate(seconds)),
        "memory": (RankMemory(rank=0, stage=0, peak_bytes=10),),
        "ranks": (RankSteps(rank=0, step_s=seconds),),
        "window_s": sum(seconds) * 1.01,
        "samples": (sample("0x0000000000000000"),),
        "probes": probes(1.0, 1.01),
        "warmup": Warmup(steps=8, ended="steady", drift=0.01),
    }
    return RunReport(spec=SPEC, outcome="ok", **(plain | fields))


def sample(throttle: str) -> DeviceSample:
    return DeviceSample(
        at_s=0.0, clock_hz=1.9e9, power_w=600.0, temperature_c=60.0, throttle=throttle
    )


def probes(before: float, after: float) -> tuple[ProbeReport, ...]:
    return (
        ProbeReport(when="before", flops_per_s=1e12 * before, bytes_per_s=1e12),
        ProbeReport(when="after", flops_per_s=1e12 * after, bytes_per_s=1e12),
    )


def test_a_clean_run_has_no_flag() -> None:
    assert flags(report()) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samples": (sample("0x0000000000000004"),)}, "throttled: software power cap"),
        ({"samples": (sample("0x0000000000000000"), sample("0x0000000000000048"))}, "throttled"),
        ({"samples": (sample("HW Thermal Slowdown"),)}, "throttled"),
        (
            {"memory": (RankMemory(rank=0, stage=0, peak_bytes=9, retries=2),)},
            "2 allocator retries in the window",
        ),
        ({"ranks": (RankSteps(rank=0, recompiles=3),)}, "3 recompiles in the window"),
        ({"probes": probes(1.0, 0.9)}, "GEMMs -10% after the run"),
        ({"window_s": 20.0}, "wall clock 20 s, but the steps sum to 8 s"),
        ({"seconds": (2.0, 2.0, 2.0, *(1.0,) * 9)}, "the first 2 steps were slower"),
        ({"seconds": (1.0, 1.5, 1.0, 1.5, 1.0, 1.5)}, "steps vary by 50%"),
        (
            {"warmup": Warmup(steps=32, ended="most steps", drift=0.2)},
            "still warming up: stopped at the limit of 32 steps",
        ),
    ],
)
def test_each_doubt_is_told(fields, words) -> None:
    assert any(words in flag for flag in flags(report(**fields))), flags(report(**fields))


@pytest.mark.parametrize("throttle", ["0x0000000000000001", "0x0000000000000002", "", "Not Active"])
def test_idling_and_a_set_clock_are_no_fault(throttle: str) -> None:
    assert flags(report(samples=(sample(throttle),))) == []


def test_the_straggler_waits_least() -> None:
    ranks = tuple(
        RankSteps(rank=rank, step_s=(1.0, 1.0), busy_s=(busy, busy))
        for rank, busy in enumerate((0.5, 0.9, 0.4))
    )
    assert straggler(report(ranks=ranks)) == (1, 0.9)
