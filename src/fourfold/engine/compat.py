"""What differs between torch 2.11 and 2.13, and the dtypes behind our names: shims in one place."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.distributed as dist

from fourfold.spec.words import AROUND

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def quiet() -> None:
    """Keep known, harmless torch warnings off a user's terminal.

    FSDP2 calls collectives by names that 2.13 deprecates, and warns about it on every call.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\..*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def activation_dtype(compute: str) -> torch.dtype:
    """What activations and gathered weights are in, given the format of matrix products."""
    return DTYPES[AROUND.get(compute, compute)]


def group_name(group: dist.ProcessGroup) -> str:
    """The name functional collectives know a group by."""
    return group.group_name
