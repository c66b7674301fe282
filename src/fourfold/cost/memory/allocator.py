"""Bytes that torch's caching allocator reserves for a history of allocations and frees, without a
GPU: its rounding, pools, splits and joins, with segments of their own or expandable ones.

After c10/cuda/CUDACachingAllocator.cpp with its default settings (no max_split_size_mb, no
roundup_power2_divisions, garbage_collection_threshold 0). A block freed while another stream still
uses it (`Tensor.record_stream`) is not modelled: it is free at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.result.one_rank import Fit

MIB = 2**20
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes are multiples of it
SMALL_BYTES = MIB  # kSmallSize: larger requests use the large pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a segment of the small pool
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: a segment for requests below kMinLargeAlloc
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its size ...
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: ... rounded up to a multiple of this
# Addresses only decide between free blocks of equal size. Segments lie far apart, later ones below
# earlier ones: with it torchtitan's Llama 3.1 8B (dp8, selective recompute, 2 sequences of 8,192
# tokens, no expandable segments) reserves 81.21 GiB, with the other order 81.65; an H200 with torch
# 2.11 reserved 81.24.
_ADDRESS_SPACE = 5 * 2**45  # a multiple of the pages of both pools
_MAX_SEGMENTS = 2**32


class StorageEvent(NamedTuple):
    """One allocation, or one free (`is_free`), of the storage with this number."""

    storage: int
    bytes: int
    stream: int = 0
    is_free: bool = False


RETURN_CACHE = StorageEvent(-1, 0)  # torch.cuda.empty_cache, at this place of a history


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeaks:
    """Highest bytes since `reset_peaks`. `retries`: requests that only went through after free
    segments were returned to the driver, since a limit was reached."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int = 0


class OutOfMemoryError(MemoryError):
    """A request that a limit has no room for, even after all cached memory was returned."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"no room for {requested_bytes} bytes beside {allocated_bytes} allocated, "
            f"{reserved_bytes} reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class _Block:
    """A range of addresses inside a segment; `before` and `after` are its neighbours."""

    __slots__ = ("address", "after", "before", "is_mapped", "is_used", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.is_mapped, self.is_used = is_mapped, False
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def is_free(self) -> bool:
        return self.is_mapped and not self.is_used

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes and return the rest as a block after this one."""
        rest = _Block(self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def absorb(self, neighbour: _Block) -> None:
        """Grow over the block before or after this one, which ceases to be."""
        self.size += neighbour.size
        if neighbour is self.before:
            self.address, self.before = neighbour.address, neighbour.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = neighbour.after
            if self.after is not None:
                self.after.before = self


class _Pool:
    """Free blocks of one stream and size class, smallest and lowest first. `unmapped`: ranges of
    its expandable segment that have addresses and no memory."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.blocks: list[tuple[int, int, _Block]] = []
        self.unmapped: list[_Block] = []

    @property
    def segment_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def insert(self, block: _Block) -> None:
        bisect.insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.address))]

    def best_fit(self, size: int) -> _Block | None:
        """Take the smallest block that is large enough out of the pool. A block that can still grow
        counts as large as it can become, so it is the last choice."""
        index = bisect.bisect_left(self.blocks, (size, -1))
        if index == len(self.blocks):
            return None
        block = self.blocks[index][2]
        for _, _, larger in self.blocks[index + 1 :]:
            if _size_with_growth(larger) >= _size_with_growth(block):
                break
            block = larger
        self.remove(block)
        return block


def _size_with_growth(block: _Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def rounded(size: int) -> int:
    """Return the bytes that a request occupies in its segment."""
    return max(MIN_BLOCK_BYTES, _multiple(size, MIN_BLOCK_BYTES))


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment that the driver is asked for, for a rounded request that no
    free block has room for; expandable segments grow instead."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return _multiple(size, ROUND_LARGE_BYTES)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


class CachingAllocator:
    """`limit_bytes`: what the driver can give in all; None is unlimited."""

    def __init__(
        self, *, expandable_segments: bool = False, limit_bytes: int | None = None
    ) -> None:
        self.expandable_segments = expandable_segments
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = self.retries = 0
        self._max_allocated_bytes = self._max_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._block_by_storage: dict[int, _Block] = {}
        self._num_segments = 0

    @property
    def peaks(self) -> AllocatorPeaks:
        return AllocatorPeaks(
            allocated_bytes=self._max_allocated_bytes,
            reserved_bytes=self._max_reserved_bytes,
            retries=self.retries,
        )

    def reset_peaks(self) -> None:
        """As torch.cuda.reset_peak_memory_stats: peaks begin at what is held now."""
        self._max_allocated_bytes = self.allocated_bytes
        self._max_reserved_bytes = self.reserved_bytes
        self.retries = 0

    def allocate(self, storage: int, size: int, stream: int = 0) -> None:
        """Give a storage a block. One of 0 bytes has none."""
        if size == 0:
            return
        size = rounded(size)
        pool = self._pool(stream, is_small=size <= SMALL_BYTES)
        block = pool.best_fit(size) or self._new_block(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemoryError(size, self.allocated_bytes, self.reserved_bytes)
        block.is_used = True
        if self._is_split(block, size):
            pool.insert(block.cut(size))
        self._block_by_storage[storage] = block
        self.allocated_bytes += block.size
        self._max_allocated_bytes = max(self._max_allocated_bytes, self.allocated_bytes)

    def free(self, storage: int) -> None:
        """Return a storage's block to its pool, joined with free neighbours."""
        block = self._block_by_storage.pop(storage, None)
        if block is None:  # of 0 bytes
            return
        self.allocated_bytes -= block.size
        block.is_used = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                neighbour.pool.remove(neighbour)
                block.absorb(neighbour)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Return free memory to the driver: segments without a used block, or all complete pages
        of expandable ones."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _pool(self, stream: int, *, is_small: bool) -> _Pool:
        key = stream, is_small
        if key not in self._pools:
            self._pools[key] = _Pool(is_small=is_small)
        return self._pools[key]

    def _is_split(self, block: _Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_BYTES

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
        """A block of memory from the driver; None where it has no room."""
        if self.expandable_segments:
            return self._expanded(pool, size)
        grown = segment_bytes(size)
        if not self._reserve(grown):
            return None
        return _Block(pool, self._segment_address(), grown)

    def _segment_address(self) -> int:
        self._num_segments += 1
        return (_MAX_SEGMENTS - self._num_segments) * _ADDRESS_SPACE

    def _reserve(self, size: int) -> bool:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return False
        self.reserved_bytes += size
        self._max_reserved_bytes = max(self._max_reserved_bytes, self.reserved_bytes)
        return True

    # Expandable segments: one range of addresses a pool, whose pages get memory when needed.

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        if not pool.unmapped:
            address = self._segment_address()
            pool.unmapped = [_Block(pool, address, _ADDRESS_SPACE // 2, is_mapped=False)]
        block = next(filter(None, (_room(gap, size) for gap in pool.unmapped)))
        if not block.is_mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.after is not None
            mapped = self._map(block.after, min(size - block.size, block.after.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _map(self, gap: _Block, size: int) -> _Block | None:
        """Give the beginning of an unmapped range memory, in complete pages; return the free block
        that it is now part of."""
        pool = gap.pool
        size = min(_multiple(size, pool.segment_bytes), gap.size)
        if not self._reserve(size):
            return None
        pool.unmapped.remove(gap)
        if size < gap.size:
            bisect.insort(pool.unmapped, gap.cut(size), key=lambda block: block.address)
        gap.is_mapped = True
        for neighbour in (gap.before, gap.after):
            if neighbour is not None and neighbour.is_free:
                pool.remove(neighbour)
                gap.absorb(neighbour)
        pool.insert(gap)
        return gap

    def _unmap(self, block: _Block) -> None:
        """Take the memory of the complete pages inside a free block."""
        pool, page = block.pool, block.pool.segment_bytes
        begin = _multiple(block.address, page)
        size = (block.address + block.size) // page * page - begin
        if size <= 0:
            return
        pool.remove(block)
        self.reserved_bytes -= size
        if begin > block.address:
            head, block = block, block.cut(begin - block.address)
            pool.insert(head)
        if size < block.size:
            pool.insert(block.cut(size))
        block.is_mapped = False
        for gap in (block.before, block.after):
            if gap is not None and not gap.is_mapped:
                pool.unmapped.remove(gap)
                block.absorb(gap)
        bisect.insort(pool.unmapped, block, key=lambda gap: gap.address)


def _room(gap: _Block, size: int) -> _Block | None:
    """The first free block at an unmapped range, if enough free and unmapped bytes follow it."""
    before = gap.before
    first = before if before is not None and before.is_free else gap
    room, block = 0, first
    while block is not None and not block.is_used and room < size:
        room, block = room + block.size, block.after
    return first if room >= size else None


def replay(
    history: Iterable[StorageEvent],
    *,
    begin: int = 0,
    expandable_segments: bool = False,
    limit_bytes: int | None = None,
) -> AllocatorPeaks:
    """Return peaks from event number `begin` on of a history that starts with an empty GPU. What
    the events before it left in the cache stays reserved."""
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    for number, event in enumerate(history):
        if number == begin:
            allocator.reset_peaks()
        if event is RETURN_CACHE:
            allocator.empty_cache()
        elif event.is_free:
            allocator.free(event.storage)
        else:
            allocator.allocate(event.storage, event.bytes, event.stream)
    return allocator.peaks


def fit(
    history: Iterable[StorageEvent], limit_bytes: int, *, expandable_segments: bool = False
) -> Fit:
    """Return whether a history runs where the driver has `limit_bytes` to give."""
    try:
        peaks = replay(history, expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    except OutOfMemoryError:
        return "oom"
    return "retries" if peaks.retries else "fits"
