"""Stages are priced as the engine will cut them.

Layouts of models with experts: words, places, and why some cannot run.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.columns import Columns
from fourfold.cost.run import columns_of
from fourfold.cost.step.pipeline import chunk_layers, stage_layers
from fourfold.search.legal import Target, why_not
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.codec import decode, encode
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from tests.specs import run_spec

H100 = catalog.cluster("nvidia-h100")


def columns(model: str, pp: int, stack: str) -> Columns:
    spec = run_spec(model, f"pp{pp}", seq_len=2048, global_batch=64)
    return columns_of([spec], cluster=H100, engine=engine_of(stack))


@pytest.mark.parametrize(
    ("model", "stack", "pp", "layers"),
    [
        ("llama-3.1-405b", "megatron-bridge-2026", 16, [7, *[8] * 14, 7]),
        ("llama-3.1-70b", "nemo-2025", 12, [5, *[7] * 10, 5]),
        ("llama-3.1-70b", "megatron-lm-2024", 3, [27, 27, 26]),
        ("llama-3.1-405b", "torchtitan", 16, [*[8] * 14, 7, 7]),
    ],
)
def test_known_cuts(model: str, stack: str, pp: int, layers: list[int]) -> None:
    c = columns(model, pp, stack)
    assert chunk_layers(c, pp)[:, 0].tolist() == layers
    ends = stage_layers(c)
    assert (ends.first[0], ends.last[0]) == (layers[0], layers[-1])
    assert max(layers[1:-1]) <= ends.middle[0] <= max(layers)


@given(
    layers=st.integers(1, 130),
    pp=st.integers(2, 40),
    virtual=st.integers(1, 8),
    stack=st.sampled_from(["megatron-bridge-2026", "torchtitan", "nanotron-2025"]),
)
def test_no_legal_cut_loses_a_layer(layers: int, pp: int, virtual: int, stack: str) -> None:
    sizes = {"hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 8, "vocab": 32000}
    model = catalog.shape("llama", layers=layers, **sizes)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    policy = Policy(schedule=schedule, virtual_stages=virtual)
    batch = Batch(seq_len=2048, global_batch=pp)
    if why_not(model, Layout(pp=pp), batch, policy, Target(engine=engine_of(stack))):
        return
    spec = run_spec(model, f"pp{pp}", batch=batch, policy=policy)
    c = columns_of([spec], cluster=H100, engine=engine_of(stack))
    counts = chunk_layers(c, pp * virtual)[:, 0]
    assert counts.sum() == layers
    assert counts.min() >= 0
    assert np.all(counts == np.floor(counts))
    ranks = counts.reshape(virtual, pp).sum(axis=0)
    ends = stage_layers(c)
    if virtual == 1 and not stack.startswith("nanotron"):
        assert (ends.first[0], ends.last[0]) == (ranks[0], ranks[-1])


@pytest.mark.parametrize(
    "words", ["pp2 dp4 cp1 tp2 ep4", "pp1 dp4 cp1 tp2 ep2 etp2", "pp1 dp2x2 cp1 tp1 ep2"]
)
def test_words_round_trip(words: str) -> None:
    layout = Layout.parse(words)
    assert str(layout) == words
    assert decode(Layout, encode(layout)) == layout


def test_neighbours_share_an_expert_then_others_hold_the_rest() -> None:
    layout = Layout.parse("dp4 tp2 ep2 etp2")
    assert [layout.expert_place(rank) for rank in range(8)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip


def test_every_copy_holds_all_experts() -> None:
    layout = Layout.parse("dp2x2 ep2")
    assert [layout.expert_place(rank)[1] for rank in range(4)] == [0, 1, 0, 1]
    assert layout.edp == 1
