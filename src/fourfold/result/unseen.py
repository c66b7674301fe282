"""What does a GPU hold that no tensor shows? Named, with a source each; bytes of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.spec.run import RunSpec

# Measured on an H200 with torch 2.11: device memory in use by a process that has run matrix
# products, attention and an optimizer step, less what torch's allocator had reserved.
_CONTEXT_BYTES = 600 * 10**6
# NCCL's user guide: NCCL_BUFFSIZE, 4 MiB by default, for each channel and direction; 16 channels
# is what it opens between 8 GPUs on NVLink unless told otherwise.
_NCCL_BYTES = 16 * 2 * 4 * 2**20
# torch's notes on CUDA: one workspace for each cuBLAS handle, 32 MiB from Hopper on, 8 MiB before.
_WORKSPACE_BYTES = 32 * 2**20
# Measured on the same H200: reserved over allocated at the peak of a training step.
_ALLOCATOR_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    name: str
    bytes: int
    source: str


def unseen_parts(spec: RunSpec, peak_bytes: int) -> tuple[Unseen, ...]:
    layout = spec.layout
    data = layout.dp * layout.cp
    groups = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, data))
    groups += layout.world > 1
    parts = [
        Unseen(
            name="CUDA context and kernels",
            bytes=_CONTEXT_BYTES,
            source="measured on an H200, torch 2.11",
        ),
        Unseen(
            name="cuBLAS workspace",
            bytes=_WORKSPACE_BYTES,
            source="torch's CUDA notes",
        ),
        Unseen(
            name="allocator rounding and fragmentation",
            bytes=round(peak_bytes * _ALLOCATOR_SHARE),
            source=f"{_ALLOCATOR_SHARE:.0%} of the peak, measured on an H200",
        ),
    ]
    if groups:
        nccl = Unseen(
            name=f"NCCL buffers of {groups} communicators",
            bytes=groups * _NCCL_BYTES,
            source="NCCL's user guide: NCCL_BUFFSIZE 4 MiB x 16 channels x 2 directions",
        )
        parts.append(nccl)
    return tuple(parts)
