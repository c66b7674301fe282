"""Is the trace of a layer what the dry run counts of it, and what formulas say?"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from fourfold.commands.trace import page
from fourfold.cost.count.params import layer_params
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import of_one
from fourfold.cost.run import columns_of
from fourfold.cost.trace.layer import layer_program, layer_spec, layer_steps
from fourfold.cost.trace.steps import Program, generic_cluster
from fourfold.cost.trace.symbols import stretched_sizes
from fourfold.cost.trace.walk import StepRow, step_rows
from fourfold.engine import compat
from fourfold.engine.jobs.dryrun import count_rank
from fourfold.engine.observe.operators import gpu_kernels
from fourfold.engine.trace.layer import count_layer
from fourfold.output import Output, text_of
from fourfold.search.legal import require_legal
from fourfold.spec import catalog
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from fourfold.verbs.trace import Traced
from tests.symbolic import dims, value

TOKENS = 8192
Steps = tuple[Program, tuple[StepRow, ...]]


def spec_of(name: str = "llama-3.1-8b", tokens: int = TOKENS, **changes: object) -> RunSpec:
    layout = changes.pop("layout", Layout())
    spec = layer_spec(catalog.model(name), tokens, layout, **changes)  # type: ignore[arg-type]
    require_legal(spec)
    return spec


@functools.cache
def trace(spec: RunSpec, rank: int = 0) -> Steps:
    compat.quiet()
    counts = count_layer(spec, rank), count_layer(stretched_sizes(spec), rank)
    program = layer_program(spec, rank, counts[0])
    steps = layer_steps(program, spec, counts)
    return program, step_rows(program, steps, generic_cluster(spec.gpus))


def sent_bytes(rows: tuple[StepRow, ...]) -> int:
    return sum(row.comm_bytes for row in rows)


# (model, layout, kind, sharding): every kind of attention, position, norm and sharding.
SPECS = [
    ("llama-3.1-8b", Layout(tp=4, cp=2, shard=2), "ring", "zero3"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama-3.1-8b", Layout(cp=4), "allgather", "zero1"),
            ("llama-3.1-8b", Layout(tp=4, cp=4), "ulysses", "zero0"),
            ("mpt-1b", Layout(tp=2, shard=2), "ring", "zero2"),
            ("bloom-176b", Layout(tp=8), "ring", "zero1"),
            ("bloom-tiny", Layout(tp=2, cp=2), "allgather", "zero1"),
            ("olmo-2-7b", Layout(tp=2, cp=2), "ring", "zero3"),
            ("qwen3-8b", Layout(tp=2), "ring", "zero1"),
        )
    ),
]


@pytest.mark.parametrize(("name", "layout", "kind", "sharding"), SPECS)
def test_a_trace_is_one_layer_of_the_dry_run(name, layout, kind, sharding) -> None:
    """Of two dry runs, one layer apart, the difference; masked pairs are counted there. What is
    summed once a step (gradients that tensor parallelism shares) is no layer's pass."""
    spec = spec_of(name, 2048, layout=layout, cp_kind=kind, sharding=sharding)
    steps = count_layer(spec, 0).steps
    with gpu_kernels():
        deeper, shallower = (
            count_rank(replace(spec, model=replace(spec.model, layers=layers)), 0)
            for layers in (4, 3)
        )
    assert sum(step.flops + step.masked_flops for step in steps) == deeper.flops - shallower.flops
    axes = {"dpxcp": "dp"}
    ops = {"send": "all-to-all"}
    traced: Counter[tuple[str, str]] = Counter()
    for message in (message for step in steps for message in step.messages):
        op = ops.get(message.op, message.op)
        traced[axes.get(message.group, message.group), op] += message.bytes
    counted: Counter[tuple[str, str]] = Counter()
    for sign, count in ((1, deeper), (-1, shallower)):
        for one in count.comm:
            counted[one.axis, one.op] += sign * one.bytes
    shared = ("tp", "all-reduce")
    assert traced.pop(shared, 0) <= counted.pop(shared, 0)
    assert +traced == +counted


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mpt-7b"])
@pytest.mark.parametrize(
    ("tp", "cp", "kind"),
    [(4, 2, "ring"), (1, 4, "allgather"), (2, 2, "ulysses")],
)
def test_flops_are_those_of_the_counts(name: str, kind: str, tp: int, cp: int) -> None:
    """Forward 2 per weight and token and half the square; backward 4, and 5/2 of attention's."""
    spec = spec_of(name, layout=Layout(tp=tp, cp=cp), cp_kind=kind)
    steps = count_layer(spec, tp * cp - 1).steps
    attention = 2 * TOKENS * TOKENS * spec.model.attention_width
    total = 6 * TOKENS * layer_params(spec.model).matmul + attention * 7 // 2
    assert tp * cp * sum(step.flops for step in steps) == total


@pytest.mark.parametrize(("name", "layout", "kind", "sharding"), SPECS)
def test_every_symbol_is_its_number(name: str, layout: Layout, kind: str, sharding: str) -> None:
    spec = spec_of(name, 2048, layout=layout, cp_kind=kind, sharding=sharding)
    program, rows = trace(spec)
    symbolic = 0
    for tensor in (tensor for row in rows for tensor in row.tensors):
        printed = dims(tensor.symbolic)
        assert tuple(value(dim, program.sizes) for dim in printed) == tensor.shape
        assert prod(tensor.shape) == tensor.elements
        symbolic += not all(dim.isdecimal() for dim in printed)
    listed = sum(len(row.tensors) for row in rows)
    assert symbolic >= 0.97 * listed
    peaks = [row.peak_bytes for row in rows]
    assert peaks == sorted(peaks)
    assert all(row.live_bytes <= row.step_peak_bytes <= row.peak_bytes for row in rows)


def test_weights_and_their_gradients_are_those_of_the_model() -> None:
    for name in ("llama-3.1-8b", "mpt-1b"):
        _, rows = trace(spec_of(name, 1024))
        tensors = [t for row in rows for t in row.tensors if t.how != "view"]
        for start in ("W_", "d_W_"):
            matrices = sum(
                t.elements for t in tensors if t.name.startswith(start) and "norm" not in t.name
            )
            assert matrices == layer_params(catalog.model(name)).matmul, (name, start)
        weights = sum(t.elements for t in rows[0].tensors if t.name.startswith(("W_", "b_")))
        assert weights == layer_params(catalog.model(name)).all


def test_tensors_have_names_a_reader_knows() -> None:
    program, rows = trace(spec_of(layout=Layout(tp=4, cp=2, shard=2), sharding="zero3"))
    named = {f"{t.name} {t.symbolic}" for row in rows for t in row.tensors}
    assert {
        "x [tokens/cp/tp, hidden]", "h1_all [tokens/cp, hidden]", "qkv [tokens/cp, qkv_width]",
        "q [heads/tp, tokens/cp, head_size]", "v [kv_heads/tp, tokens/cp, head_size]",
        "gate_up [tokens/cp, 2*ffn/tp]", "act [tokens/cp, ffn/tp]", "y [tokens/cp/tp, hidden]",
        "d_act [tokens/cp, ffn/tp]", "d_qkv [tokens/cp, qkv_width]", "d_x [tokens/cp/tp, hidden]",
        "W_qkv [qkv_width, hidden]", "d_W_down [hidden, ffn/tp]", "buffer [weights]",
    } <= named  # fmt: skip
    steps = [row.name for row in rows]
    assert steps[:6] == [
        "hold", "weights, all-gather", "attention norm", "attention input, all-gather", "project",
        "rotate",
    ]  # fmt: skip
    assert steps[-1] == "weights, back, reduce-scatter"
    assert program.sizes["weights"] == layer_params(catalog.model("llama-3.1-8b")).all // 4 + 6144
    views = [t for row in rows for t in row.tensors if t.how == "view"]
    assert any(t.name == "v" for t in views)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "ranks"),
    [
        ("ring", 32, 8, 16),
        ("allgather", 32, 8, 4),
        ("ulysses", 32, 8, 8),
        ("ulysses", 32, 8, 16),
        ("ulysses", 24, 6, 4),
    ],
)
def test_priced_messages_of_attention_are_the_engines(kind, heads, kv_heads, ranks) -> None:
    """Whole buffers of a layer, with copies of KV heads that do not come out even; what it keeps
    follows them."""
    model = replace(catalog.model("llama-3.1-8b"), heads=heads, kv_heads=kv_heads, head_dim=128)
    spec = layer_spec(model, TOKENS, Layout(cp=ranks), cp_kind=kind)
    c = columns_of([spec], cluster=generic_cluster(ranks), engine=engine_of("fourfold"))
    priced = [op for op in decoder_layer(c, c.micro) if op.axis == "cp"]
    steps = count_layer(spec, 0).steps
    turn = [step.name for step in steps].index("gradient")
    forward = sum(m.bytes for step in steps[:turn] for m in step.messages if m.group == "cp")
    hops = (ranks - 1) / ranks if kind == "ring" else 1.0  # what goes round a ring is sent whole
    assert of_one(priced[0].halves * priced[0].bytes) * hops == forward
    if kind == "ulysses":
        back = sum(m.bytes for step in steps[turn:] for m in step.messages if m.group == "cp")
        assert of_one(priced[1].halves * priced[1].bytes) == back
        cast_weights = 2 * layer_params(model).matmul
        kept = steps[turn - 1].live_bytes - steps[0].live_bytes - cast_weights
        forward_ops = (op for op in decoder_layer(c, c.micro) if op.phase == "forward")
        assert sum(of_one(op.keeps) for op in forward_ops) == pytest.approx(kept, rel=5e-4)


def test_rounds_of_a_ring_are_one_step() -> None:
    _, rows = trace(spec_of(tokens=16384, layout=Layout(cp=8)))
    rounds = next(row for row in rows if row.times > 1)
    assert (rounds.name, rounds.times) == ("attend, block", 5)
    hop = 2 * 2048 * 8 * 128 * 2
    assert [(m.op, m.bytes) for m in rounds.comm] == [("send", 5 * hop)]
    assert rounds.flops_rank == 5 * 2 * 2048 * 2048 * 4096


def test_traffic_of_tensor_parallelism() -> None:
    """Four gathers and four sums of [tokens, hidden], each (tp-1)/tp of it."""
    _, rows = trace(spec_of(layout=Layout(tp=4)))
    assert sent_bytes(rows) == 8 * TOKENS * 4096 * 2 * 3 // 4


def test_zero3_gathers_twice_and_scatters_once() -> None:
    program, rows = trace(spec_of(layout=Layout(shard=8), sharding="zero3"))
    assert sent_bytes(rows) == 3 * program.sizes["weights"] * 2 * 7 // 8
    steps = count_layer(spec_of(layout=Layout(shard=8), sharding="zero2"), 0).steps
    payload = sum(message.bytes for step in steps for message in step.messages)
    assert payload == 2 * program.sizes["weights"] * 2


def test_cuts_lower_the_peak() -> None:
    peaks = [
        max(step.peak_bytes for step in count_layer(spec_of(layout=layout), 0).steps)
        for layout in (Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=4, cp=2))
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_few_kv_heads_sit_on_several_ranks() -> None:
    _, rows = trace(spec_of(layout=Layout(tp=16)))
    qkv = next(t for row in rows for t in row.tensors if t.name == "qkv")
    assert qkv.shape == (TOKENS, (2 + 2) * 128)


def test_alibi_keeps_its_bias_and_fp8_its_formats() -> None:
    _, rows = trace(spec_of("bloom-176b", 2048, layout=Layout(tp=8)))
    shapes = [t.shape for row in rows for t in row.tensors]
    assert (14, 2048, 2048) in shapes
    _, rows = trace(spec_of(tokens=1024, dtype="fp8"))
    assert "float8_e4m3fn" in {t.dtype for row in rows for t in row.tensors}


def test_forms_agree() -> None:
    program, rows = trace(spec_of(tokens=2048, layout=Layout(tp=2, cp=2)))
    cluster = generic_cluster(4)
    answer = Traced(program, cluster, rows)
    data = json.loads(json.dumps(answer.plain()))
    lines = answer.rows()
    text = text_of(Output(parts=lambda: page(answer, "text")), "text")
    assert sum(line.get("comm_bytes", 0) for line in lines) == sent_bytes(rows)
    assert sum(step["flops_all"] for step in data["steps"]) == sum(row.flops_all for row in rows)
    for tensor in (tensor for step in data["steps"] for tensor in step["tensors"]):
        assert f"{tensor['name']} {tensor['symbolic']} = {tensor['shape']}" in text
