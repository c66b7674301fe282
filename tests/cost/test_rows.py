"""A row of a published table and the run that it describes are one run to the cost model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fourfold.cost.columns import NAMES
from fourfold.cost.run import columns_of
from fourfold.cost.table.reference import SCHEMA, RowTable
from fourfold.cost.table.rows import Rows
from fourfold.logs.models import model_columns
from fourfold.search.rows.read import parse
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.layout import Layout
from tests.specs import run_spec

CLUSTER = catalog.cluster("nvidia-h100", 64)
LAYOUT = "pp2 dp8 cp1 tp4"


def table(*rows: dict[str, Any]) -> RowTable:
    texts = {name: [str(row.get(name, "")) for row in rows] for name in SCHEMA}
    return RowTable("made", texts, len(rows))


def published(model: str, layout: str = LAYOUT, **cells: Any) -> dict[str, Any]:
    """A row as a table prints it."""
    of_model = {k: int(v) if isinstance(v, bool) else v
                for k, v in model_columns(catalog.model(model)).items()}  # fmt: skip
    return {
        "cluster": CLUSTER.name, "hardware": CLUSTER.device.id, "gpus_per_node": CLUSTER.host_gpus,
        "seq_len": 4096, "n_gpus": 64, "mbs": 1, "gbs": 128, "sharding": "zero1", "vpp": 1,
        "sequence_parallel": 1, "precision": "bf16", "act_ckpt": "none", "stack": "nemo-2025",
        "routing": "natural", **of_model, **Layout.parse(layout).sizes, **cells,
    }  # fmt: skip


def same(rows: Rows, stack: str, model: str, layout: str = LAYOUT, **wanted: Any) -> None:
    spec = run_spec(model, layout, seq_len=4096, global_batch=128, **wanted)
    mine, theirs = rows.columns, columns_of([spec], cluster=CLUSTER, engine=engine_of(stack))
    assert rows.usable[0], rows.reasons
    for name in NAMES:
        a, b = getattr(mine, name), getattr(theirs, name)
        np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=name)
    assert mine.sequences == theirs.sequences


@pytest.mark.parametrize(
    ("stack", "cells", "wanted"),
    [
        ("nemo-2025", {}, {}),
        ("nemo-2025", {"precision": "fp4"}, {"precision": "fp4"}),
        ("nemo-2025", {"precision": "fp8", "note": "recipe mxfp8"},
         {"precision": "fp8", "scaling": "mx"}),
        ("nemo-2025", {"precision": "fp32"}, {"precision": "fp32"}),
        ("nemo-2025", {"vpp": 4}, {"virtual_stages": 4}),
        ("megatron-lm-2024", {"act_ckpt": "selective"}, {"recompute": "selective"}),
        ("megatron-lm-2024", {"act_ckpt": "block-2"}, {"recompute": "block-2"}),
        ("megatron-lm-2024", {"attention": "fused"}, {"attention": "fused-softmax"}),
        ("torchtitan-2025", {"sharding": "zero3", "note": "torch.compile + AsyncTP"},
         {"sharding": "zero3", "compile": True, "async_tp": True}),
        ("fourfold", {"sharding": "zero2", "note": "; compiled"},
         {"sharding": "zero2", "compile": True}),
        ("llm-foundry-2023", {"note": "pure"}, {"reduce_dtype": "bf16"}),
        ("nemo-2025", {"grad_dtype": "fp32"}, {"grad_dtype": "fp32", "reduce_dtype": "fp32"}),
        ("megatron-lm-2024", {"reduce_dtype": "bf16"},
         {"grad_dtype": "bf16", "reduce_dtype": "bf16"}),
        ("torchtitan-2025", {"reduce_dtype": "bf16"}, {"reduce_dtype": "bf16"}),
        ("aleph-2023", {"grad_dtype": "fp32"}, {"grad_dtype": "fp32"}),
        ("nemo-2025", {"optimizer_dtype": "bf16"}, {"optimizer_dtype": "bf16"}),
        ("nemo-2025", {"cuda_graph": "full_iteration"}, {"cuda_graph": True}),
        ("nemo-2025", {"overlap": "tp"}, {"overlap_grad_reduce": False, "async_tp": True}),
        ("megatron-lm-2024", {"overlap": "tp grad-reduce"}, {"async_tp": True}),
        ("megatron-lm-2024", {"overlap": "none"}, {"overlap_grad_reduce": False}),
        ("nemo", {"engine_release": "25.04"}, {}),
        ("generic", {"precision": "bf16-pure"}, {"precision": "bf16-pure"}),
        ("torchtitan-2025", {"precision": "bf16-pure", "sharding": "zero3"},
         {"precision": "bf16-pure", "sharding": "zero3", "reduce_dtype": "fp32"}),
    ],
)  # fmt: skip
def test_a_published_row_is_priced_as_the_run_it_describes(stack, cells, wanted) -> None:
    rows = parse(table(published("llama-3.1-8b", stack=stack, **cells)))
    same(
        rows,
        str(MeasuredAs.of(stack).released(cells.get("engine_release", ""))),
        "llama-3.1-8b",
        **wanted,
    )


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({}, "gradients bf16, overlap of gradients and tp: habits of nemo-2025"),
        ({"overlap": "none"}, "gradients bf16: habit of nemo-2025"),
        ({"overlap": "none", "grad_dtype": "fp32"}, ""),
        ({"stack": "megatron-lm-2024"}, "gradients fp32: habit of megatron-lm-2024"),
        (
            {"stack": "megatron-lm-2024", "precision": "fp16"},
            "gradients fp16, reduced in fp32: habit of megatron-lm-2024",
        ),
        (
            {"overlap": "sometimes"},
            "not expressible: overlap is not none, or some of grad-reduce, param-gather, tp",
        ),
        ({"grad_dtype": "int8"}, "not expressible: grad_dtype is not one of bf16, fp16, fp32"),
        ({"nvlink_domain": 4}, "not expressible: nvlink_domain must cover the 8 GPUs of a node"),
        (
            {"engine_release": "26.04"},
            "not expressible: engine_release 26.04 contradicts the year of nemo-2025",
        ),
    ],
)
def test_row_says_which_habits_of_its_stack_blank_cells_took(cells, said) -> None:
    assert parse(table(published("llama-3.1-8b", **cells))).reasons == [said]


@pytest.mark.parametrize(
    ("stack", "cell", "said"),
    [
        ("megatron-bridge-2026", "", ["dispatcher all-to-all"]),
        ("megatron-bridge-2026", "hybridep", []),
        ("deepspeed", "", []),  # which has none
    ],
)
def test_row_with_experts_says_which_dispatcher_a_blank_cell_took(stack, cell, said) -> None:
    rows = parse(table(published("qwen3-30b-a3b", stack=stack, dispatcher=cell)))
    words = rows.reasons[0].partition(":")[0].split(", ")
    assert rows.usable[0]
    assert [word for word in words if word.startswith("dispatcher")] == said


def test_row_with_an_nvlink_domain_has_it_apart_from_its_nodes() -> None:
    cells = {"stack": "nemo-2025", "cluster": "", "gpus_per_node": 4, "hardware": "gb200"}
    for domain, expected in (("", 72.0), (8, 8.0), (36, 36.0)):
        rows = parse(table(published("llama-3.1-8b", **cells, nvlink_domain=domain)))
        assert (rows.columns.domain[0], rows.columns.node[0]) == (expected, 4.0)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3"])
def test_so_is_one_with_experts(model: str) -> None:
    layout = "pp1 dp64 cp1 tp1 ep8"
    stack = "megatron-lm-2024"
    cells = {"stack": stack, "dispatcher": "deepep", "a2a_overlap": 1,
             "mtp_layers": catalog.model(model).mtp or ""}  # fmt: skip
    rows = parse(table(published(model, layout, **cells)))
    same(rows, stack, model, layout, dispatcher="deepep", overlap_exchange=True)


def test_rows_of_one_run_are_read_apart_by_layout_and_batch() -> None:
    """Whatever stands around them, and in which order."""
    cells = [
        {"gbs": 256}, {"mbs": 4}, {"seq_len": 8192}, {"n_gpus": 32, "dp": 4}, {"n_gpus": 63},
        {"act_ckpt": "full"}, {"pp": 4, "dp": 4, "vpp": 2}, {"tp": 8, "dp": 4}, {"gbs": "many"},
    ]  # fmt: skip
    rows = [published("llama-3.1-8b", **changed) for changed in cells]
    together = parse(table(*rows, *reversed(rows)))
    assert together.usable.tolist() == [
        *(i not in (4, 8) for i in range(9)), *(i not in (4, 8) for i in reversed(range(9)))
    ]  # fmt: skip
    for i, row in enumerate(rows):
        alone = parse(table(row))
        assert together.reasons[i] == together.reasons[-1 - i] == alone.reasons[0]
        for name in NAMES if alone.usable[0] else ():
            values = getattr(together.columns, name)
            if name != "sequence":
                assert values[i] == values[-1 - i] == getattr(alone.columns, name)[0], name


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"n_gpus": 32}, "n_gpus 32 is not pp 2 x dp 8 x cp 1 x tp 4 = 64"),
        ({"tp": 3, "dp": 8, "n_gpus": 48}, "tp 3 must divide heads=32"),
        ({"cp": 3, "dp": 1, "n_gpus": 24}, "seq_len 4096 must be a multiple of 6"),
        ({"pp": 64, "dp": 1, "n_gpus": 256}, "pp 64 exceeds layers=32"),
        ({"gbs": 4}, "dp 8 exceeds global_batch 4"),
    ],
)
def test_row_is_refused_by_the_rules_that_plans_ask(cells, why) -> None:
    rows = parse(table(published("llama-3.1-8b"), published("llama-3.1-8b", **cells)))
    assert rows.usable.tolist() == [True, False]
    assert rows.reasons[1].startswith(f"not expressible: {why}"), rows.reasons[1]


def test_a_stated_group_shards_the_state() -> None:
    cells = {"sharding": "zero3", "note": "zero3 over 4 ranks"}
    c = parse(table(published("llama-3.1-8b", **cells))).columns
    assert (c.shard[0], c.dp[0]) == (4, 8)
    uneven = parse(
        table(published("llama-3.1-8b", **cells | {"note": "zero3 over 3 ranks"}))
    ).columns
    assert (uneven.shard[0], uneven.dp[0]) == (4, 8)


def test_a_row_may_say_any_recompute_that_a_policy_may() -> None:
    rows = parse(
        table(*(published("llama-3.1-8b", act_ckpt=kind) for kind in ("norm+mlp", "some")))
    )
    assert rows.usable.tolist() == [True, False]
    assert rows.columns.mlp_ckpt[0] == 1
    assert rows.reasons[1].startswith("not expressible: act_ckpt is not")


def test_one_moment_takes_what_two_of_half_the_width_do() -> None:
    c = parse(table(published("llama-3.1-8b"), published("llama-3.1-8b", note="LION"))).columns
    assert c.opt_bytes.tolist() == [12, 8]
    assert c.moment_bytes.tolist() == [8, 4]


def test_layers_that_predict_further_tokens_count_in_any_engine() -> None:
    plain, further = (parse(table(published("deepseek-v3", "pp1 dp64 cp1 tp1 ep8",
                                            stack="nobody-2026", mtp_layers=mtp))).columns
                      for mtp in (0, 1))  # fmt: skip
    assert further.layers[0] == plain.layers[0] + 1
    assert further.mtp[0] == 1
