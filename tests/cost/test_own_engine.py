"""Our engine on one H200: do the formulas say what was measured, and who uses them?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from fourfold.cost.fit.calibration import gpu_entry, load, shipped
from fourfold.cost.kinds import DENSE
from fourfold.cost.memory.peak import memory
from fourfold.cost.ops.ends import update
from fourfold.cost.ops.layer import decoder_layer, weights
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.reports import read_reports
from fourfold.errors import UserError
from fourfold.search.predict import predict
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import listed, match_engine, resolve
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.run import RunSpec
from fourfold.verbs.fit import fit
from fourfold.verbs.machine import read_profile
from fourfold.verbs.requests import FitRequest
from tests.specs import run_spec

RUNS = Path(__file__).parents[2] / "results" / "h200" / "fit"
H200 = usual_cluster(catalog.device("h200"), 1)


def run(model: str = "mistral-7b", *, micro: int = 1, batch: int = 1, **policy) -> RunSpec:
    fields = {"seq_len": 8192, "micro_batch": micro, "global_batch": batch, "compile": True}
    return run_spec(model, **(fields | policy))


def columns(*specs: RunSpec, stack: str = "fourfold"):
    return columns_of(specs, cluster=H200, engine=engine_of(stack))


def test_stored_runs_are_predicted_within_five_percent():
    reports = read_reports(str(RUNS))
    said = predict([report.spec for report in reports], cluster=H200)
    off: dict[bool, list[float]] = {True: [], False: []}
    for report, one in zip(reports, said, strict=True):
        seconds = median(step.seconds for step in report.steps if not step.warmup)
        peak = max(rank.peak_bytes for rank in report.memory)
        has_experts = report.spec.model.moe is not None
        off[has_experts].append(abs(one.step_s / seconds - 1.0))
        room = 0.12 if has_experts else 0.05
        assert one.peak_bytes == pytest.approx(peak, rel=room), report.spec.model.name
    assert len(off[False]) == 10
    assert max(off[False]) < 0.05
    # The host's own time of small micro batches differs between two cards by a fifth.
    assert len(off[True]) == 19
    assert median(off[True]) < 0.02
    assert sorted(off[True])[-2] < 0.05


def test_one_gpu_takes_what_was_measured_and_many_take_its_kernels():
    own = gpu_entry(MeasuredAs("fourfold"), "h200")
    engine = resolve("fourfold", H200, shipped())
    assert (engine.entry, engine.no_rows) == (own, "")
    larger = resolve("fourfold", usual_cluster(catalog.device("h200"), 64), shipped())
    many = larger.entry
    assert "other stacks and clusters" in larger.no_rows
    assert all(many.coefficients[name] == own.coefficients[name] for name in own.free_time)
    assert many.coefficients["net"] != own.coefficients["net"] or many.cluster != own.cluster
    other = resolve("megatron-lm-2025", H200, shipped()).entry
    assert other.coefficients["engine"] != own.coefficients["engine"]
    assert gpu_entry(MeasuredAs("fourfold"), "a100-80gb") is None


def moved(ops, phase: str, *kinds: str) -> float:
    return sum(float(op.bytes[0]) for op in ops if op.phase == phase and op.kind in kinds)


def test_bytes_are_those_of_tensors_read_and_written_once():
    c = columns(run())
    d, f, layer = 4096, 14336, list(decoder_layer(c, c.micro))
    # Norms and adds 8 widths, queries and keys in and out, gate and up in, their product out.
    there, back = (moved(layer, phase, "norm", "elementwise") for phase in ("forward", "inputs"))
    assert there == 2 * 8192 * (8 * d + 2 * (d + 1024) + 2 * f + f)
    assert back == 2 * 8192 * (8 * d + 2 * (d + 1024) + 2 * 2 * f + f)
    params = np.array([1e9])
    # fp32 weights and two moments both ways, bf16 gradients twice, bf16 copies once.
    assert moved(update(c, params, DENSE), "update", "copy") == 1e9 * (24 + 4 + 2)
    assert moved(weights(c), "weights", "copy") == 0
    two = columns(run(batch=2))
    assert moved(update(two, params, DENSE), "update", "copy") == 1e9 * (24 + 8 + 2)
    held = float(DENSE.on_rank(two)[0])
    assert moved(weights(two), "weights", "copy") == held * (2 + 8) / 2


def test_a_biased_model_reads_its_gradients_once_more():
    c = columns(run("mpt-1b"))
    without = columns(replace(run("mpt-1b"), model=replace(run("mpt-1b").model, bias=False)))
    plain, less = (moved(decoder_layer(x, x.micro), "inputs", "elementwise") for x in (c, without))
    assert plain - less == 2 * 8192 * (3 + 2 + 4) * 2048


def test_compiled_layers_keep_less_and_fp8_ones_least():
    specs = [run(compile=False), run(), run(compute_dtype="fp8")]
    peaks = memory(
        columns(*specs), gpu_entry(MeasuredAs("fourfold"), "h200").coefficients
    ).worst_bytes
    ffn, hidden = 2 * 8192 * 14336 * 32, 2 * 8192 * 4096 * 32
    assert peaks[0] - peaks[1] > 0.9 * ffn  # the gate's own activation, and logits in fp32
    assert peaks[1] - peaks[2] == pytest.approx(ffn + 2 * hidden, rel=0.1)


def test_a_lean_loss_pays_only_where_it_is_compiled():
    """mpt-125m, 8 x 2048 tokens, four times: 188 ms with torch's loss, 253 with the lean one."""
    eager = [run("mpt-125m", micro=8, batch=32, compile=False, loss=x) for x in ("torch", "lean")]
    compiled = [run("mpt-125m", micro=8, batch=32, loss=x) for x in ("torch", "lean")]
    seconds = estimate(
        columns(*eager, *compiled), gpu_entry(MeasuredAs("fourfold"), "h200").coefficients
    ).step_s
    assert seconds[1] > 1.2 * seconds[0]
    assert seconds[3] <= seconds[2]


def test_fp8_by_its_compute_format_is_priced():
    both = columns(run(precision="bf16-pure"), run(precision="bf16-pure", compute_dtype="fp8"))
    seconds = estimate(both, gpu_entry(MeasuredAs("fourfold"), "h200").coefficients).step_s
    assert 0.7 < seconds[1] / seconds[0] < 0.9


def test_a_profile_comes_with_the_package():
    profile = read_profile("h200")
    assert profile.device_name == "NVIDIA H200"
    assert profile.peak("bf16") > 6e14
    with pytest.raises(UserError, match="profile"):
        read_profile("h300")


def test_a_graphed_step_never_waits_for_its_host() -> None:
    """Of 128 tokens a layer is little but launches."""
    small = replace(run(), batch=replace(run().batch, seq_len=128))
    graphed = replace(small, policy=replace(small.policy, cuda_graph=True))
    waiting, busy = (one.step_s for one in predict([small, graphed], cluster=H200))
    assert busy < 0.9 * waiting


def test_a_fit_keeps_runs_with_experts_apart_and_a_plan_finds_them(tmp_path: Path):
    """As dense ones they would set rates of dense runs, and no plan with experts would see them."""
    out = tmp_path / "mine.json"
    request = FitRequest(runs=str(RUNS), cluster=str(RUNS.parent / "one-h200.toml"))
    out.write_text(fit(request).json())
    known = load(str(out))
    for experts, rows in ((False, 10), (True, 19)):
        engine = resolve("fourfold", H200, known, experts=experts)
        entry = engine.entry
        assert (entry.rows_time, engine.no_rows) == (rows, "")
        assert ("moe_host_s" in entry.free_time) == experts
    routed = replace(known, entries=known.routed)
    assert {row["stack"]: row["with_experts"] for row in listed(routed, None)}["fourfold"] == {
        "1 x h200": 19
    }
    other = replace(routed.entries[0], measured_as=MeasuredAs("megatron-lm-dev", experts=True))
    routed = replace(routed, entries=(other,))
    assert match_engine("megatron", H200, routed, experts=True).stack == "megatron-lm-dev"
    assert match_engine("megatron", H200, routed).stack == "megatron"  # no rates of a dense run
