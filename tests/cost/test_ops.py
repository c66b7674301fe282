"""A step told as a list of operations: does it say what the engine and the step do?"""

from __future__ import annotations

from dataclasses import replace
from math import fsum

import numpy as np
import pytest

from fourfold.commands.plan import operations_table
from fourfold.cost.count.flops import FlopsQuery, convention
from fourfold.cost.count.params import model_params
from fourfold.cost.fit.calibration import shipped
from fourfold.cost.kinds import DENSE
from fourfold.cost.one_rank import joined, predicted
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.weights import weights
from fourfold.cost.predict import operations, predictions
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import once_ops
from fourfold.result.one_rank import OneRankResult, PhaseTime
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import resolve
from fourfold.spec import catalog, codec
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.run import RunSpec
from fourfold.units import whole_units

RUNS = [
    {"layout": "dp32 tp2"},
    {"layout": "pp4 dp4 tp4", "policy": {"recompute": "full", "sequence_parallel": False}},
    {"layout": "dp16 cp4", "policy": {"sharding": "zero3", "recompute": "selective"}},
    {"layout": "pp2 dp8 tp4", "policy": {"compute_dtype": "fp8", "compile": True}},
    {"layout": "pp2 dp16 tp2 ep16", "model": "deepseek-v2-lite", "policy": {"recompute": "moe"}},
    {"layout": "dp32 tp2 ep4 etp2", "model": "mixtral-8x7b", "policy": {"sharding": "zero3"}},
]


def run(**fields) -> RunSpec:
    batch = {"seq_len": 8192, "micro_batch": 2, "global_batch": 544} | fields.pop("batch", {})
    plain = {"model": "llama-3.1-8b", "gpus": 64, **fields, "batch": batch}
    return codec.load(RunSpec, plain)


def columns(spec: RunSpec, stack: str = "megatron-lm-2025"):
    cluster = usual_cluster(catalog.device("h100-80gb"), spec.gpus)
    return columns_of([spec], cluster=cluster, engine=engine_of(stack)), resolve(
        MeasuredAs.of(stack), cluster, shipped()
    ).entry


@pytest.mark.parametrize("stack", ["megatron-lm-2025", "fourfold"])
@pytest.mark.parametrize("fields", RUNS, ids=lambda fields: fields["layout"])
def test_operations_add_up_to_the_step(fields, stack):
    c, entry = columns(run(**fields), stack)
    said = predictions(c, entry)
    parts = {name: float(part[0]) for name, part in said.times.parts.items()}
    rows = operations(c, entry.coefficients, parts)
    assert fsum(row.step_s for row in rows) == pytest.approx(float(said.step_s[0]), rel=1e-12)
    assert {row.part for row in rows} >= {name for name, seconds in parts.items() if seconds}
    *shown, total = operations_table(rows).rows
    assert sum(round(1e3 * float(row[-1])) for row in shown) == round(1e3 * float(total[-1]))


def listed(spec: RunSpec):
    c, entry = columns(spec)
    parts = {name: float(part[0]) for name, part in predictions(c, entry).times.parts.items()}
    return operations(c, entry.coefficients, parts)


def test_flops_of_the_list_are_the_models():
    """Attention's among them, by the causal half."""
    spec = run(layout="pp2 dp8 cp2 tp2", batch={"global_batch": 512})
    rows = [row for row in listed(spec) if row.phase != "recompute"]
    every = sum(row.times * row.flops for row in rows) * spec.gpus
    causal = convention("causal").count(FlopsQuery.of_spec(spec)).model
    assert every == pytest.approx(causal * spec.batch.tokens, rel=1e-9)


def test_messages_of_the_list_are_what_ranks_exchange():
    """Each with its whole buffer: stages hand over once for each virtual stage, a ring's keys are
    those of all ranks, and a token goes to every rank that has one of its experts."""
    policy = {"schedule": "interleaved", "virtual_stages": 4, "sharding": "zero1"}
    batch = {"micro_batch": 1, "global_batch": 128}
    dense = listed(run(layout="pp4 dp4 cp2 tp2", policy=policy, batch=batch))
    routed = listed(run(model="qwen3-30b-a3b", layout="dp64 ep8", batch=batch,
                        policy={"dispatcher": "alltoall"}))  # fmt: skip
    found = {(row.name, row.phase): (row.times, row.bytes) for row in (*dense, *routed)}
    tokens = 8192 / 2 * 2  # bytes of a value of each
    assert found["stage, send", "forward"] == (32 * 4, tokens * 4096 / 2)
    assert found["attention.core, keys", "forward"] == (32 * 8, 2 * 2 * tokens * 1024 / 2)
    assert found["mlp.dispatch", "forward"] == (2 * 48, 8192 * 2 * 2048 * 8 * 7 / 8)


def test_products_are_those_of_the_model():
    """Forwards 2 FLOPs a weight and token; backwards twice that."""
    c, _ = columns(run(layout="dp32 tp2"))
    products = [op for op in decoder_layer(c, c.micro) if op.kind == "product"]
    flops = dict.fromkeys(("forward", "inputs", "weights"), 0.0)
    for op in products:
        flops[op.phase] += 2.0 * float((op.m * op.n * op.k)[0])
    layer = 2 * 8192 * 2 * float(DENSE.on_rank(c)[0])
    assert flops == dict.fromkeys(flops, pytest.approx(layer))


def test_a_recomputed_layer_repeats_its_forward_pass():
    """Ours stops before the last product, which torch does not need."""
    for stack, missing in (("megatron-lm-2025", set()), ("fourfold", {"mlp.down"})):
        c, _ = columns(run(layout="dp64", policy={"recompute": "full"}), stack)
        ops = [
            op for op in decoder_layer(c, c.micro) if op.phase == "forward" and op.kind != "host"
        ]
        computed = [op for op in ops if op.axis != "shard"]
        assert {op.name for op in computed if not np.all(op.again == 1.0)} == missing


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])  # tied, untied
def test_a_single_stage_reduces_and_updates_every_weight(model):
    spec = run(model=model, layout="dp32 tp2", policy={"sharding": "zero1"})
    c, _ = columns(spec)
    [(reduced, gathered)], [updated] = once_ops(c)
    weights = model_params(spec.model, 8192) / 2
    for op, each in ((reduced, c.grad_bytes), (gathered, c.act_bytes)):
        assert float((op.bytes / each)[0]) == pytest.approx(weights, rel=1e-3)  # norms aside
    assert float((updated.m * c.shard)[0]) == pytest.approx(weights, rel=1e-3)


def test_hybrid_shards_sum_gradients_over_replicas():
    whole, hybrid = (
        columns(run(layout=one, policy={"sharding": "zero3"}))[0] for one in ("dp64", "dp8x8")
    )
    assert not [op for op in weights(whole) if op.axis == "replicas"]
    [summed] = [op for op in weights(hybrid) if op.axis == "replicas"]
    sent = DENSE.on_rank(hybrid) * hybrid.grad_bytes
    assert (float((summed.bytes * 8)[0]), float(summed.times[0])) == (float(sent[0]), 1.0)


def test_zero2_scatters_gradients_of_every_micro_batch():
    """Beside their backward passes: engines pay for the last one's alone, as for ZeRO-1's."""
    steps = []
    for sharding, times in (("zero1", 1), ("zero2", 5)):
        c, entry = columns(run(layout="dp64", policy={"sharding": sharding}), "fourfold")
        [(reduced, gathered)], _ = once_ops(c)
        assert (float(reduced.times[0]), float(gathered.times[0])) == (times, 1)
        steps.append(float(predictions(c, entry).step_s[0]))
    assert 1.0 < steps[1] / steps[0] < 1.01


ALONE = [
    {"layout": "dp32 tp2", "policy": {"sharding": "zero1"}},
    {"layout": "dp8x8", "policy": {"sharding": "zero3"}},
    {"layout": "dp16 cp4", "policy": {"sharding": "zero2"}},
    {"layout": "dp64 ep8", "model": "olmoe-1b-7b", "policy": {"recompute": "full"}},
    {"layout": "dp32 tp2 ep4 etp2", "model": "mixtral-8x7b", "policy": {"sharding": "zero3"}},
]


NOTHING = {
    "rank": 0, "world": 64, "stage": 0, "micro_batches": 1, "ran": 1, "step_s": (),
    "compute_s": 0.0, "phases": (), "kernels": (), "update_s": 0.0, "update_elements": 0,
    "comm": (), "flops": 0, "peak_bytes": 0, "reserved_bytes": 0, "retries": 0, "peaks_from": "",
    "device": "", "torch": "",
}  # fmt: skip


@pytest.mark.parametrize("fields", ALONE, ids=lambda fields: fields["layout"])
def test_a_rank_that_computes_as_predicted_has_the_predicted_step(fields):
    """Its compute, with the traffic that its peers would send, experts' exchange among it."""
    spec = run(**fields)
    c, entry = columns(spec, "fourfold")
    alone = OneRankResult(layers=spec.model.layers, **NOTHING)
    said = predicted(c, entry.coefficients, alone)
    once = said.compute_parts_s["optimizer"] + said.compute_parts_s["fixed"]
    layers_s = alone.layers * said.layer_s
    rest_s = (said.compute_s - once) / float((c.share / c.micro)[0]) - layers_s
    phases = {"layers": layers_s, "head": rest_s}
    found = replace(
        alone,
        compute_s=said.compute_s,
        phases=tuple(PhaseTime(name=name, seconds=s) for name, s in phases.items()),
    )
    whole = sum(joined(c, entry.coefficients, found).values())
    assert whole == pytest.approx(float(predictions(c, entry).step_s[0]), rel=0.02)


def test_rounded_parts_add_up():
    assert whole_units([0.4, 0.4, 0.4], 1.0) == [1, 0, 0]
    assert sum(whole_units([1e-7] * 26, 1e-6)) == 3
