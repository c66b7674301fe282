"""Does the trace of a whole layer agree with the counts, and end what it starts?"""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import pytest

from fourfold.cost.count.params import layer_matmul_params, layer_params
from fourfold.cost.trace.layer import layer
from fourfold.cost.trace.layer_ask import LayerAsk
from fourfold.cost.trace.walk import StepRow, walk
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.layout import Layout

TOKENS = 8192
MODELS = ("llama-3.1-8b", "mpt-7b", "gpt-3-175b")
KINDS = ("ring", "allgather", "ulysses")
STAYS = {"x", "y", "d_y", "d_x", "cos_sin", "norms", "W_qkv", "W_out", "W_up", "W_down"}
GRADIENTS = {"d_W_qkv", "d_W_out", "d_W_up", "d_W_down"}


def ask(name: str = "llama-3.1-8b", **changes: object) -> LayerAsk:
    fields = {"model": catalog.model(name), "tokens": TOKENS, "layout": Layout()}
    return LayerAsk(**(fields | changes))  # type: ignore[arg-type]


def rows(question: LayerAsk) -> tuple[StepRow, ...]:
    return walk(layer(question), catalog.cluster("nvidia-h100"))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model(name: str) -> None:
    """All but the linear biases, which a trace leaves out."""
    model = catalog.model(name)
    held = {t.name: t.elements for t in rows(ask(name))[0].tensors}
    matrices = sum(count for key, count in held.items() if key.startswith("W_"))
    assert matrices == layer_matmul_params(model)
    assert matrices + held["norms"] <= layer_params(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_flops_are_those_of_the_counts(name: str, kind: str, tp: int, cp: int) -> None:
    """Forward 2 per weight and token and half the square; backward 4, and 5/2 of attention's."""
    model = catalog.model(name)
    question = ask(name, layout=Layout(tp=tp, cp=cp), cp_kind=kind)
    total = sum(row.flops_all for row in rows(question))
    attention = 2 * TOKENS * TOKENS * model.attention_width
    assert total == 6 * TOKENS * layer_matmul_params(model) + attention * 7 // 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", ["zero0", "zero1", "zero2", "zero3"])
def test_every_tensor_ends_where_it_should(kind: str, sharding: str) -> None:
    for name, tp, cp, dp in itertools.product(MODELS, (1, 2), (1, 2, 4), (1, 2)):
        layout = Layout(tp=tp, cp=cp, shard=dp)
        program = layer(ask(name, layout=layout, cp_kind=kind, sharding=sharding))
        numbers = walk(program, catalog.cluster("nvidia-h100"))
        held: dict[str, int] = {}
        for step, row in zip(program.steps, numbers, strict=True):
            held |= {t.name: t.bytes for t in row.tensors if t.how != "view"}
            for gone in step.frees:
                del held[gone]
            for source, target in step.moves:
                held[target] = held.pop(source)
        left = set(held) - {"cos_sin"}
        if dp * cp == 1:
            assert left == (STAYS | GRADIENTS) - {"cos_sin"}
        else:
            reduced = "d_weights" if sharding == "zero0" else "d_weights_part"
            assert left == {"x", "y", "d_y", "d_x", "weights_part", reduced}


def test_cuts_lower_the_peak() -> None:
    peaks = [
        rows(ask(layout=layout))[-1].peak_bytes
        for layout in (Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=4, cp=2))
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_traffic_of_tensor_parallelism() -> None:
    """Four gathers and four sums of [tokens, hidden], each (tp-1)/tp of it."""
    sent = sum(row.comm_bytes for row in rows(ask(layout=Layout(tp=4))))
    assert sent == 8 * TOKENS * 4096 * 2 * 3 // 4


def test_zero3_gathers_twice_and_scatters_once() -> None:
    question = ask(layout=Layout(shard=8), sharding="zero3")
    count = layer(question).sizes["weights"]
    assert sum(row.comm_bytes for row in rows(question)) == 3 * count * 2 * 7 // 8
    last = replace(question, last=True)
    assert sum(row.comm_bytes for row in rows(last)) == 2 * count * 2 * 7 // 8


def test_few_kv_heads_sit_on_several_ranks() -> None:
    question = ask(layout=Layout(tp=16))
    qkv = next(t for row in rows(question) for t in row.tensors if t.name == "qkv")
    assert qkv.shape == (TOKENS, (2 + 2) * 128)


def test_ulysses_repeats_kv_heads_within_tensor_parallelism() -> None:
    question = ask(layout=Layout(tp=4, cp=8), cp_kind="ulysses")
    turned = next(t for row in rows(question) for t in row.tensors if t.name == "kv_turned")
    assert prod(turned.shape) == 2 * 1 * TOKENS * 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": Layout(tp=3)}, "tp=3 must divide heads=32; such as 2"),
        ({"layout": Layout(cp=64), "cp_kind": "ulysses"}, "divide heads=32"),
        ({"layout": Layout(tp=4, cp=16), "cp_kind": "ulysses"}, "divide heads=8"),
        ({"tokens": 8190, "layout": Layout(tp=4)}, "8188 or 8192"),
        ({"model": catalog.model("bloom-176b"), "layout": Layout(cp=2)}, "ALiBi"),
        ({"model": catalog.shape("llama", name="odd", layers=1, hidden=768, ffn=768, heads=12,
                                 kv_heads=6, vocab=8), "layout": Layout(tp=4)}, "kv_heads=6"),
    ],
)  # fmt: skip
def test_refusals_name_a_way_out(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rows(ask(**changes))


def test_alibi_keeps_its_bias() -> None:
    question = ask("bloom-176b", tokens=2048, layout=Layout(tp=8))
    bias = next(t for row in rows(question) for t in row.tensors if t.name == "bias")
    assert bias.shape == (14, 2048, 2048)
