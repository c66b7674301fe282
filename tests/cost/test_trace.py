"""Does a trace give the published numbers, and hold what it must?

Does a dimension get the symbol that gives its number, and no other?

Does the recommendation follow from bytes, links and kernels, and say where it turns?
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op, of_one
from fourfold.cost.run import columns_of
from fourfold.cost.trace import advice
from fourfold.cost.trace.advice import advise
from fourfold.cost.trace.divided import PROGRAMS
from fourfold.cost.trace.layer import layer_spec
from fourfold.cost.trace.steps import CP_KINDS, Ask, Kind, axis_groups, spans
from fourfold.cost.trace.symbols import Symbols, stretched_sizes
from fourfold.cost.trace.walk import StepRow, step_rows, walk
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster, stretched
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from tests.symbolic import value

PUBLISHED_PEAKS_GB = (2.27, 2.68, 3.05, 3.17, 60.65, 60.77, 60.90, 60.90, 61.02, 61.02)


def ask(**changes: object) -> Ask:
    """The published trace: 60,000 tokens over 16 ranks."""
    fields = {"hidden": 16384, "heads": 128, "kv_heads": 128, "ffn": 53248, "layers": 126}
    fields |= {"tokens": 60000, "layout": Layout(tp=8, shard=2), "attention": "naive"}
    return Ask(**(fields | changes))  # type: ignore[arg-type]


def rows(kind: Kind, **changes: object) -> tuple[StepRow, ...]:
    program = PROGRAMS[kind](ask(**changes))
    return step_rows(program, walk(program), catalog.cluster("nvidia-h100"))


def test_ulysses_gives_the_published_peaks() -> None:
    peaks = [row.peak_bytes / 1e9 for row in rows("ulysses")]
    assert peaks == pytest.approx(PUBLISHED_PEAKS_GB, abs=0.006)


def test_ulysses_gives_the_published_sizes_and_flops() -> None:
    steps = rows("ulysses")
    held = {tensor.name: tensor for tensor in steps[0].tensors}
    assert held["input"].elements == 61_440_000
    assert held["input"].bytes == 122_880_000
    assert {held[name].bytes for name in "QKVO"} == {2 * 16384**2}
    assert steps[4].tensors[0].bytes == 57_600_000_000
    flops = [row.flops_all / 1e12 for row in steps if row.flops_all]
    assert flops == pytest.approx([96.64, 117.96, 117.96, 32.21], abs=0.005)


def test_mlp2d_gives_the_published_sizes() -> None:
    steps = rows("mlp2d")
    tensors = {tensor.name: tensor for row in steps for tensor in row.tensors}
    four = [tensors[name] for name in ("W1", "W2", "input", "intermediate")]
    assert [tensor.shape for tensor in four] == [
        (126, 16384, 6656),
        (126, 6656, 16384),
        (30000, 16384),
        (30000, 6656),
    ]
    assert sum(tensor.bytes for tensor in four) / 1e9 == pytest.approx(56.34, abs=0.005)
    up = next(row for row in steps if row.name == "up")
    assert up.live_bytes == sum(tensor.bytes for tensor in four) + 42_000_000


def test_traffic_counts_what_leaves_a_rank() -> None:
    """Ulysses sends 4 x (P-1)/P of a rank's activations, all-gather and ring (P-1) of its KV."""
    part = 122_880_000
    assert sum(row.comm_bytes for row in rows("ulysses")) == 4 * part * 15 // 16
    assert sum(row.comm_bytes for row in rows("allgather")) == 2 * part * 15
    assert sum(row.comm_bytes for row in rows("ring")) == 2 * part * 15
    by_level = rows("ulysses")[3].comm[0].by_link_bytes
    assert by_level == {"nvlink": part * 7 // 16, "network": part * 8 // 16}
    assert all(row.comm_bytes == 0 for row in rows("ring", layout=Layout()))


def test_few_kv_heads_are_sent_to_several_ranks() -> None:
    exchange = rows("ulysses", kv_heads=8)[3]
    shapes = {tensor.name: tensor.shape for tensor in exchange.tensors}
    assert shapes["q_heads"] == (60000, 8, 128)
    assert shapes["k_heads"] == (60000, 1, 128)
    odd = rows("ulysses", heads=96, kv_heads=12, hidden=12288, layout=Layout(tp=8))[3]
    assert [tensor.shape[1] for tensor in odd.tensors] == [12, 12, 12]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("ulysses", {"layout": Layout(tp=48)}, "ranks=48"),
        ("ulysses", {"heads": 12, "kv_heads": 6, "hidden": 1536, "layout": Layout(tp=8)},
         "use 2, 3, 4, 6 ranks"),
        ("ulysses", {"tokens": 60001}, "60000 or 60016"),
        ("ring", {"tokens": 60016, "attention": "flash"}, "60000 or 60032"),
        ("allgather", {"heads": 100}, "must divide hidden"),
        ("ulysses", {"kv_heads": 3}, "must divide heads"),
        ("mlp", {}, "mlp2d"),
        ("mlp2d", {"ffn": 53249}, "53248"),
        ("mlp2d", {"layout": Layout(cp=2)}, "use dp = 2"),
    ],
)  # fmt: skip
def test_refusals_name_a_way_out(kind: Kind, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rows(kind, **changes)


def test_groups_and_spans() -> None:
    layout = Layout(tp=4, cp=2, shard=2)
    assert axis_groups(layout, ("dp",)).members[:2] == ((0, 8), (1, 9))
    assert axis_groups(layout, ("dp", "cp")).members[0] == (0, 4, 8, 12)
    assert spans((0, 1, 2, 8)) == "0-2 8"
    assert spans((0, 8, 16)) == "0-16 by 8"
    big = stretched(catalog.cluster("nvidia-h100"), 10_001)
    assert big.gpus == 10_001
    assert big.links[-1].ranks % 8 == 0


def sizes(spec: RunSpec) -> dict[str, int]:
    model, layout = spec.model, spec.layout
    return {
        "tokens": spec.batch.seq_len, "hidden": model.hidden, "heads": model.heads,
        "kv_heads": model.kv_heads, "head_size": model.head_size, "ffn": model.ffn,
        "tp": layout.tp, "cp": layout.cp, "dp": layout.dp,
        "qkv_width": (model.heads + 2 * model.kv_heads) // layout.tp * model.head_size,
    }  # fmt: skip


def both(spec: RunSpec) -> tuple[dict[str, int], dict[str, int]]:
    return sizes(spec), sizes(stretched_sizes(spec))


def named(spec: RunSpec, *dims: str) -> list[str]:
    first, second = both(spec)
    pairs = [(int(value(dim, first)), int(value(dim, second))) for dim in dims]
    return Symbols(first, second).of(pairs)


def test_equal_numbers_are_told_apart() -> None:
    """tokens / cp = hidden = 4096; kv_heads / tp = 2 = a pair; ffn / 2 = 2 ffn / tp."""
    spec = layer_spec(catalog.model("llama-3.1-8b"), 8192, Layout(tp=4, cp=2, shard=2))
    for dims in (
        ["tokens/cp", "hidden"],
        ["hidden", "tokens/cp"],
        ["2", "kv_heads/tp", "tokens/cp", "head_size"],
        ["tokens/cp", "2*ffn/tp"],
        ["tokens/cp/tp", "hidden"],
        ["heads/tp", "tokens/cp/2", "head_size/2"],
        ["qkv_width/dp/cp", "hidden"],
    ):
        assert named(spec, *dims) == dims


def test_half_of_the_tokens_is_no_part_of_tensor_parallelism() -> None:
    """With tp = 2 both have the same number in any count: who has heads is inside a block."""
    spec = layer_spec(catalog.model("llama-3.1-8b"), 8192, Layout(tp=2, cp=2))
    assert named(spec, "heads/tp", "tokens/cp/2", "head_size") == [
        "heads/tp", "tokens/cp/2", "head_size"
    ]  # fmt: skip
    assert named(spec, "tokens/cp/2", "hidden") == ["tokens/cp/tp", "hidden"]
    assert named(spec, "heads/tp", "tokens/cp/2") == ["heads/tp", "tokens/cp/2"]


def test_what_is_no_symbol_is_its_number() -> None:
    spec = layer_spec(catalog.model("llama-3.1-8b"), 8192, Layout(tp=4))
    first, second = both(spec)
    assert Symbols(first, second).of([(7, 7), (12345, 99999), (4096, 4096 * 13)]) == [
        "7", "12345", "hidden"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_symbol_gives_its_number_in_both_counts(kind: str, data: st.DataObject) -> None:
    tp, cp = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4]))
    spec = layer_spec(
        catalog.model(data.draw(st.sampled_from(["llama-3.1-8b", "mpt-7b", "gpt-3-175b"]))),
        tp * cp * 2 * data.draw(st.integers(1, 5000)),
        Layout(tp=tp, cp=cp, shard=data.draw(st.sampled_from([1, 2]))),
        cp_kind=kind,  # type: ignore[arg-type]
    )
    first, second = both(spec)
    texts = ("tokens", "tokens/cp", "tokens/cp/tp", "hidden", "heads/tp", "kv_heads/tp",
             "head_size", "ffn/tp", "2*ffn/tp", "qkv_width", "heads*head_size/tp")  # fmt: skip
    dims = data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4))
    pairs = [(int(value(dim, first)), int(value(dim, second))) for dim in dims]
    for text, pair in zip(Symbols(first, second).of(pairs), pairs, strict=True):
        assert (value(text, first), value(text, second)) == pair or text == str(pair[0])


def asked(name: str = "llama-3.1-8b", tokens: int = 65536, ranks: int = 8) -> Ask:
    model = catalog.model(name)
    sizes = {name: getattr(model, name) for name in ("hidden", "heads", "kv_heads")}
    return Ask(tokens=tokens, layout=Layout(cp=ranks), **sizes)


def with_network(cluster: Cluster, bytes_per_s: float) -> Cluster:
    outer = replace(cluster.links[-1], bytes_per_s=bytes_per_s)
    return replace(cluster, links=(*cluster.links[:-1], outer))


H100 = catalog.cluster("nvidia-h100")


def test_inside_a_host_a_ring_pays_for_its_pieces() -> None:
    """Published on 8 H200 at 64k: ring slower by tens of percent, Ulysses and all-gather close."""
    times = {choice.kind: choice.total_s for choice in advise(asked(), H100).choices}
    assert min(times, key=lambda kind: times[kind]) == "ulysses"
    assert times["ring"] > 1.08 * times["ulysses"]
    assert times["allgather"] < times["ring"]


def test_few_kv_heads_and_a_slow_network_favour_gathering() -> None:
    """405B has 16 queries per KV head: gathering KV moves less than trading all queries, up to
    where attention, which runs in pieces, outweighs messages."""
    slow = advise(asked("llama-3.1-405b", 32768, 16), catalog.cluster("jean-zay"))
    assert slow.best == "allgather"
    pair = next(p for p in slow.pairs if {p.first, p.second} == {"ulysses", "allgather"})
    assert pair.first == "ulysses"
    assert len(pair.crossover_tokens) == 2


def test_a_crossover_is_where_the_two_cost_the_same() -> None:
    question, cluster = asked("llama-3.1-405b", 131072, 16), catalog.cluster("jean-zay")
    pair = next(p for p in advise(question, cluster).pairs if p.crossover_tokens)
    length = pair.crossover_tokens[0]
    around = np.array([length / 1.001, length * 1.001])
    first, second = (
        advice._numbers(kind, question, cluster, around)["total_s"]
        for kind in (pair.first, pair.second)
    )
    assert first[0] < second[0]
    assert first[1] >= second[1]


@pytest.mark.parametrize("kind", CP_KINDS)
def test_bytes_are_those_of_the_trace(kind: str) -> None:
    """Forward bytes of the trace; back as much, and gradients of keys but where all is traded."""
    question = asked()
    program = PROGRAMS[kind](question)
    forward = sum(row.comm_bytes for row in step_rows(program, walk(program), H100))
    chosen = next(c for c in advise(question, H100).choices if c.kind == kind)
    assert chosen.sent_bytes == (2 if kind == "ulysses" else 3) * forward


def priced(kind: str, model: ModelShape, layout: Layout, tokens: int) -> dict[str, Op]:
    """Forward operations of a layer as a step's price has them, by name."""
    known = {"cp_kind": kind} if kind in CP_KINDS else {}
    spec = layer_spec(model, tokens, layout, **known)  # type: ignore[arg-type]
    if kind == "mlp":  # whole tokens on every rank
        spec = replace(spec, policy=replace(spec.policy, sequence_parallel=False))
    c = columns_of([spec], cluster=H100, engine=engine_of("fourfold"))
    return {op.name: op for op in decoder_layer(c, c.micro) if op.phase == "forward"}


@pytest.mark.parametrize("kind", CP_KINDS)
@pytest.mark.parametrize(("name", "ranks"), [("llama-3.1-8b", 8), ("llama-3.1-405b", 16)])
def test_attention_is_traced_as_it_is_priced(kind: Kind, name: str, ranks: int) -> None:
    question = asked(name, 65536, ranks)
    ops = priced(kind, catalog.model(name), question.layout, question.tokens)
    for attention in ("flash", "naive"):
        program = PROGRAMS[kind](replace(question, attention=attention))
        traced = {row.name: row for row in step_rows(program, walk(program), H100)}
        for step, op in (("project", "attention.qkv"), ("output", "attention.out")):
            assert traced[step].flops_rank == of_one(ops[op].flops), step
        core = sum(row.flops_rank for row in traced.values()) - of_one(
            ops["attention.qkv"].flops + ops["attention.out"].flops
        )
        square = 1 if attention == "flash" else 2  # without a mask, all of it
        assert core == square * of_one(ops["attention.core"].flops)
        sent = of_one(ops["attention.core, keys"].bytes) * (ranks - 1) / ranks
        assert sum(row.comm_bytes for row in traced.values()) == sent


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mpt-7b"])
@pytest.mark.parametrize(("kind", "layout"), [("mlp", Layout(tp=4)), ("mlp2d", Layout(tp=4))])
def test_an_mlp_is_traced_as_it_is_priced(kind: Kind, layout: Layout, name: str) -> None:
    model, tokens = catalog.model(name), 8192
    ops = priced(kind, model, layout, tokens)
    sizes = {"hidden": model.hidden, "ffn": model.ffn, "gated": model.gated}
    program = PROGRAMS[kind](Ask(tokens=tokens, layout=layout, **sizes))
    traced = step_rows(program, walk(program), H100)
    flops = sum(of_one(ops[name].flops) for name in ("mlp.gate_up", "mlp.down"))
    assert sum(row.flops_rank for row in traced) == flops
    around = [ops[name] for name in ("mlp.input_comm", "mlp.down, sum")]
    sent = sum(of_one(op.halves * op.bytes) for op in around) * (layout.tp - 1) / layout.tp
    assert sum(row.comm_bytes for row in traced) == sent


@pytest.mark.parametrize("kind", CP_KINDS)
def test_a_faster_network_never_slows_a_kind(kind: str) -> None:
    question = asked(ranks=32)
    times = []
    for rate in (5e9, 10e9, 50e9, 400e9):
        choices = advise(question, with_network(H100, rate)).choices
        times.append(next(c.total_s for c in choices if c.kind == kind))
    assert times == sorted(times, reverse=True)


def test_refused_kinds_are_named_and_never_chosen() -> None:
    answer = advise(asked(ranks=64), H100)
    refused = {c.kind: c.refused for c in answer.choices if c.refused}
    assert list(refused) == ["ulysses"]
    assert "16, 32 ranks" in refused["ulysses"]
    assert answer.best in ("allgather", "ring")
    assert len(answer.pairs) == 1


def test_memory_refuses_too() -> None:
    """Keys and values of 32 Mi tokens do not fit on every rank."""
    answer = advise(asked("mpt-7b", 2**25, 64), H100)
    refused = {c.kind: c.refused for c in answer.choices if c.refused}
    assert "GB" in refused["allgather"]
    assert answer.best == "ring"
