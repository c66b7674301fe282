"""Bytes of a run: divided where the engine divides, in the formats it keeps, and how sure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.cost.columns import Columns
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.accuracy import score
from fourfold.cost.fit.coefficients import LEAN, defaults
from fourfold.cost.fit.validate import others_of
from fourfold.cost.memory.held import kept_bytes
from fourfold.cost.memory.peak import (
    FRAGMENTS,
    REFUSED,
    SURE,
    fit_chance,
    lean_coefficients,
    limit_bytes,
    memory,
    memory_bounds,
)
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.predict import predict
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.reports import read_reports
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import resolve
from fourfold.search.rows.read import parse
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.layout import Layout
from tests.specs import run_spec

SHIPPED = calibrations.shipped()
GOLDEN = Path(__file__).parent.parent / "golden"
H200 = Path(__file__).parents[2] / "results" / "h200"


def seen(stack: str, gpu: str = "h100-80gb", micro: int = 1, **policy) -> Columns:
    """llama-3.1-70b on 256 GPUs, dp32 tp8, 8192 tokens."""
    layout = Layout(shard=32, tp=8)
    sizes = {"seq_len": 8192, "global_batch": 32 * micro, "micro_batch": micro}
    spec = run_spec("llama-3.1-70b", layout, **sizes, **policy)
    return columns_of(
        [spec], cluster=usual_cluster(catalog.device(gpu), 256), engine=engine_of(stack)
    )


def activations(c: Columns, stack: str) -> float:
    entry = resolve(
        MeasuredAs.of(stack), usual_cluster(catalog.device("h100-80gb"), 256), SHIPPED
    ).entry
    return float(memory(c, entry.coefficients).parts["activations"][0])


@pytest.mark.parametrize("stack", ["generic", "megatron-bridge-2026", "fourfold"])
def test_saved_inputs_are_divided_where_the_sequence_is(stack: str) -> None:
    """80 inputs of layers, 8192 tokens of 8192 numbers: 10.7 GB whole, an eighth under sp."""
    policy = {"recompute": "full", "sharding": "zero3"}
    whole = activations(seen(stack, sequence_parallel=False, **policy), stack)
    divided = activations(seen(stack, **policy), stack)
    inputs = 80 * 8192 * 8192 * 2
    assert whole - divided > 0.95 * inputs * 7 / 8


def test_fp8_keeps_what_the_engine_keeps() -> None:
    """Transformer Engine the casts, torchao the originals."""
    for stack, less in (("megatron-bridge-2026", True), ("fourfold", False)):
        bf16, fp8 = (activations(seen(stack, precision=p), stack) for p in ("bf16-mixed", "fp8"))
        assert (fp8 < 0.9 * bf16) == less, stack


def test_torchtitans_published_70b_run() -> None:
    """829 tokens/s/GPU (19.76 s) and 71.9 GiB on 256 H100 with 96 GB, by rows of other engines."""
    others = tuple(e for e in SHIPPED.entries if e.measured_as.engine != "torchtitan")
    assert len(others) < len(SHIPPED.entries)
    policy = {"precision": "fp8", "recompute": "full", "sharding": "zero3", "compile": True}
    c = seen("torchtitan-2024", "h100-96gb", micro=16, **policy)
    machine = usual_cluster(catalog.device("h100-96gb"), 256)
    entry = resolve(
        MeasuredAs.of("torchtitan-2024"), machine, replace(SHIPPED, entries=others)
    ).entry
    assert float(estimate(c, entry.coefficients).step_s[0]) == pytest.approx(19.764, rel=0.10)
    peak = float(memory(c, entry.coefficients).worst_bytes[0]) / 2**30
    assert peak == pytest.approx(71.9, rel=0.15)


def test_megatrons_tensors_are_those_that_are_counted() -> None:
    """Published peaks of allocated memory (SimuMax, one node of B200): gradients summed in fp32,
    and the gradient of the head beside them, explain them without any factor."""
    rows = parse(read_table(str(GOLDEN.parent / "samples" / "published_peaks.csv")))
    counted = defaults() | dict.fromkeys(("act", "kept_hidden", "state", "logits"), 1.0)
    counted |= {"gathered": 0.0, "whole_logits": 0.0, "base_gib": 0.0}
    peaks = memory(rows.columns, counted).worst_bytes / 2**30
    assert peaks == pytest.approx(rows.mem_gb, rel=0.03)


def kept(c):
    return kept_bytes(c, decoder_layer(c, c.micro), defaults())


def test_the_fullest_stage_may_be_between_the_ends() -> None:
    """126 layers on 16 stages: 7 and the embedding, 14 times 8, 7 and the head."""
    layout = Layout(pp=16, shard=128, tp=8)
    fields = {"sharding": "zero2", "schedule": "interleaved", "virtual_stages": 8}
    spec = run_spec("llama-3.1-405b", layout, seq_len=8192, global_batch=2048, **fields)
    machine = usual_cluster(catalog.device("h100-80gb"), 16384)
    c = columns_of([spec], cluster=machine, engine=engine_of("generic"))
    found = memory(c, defaults())
    assert found.worst_bytes > found.first_bytes > found.last_bytes
    assert found.parts["logits"] == 0.0
    held = 16 * 8 * kept(c)
    assert found.parts["activations"] == pytest.approx(held)


def test_plain_calls_keep_the_activated_gate() -> None:
    c = seen("generic")
    eager = replace(c, eager=np.ones(1))
    more = kept(eager) - kept(c)
    assert more == pytest.approx(8192 * 2.0 * 28672 / 8 * defaults()["act"])


def test_an_unknown_engine_gathers_again_what_it_gathered() -> None:
    """As Megatron and torch do: kept, it would be a tenth of a layer's bytes under tp 8."""
    machine = usual_cluster(catalog.device("h100-80gb"), 256)
    engine = resolve("generic", machine, SHIPPED)
    entry, why = engine.entry, engine.no_rows
    assert why
    assert entry.coefficients["gathered"] == LEAN["gathered"]


def test_a_chance_to_fit_is_sure_only_beyond_the_interval() -> None:
    stack = "megatron-bridge-2026"
    c = seen(stack)
    entry = resolve(MeasuredAs.of(stack), catalog.cluster("nvidia-h100"), SHIPPED).entry
    low, high = memory_bounds(c, entry)
    limit = limit_bytes(replace(c, capacity=np.ones(1)), entry.coefficients)
    lean = lean_coefficients(entry)
    least = (
        memory(c, lean).worst_bytes * np.exp(-FRAGMENTS) * entry.coefficients["room"] / lean["room"]
    )
    assert least < low  # nobody measured this engine's memory: a lean one may need less
    worst = memory(c, entry.coefficients).worst_bytes
    sizes = (0.99 * least, 1.01 * least, worst, 0.99 * high, 1.01 * high)
    chances = [float(fit_chance(replace(c, capacity=size / limit), entry)[0]) for size in sizes]
    assert chances == sorted(chances)
    assert chances[0] < REFUSED < chances[1] < chances[2] == pytest.approx(0.5)
    assert 0.5 < chances[3] < SURE < chances[4]


def test_rows_narrow_what_a_lean_engine_may_need() -> None:
    entry = resolve(MeasuredAs.of("nanotron-2025"), catalog.cluster("hf-h100"), SHIPPED).entry
    assert entry.informed["kept_hidden"] > 0.9
    taught, lean = lean_coefficients(entry), lean_coefficients(replace(entry, informed={}))
    assert lean["kept_hidden"] < taught["kept_hidden"] <= entry.coefficients["kept_hidden"]


@pytest.mark.parametrize("name", ["mpt", "bloom", "par4d"])
@pytest.mark.parametrize("measured", [True, False])
def test_runs_that_ran_are_not_refused_whoever_measured_their_engine(name, measured) -> None:
    """Also where the table has no run out of memory to weigh that against."""
    rows = parse(read_table(str(GOLDEN / f"{name}.csv")))
    others = replace(SHIPPED, entries=others_of(SHIPPED.entries, rows))
    found = score(rows, predict(rows, SHIPPED if measured else others))
    assert found.refused_pct < 2.0
    assert found.missed_pct != found.missed_pct or found.missed_pct < 5.0


def test_a_run_whose_recompute_is_not_stated_is_not_refused() -> None:
    table = read_table(str(GOLDEN / "mpt.csv"))
    huge = {name: list(cells) for name, cells in table.texts.items()}
    huge["mbs"] = ["4096"] * table.length
    for act, refused in (("none", True), ("", False)):
        rows = parse(replace(table, texts=huge | {"act_ckpt": [act] * table.length}))
        answers = predict(rows, SHIPPED)
        assert (answers.fit_chance < REFUSED)[rows.usable].any() == refused


def test_torchtitan_is_counted_as_it_ran() -> None:
    """torchtitan 0.2.2 on one H200, without FSDP, layers and loss compiled."""
    reports = read_reports(str(H200 / "torchtitan"))
    assert len(reports) == 3
    entry = resolve(
        MeasuredAs.of("torchtitan"), catalog.cluster(str(H200 / "one-h200.toml")), SHIPPED
    ).entry
    for report in reports:
        cluster = catalog.cluster(str(H200 / "one-h200.toml"))
        c = columns_of([report.spec], cluster=cluster, engine=engine_of("torchtitan"))
        said = memory(c, entry.coefficients).worst_bytes[0]
        held = max(rank.peak_bytes for rank in report.memory)
        assert said == pytest.approx(held, rel=0.06), report.spec.model.name
        assert fit_chance(c, entry)[0] > SURE
        eager = replace(report.spec, policy=replace(report.spec.policy, compile=False))
        plain = columns_of([eager], cluster=cluster, engine=engine_of("torchtitan"))
        assert memory(plain, entry.coefficients).worst_bytes[0] > said
