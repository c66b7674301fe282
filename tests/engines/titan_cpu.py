"""torchtitan 0.2.2 on the CPU: `torchrun titan_cpu.py ...` instead of `-m torchtitan.train ...`.

It asks for an accelerator where it names its device, reads memory and waits for ranks; here these
are the CPU, the memory of the process, and a barrier of gloo, which sums gradients without a factor
(torchtitan's is 1). All else is its own code.
"""

from __future__ import annotations

import os
import resource
import types
from typing import Any

import torch
import torch._utils as asked
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

GIB = 2**30
os.environ["LOCAL_RANK"] = "0"  # all ranks share one CPU


def _memory(*_: Any) -> dict[str, int]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def _nothing(*_: Any) -> None:
    pass


CPU = types.SimpleNamespace(
    set_device=_nothing,
    current_device=lambda: 0,
    synchronize=_nothing,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: types.SimpleNamespace(total_memory=64 * GIB),
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
    memory_stats=_memory,
)
asked._get_available_device_type = lambda: "cpu"  # pyrefly: ignore
asked._get_device_module = lambda kind: CPU  # pyrefly: ignore
_barrier = dist.barrier
dist.barrier = lambda *args, device_ids=None, **more: _barrier(*args, **more)  # pyrefly: ignore
_divide = FSDPModule.set_gradient_divide_factor


def _sum(module: FSDPModule, factor: float) -> None:
    assert factor == 1.0
    _divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _sum

if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("FAIL_RANK") == os.environ["RANK"]:
        raise RuntimeError("this rank was asked to fail")
    from torchtitan.train import Trainer, main

    main(Trainer)
