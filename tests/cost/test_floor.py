"""A step against what can't be avoided: parts that exclude each other and sum to the step."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.cost.run import columns_of
from fourfold.result.one_rank import DevicePart, Floor, OneRankResult, PhaseTime
from fourfold.search.query import usual_cluster
from fourfold.spec import catalog
from fourfold.spec.engine import engine_of
from tests.specs import run_spec

_SCRIPT = Path(__file__).parents[2] / "scripts" / "floor.py"
_MODULE = importlib.util.spec_from_file_location("floor", _SCRIPT)
floor = importlib.util.module_from_spec(_MODULE)
sys.modules["floor"] = floor  # dataclasses look their module up
_MODULE.loader.exec_module(floor)

CLUSTER = usual_cluster(catalog.device("h200"), 1)
SIZES = {"seq_len": 8192, "micro_batch": 2, "global_batch": 4}
SPEC = run_spec("llama-3.2-1b-untied", compile=True, **SIZES)
LAYER, FIRST, LAST, ELEMENT = floor.least_bytes(
    columns_of([SPEC], cluster=CLUSTER, engine=engine_of("fourfold"))
)
SEEN = {"matrix products": 0.21, "attention": 0.03, "norms and element-wise": 0.02,
        "copies and casts": 0.001, "fills": 0.5}  # fmt: skip


def found(**changes) -> OneRankResult:
    phases = {"layers": 0.19, "layers back": 0.08, "optimizer": 0.011, "reduce": 0.001}
    usual = OneRankResult(
        rank=0, world=1, stage=0, layers=16, micro_batches=2, ran=2, step_s=(0.56,),
        compute_s=2 * 0.27 + 0.012 + 0.004,
        phases=tuple(PhaseTime(name=n, seconds=s) for n, s in [*phases.items(), ("once", 0.004)]),
        kernels=(), update_s=0.01, update_elements=1_498_482_688, comm=(), flops=1, peak_bytes=1,
        reserved_bytes=1, retries=0, peaks_from="allocator", device="NVIDIA H200", torch="2.11",
        parts=tuple(DevicePart(name=n, seconds=s) for n, s in SEEN.items()), watched=(1, 1),
        floor=Floor(products_s=0.2, attention_s=0.028, again_products_s=0.0,
                    again_attention_s=0.0, bytes_per_s=4.2e12,
                    moved_bytes=16 * LAYER + FIRST + LAST,
                    update_bytes=1_498_482_688 * ELEMENT),
    )  # fmt: skip
    return replace(usual, **changes)


def test_parts_sum_to_the_step_and_limits_are_bytes_at_the_measured_speed():
    rows = {row.name: row for row in floor.step_parts(found())}
    assert sum(row.engine_s for row in rows.values()) == pytest.approx(found().compute_s)
    assert rows["matrix products"].limit_s == 0.4
    assert rows["matrix products"].gap_s == pytest.approx(0.02)
    # 24 bytes of weights and moments, 8 of summed gradients, 2 of copies, for every weight.
    update = rows["norm of gradients, update"]
    assert update.limit_s == pytest.approx(1_498_482_688 * 34 / 4.2e12)
    assert update.engine_s == pytest.approx(0.012)
    tokens, d, f, v = 16384, 2048, 8192, 128256
    layer = 2 * tokens * (16 * d + 4 * (d + 512) + 3 * f + 5 * f)
    ends = 2 * tokens * (6 * d + 8 * d + 3 * v)
    least = 2 * (16 * layer + ends) / 4.2e12
    assert rows["norms, element-wise, loss"].limit_s == pytest.approx(least)
    assert rows["waiting for the host, rest"].engine_s == pytest.approx(
        found().compute_s - 2 * (0.21 + 0.03 + 0.02 + 0.001) - 0.012
    )


def test_what_is_computed_again_is_avoidable():
    again = replace(found().floor, again_products_s=0.05, again_attention_s=0.01)
    rows = {row.name: row for row in floor.step_parts(found(floor=again))}
    assert rows["computed again"].limit_s == 0
    assert rows["computed again"].engine_s == pytest.approx(2 * 0.06)
    assert rows["matrix products"].engine_s == pytest.approx(2 * (0.21 - 0.05))


def test_a_slow_watch_does_not_make_parts_larger_than_the_step():
    slow = tuple(DevicePart(name=part.name, seconds=3 * part.seconds) for part in found().parts)
    rows = floor.step_parts(found(parts=slow))
    assert sum(row.engine_s for row in rows) == pytest.approx(found().compute_s)
    assert rows[-1].engine_s >= 0
    before = {row.name: row.engine_s for row in floor.step_parts(found())}
    after = {row.name: row.engine_s for row in rows}
    ratio = before["matrix products"] / before["attention"]
    assert after["matrix products"] / after["attention"] == pytest.approx(ratio)


def test_floor_report_and_picture_show_every_part():
    rows = floor.step_parts(found())
    lines = floor.report("1b", found(), 32768).splitlines()
    assert [line.split("|")[1].strip() for line in lines[3:-2]] == [row.name for row in rows]
    limit_s = sum(row.limit_s for row in rows)
    speed = f"{32768 / found().compute_s:,.0f} of at most {32768 / limit_s:,.0f} tokens/s per GPU"
    assert lines[-1].startswith(speed)
    pytest.importorskip("matplotlib")
    picture = floor.picture([("1b", rows)], "floor.svg").decode()
    assert picture.count("<svg") == 1
