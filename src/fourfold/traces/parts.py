"""The parts of a step, and to which one a kernel belongs by its name, its operator and shapes."""

from __future__ import annotations

import re
from functools import cache

from fourfold.spec import catalog

QKV, OUT, UP, DOWN, HEAD, ROUTER, EXPERTS, OTHER = (
    f"GEMM: {name}"
    for name in ("qkv", "out", "up, gate", "down", "head", "router", "experts", "other")
)
PRODUCTS = (QKV, OUT, UP, DOWN, HEAD, ROUTER, EXPERTS, OTHER)
CONVOLUTION = "convolutions"
ATTENTION, ELEMENTWISE, EMBEDDING = "attention", "norms, element-wise", "embedding"
ROUTING, LOSS, OPTIMIZER, COPIES = "routing", "loss", "optimizer, clipping", "copies, casts"
STAND_IN, UNPLACED = "stand-ins of peers", "unplaced"
COMMUNICATION = "communication: "  # an axis follows
# Time in which nothing runs on the device.
DATA, LAUNCHES, SYNC, MEMORY, BETWEEN, OUTSIDE = (
    "waiting: data",
    "waiting: launches",
    "waiting: synchronisation",
    "waiting: memory",
    "between kernels",
    "waiting: host",
)
WAITS = (DATA, LAUNCHES, SYNC, MEMORY, OUTSIDE)
IDLE = (*WAITS, BETWEEN)
_OVER_MEMORY = (ELEMENTWISE, EMBEDDING, ROUTING, LOSS, OPTIMIZER, COPIES)
COMPUTE = (*PRODUCTS, CONVOLUTION, ATTENTION, *_OVER_MEMORY)

NAMES = catalog.data("traces.toml")


def pattern(kind: str, flags: re.RegexFlag = re.I) -> re.Pattern[str]:
    return re.compile("|".join(NAMES["patterns"][kind]), flags)


_ATTENTION, _CONVOLUTION, _PRODUCT, _LOSS = map(
    pattern, ("attention", "convolution", "product", "loss")
)
_OPTIMIZER, _EMBEDDING, _ROUTING, _ORDINARY, _COLLECTIVE = map(
    pattern, ("optimizer", "embedding", "routing", "ordinary", "collective")
)
# Of operators that compute attention in one.
ATTENDS = re.compile("attention|flash_attn", re.IGNORECASE)
GROUPED, _COPIES, _MOVES = (
    frozenset(NAMES["names"][kind]) for kind in ("grouped", "copies", "moves")
)


def is_helper(kernel: str) -> bool:
    return kernel.startswith(tuple(NAMES["names"]["helpers"]))


@cache  # millions of kernels have a few hundred names
def is_nccl(kernel: str) -> bool:
    return _COLLECTIVE.search(kernel) is not None


def simple_part(kernel: str, op: str) -> str | None:
    """By names alone; None: an ordinary kernel over memory, whose shapes say more."""
    both = f"{op} {kernel}"
    if op in GROUPED or "grouped_gemm" in both:
        return EXPERTS
    if _ATTENTION.search(op) or (_ATTENTION.search(kernel) and not op.startswith("aten::mm")):
        return ATTENTION
    if _CONVOLUTION.search(both):
        return CONVOLUTION
    if _is_product(kernel, op):
        return OTHER
    if _LOSS.search(both):
        return LOSS
    if _OPTIMIZER.search(both):
        return OPTIMIZER
    if _EMBEDDING.search(both):
        return EMBEDDING
    return None


def _is_product(kernel: str, op: str) -> bool:
    if op.startswith("aten::") and op.removeprefix("aten::") in NAMES["names"]["multiply"]:
        return True
    return bool(_PRODUCT.search(kernel)) and not kernel.startswith(("triton_poi", "triton_red"))


def memory_part(kernel: str, op: str, *, of_weight: bool, expert_rows: bool) -> str:
    """Of a kernel that reads and writes. `of_weight`: its tensors have the shape of a weight;
    `expert_rows`: as many rows as tokens times chosen experts."""
    if _ROUTING.search(op) or _ROUTING.search(kernel.partition("<")[0]):
        return ROUTING
    if kernel.startswith("triton_"):
        words = {word for word in kernel.split("_") if word and not word.isdecimal()}
        return COPIES if of_weight and words.issubset(_MOVES) else ELEMENTWISE
    if expert_rows and (
        op in _COPIES or op in ("aten::index", "aten::gather", "aten::index_select")
    ):
        return ROUTING
    if op in _COPIES or kernel.startswith(("Memcpy", "Memset")):
        return COPIES
    if op or _ORDINARY.search(kernel) or "norm" in kernel.lower():
        return ELEMENTWISE
    return UNPLACED
