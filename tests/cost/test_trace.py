"""Does a trace give the published numbers, and hold what it must?"""

from __future__ import annotations

import pytest

from fourfold.cost.trace.attention import allgather, ring, ulysses
from fourfold.cost.trace.steps import Ask, axis_groups, spans
from fourfold.cost.trace.walk import StepRow, mlp, mlp2d, walk
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.cluster import stretched
from fourfold.spec.layout import Layout

PUBLISHED_PEAKS_GB = (2.27, 2.68, 3.05, 3.17, 60.65, 60.77, 60.90, 60.90, 61.02, 61.02)


def ask(**changes: object) -> Ask:
    """The published trace: 60,000 tokens over 16 ranks."""
    fields = {
        "tokens": 60000,
        "hidden": 16384,
        "heads": 128,
        "kv_heads": 128,
        "ffn": 53248,
        "layers": 126,
        "layout": Layout(tp=8, shard=2),
        "attention": "naive",
    }
    return Ask(**(fields | changes))  # type: ignore[arg-type]


def rows(program_of: object, **changes: object) -> tuple[StepRow, ...]:
    program = program_of(ask(**changes))  # type: ignore[operator]
    return walk(program, catalog.cluster("nvidia-h100"))


def test_ulysses_gives_the_published_peaks() -> None:
    peaks = [row.peak_bytes / 1e9 for row in rows(ulysses)]
    assert peaks == pytest.approx(PUBLISHED_PEAKS_GB, abs=0.006)


def test_ulysses_gives_the_published_sizes_and_flops() -> None:
    steps = rows(ulysses)
    held = {tensor.name: tensor for tensor in steps[0].tensors}
    assert held["input"].elements == 61_440_000
    assert held["input"].bytes == 122_880_000
    assert {held[name].bytes for name in "QKVO"} == {2 * 16384**2}
    assert steps[4].tensors[0].bytes == 57_600_000_000
    flops = [row.flops_all / 1e12 for row in steps if row.flops_all]
    assert flops == pytest.approx([96.64, 117.96, 117.96, 32.21], abs=0.005)


def test_mlp2d_gives_the_published_sizes() -> None:
    steps = rows(mlp2d)
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


@pytest.mark.parametrize("program_of", [ulysses, allgather, ring])
@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_every_kind_does_the_same_products(program_of: object, attention: str) -> None:
    """However the sequence is divided, the FLOPs of all ranks are those of one."""
    total = sum(row.flops_all for row in rows(program_of, attention=attention))
    alone = sum(row.flops_all for row in rows(ulysses, attention=attention, layout=Layout()))
    assert total == alone


def test_traffic_counts_what_leaves_a_rank() -> None:
    """Ulysses sends 4 x (P-1)/P of a rank's activations, all-gather and ring (P-1) of its KV."""
    part = 122_880_000
    assert sum(row.comm_bytes for row in rows(ulysses)) == 4 * part * 15 // 16
    assert sum(row.comm_bytes for row in rows(allgather)) == 2 * part * 15
    assert sum(row.comm_bytes for row in rows(ring)) == 2 * part * 15
    by_level = rows(ulysses)[3].messages[0].by_level
    assert by_level == {"nvlink": part * 7 // 16, "network": part * 8 // 16}
    assert all(row.comm_bytes == 0 for row in rows(ring, layout=Layout()))


def test_few_kv_heads_are_sent_to_several_ranks() -> None:
    exchange = rows(ulysses, kv_heads=8)[3]
    shapes = {tensor.name: tensor.shape for tensor in exchange.tensors}
    assert shapes["q_heads"] == (60000, 8, 128)
    assert shapes["k_heads"] == (60000, 1, 128)
    odd = rows(ulysses, heads=96, kv_heads=12, hidden=12288, layout=Layout(tp=8))[3]
    assert [tensor.shape[1] for tensor in odd.tensors] == [12, 12, 12]


@pytest.mark.parametrize(
    ("program_of", "changes", "words"),
    [
        (ulysses, {"layout": Layout(tp=48)}, "ranks=48"),
        (ulysses, {"tokens": 60001}, "60000 or 60016"),
        (ring, {"tokens": 60016, "attention": "flash"}, "60000 or 60032"),
        (allgather, {"heads": 100}, "must divide hidden"),
        (ulysses, {"kv_heads": 3}, "must divide heads"),
        (mlp, {}, "mlp2d"),
        (mlp2d, {"ffn": 53249}, "53248"),
        (mlp2d, {"layout": Layout(cp=2)}, "use dp = 2"),
    ],
)
def test_refusals_name_a_way_out(program_of: object, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rows(program_of, **changes)


def test_ulysses_refusal_names_groups_that_fit() -> None:
    with pytest.raises(UserError, match="use 2, 3, 4, 6 ranks"):
        rows(ulysses, heads=12, kv_heads=6, hidden=1536, layout=Layout(tp=8))


def test_groups_and_spans() -> None:
    layout = Layout(tp=4, cp=2, shard=2)
    assert axis_groups(layout, ("dp",)).members[:2] == ((0, 8), (1, 9))
    assert axis_groups(layout, ("dp", "cp")).members[0] == (0, 4, 8, 12)
    assert spans((0, 1, 2, 8)) == "0-2 8"
    assert spans((0, 8, 16)) == "0-16 by 8"
    big = stretched(catalog.cluster("nvidia-h100"), 10_001)
    assert big.gpus == 10_001
    assert big.links[-1].ranks % 8 == 0
