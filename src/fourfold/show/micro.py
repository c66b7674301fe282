"""Which micro batches does each data-parallel rank run? In sequences, for a reader.

48 sequences in micro batches of 11 on one rank: "11, 11, 11, 11, 4".
"""

from __future__ import annotations

from itertools import groupby

from fourfold.spec.batch import Batch

# A longer list is told by counting equal neighbours: "8 x 32, 5".
_LISTED = 8


def micro_words(batch: Batch, dp: int) -> str:
    """Ranks with the same sizes together; padding that keeps ranks in step is said."""
    count = batch.micro_count(dp)
    told: list[tuple[list[int], str]] = []
    for rank, sizes in enumerate(batch.micro_plan(dp)):
        padding = f" and {count - len(sizes)} of padding" if len(sizes) < count else ""
        words = _sizes(sizes) + padding
        if not told or told[-1][1] != words:
            told.append(([], words))
        told[-1][0].append(rank)
    if len(told) == 1:
        return told[0][1]
    return "; ".join(f"dp {_ranks(ranks)}: {words}" for ranks, words in told)


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _LISTED:
        return ", ".join(map(str, sizes))
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return ", ".join(f"{size} x {times}" if times > 1 else f"{size}" for size, times in runs)


def _ranks(ranks: list[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
