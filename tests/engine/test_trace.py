"""Do the steps of a trace, really done by 4 gloo ranks, have the shapes and bytes computed?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.cost.trace.divided import PROGRAMS
from fourfold.cost.trace.layer import layer_program, layer_spec, layer_steps, payload_bytes
from fourfold.cost.trace.steps import Ask, Kind, generic_cluster
from fourfold.cost.trace.walk import step_rows, walk
from fourfold.engine.trace import steps
from fourfold.launch.local import run_job
from fourfold.result.job import Job, Limits, answer_file
from fourfold.result.trace import TraceMeasure
from fourfold.spec import catalog, codec
from fourfold.spec.layout import Layout
from fourfold.verbs.trace import Traced, count_layer, run_layer

WORLD = Layout(tp=2, shard=2)


def measure(kind: Kind, ask: Ask, folder: Path) -> TraceMeasure:
    options = (("ask", codec.to_json(ask)), ("device", "cpu"), ("kind", kind))
    limits = Limits(start_s=400.0, step_s=400.0)
    report = run_job(Job(job="trace", ranks=4, options=options, limits=limits), folder)
    assert report.outcome == "ok", report.failure
    return codec.from_json(TraceMeasure, answer_file(folder, 0).read_text())


def ask(attention: str, **changes: object) -> Ask:
    fields = {"tokens": 256, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 128, "layers": 2}
    fields |= {"layout": WORLD, "dtype": "fp32", "attention": attention}
    return Ask(**(fields | changes))  # type: ignore[arg-type]


def test_no_step_waits_for_its_sizes() -> None:
    """They are worked out before the clock runs, in the counts that a step is compared with."""
    question = ask("flash", layout=Layout())
    program = PROGRAMS["mlp"](question)
    alone: Any = SimpleNamespace(size=1, rank=0)
    rank = steps.TraceRank(program, question, alone, torch.device("cpu"), torch.float32)
    for step, row in list(zip(program.steps, walk(program), strict=True))[:-1]:
        names = [
            op._replace(writes=tuple(tensor._replace(dims=()) for tensor in op.writes))
            for op in step.operations
        ]
        rank.do(replace(step, operations=tuple(names)), row)
    assert rank.wrong == []
    assert rank.t["partial"].shape == (256, 256)


@pytest.mark.parametrize(
    ("kind", "question"),
    [
        ("ulysses", ask("naive")),
        ("ring", ask("flash")),
        ("mlp2d", ask("flash", gated=True)),
        pytest.param("ulysses", ask("flash", kv_heads=2), marks=pytest.mark.slow),
        pytest.param("ulysses", ask("naive", kv_heads=8), marks=pytest.mark.slow),
        pytest.param("ring", ask("naive"), marks=pytest.mark.slow),
        pytest.param("allgather", ask("naive"), marks=pytest.mark.slow),
        pytest.param("allgather", ask("flash"), marks=pytest.mark.slow),
        pytest.param("mlp", ask("flash", layout=Layout(tp=4)), marks=pytest.mark.slow),
        pytest.param("mlp2d", ask("flash"), marks=pytest.mark.slow),
    ],
)
def test_every_shape_and_byte_is_as_computed(kind: Kind, question: Ask, tmp_path: Path) -> None:
    measured = measure(kind, question, tmp_path)
    assert measured.wrong == ()
    program = PROGRAMS[kind](question)
    cluster = generic_cluster(4)
    computed = step_rows(program, walk(program), cluster, workspace_bytes=0)
    pairs = Traced(program, cluster, computed, measured).pairs
    tensors = [t for row in computed for t in row.tensors if t.name != "block_fp32"]
    assert measured.checked == 4 * len(tensors)
    for row, pair in zip(computed, pairs, strict=True):
        assert pair.live_bytes == pair.measured.live_bytes
        # gloo may hold a sent buffer while the next is made; the engine's joins also make vectors
        # of one number a row, which no list names.
        sent = max(t.bytes for t in row.tensors) if row.comm else 0
        vectors = pair.peak_bytes // 50 if question.attention == "flash" else 0
        over = pair.measured.peak_bytes - pair.peak_bytes
        assert 0 <= over <= sent + vectors, pair


@pytest.mark.parametrize(
    ("layout", "kind", "sharding"),
    [
        (Layout(tp=2, cp=2), "ring", "zero1"),
        pytest.param(Layout(tp=2, cp=2), "allgather", "zero0", marks=pytest.mark.slow),
        pytest.param(Layout(cp=2, shard=2), "ulysses", "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_layer_sends_and_holds_what_was_computed(layout, kind, sharding) -> None:
    """On a CPU the norm is not one kernel and keeps its scaled input too: two tensors more."""
    spec = layer_spec(
        catalog.model("llama-tiny"),
        512,
        layout,
        dtype="fp32",
        cp_kind=kind,  # type: ignore[arg-type]
        sharding=sharding,  # type: ignore[arg-type]
    )
    counts = count_layer(spec, 0)
    measured = run_layer(spec, payload_bytes(counts[0]), "cpu")
    assert measured.wrong == ()
    program = layer_program(spec, 0, counts[0])
    cluster = generic_cluster(4)
    steps = layer_steps(program, spec, counts)
    computed = step_rows(program, steps, cluster, workspace_bytes=0)
    forward, backward = Traced(program, cluster, computed, measured).pairs
    norms = 2 * 512 // layout.cp // layout.tp * spec.model.hidden * 4
    vectors = 8 * 512 * 8
    for half in (forward, backward):
        kept = norms if half is forward else 0
        assert abs(half.measured.live_bytes - half.live_bytes - kept) <= vectors
    # gloo may hold a sent buffer while the next is made.
    held = max(message.bytes for row in computed for message in row.comm)
    over = forward.measured.peak_bytes - forward.peak_bytes - norms
    assert -vectors <= over <= vectors + held
    sent = payload_bytes(counts[0])
    assert run_layer(spec, (sent[0] + 1, sent[1]), "cpu").wrong != ()
