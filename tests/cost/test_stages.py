"""Memory of a pipeline stage follows the layers that it holds."""

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
from fourfold.cost.run import columns_of
from fourfold.cost.step.pipeline import chunk_layers, routed_shares
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
    model = replace(catalog.model(name), mtp=None)
    c = runs(model, f"pp{pp} dp8 ep8")
    first, *inner, last = stage_weights(model, c, 8)
    middle = max(inner, key=lambda weights: weights[1], default=None)
    loads = stage_loads(c, defaults())
    for wanted, (params, _, _) in zip((first, middle, last), loads, strict=True):
        if wanted is not None:
            assert [count[0] for count in params] == pytest.approx(wanted, rel=1e-12)


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
