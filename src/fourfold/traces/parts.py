"""The parts of a step, and to which one a kernel belongs by its name, its operator and shapes."""

from __future__ import annotations

import re
from functools import cache

QKV, OUT, UP, DOWN, HEAD, ROUTER, EXPERTS, OTHER = (
    f"products: {name}"
    for name in ("qkv", "out", "up, gate", "down", "head", "router", "experts", "other")
)
PRODUCTS = (QKV, OUT, UP, DOWN, HEAD, ROUTER, EXPERTS, OTHER)
ATTENTION, ELEMENTWISE, EMBEDDING = "attention", "norms, element-wise", "embedding"
ROUTING, LOSS, OPTIMIZER, COPIES = "routing", "loss", "optimizer, clipping", "copies, casts"
STAND_IN, UNPLACED = "stand-ins of peers", "unplaced"
COMMUNICATION = "communication: "  # an axis follows
# Time in which nothing runs on the device.
DATA, LAUNCHES, SYNC, MEMORY, BETWEEN, OUTSIDE = (
    "waiting: data", "waiting: launches", "waiting: synchronisation", "waiting: memory",
    "between kernels", "waiting: host",
)  # fmt: skip
IDLE = (DATA, LAUNCHES, SYNC, MEMORY, OUTSIDE, BETWEEN)
COMPUTE = (*PRODUCTS, ATTENTION, ELEMENTWISE, EMBEDDING, ROUTING, LOSS, OPTIMIZER, COPIES)

_ATTENTION = re.compile(
    r"attention|flash_(fwd|bwd|attn)|fmha|sdpa|_attn_(fwd|bwd)|FlashAttn|mla_(fwd|bwd)"
    r"|cudnn::fusion::(compute_dot|convert_dq)",
    re.I,
)
_PRODUCT = re.compile(
    r"gemm|nvjet|cublas(?!Lt::splitK)|splitKreduce|xmma|^Cijk_|^triton_tem_fused_.*(mm|bmm)"
    r"|cutlass.*(Gemm|gemm)|deep_gemm|s16816|matmul", re.I
)  # fmt: skip
_LOSS = re.compile(
    r"log_softmax|nll_loss|cross_entropy|SoftMax(Forward|Backward)|CrossEntropy"
    r"|(^|\s)(row_sums|turn)$",
    re.I,
)
_OPTIMIZER = re.compile(
    r"fused_adam|_foreach_|multi_tensor|FusedAdam|fused_sgd|clip_grad|linalg_vector_norm"
    r"|triton_for_fused|Optimizer\.step|adamw?_kernel|lamb_", re.I
)  # fmt: skip
_EMBEDDING = re.compile(r"embedding|EmbeddingBag|sum_and_scatter|compute_grad_weight", re.I)
_ROUTING = re.compile(
    r"topk|sort|histc|bincount|one_hot|permute_(kernel|tokens)|unpermute|moe_|index_put|scatter_add"
    r"|indices_kernel|_index_put_impl_|cumsum|indexing_backward|gatherTopK|dispatch|combine"
    r"|(order|take|put)_rows|best_experts|^(best|count|place|take|put)$", re.I
)  # fmt: skip
_COPIES = {
    "aten::copy_", "aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::cat",
    "aten::fill_", "aten::zero_", "aten::zeros", "aten::stack", "aten::_foreach_copy_",
    "aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::slice_scatter", "aten::chunk_cat",
    "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat",
}  # fmt: skip
_NORM = re.compile(r"norm", re.I)
_KNOWN_KERNEL = re.compile(
    r"^(void )?(at::native|\(anonymous namespace\)|at_cuda_detail|at::cuda|c10|cub::|thrust)"
    r"|^triton_"
    r"|elementwise|reduce_kernel|transformer_engine|liger|apex|rms_?norm|layer_?norm|rope|rotary"
    r"|swiglu|silu|gelu|dropout|cast|transpose|quantize|cunn_|^(add|widen)$", re.I
)  # fmt: skip
NCCL = re.compile(r"^nccl(Dev)?Kernel|^rccl|^ncclKernel|msccl|deep_ep|symm_mem|nvshmem", re.I)
# Words of a fused kernel's name that only move or change the format of values.
_MOVES = {
    "to", "copy", "view", "t", "transpose", "unsafe", "clone", "permute", "cat", "slice", "expand",
    "unsqueeze", "squeeze", "poi", "fused", "triton", "select",
}  # fmt: skip


# Kernels that only serve another one of the same operator.
_HELPERS = ("Memset", "Memcpy", "void cublasLt::splitKreduce", "splitKreduce")


def is_helper(kernel: str) -> bool:
    return kernel.startswith(_HELPERS) or kernel.startswith(
        "void at::cuda::detail::prepare_grouped"
    )


@cache  # millions of kernels have a few hundred names
def is_nccl(kernel: str) -> bool:
    return NCCL.search(kernel) is not None


def simple_part(kernel: str, op: str) -> str | None:
    """By names alone; None: an ordinary kernel over memory, whose shapes say more."""
    both = f"{op} {kernel}"
    if op in GROUPED or "grouped_gemm" in both:
        return EXPERTS
    if _ATTENTION.search(op) or (_ATTENTION.search(kernel) and not op.startswith("aten::mm")):
        return ATTENTION
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
    if op.startswith("aten::") and op.removeprefix("aten::") in _MULTIPLY:
        return True
    return bool(_PRODUCT.search(kernel)) and not kernel.startswith(("triton_poi", "triton_red"))


GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm")
_MULTIPLY = {"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "linear", "matmul", "addmv", "mv"}


def memory_part(kernel: str, op: str, *, of_weight: bool, expert_rows: bool) -> str:
    """Of a kernel that reads and writes. `of_weight`: its tensors have the shape of a weight;
    `expert_rows`: as many rows as tokens times chosen experts."""
    if _ROUTING.search(op) or _ROUTING.search(kernel.partition("<")[0]):
        return ROUTING
    if kernel.startswith("triton_"):
        words = {word for word in kernel.split("_") if word and not word.isdecimal()}
        return COPIES if of_weight and words <= _MOVES else ELEMENTWISE
    if expert_rows and (
        op in _COPIES or op in ("aten::index", "aten::gather", "aten::index_select")
    ):
        return ROUTING
    if op in _COPIES or kernel.startswith(("Memcpy", "Memset")):
        return COPIES
    if op or _KNOWN_KERNEL.search(kernel) or _NORM.search(kernel):
        return ELEMENTWISE
    return UNPLACED
