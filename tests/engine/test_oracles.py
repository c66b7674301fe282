"""Tensor parallelism against torch's DTensor plan, pipelines against torch's schedules, compiled
layers against the same run eagerly.
"""

from __future__ import annotations

import pytest

from tests.engine.forked import findings


@pytest.mark.parametrize(
    "which", ["tensor", "pipeline", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_loss_and_gradients_equal_those_of_torchs_own(which):
    gaps = findings("oracle_ranks.py", which)
    assert gaps
    assert all(gap < 1e-5 for gap in gaps.values()), gaps
