"""Tensor parallelism against torch's DTensor plan, pipelines against torch's schedules, compiled
layers against the same run eagerly.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "which", ["tensor", "pipeline", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_loss_and_gradients_equal_those_of_torchs_own(which):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = warm.run(
        [sys.executable, str(HERE / "oracle_ranks.py"), which],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = json.loads(done.stdout)
    assert gaps
    assert all(gap < 1e-5 for gap in gaps.values()), gaps
