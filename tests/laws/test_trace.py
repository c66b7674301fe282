"""Do the numbers of a trace follow their symbols, whatever the sizes?"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.commands.trace import page
from fourfold.cost.trace.divided import PROGRAMS
from fourfold.cost.trace.steps import CP_KINDS, WORKSPACE_BYTES, Ask, Program
from fourfold.cost.trace.symbols import Size
from fourfold.cost.trace.walk import StepRow, step_rows, walk
from fourfold.output import Output, text_of
from fourfold.spec import catalog
from fourfold.spec.cluster import stretched
from fourfold.spec.layout import Layout
from fourfold.verbs.trace import Traced
from tests.sampling import examples
from tests.symbolic import dims, value


@st.composite
def asks(draw: st.DrawFn, kind: str) -> Ask:
    """Sizes with room to halve the tokens and double the ranks."""
    ranks = draw(st.sampled_from([1, 2, 4, 8, 16]))
    kv_heads = ranks * 2 * draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    dp = 1 if kind == "mlp" else draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))
    return Ask(
        tokens=8 * ranks * draw(st.integers(1, 50)),
        hidden=heads * 2 * draw(st.integers(1, 64)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=2 * ranks * draw(st.integers(1, 300)),
        gated=draw(st.booleans()),
        layers=draw(st.integers(1, 5)),
        layout=Layout(tp=ranks // dp, shard=dp),
        dtype=draw(st.sampled_from(["bf16", "fp32"])),
        attention=draw(st.sampled_from(["naive", "flash"])),
    )


CASES = st.sampled_from(sorted(PROGRAMS)).flatmap(lambda kind: st.tuples(st.just(kind), asks(kind)))


def trace(kind: str, ask: Ask) -> tuple[Program, tuple[StepRow, ...]]:
    program = PROGRAMS[kind](ask)
    cluster = stretched(catalog.cluster("nvidia-h100"), program.ranks)
    return program, step_rows(program, walk(program), cluster)


def expected_ratio(shape: str, old: dict[str, int], new: dict[str, int]) -> Fraction:
    """How a printed symbolic shape says its count changes."""
    return prod((value(dim, new) / value(dim, old) for dim in dims(shape)), start=Fraction(1))


@settings(max_examples=examples(60))
@given(CASES)
def test_halving_tokens_changes_every_tensor_as_its_symbols_say(case: tuple[str, Ask]) -> None:
    kind, ask = case
    _compare(trace(kind, ask), trace(kind, replace(ask, tokens=ask.tokens // 2)))


@settings(max_examples=examples(60))
@given(CASES)
def test_doubling_ranks_changes_every_tensor_as_its_symbols_say(case: tuple[str, Ask]) -> None:
    kind, ask = case
    wider = replace(ask, layout=replace(ask.layout, tp=2 * ask.layout.tp))
    _compare(trace(kind, ask), trace(kind, wider))


def _compare(
    old: tuple[Program, tuple[StepRow, ...]], new: tuple[Program, tuple[StepRow, ...]]
) -> None:
    sizes, changed = old[0].sizes, new[0].sizes
    after = {(row.name, tensor.name): tensor for row in new[1] for tensor in row.tensors}
    compared = 0
    for row in old[1]:
        for tensor in row.tensors:
            other = after.get((row.name, tensor.name))
            if other is None or other.symbolic != tensor.symbolic:
                continue  # rounds of a ring that only one of the two has
            ratio = expected_ratio(tensor.symbolic, sizes, changed)
            assert other.elements == tensor.elements * ratio
            assert other.bytes == tensor.bytes * ratio
            compared += 1
    assert compared >= 4


@settings(max_examples=examples(60))
@given(CASES)
def test_flops_of_all_ranks_do_not_depend_on_their_number(case: tuple[str, Ask]) -> None:
    kind, ask = case
    _, rows = trace(kind, ask)
    _, alone = trace(kind, replace(ask, layout=Layout()))
    assert sum(row.flops_all for row in rows) == sum(row.flops_all for row in alone)
    assert all(row.flops_all == row.flops_rank * ask.ranks for row in rows)
    assert sum(row.comm_bytes for row in alone) == 0
    if kind in CP_KINDS:  # however the sequence is divided
        _, same = trace("ulysses", replace(ask, layout=Layout()))
        assert sum(row.flops_all for row in alone) == sum(row.flops_all for row in same)


@settings(max_examples=examples(60))
@given(asks("mlp2d"))
def test_shards_add_up_to_the_whole(ask: Ask) -> None:
    shards = {t.name: t for row in trace("mlp2d", ask)[1] for t in row.tensors}
    whole = {
        t.name: t for row in trace("mlp2d", replace(ask, layout=Layout()))[1] for t in row.tensors
    }
    tp, dp = ask.layout.tp, ask.layout.dp
    for name, parts in {"W1": tp, "W2": tp, "input": dp, "intermediate": tp * dp,
                        "input_part": tp * dp, "output": tp * dp}.items():  # fmt: skip
        assert shards[name].elements * parts == whole[name].elements, name


@settings(max_examples=examples(60))
@given(asks("ulysses"), st.sampled_from(["ulysses", "allgather", "ring"]))
def test_sequence_shards_add_up_to_the_whole(ask: Ask, kind: str) -> None:
    shards = {(row.name, t.name): t for row in trace(kind, ask)[1] for t in row.tensors}
    whole = trace(kind, replace(ask, layout=Layout()))[1]
    for row in whole:
        for tensor in row.tensors:
            if tensor.name in ("input", "q", "k", "v", "output"):
                assert shards[row.name, tensor.name].elements * ask.ranks == tensor.elements


@settings(max_examples=examples(60))
@given(CASES)
def test_memory_is_what_is_held(case: tuple[str, Ask]) -> None:
    """Replayed with nothing but the printed rows and the rule of names."""
    program, rows = trace(*case)
    held: dict[str, int] = {}
    for step, row in zip(program.steps, rows, strict=True):
        held |= {t.name: t.bytes for t in row.tensors if t.how != "view"}
        held = {name: count for name, count in held.items() if name not in step.frees}
        for source, target in step.moves:
            held[target] = held.pop(source)
        if row.flops_rank:
            held["workspace"] = WORKSPACE_BYTES
        assert row.live_bytes == sum(held.values())
        assert row.live_bytes <= row.step_peak_bytes <= row.peak_bytes
    peaks = [row.peak_bytes for row in rows]
    assert peaks == sorted(peaks)


@settings(max_examples=examples(60))
@given(CASES)
def test_text_json_and_csv_agree(case: tuple[str, Ask]) -> None:
    program, rows = trace(*case)
    cluster = stretched(catalog.cluster("nvidia-h100"), program.ranks)
    answer = Traced(program, cluster, rows)
    data = json.loads(json.dumps(answer.plain()))
    lines = answer.rows()
    text = text_of(Output(parts=lambda: page(answer, "text")), "text")
    assert len(lines) == sum(max(1, len(step["tensors"])) for step in data["steps"])
    place = 0
    for number, step in enumerate(data["steps"], 1):
        first = lines[place]
        assert (first["step"], first["name"]) == (number, step["name"])
        for key in ("flops_rank", "flops_all", "comm_bytes", "live_bytes", "peak_bytes"):
            assert first[key] == step[key]
        for tensor in step["tensors"]:
            line = lines[place]
            for key in ("shape", "elements", "bytes"):
                assert line[key] == tensor[key]
            assert prod(tensor["shape"]) == tensor["elements"]
            named = f"{tensor['name']} {tensor['symbolic']} = {tensor['shape']}"
            assert named in text
            assert f"{tensor['elements']:,}" in text
            place += 1
        place += not step["tensors"]  # a step in place has one line
        assert f"{step['live_bytes'] / 1e9:.3f}" in text
        assert f"{step['peak_bytes'] / 1e9:.3f}" in text
    assert place == len(lines)


SIZE_NAMES = ("tokens", "ffn", "heads", "head_size", "ranks", "tp")


@settings(max_examples=examples(60))
@given(
    st.dictionaries(st.sampled_from(SIZE_NAMES), st.integers(1, 1000), min_size=2),
    st.integers(1, 9),
    st.data(),
)
def test_a_size_prints_what_gives_its_number(
    sizes: dict[str, int], factor: int, data: st.DataObject
) -> None:
    first, *others = data.draw(st.permutations(sorted(sizes)))
    size = factor * Size(sizes[first], first)
    for name in others:
        operand = Size(sizes[name], name)
        size = size / operand if data.draw(st.booleans()) else operand * size
    every = sizes | {"hidden": sizes.get("heads", 1) * sizes.get("head_size", 1)}
    assert float(value(str(size), every)) == pytest.approx(float(size), rel=1e-12)
    assert type(np.ones(2) * size) is type(size * np.ones(2)) is np.ndarray
