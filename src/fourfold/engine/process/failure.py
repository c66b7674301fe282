"""The outcome of an exception, and failures on purpose, which happen for real."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.result.report import OomReport, Outcome
from fourfold.spec.run import Fault

# What allocators say when they raise a plain RuntimeError: torch on CPU, cuBLAS, CUDA, NCCL.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED|cannot allocate memory",
    re.IGNORECASE,
)
# No machine has this much (1 PiB), so the allocator itself must refuse.
_TOO_MUCH_BYTES = 2**50


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm is NaN or infinite; `from_here`: it may come from this rank."""

    def __init__(self, message: str, *, from_here: bool = True) -> None:
        super().__init__(message)
        self.from_here = from_here


class OomError(MemoryError):
    """Memory ran out; what was raised then is its `__cause__`, what the rank held its `report`."""

    def __init__(self, report: OomReport | None) -> None:
        super().__init__("out of memory")
        self.report = report


def check_finite(
    norm: Tensor, leaves: Sequence[Tensor], step: int, *, forgiven: bool = False
) -> None:
    """Before the update spreads it to every weight: who holds a bad weight is the source.
    `forgiven`: with finite weights it is too large a scale; the step is skipped, the scale
    lowered."""
    if math.isfinite(float(norm)):
        return
    own = all(bool(torch.isfinite(leaf).all()) for leaf in leaves)
    if own and forgiven:
        return
    where = "this rank's weights are finite" if own else "weights of this rank are not finite"
    raise NonFiniteError(f"gradient norm {float(norm)} in step {step}; {where}", from_here=not own)


def outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, UserError):
        return "illegal"
    if isinstance(error, NonFiniteError):
        return "nonfinite"
    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
        return "oom"
    return "crashed"


@torch.no_grad()
def inject_fault(fault: Fault | None, *, rank: int, step: int, tensors: Sequence[Tensor]) -> None:
    """Let the asked failure happen on its rank before its step; the first tensor may get a NaN."""
    if fault is None or rank != fault.rank or step != fault.step:
        return
    if fault.kind == "hang":
        while True:
            time.sleep(3600.0)
    if fault.kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault.kind == "oom":
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        torch.empty(_TOO_MUCH_BYTES, dtype=torch.uint8, device=device)
    if fault.kind == "nonfinite":
        tensors[0].view(-1)[0] = math.nan  # as from a cosmic ray or a bad kernel
