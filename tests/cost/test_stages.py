"""Memory and seconds of a pipeline stage follow the layers that it holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from fourfold.cost.columns import Columns, joined
from fourfold.cost.count.params import stage_tensors
from fourfold.cost.fit.coefficients import defaults
from fourfold.cost.memory.peak import memory, stage_loads
from fourfold.cost.predict import chunk_times
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import by_stage, ends_s, estimate, layer_times
from fourfold.cost.step.pipeline import chunk_layers, stage_layers
from fourfold.cost.step.stage_kinds import routed_shares
from fourfold.search.query import usual_cluster
from fourfold.spec import catalog
from fourfold.spec.engine import engine_of
from fourfold.spec.model import ModelShape
from tests.specs import run_spec


def runs(model: str | ModelShape, layout: str, stack: str = "megatron", **policy: Any) -> Columns:
    spec = run_spec(model, layout, seq_len=4096, micro_batch=1, global_batch=256, **policy)
    cluster = usual_cluster(catalog.device("h100-80gb"), spec.gpus)
    return columns_of([spec], cluster=cluster, engine=engine_of(stack))


def stage_weights(model: ModelShape, c: Columns, ep: int) -> list[tuple[float, float]]:
    """Weights of matrix products of each stage, outside of experts and in those of a rank, added up
    tensor by tensor."""
    counts = chunk_layers(c, int(c.pp[0]))[:, 0].astype(int).tolist()
    stages = tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))
    found = []
    for stage in range(len(stages)):
        matrices = [t for t in stage_tensors(model, 4096, stages, stage) if len(t.shape) == 2]
        routed = sum(t.count for t in matrices if t.expert is not None)
        found.append((sum(t.count for t in matrices) - routed, routed / ep))
    return found


@pytest.mark.parametrize("name", ["moonlight-16b-a3b", "deepseek-v3", "llama4-maverick"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_weights_of_a_stage_are_those_of_its_layers(name: str, pp: int) -> None:
    model = replace(catalog.model(name), mtp=None, vocab=2**17)  # a multiple of 128: none is padded
    c = runs(model, f"pp{pp} dp8 ep8")
    first, *inner, last = stage_weights(model, c, 8)
    middle = max(inner, key=lambda weights: weights[1], default=None)
    loads = stage_loads(c, defaults())
    for wanted, (params, _, _) in zip((first, middle, last), loads, strict=True):
        if wanted is not None:
            assert [count[0] for count in params[:-1]] == pytest.approx(wanted, rel=1e-12)


def test_dense_layers_are_on_the_first_stage_alone() -> None:
    assert routed_shares(runs("deepseek-v2-lite", "pp3 dp8 ep8"))[:, 0].tolist() == [8 / 9, 1, 1]


def test_virtual_stages_of_a_rank_are_chunks_apart() -> None:
    """Ranks of 4 x 2 chunks of 6 Maverick layers, every second of which has experts."""
    c = runs("llama4-maverick", "pp4 dp8 ep8", schedule="interleaved", virtual_stages=2)
    assert routed_shares(c)[:, 0].tolist() == [0.5, 0.5, 0.5]


def test_stages_of_three_alternating_layers_are_not_the_mean() -> None:
    """16 stages of 3 layers: one or two of them have experts."""
    shares = routed_shares(runs("llama4-maverick", "pp16 dp8 ep8"))[:, 0]
    assert shares.tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_joined_runs_keep_their_own_layers() -> None:
    parts = [runs("deepseek-v3", "pp8 dp8 ep8"), runs("moonlight-16b-a3b", "pp4 dp8 ep8")]
    both = memory(joined(parts), defaults()).worst_bytes
    apart = [memory(part, defaults()).worst_bytes[0] for part in parts]
    np.testing.assert_allclose(both, apart, rtol=1e-12)
    second = memory(joined(parts).take(np.array([1])), defaults()).worst_bytes
    np.testing.assert_allclose(second, apart[1:], rtol=1e-12)


def alone(model: ModelShape, layout: str, part: str = "") -> float:
    """Seconds of a layer of a model that is one stage, or of a part of them."""
    times = layer_times(runs(model, layout), defaults(), micro=np.ones(1))
    return float((times.parts[part] if part else times.total)[0])


def test_seconds_of_stages_are_those_of_models_with_their_layers() -> None:
    """27 layers on 3 stages of 9, of which the first layer alone is dense: a micro batch takes the
    first stage 9 layers of a model that begins with a dense one, and the others 9 with experts."""
    model = catalog.model("deepseek-v2-lite")
    assert model.moe is not None
    begins_dense = replace(model, layers=9)
    has_experts = replace(begins_dense, moe=replace(model.moe, dense_first=0))
    c = runs(model, "pp3 dp8 ep8")
    head, embed, handover = (float(s[0]) for s in ends_s(c, defaults(), np.ones(1)))
    first = 9 * alone(begins_dense, "dp8 ep8") + embed + handover
    middle = 9 * alone(has_experts, "dp8 ep8") + handover
    last = middle + head
    assert first < middle < last
    micros, way_through = 32, 27 * alone(model, "dp8 ep8") + embed + head + 3 * handover
    by_hand = micros * last + (way_through - last)
    times = estimate(c, defaults())
    once = sum(times.parts[name] for name in ("dp_comm", "optimizer", "fixed", "jitter"))
    assert (times.step_s - once)[0] == pytest.approx(by_hand, rel=1e-9)
    # Of stages of 9 mean layers the slowest would be faster.
    assert by_hand > 1.01 * (micros - 1) * way_through / 3


def test_played_chunks_take_what_their_layers_take() -> None:
    """16 stages of 3 of Maverick's layers, every second of which has experts: one, then two."""
    model = catalog.model("llama4-maverick")
    c = runs(model, "pp16 dp8 ep8")
    coef = defaults()
    _, chunks_s = chunk_times(c, coef, estimate(c, coef), 32)
    lean, rich = chunks_s[2, 0], chunks_s[3, 0]
    assert chunks_s[2:14:2, 0] == pytest.approx(lean, rel=1e-12)
    assert chunks_s[3:14:2, 0] == pytest.approx(rich, rel=1e-12)
    assert model.moe is not None
    three = [replace(model, layers=3), replace(model, layers=3, moe=replace(model.moe, every=1))]
    one_of_three, three_of_three = (3 * alone(shape, "dp8 ep8") for shape in three)
    handover = float(ends_s(c, coef, np.ones(1))[2][0])
    assert lean - handover == pytest.approx(one_of_three, rel=1e-9)
    assert one_of_three < rich - handover < three_of_three


@pytest.mark.parametrize("layout", ["dp8", "pp4 dp8", "cp2 dp8"])
def test_windowed_layers_are_priced_apart_from_full_ones(layout: str) -> None:
    """A ring of ranks hides its hops under the attention of the layer that they are sent in, which
    is short in a layer with a window."""
    model = catalog.model("gpt-oss-20b")
    wide, narrow = replace(model, mixers=None, window=None), replace(model, mixers=None)
    for part in ("attention", "cp_comm"):
        mean = (alone(wide, layout, part) + alone(narrow, layout, part)) / 2
        assert alone(model, layout, part) == pytest.approx(mean, rel=1e-9)


def test_a_last_stage_without_layers_takes_what_its_head_takes() -> None:
    c = runs("kimi-k2", "pp32 dp8 ep8", "generic")
    assert stage_layers(c).last[0] == 0
    layer = by_stage(c, defaults(), layer_times(c, defaults(), micro=c.micro))
    assert layer.last[0] == 0.0
    assert np.isfinite(estimate(c, defaults()).step_s).all()


def test_joined_runs_take_what_they_take_apart() -> None:
    """To the last bit, whether or not the other runs have experts, or layers that differ."""
    names = ("deepseek-v3", "llama-3.1-8b", "gpt-oss-20b", "mixtral-8x7b")
    parts = [runs(name, "pp4 dp8") for name in names]
    both = estimate(joined(parts), defaults())
    apart = [estimate(part, defaults()) for part in parts]
    assert both.step_s.tolist() == [times.step_s[0] for times in apart]
    assert both.parts["dp_comm"].tolist() == [times.parts["dp_comm"][0] for times in apart]
