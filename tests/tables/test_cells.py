"""Do the MPT tables' Precision and MP Mode name our precisions, in both directions?"""

from __future__ import annotations

import pytest

from fourfold.spec.policy import Policy
from fourfold.tables.cells import precision_cells, precision_of


@pytest.mark.parametrize(
    ("ours", "cells", "formats"),
    [
        ("bf16-mixed", ("amp_bf16", "DEFAULT"), ("fp32", "bf16", "fp32", "fp32", "fp32")),
        ("bf16-pure", ("bf16", "PURE"), ("bf16", "bf16", "bf16", "bf16", "bf16")),
        ("fp8", ("amp_fp8", "DEFAULT"), ("fp32", "fp8", "fp32", "fp32", "fp32")),
    ],
)
def test_precision_and_mode_map_both_ways(ours, cells, formats):
    assert precision_cells(ours) == cells
    assert precision_of(*cells) == ours
    # A row that was read keeps its own two words.
    assert precision_cells(*cells) == cells
    dtypes = Policy(precision=ours).dtypes
    found = (dtypes.param, dtypes.compute, dtypes.reduce, dtypes.grad, dtypes.optimizer)
    assert found == formats


def test_other_words_stay():
    assert precision_cells("fp16") == ("fp16", "DEFAULT")
    assert precision_of("fp32", "DEFAULT") == "fp32"
    assert precision_of("amp_bf16", "") == "bf16-mixed"
