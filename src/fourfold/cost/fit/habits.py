"""What does an engine do when nobody says? The usual values of each training stack.

Bytes are per element. Sources: the engines' own defaults and the notes of the published tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fourfold.result.overheads import RESERVED_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Defaults of a stack. `grad_bytes` travel, `acc_bytes` are held."""

    grad_bytes: float = 4.0
    acc_bytes: float = 4.0
    sharding: str = "zero1"
    recompute: str = "none"
    sequence_parallel: bool = True
    overlap_dp: bool = False
    overlap_tp: bool = False
    balanced: bool = False
    even_stages: bool = False  # equal stages, only the first and the last may hold fewer layers
    split_loss: bool = True
    eager: bool = False
    compiled: bool = False
    # In fp8: bytes of an input that a product keeps for its backward (Transformer Engine keeps the
    # cast, torchao the original), and of a weight that ZeRO-3 gathers.
    fp8_saved_bytes: float = 1.0
    fp8_gather_bytes: float = 2.0
    # Its tensors are those of torch's FSDP2, counted one by one (own_memory.py); the memory it
    # prints is what the allocator reserved, so much more than they take (result/overheads.py).
    counted: bool = False
    reserved: float = 1.0
    selective_share: float = 1.0  # of what a layer keeps, under "selective" by operators
    whole_layers: float = 0.0  # share of layers that "selective" recomputes whole; 0 = core only
    shard_group: int = 0  # ZeRO-3 group on large jobs; 0 = all data-parallel ranks
    reports_rank0: bool = False  # printed memory is rank 0's, not the fullest rank's


_NVIDIA = Habits(grad_bytes=2.0, acc_bytes=2.0, overlap_dp=True, overlap_tp=True, even_stages=True)
# by the stack's name without its year; the longest matching prefix counts
HABITS: dict[str, Habits] = {
    "": Habits(),
    "llm-foundry": Habits(sharding="zero3", sequence_parallel=False),
    # fp16 gradients are all-reduced: as much traffic as scattering fp32
    "megatron-deepspeed": Habits(recompute="full", sequence_parallel=False),
    "megatron": Habits(even_stages=True),
    "megatron-lm": Habits(even_stages=True),
    "megatron-lm-2025": _NVIDIA,
    "megatron-kwai": Habits(even_stages=True),
    "megatron-bridge": _NVIDIA,
    "nemo": _NVIDIA,
    "nanotron": Habits(balanced=True, overlap_tp=True, eager=True, reports_rank0=True),
    # bf16 gradients held, and logits gathered over tp before the loss
    "aleph": Habits(grad_bytes=2.0, acc_bytes=2.0, split_loss=False, eager=True),
    "maxtext": Habits(
        sharding="zero3", recompute="full", sequence_parallel=False, overlap_dp=True,
        compiled=True, shard_group=128,
    ),
    "internevo": Habits(grad_bytes=2.0, sequence_parallel=False, overlap_dp=True),
    "fms-fsdp": Habits(
        grad_bytes=2.0, sharding="zero3", sequence_parallel=False, whole_layers=0.5
    ),
    "fms-fsdp-2024-compile": Habits(
        grad_bytes=2.0, sharding="zero3", sequence_parallel=False, whole_layers=0.5, compiled=True
    ),
    # its published fp8 runs gather weights in fp8
    "torchtitan": Habits(
        sharding="zero3", overlap_dp=True, fp8_saved_bytes=2.0, fp8_gather_bytes=1.0,
        counted=True, reserved=sum(RESERVED_RATIO) / 2,
        # by operators: every second product, attention and the input, 7 of 22 widths
        selective_share=1.0 / 3.0,
    ),
    "fourfold": Habits(fp8_saved_bytes=2.0, counted=True),
    "mlperf-nvidia": Habits(grad_bytes=2.0, acc_bytes=2.0, overlap_dp=True, overlap_tp=True),
}  # fmt: skip


def habits(stack: str) -> Habits:
    """Usual values of a stack; an unknown one gets the generic row."""
    names = [name for name in HABITS if stack.startswith(name)]
    return HABITS[max(names, key=len)]


def is_known(stack: str) -> bool:
    return any(name and stack.startswith(name) for name in HABITS)


def family_of(stack: str) -> str:
    """'nemo-2024' -> 'nemo': the engine without its year."""
    return re.sub(r"-20\d\d.*", "", stack)


def year_of(stack: str) -> int | None:
    found = re.search(r"20\d\d", stack)
    return int(found[0]) if found else None
