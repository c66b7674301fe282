"""What could ranks of this host use? Asked without torch: importing it takes seconds."""

from __future__ import annotations

import os

from fourfold.errors import UserError
from fourfold.result.machine import listed_gpus


def core_count() -> int:
    """Cores this process may run on; a container may give fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count() -> int:
    """CUDA_VISIBLE_DEVICES where it is set, else what the driver's tool lists; 0 without either."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [word.strip() for word in visible.split(",") if word.strip()]
        return len(ids[: ids.index("-1")] if "-1" in ids else ids)
    return listed_gpus()


def require_gpus(
    device: str, ranks: int, *, hint: str = "device = cpu", shared: bool = False
) -> None:
    """Every rank computes on a GPU of its own, or (`shared`) there is one for all of them; said
    before ranks start, not by one that falls."""
    if device != "cuda" or (gpus := gpu_count()) >= (1 if shared else ranks):
        return
    wanted = "a GPU" if shared else f"{ranks} GPUs, one per rank"
    raise UserError(
        f"needs {wanted}, but this machine has {gpus}",
        field="device",
        value=device,
        hint=f"use {gpus} ranks, or {hint}" if gpus else f"use {hint}",
    )
