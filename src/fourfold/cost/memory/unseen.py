"""What a rank of our engine holds on a GPU that no tensor shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.spec.layout import Layout

# On an H200 with torch 2.11 and NCCL 2.28, device memory in use beyond what torch's allocator had
# reserved: 0.649 GB for the context, 0.735 GB once matrix products and attention had run; the first
# communicator added 0.585 GB, a second 0.409 GB (each of one rank).
CONTEXT_BYTES = 735 * 10**6
FIRST_COMMUNICATOR_BYTES = 585 * 10**6
COMMUNICATOR_BYTES = 409 * 10**6
# torch's notes on CUDA: one workspace for each cuBLAS handle, 32 MiB from Hopper on.
WORKSPACE_BYTES = 32 * 2**20
WORKSPACE = "cuBLAS workspace"
# The same runs, five models of 1 to 7 billion parameters: reserved over allocated at the peak.
# Cached memory is given back before an allocation fails, so it is told and not added.
RESERVED_RATIO = (1.18, 1.28)


@dataclass(frozen=True, slots=True)
class Unseen:
    name: str
    bytes: int
    source: str


def communicators(c: Columns) -> tuple[Floats, Floats]:
    """(groups of more than one rank that a rank belongs to, the world among them; their bytes)."""
    groups = (c.tp, c.cp, c.pp, c.dp * c.cp, c.shard, c.dp * c.cp / c.shard, c.gpus)
    count = sum((np.where(size > 1, 1.0, 0.0) for size in groups), np.zeros(()))
    count = count + np.where((c.pp > 1) & (c.tied > 0), 1.0, 0.0)
    wires = FIRST_COMMUNICATOR_BYTES + (count - 1.0) * COMMUNICATOR_BYTES
    return count, np.where(count > 0, wires, 0.0)


def unseen_bytes(c: Columns) -> Floats:
    return CONTEXT_BYTES + WORKSPACE_BYTES + communicators(c)[1]


def unseen_parts(c: Columns) -> tuple[Unseen, ...]:
    """Of the one run in `c`, each with its source."""
    return _parts(int(communicators(c)[0][0]))


def unseen_parts_of(layout: Layout) -> tuple[Unseen, ...]:
    """The same by a layout alone, of a model whose embedding and head are not tied over stages."""
    tp, cp, pp, shard = layout.tp, layout.cp, layout.pp, layout.shard
    groups = (tp, cp, pp, layout.dp * cp, shard * cp, layout.replicate, layout.world)
    return _parts(sum(size > 1 for size in groups))


def _parts(count: int) -> tuple[Unseen, ...]:
    known = [
        ("CUDA context and kernels", CONTEXT_BYTES, "measured on an H200, torch 2.11"),
        (WORKSPACE, WORKSPACE_BYTES, "torch's notes on CUDA"),
    ]
    if count:
        source = "measured on an H200, NCCL 2.28: 0.585 GB for the first, 0.409 GB for each other"
        wires = FIRST_COMMUNICATOR_BYTES + (count - 1) * COMMUNICATOR_BYTES
        known.append((f"{count} NCCL communicators", wires, source))
    return tuple(Unseen(*part) for part in known)
