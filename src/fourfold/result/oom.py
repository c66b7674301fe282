"""What did a rank hold when it ran out of memory? Bytes by kind, and its largest tensors.

On a CPU the ledger knows every live tensor; on a GPU the allocator knows its blocks, and tensors
that Python still sees give some of them a shape and a name.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.result.dryrun import Kind, Large


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """`asked_bytes`: the allocation that failed (0: not known); `live_bytes` do not hold it unless
    the ledger counted it. `limit_bytes`: what the rank might use (0: not known)."""

    live_bytes: int
    asked_bytes: int = 0
    limit_bytes: int = 0
    reserved_bytes: int = 0
    kinds: tuple[Kind, ...] = ()
    largest: tuple[Large, ...] = ()
    source: str = ""
