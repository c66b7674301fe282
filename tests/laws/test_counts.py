"""Laws of counting: shards add up to the whole, stages lose no layer, recompute only adds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery
from fourfold.cost.count.params import (
    LOAD,
    chunk,
    head_cost,
    model_params,
    rank_params,
    split_layers,
    stage_layers,
    stage_tensors,
    tensors,
    tp_shape,
)
from fourfold.cost.count.tensors import Param
from fourfold.cost.run import columns_of
from fourfold.cost.step import pipeline
from fourfold.search.query import usual_cluster
from fourfold.spec import catalog
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from tests.sampling import examples
from tests.specs import run_spec

models = st.sampled_from(sorted(catalog.model_names())).map(catalog.model)
small = st.sampled_from([name for name in catalog.model_names() if "tiny" in name]).map(
    catalog.model
)


def learned(model: ModelShape, seq_len: int) -> list[Param]:
    """Listed tensors but for the loads that routers keep, which are no parameters."""
    return [one for one in tensors(model, seq_len) if not one.name.endswith(f".router.{LOAD}")]


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_chunks_tile_the_whole(size: int, parts: int) -> None:
    pieces = [chunk(size, parts, part) for part in range(parts)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == size
    assert all(left[1] == right[0] for left, right in pairwise(pieces))


@given(st.integers(1, 130), st.integers(1, 64), st.floats(0, 5), st.floats(0, 9))
def test_stages_hold_every_layer_once_and_are_balanced(layers, stages, first, last) -> None:
    assume(stages <= layers)
    cut = split_layers(layers, stages, first, last)
    assert [layer for part in cut for layer in part] == list(range(layers))
    assert all(len(part) >= 1 for part in cut)
    cost = [len(part) for part in cut]
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    worst = max(count + more for count, more in zip(cost, extra, strict=True))
    # Moving any one layer to any other stage does not lower the costliest stage below the optimum:
    # no stage that exceeds the bound could give a layer to one that stays under it.
    for giver in range(stages):
        if cost[giver] + extra[giver] == worst and cost[giver] > 1:
            assert all(cost[taker] + 1 + extra[taker] >= worst for taker in range(stages))


@settings(max_examples=examples(60))
@given(
    models,
    st.integers(2, 16),
    st.integers(1, 3),
    st.sampled_from((512, 4096, 131072)),
)
def test_times_of_our_engine_are_of_its_own_cut(model, pp, virtual, seq_len) -> None:
    assume(pp * virtual <= model.layers)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    fields = {"seq_len": seq_len, "global_batch": pp, "schedule": schedule}
    spec = run_spec(model, f"pp{pp}", virtual_stages=virtual, **fields)
    cluster = usual_cluster(catalog.device("h100-80gb"), pp)
    c = columns_of([spec], cluster=cluster, engine=engine_of("fourfold"))
    chunks = [len(part) for part in stage_layers(model, pp * virtual, seq_len)]
    assert pipeline.chunk_layers(c, pp * virtual)[:, 0].tolist() == chunks
    ranks = np.reshape(chunks, (virtual, pp)).sum(axis=0).tolist()
    counted = pipeline.stage_layers(c)
    assert (counted.first[0], counted.last[0]) == (ranks[0], ranks[-1])
    assert counted.middle[0] == max(ranks[1:-1], default=0)


@settings(max_examples=examples(60))
@given(models, st.integers(1, 4096))
def test_the_listed_tensors_are_the_count(model: ModelShape, seq_len: int) -> None:
    listed = list(tensors(model, seq_len))
    parameters = learned(model, seq_len)
    assert sum(tensor.count for tensor in parameters) == model_params(model, seq_len)
    assert len(listed) == len(parameters) + model.count_layers("experts")
    assert len({tensor.name for tensor in listed}) == len(listed)


@settings(max_examples=examples(60))
@given(
    small,
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 3, 4)),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_owned_shards_add_up(model: ModelShape, tp: int, pp: int, shard: int, cp: int) -> None:
    layout = Layout(pp=pp, shard=shard, cp=cp, tp=tp)
    stages = stage_layers(model, pp, 64)
    owned = sum(
        rank_params(model, layout, seq_len=64, stages=stages, rank=rank, zero=3).owned
        for rank in range(layout.world)
    )
    # What tensor parallelism keeps whole is owned once per tp rank; KV heads once per sharing rank;
    # experts, which tp does not cut, once.
    expected = 0
    for tensor in learned(model, 64):
        if tensor.expert is not None:
            expected += tensor.count
            continue
        for rank in range(tp):
            count = 1
            for size in tp_shape(model, tensor, tp, rank):
                count *= size
            expected += count
    assert owned == expected
    if tp == 1:
        assert owned == model_params(model, 64)


@settings(max_examples=examples(40))
@given(models, st.integers(1, 16))
def test_stages_hold_every_tensor_and_tied_ones_twice(model: ModelShape, pp: int) -> None:
    assume(pp <= model.layers)
    cut = stage_layers(model, pp, 128)
    held = [tensor.name for stage in range(pp) for tensor in stage_tensors(model, 128, cut, stage)]
    twice = 1 if model.tied and pp > 1 else 0
    assert held.count("embedding.weight") == 1 + twice
    assert len(held) - twice == len(set(held)) == len(learned(model, 128))
    assert head_cost(model, 128) > 0


@settings(max_examples=examples(60))
@given(models, st.integers(1, 10**6), st.sampled_from(("none", "selective", "every-4", "full")))
def test_conventions_are_ordered(model: ModelShape, seq_len: int, recompute: str) -> None:
    ask = FlopsQuery.of(
        model=model, seq_len=seq_len, layout=Layout(), policy=Policy(recompute=recompute)
    )
    counts = {name: convention.count(ask) for name, convention in CONVENTIONS.items()}
    for count in counts.values():
        assert 0 < count.model <= count.hardware
    assert counts["causal"].model < counts["full-attention"].model
    assert counts["6n"].model < counts["mpt"].model
    if recompute == "full":
        assert counts["mpt"].hardware * 3 == counts["mpt"].model * 4
