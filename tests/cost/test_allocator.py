"""The caching allocator against cases worked out by hand, torch's own constants, and what must hold
for every history."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.memory import allocator
from fourfold.cost.memory.allocator import (
    MIB,
    RETURN_CACHE,
    AllocatorPeaks,
    CachingAllocator,
    OutOfMemoryError,
    StorageEvent,
    replay,
)

KIB = 2**10
BOTH = pytest.mark.parametrize("expandable", [False, True])


def reserved(*sizes: int, expandable: bool) -> int:
    events = [StorageEvent(number, size) for number, size in enumerate(sizes)]
    return replay(events, expandable_segments=expandable).reserved_bytes


def test_constants_are_those_of_the_installed_torch() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    header = Path(spec.origin).parent / "include/c10/core/AllocatorConfig.h"
    if not header.is_file():
        pytest.skip("this torch has its constants elsewhere")
    constants = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text()))
    ours = {
        "kMinBlockSize": allocator.MIN_BLOCK_BYTES,
        "kSmallSize": allocator.SMALL_BYTES,
        "kSmallBuffer": allocator.SMALL_SEGMENT_BYTES,
        "kMinLargeAlloc": allocator.MIN_LARGE_BYTES,
        "kRoundLarge": allocator.ROUND_LARGE_BYTES,
    }
    assert {name: int(constants[name]) for name in ours} == ours


# What the driver is asked for: (sizes allocated, reserved by segments, by expandable segments).
@pytest.mark.parametrize(
    ("sizes", "segments", "expandable"),
    [
        ((1,), 2 * MIB, 2 * MIB),
        ((MIB,), 2 * MIB, 2 * MIB),
        ((MIB, MIB), 2 * MIB, 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB, 4 * MIB),
        ((MIB + 1,), 20 * MIB, 20 * MIB),
        ((10 * MIB - 512, 10 * MIB - 512), 20 * MIB, 20 * MIB),
        ((10 * MIB,), 10 * MIB, 20 * MIB),
        ((10 * MIB + 1,), 12 * MIB, 20 * MIB),
        ((21 * MIB,), 22 * MIB, 40 * MIB),
        ((21 * MIB, 19 * MIB), 42 * MIB, 40 * MIB),
        ((512, 21 * MIB), 24 * MIB, 42 * MIB),
    ],
)
def test_driver_is_asked_for_segments(sizes, segments, expandable) -> None:
    assert reserved(*sizes, expandable=False) == segments
    assert reserved(*sizes, expandable=True) == expandable


def test_sizes_are_rounded_to_512_bytes() -> None:
    peaks = replay([StorageEvent(0, 1), StorageEvent(1, 513), StorageEvent(2, 0)])
    assert peaks == AllocatorPeaks(allocated_bytes=512 + 1024, reserved_bytes=2 * MIB)


def test_large_block_keeps_a_rest_of_one_mib() -> None:
    """Of 20 MiB, 19 are asked for: the rest of exactly 1 MiB is not split off."""
    whole = CachingAllocator()
    whole.allocate(0, 20 * MIB)
    whole.free(0)
    whole.allocate(1, 19 * MIB)
    assert whole.allocated_bytes == 20 * MIB
    split = CachingAllocator()
    split.allocate(0, 20 * MIB)
    split.free(0)
    split.allocate(1, 19 * MIB - 512)
    assert split.allocated_bytes == 19 * MIB - 512


def test_expandable_block_is_split_to_512_bytes() -> None:
    memory = CachingAllocator(expandable_segments=True)
    memory.allocate(0, 20 * MIB - 512)
    assert memory.allocated_bytes == 20 * MIB - 512


@BOTH
def test_smallest_free_block_that_fits_is_taken(expandable) -> None:
    """Of free blocks of 40 and 24 MiB, 22 MiB are taken from the second, and 36 from the first."""
    memory = CachingAllocator(expandable_segments=expandable)
    for storage, size in enumerate((40, 20, 24, 20)):
        memory.allocate(storage, size * MIB)
    before = memory.reserved_bytes
    memory.free(0)
    memory.free(2)
    memory.allocate(4, 22 * MIB)
    memory.allocate(5, 36 * MIB)
    assert memory.reserved_bytes == before


@BOTH
def test_free_neighbours_join(expandable) -> None:
    """Four blocks of 5 MiB in 20 MiB: after two neighbours are freed 10 MiB fit again, after two
    that are apart they do not."""
    for freed, extra in (((1, 2), 0), ((0, 2), 20 if expandable else 10)):
        memory = CachingAllocator(expandable_segments=expandable)
        for storage in range(4):
            memory.allocate(storage, 5 * MIB)
        assert memory.reserved_bytes == 20 * MIB
        for storage in freed:
            memory.free(storage)
        memory.allocate(9, 10 * MIB)
        assert memory.reserved_bytes == (20 + extra) * MIB


def test_expandable_segment_grows_at_its_end() -> None:
    """A free end of 15 MiB counts towards 30 MiB: one page of 20 is added, where a segment of its
    own takes all 30."""
    sizes = [StorageEvent(0, 5 * MIB), StorageEvent(1, 30 * MIB)]
    assert replay(sizes, expandable_segments=True).reserved_bytes == 40 * MIB
    assert replay(sizes).reserved_bytes == 50 * MIB


@BOTH
def test_streams_and_size_classes_share_nothing(expandable) -> None:
    events = [StorageEvent(0, 20 * MIB, 0), StorageEvent(0, 20 * MIB, 0, is_free=True)]
    again = replay([*events, StorageEvent(1, 20 * MIB, 0)], expandable_segments=expandable)
    other = replay([*events, StorageEvent(1, 20 * MIB, 1)], expandable_segments=expandable)
    small = replay([*events, StorageEvent(1, 512, 0)], expandable_segments=expandable)
    assert again.reserved_bytes == 20 * MIB
    assert other.reserved_bytes == 40 * MIB
    assert small.reserved_bytes == 22 * MIB


@BOTH
def test_cached_memory_is_returned_before_a_request_fails(expandable) -> None:
    memory = CachingAllocator(expandable_segments=expandable, limit_bytes=100 * MIB)
    memory.allocate(0, 60 * MIB, stream=0)
    memory.free(0)
    memory.allocate(1, 60 * MIB, stream=1)
    assert (memory.retries, memory.reserved_bytes) == (1, 60 * MIB)
    with pytest.raises(OutOfMemoryError, match="no room for 62914560 bytes") as caught:
        memory.allocate(2, 60 * MIB, stream=0)
    assert caught.value.allocated_bytes == caught.value.reserved_bytes == 60 * MIB


def test_only_expandable_segments_return_a_part() -> None:
    """30 of 60 MiB are free at the end: pages of 20 MiB are returned, a segment in use is not."""
    for expandable, left in ((False, 60), (True, 40)):
        memory = CachingAllocator(expandable_segments=expandable)
        memory.allocate(0, 60 * MIB)
        memory.free(0)
        memory.allocate(1, 30 * MIB)
        memory.empty_cache()
        assert memory.reserved_bytes == left * MIB
        memory.allocate(2, 30 * MIB)
        assert memory.reserved_bytes == 60 * MIB


def test_peaks_begin_at_an_event() -> None:
    events = [
        StorageEvent(0, 8 * MIB),
        StorageEvent(0, 8 * MIB, is_free=True),
        StorageEvent(1, 4 * MIB),
    ]
    peaks = replay(events, begin=2)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (4 * MIB, 20 * MIB)


# Anything may be allocated, freed and emptied in any order: (bytes, stream), a live storage to free
# by its place, or None to empty the cache.
SIZES = st.one_of(st.integers(1, 3 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))
STEPS = st.lists(
    st.one_of(st.tuples(SIZES, st.integers(0, 2)), st.integers(0, 2**16), st.none()), max_size=120
)


@BOTH
@given(steps=STEPS)
def test_blocks_never_overlap_and_all_memory_returns(expandable, steps) -> None:
    memory = CachingAllocator(expandable_segments=expandable)
    live: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step is None:
            memory.empty_cache()
        elif isinstance(step, tuple):
            memory.allocate(number, *step)
            live[number] = step[0]
        elif live:
            storage = list(live)[step % len(live)]
            memory.free(storage)
            del live[storage]
        check_blocks(memory, live)
    for storage in live:
        memory.free(storage)
    memory.empty_cache()
    assert (memory.allocated_bytes, memory.reserved_bytes) == (0, 0)


def check_blocks(memory: CachingAllocator, live: dict[int, int]) -> None:
    """Every byte reserved is in one block, in use or free, and no block is smaller than asked."""
    used = memory._block_by_storage
    assert used.keys() == live.keys()
    assert all(block.size >= live[storage] for storage, block in used.items())
    free = [block for pool in memory._pools.values() for _, _, block in pool.blocks]
    ranges = sorted((b.address, b.address + b.size) for b in (*used.values(), *free))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert memory.allocated_bytes == sum(block.size for block in used.values())
    assert memory.reserved_bytes == sum(end - begin for begin, end in ranges)
    assert not any(b.after is not None and b.after.is_free for b in free), "free neighbours"


@BOTH
@given(steps=STEPS)
def test_limit_that_was_enough_changes_nothing(expandable, steps) -> None:
    events, live = [], []
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            live.append(StorageEvent(number, *step))
            events.append(live[-1])
        elif step is not None and live:
            events.append(live.pop(step % len(live))._replace(is_free=True))
    free = replay(events, expandable_segments=expandable)
    limited = replay(events, expandable_segments=expandable, limit_bytes=free.reserved_bytes)
    assert limited == free
    assert free.reserved_bytes >= free.allocated_bytes


@BOTH
def test_returned_cache_is_reserved_no_longer(expandable) -> None:
    """Of two segments of 40 MiB the free one goes back, and the other keeps its pages."""
    events = [
        StorageEvent(0, 40 * MIB),
        StorageEvent(1, 40 * MIB),
        StorageEvent(0, 40 * MIB, is_free=True),
        RETURN_CACHE,
        StorageEvent(2, 20 * MIB),
    ]
    peaks = replay(events, begin=4, expandable_segments=expandable)
    assert peaks.reserved_bytes == 60 * MIB
