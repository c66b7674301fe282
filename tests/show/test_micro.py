"""Are the sizes of micro batches told as they run?"""

from __future__ import annotations

import pytest

from fourfold.spec.batch import Batch
from fourfold.verbs.run_shown import micro_words


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "dp", "words"),
    [
        (48, 11, 1, "11, 11, 11, 11, 4"),
        (48, 11, 2, "11, 11, 2"),
        (7, 3, 2, "dp 0: 3, 1; dp 1: 3 and 1 of padding"),
        (13, 2, 3, "dp 0: 2, 2, 1; dp 1-2: 2, 2 and 1 of padding"),
        (257, 8, 1, "8 x 32, 1"),
        (3, 4, 3, "1"),
    ],
)
def test_sizes_in_words(global_batch: int, micro_batch: int, dp: int, words: str) -> None:
    batch = Batch(seq_len=8, micro_batch=micro_batch, global_batch=global_batch)
    assert micro_words(batch, dp) == words
    assert sum(map(sum, batch.micro_plan(dp))) == global_batch
