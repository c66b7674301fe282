"""A step told as a list of operations: does it say what the engine and the step do?"""

from __future__ import annotations

from math import fsum

import numpy as np
import pytest

from fourfold.commands.plan import operations_table
from fourfold.cost.fit.calibration import shipped
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.predict import operations, predictions, whole_units
from fourfold.cost.run import columns_of
from fourfold.search.query import entry_for, usual_cluster
from fourfold.spec import catalog, codec
from fourfold.spec.run import RunSpec

RUNS = [
    {"layout": "dp32 tp2"},
    {"layout": "pp4 dp4 tp4", "policy": {"recompute": "full", "sequence_parallel": False}},
    {"layout": "dp16 cp4", "policy": {"sharding": "zero3", "recompute": "selective"}},
    {"layout": "pp2 dp8 tp4", "policy": {"compute_dtype": "fp8", "compile": True}},
    {"layout": "pp2 dp16 tp2 ep16", "model": "deepseek-v2-lite", "policy": {"recompute": "moe"}},
    {"layout": "dp32 tp2 ep4 etp2", "model": "mixtral-8x7b", "policy": {"sharding": "zero3"}},
]


def run(**fields) -> RunSpec:
    batch = {"seq_len": 8192, "micro_batch": 2, "global_batch": 544}
    return codec.load(RunSpec, {"model": "llama-3.1-8b", "gpus": 64, "batch": batch, **fields})


def columns(spec: RunSpec, stack: str = "megatron-lm-2025"):
    cluster = usual_cluster(catalog.device("h100-80gb"), spec.gpus)
    return columns_of([spec], cluster=cluster, stack=stack), entry_for(shipped(), stack, cluster)[0]


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


def test_products_are_those_of_the_model():
    """Forwards 2 FLOPs a weight and token; backwards twice that."""
    c, _ = columns(run(layout="dp32 tp2"))
    products = [op for op in decoder_layer(c, c.micro) if op.kind == "product"]
    flops = dict.fromkeys(("forward", "inputs", "weights"), 0.0)
    for op in products:
        flops[op.phase] += 2.0 * float((op.m * op.n * op.k)[0])
    layer = 2 * 8192 * 2 * float(c.rank_layer_weights[0])
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


def test_rounded_parts_add_up():
    assert whole_units([0.4, 0.4, 0.4], 1.0) == [1, 0, 0]
    assert sum(whole_units([1e-7] * 26, 1e-6)) == 3
