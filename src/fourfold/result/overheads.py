"""What does a GPU hold that no tensor shows? Named, with a source each; bytes of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.spec.run import RunSpec

# On an H200 with torch 2.11 and NCCL 2.28, device memory in use beyond what torch's allocator had
# reserved: 0.649 GB for the context, 0.735 GB once matrix products and attention had run; the first
# communicator added 0.585 GB, a second 0.409 GB (each of one rank).
CONTEXT_BYTES = 735 * 10**6
FIRST_COMMUNICATOR_BYTES = 585 * 10**6
COMMUNICATOR_BYTES = 409 * 10**6
# torch's notes on CUDA: one workspace for each cuBLAS handle, 32 MiB from Hopper on.
WORKSPACE_BYTES = 32 * 2**20
# The same runs, five models of 1 to 7 billion parameters: reserved over allocated at the peak.
# Cached memory is given back before an allocation fails, so it is told and not added.
RESERVED_RATIO = (1.18, 1.28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    name: str
    bytes: int
    source: str


def unseen_parts(spec: RunSpec) -> tuple[Unseen, ...]:
    """Of one rank on a GPU; the peak of its tensors is not in here."""
    count = communicators(spec)
    parts = [
        Unseen(
            name="CUDA context and kernels",
            bytes=CONTEXT_BYTES,
            source="measured on an H200, torch 2.11",
        ),
        Unseen(name="cuBLAS workspace", bytes=WORKSPACE_BYTES, source="torch's notes on CUDA"),
    ]
    if count:
        size = FIRST_COMMUNICATOR_BYTES + (count - 1) * COMMUNICATOR_BYTES
        source = "measured on an H200, NCCL 2.28: 0.585 GB for the first, 0.409 GB for each other"
        parts.append(Unseen(name=f"{count} NCCL communicators", bytes=size, source=source))
    return tuple(parts)


def communicators(spec: RunSpec) -> int:
    """Groups of more than one rank that a rank of the engine belongs to, the world among them."""
    layout = spec.layout
    tied_ends = layout.pp > 1 and spec.model.tied
    sizes = (layout.tp, layout.cp, layout.pp, layout.dp * layout.cp, layout.shard * layout.cp)
    return sum(size > 1 for size in (*sizes, layout.replicate, layout.world)) + tied_ends
