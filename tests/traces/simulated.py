"""A profiler's trace of a decoder as torch would write it on an H200, with faults on request: a
host that launches operators, and a device that runs their kernels as soon as it may."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

MAIN, AUTOGRAD = 1, 2


@dataclass(frozen=True)
class Faults:
    """Seconds, or factors of kernels."""

    loader_s: float = 0.0
    batch_s: float = 0.0
    sync_s: float = 0.0
    flush_s: float = 0.0
    launch_s: float = 8e-6
    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    recompute: bool = False
    fp32: bool = False
    kernel: str = "cudnn_generated_sdpa_sm90_flash"
    exposed_s: float = 0.0
    uneven: float = 0.0
    routing_s: float = 0.0


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    hidden: int = 2048
    ffn: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32000
    length: int = 8192
    sequences: int = 2
    experts: int = 0
    top_k: int = 8
    expert_ffn: int = 768
    micro_batches: int = 1
    head: bool = True

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass
class Recorder:
    faults: Faults
    events: list[dict[str, Any]] = field(default_factory=list)
    host_s: float = 0.0
    device_s: float = 0.0
    number: int = 0
    thread: int = MAIN

    def add(self, cat: str, name: str, start: float, end: float, thread: int, **args: Any) -> None:
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": 1e6 * start,
            "dur": 1e6 * (end - start), "args": args,
        })  # fmt: skip

    def run(self, op: str, kernel: str, seconds: float, dims: Any = None, **told: Any) -> None:
        """One operator, the launch in it, its kernel on the device."""
        self.number += 1
        begin, number = self.host_s, self.number
        self.host_s += self.faults.launch_s
        args = {"External id": number, "Input Dims": dims or [], **told}
        self.add("cpu_op", op, begin, self.host_s, self.thread, **args)
        launch = {"correlation": number, "External id": number}
        self.add(
            "cuda_runtime", "cudaLaunchKernel", begin + 1e-6, self.host_s, self.thread, **launch
        )
        start = max(self.device_s + 1.5e-6, self.host_s + 4e-6)
        self.device_s = start + seconds
        self.add("kernel", kernel, start, self.device_s, 7, **launch, stream=7)

    def block(self, call: str, after_s: float) -> None:
        """The host waits until the device has nothing left, and a while more."""
        begin = self.host_s
        self.host_s = max(self.host_s, self.device_s) + after_s
        self.add("cuda_runtime", call, begin, self.host_s, self.thread, correlation=-1)

    def mark(self, name: str, start: float) -> None:
        self.add("user_annotation", name, start, self.host_s, MAIN)


def _product(r: Recorder, shape: Shape, ins: int, outs: int, of: str) -> None:
    tokens = shape.tokens
    m, k, n = {
        "forward": (tokens, ins, outs), "inputs": (tokens, outs, ins),
        "weights": (outs, tokens, ins),
    }[of]  # fmt: skip
    strides = [[1, m] if of == "weights" else [k, 1], [1, k] if of == "forward" else [n, 1]]
    seconds = 2.0 * m * n * k / 690e12 * r.faults.products
    kind = "float" if r.faults.fp32 else "c10::BFloat16"
    told = {"Input Strides": strides, "Input type": [kind, kind]}
    r.run("aten::mm", "nvjet_sm90_tst_256x128", seconds, [[m, k], [k, n]], **told)


def _experts(r: Recorder, shape: Shape, layer: int, of: str) -> None:
    rows, experts = shape.tokens * shape.top_k, shape.experts
    if r.faults.routing_s and of != "inputs":
        kernel = "void at::native::indexing_backward_kernel<c10::BFloat16, 4>"
        r.run("aten::index_put_", kernel, r.faults.routing_s, [[rows, shape.hidden]])
    seconds = 2.0 * rows * shape.hidden * shape.expert_ffn / 600e12
    seconds *= 1.0 + r.faults.uneven * (layer % 4)
    for ins, outs in ((shape.hidden, shape.expert_ffn),) * 2 + ((shape.expert_ffn, shape.hidden),):
        dims = [[rows, ins], [experts, ins, outs], [experts]]
        if of == "weights":
            dims = [[outs, rows], [rows, ins], [experts]]
        r.run("aten::_grouped_mm", "_ZN7cutlass13device_kernelGemmUniversal", seconds, dims)


def _attention(r: Recorder, shape: Shape, back: bool) -> None:
    q = [shape.sequences, shape.heads, shape.length, shape.head_dim]
    k = [shape.sequences, shape.kv_heads, shape.length, shape.head_dim]
    flops = 2.0 * shape.sequences * shape.heads * shape.length**2 * shape.head_dim
    seconds = flops * (2.5 / 360e12 if back else 1.0 / 410e12) * r.faults.attention
    op = "aten::_cudnn_attention_backward" if back else "aten::_cudnn_attention_forward"
    r.run(op, f"{r.faults.kernel}_{'bprop' if back else 'fprop'}", seconds, [q, k, k])


def _memory(r: Recorder, shape: Shape, name: str, width: float) -> None:
    """A pass over `width` values of each token; uncompiled, in several plain kernels."""
    seconds = shape.tokens * width * 2.0 / 3.3e12
    dims = [[shape.sequences, shape.length, shape.hidden]]
    if r.faults.memory == 1.0:
        r.run(f"triton_poi_fused_{name}", f"triton_poi_fused_{name}_0", seconds, dims)
        return
    for _ in range(3):
        part = seconds * r.faults.memory / 3.0
        r.run("aten::mul", "void at::native::vectorized_elementwise_kernel<4>", part, dims)


def _weights(shape: Shape) -> list[tuple[int, int]]:
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    mlp = [] if shape.experts else [(h, shape.ffn), (h, shape.ffn), (shape.ffn, h)]
    return [(h, h), (h, kv), (h, kv), (h, h), *mlp]


def _layer(r: Recorder, shape: Shape, layer: int, *, back: bool) -> None:
    weights = _weights(shape)
    passes = ("inputs", "weights") if back else ("forward",)
    for place, (ins, outs) in enumerate(reversed(weights) if back else weights):
        for of in passes:
            _product(r, shape, ins, outs, of)
        if place == (len(weights) - 4 if back else 2):
            _attention(r, shape, back)
    for of in passes if shape.experts else ():
        _experts(r, shape, layer, of)
    twice = 2.0 if back else 1.0
    _memory(r, shape, "rms_norm", 12.0 * twice * shape.hidden)
    _memory(r, shape, "silu_mul", 4.5 * twice * shape.ffn)
    if r.faults.exposed_s:
        group = {"Collective name": "allgather", "Process Group Description": "mesh_fsdp"}
        r.run("c10d::allgather", "ncclDevKernel_AllGather", r.faults.exposed_s)
        r.events[-1]["args"] |= group


def _step(r: Recorder, shape: Shape) -> None:
    r.thread = MAIN
    r.host_s += r.faults.loader_s
    for _ in range(shape.micro_batches):
        run_micro_batch(r, shape)
    r.thread = MAIN
    each = shape.layers * sum(a * b for a, b in _weights(shape))
    each += shape.layers * 3 * shape.experts * shape.hidden * shape.expert_ffn
    params = each + 2 * shape.vocab * shape.hidden
    name = "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
    r.run("aten::_fused_adamw_", name, 40.0 * params / 3.45e12)


def forward(shape: Shape | None = None, *, steps: int = 3, layer: Any = None) -> dict[str, Any]:
    """Inference: passes without gradients. `layer`: run(recorder, shape) of other networks."""
    shape, r = shape or Shape(), Recorder(Faults())
    tokens, table = [shape.sequences, shape.length], [shape.vocab, shape.hidden]
    for step in range(steps):
        begin = r.host_s
        if layer is None:
            gather = "void at::native::vectorized_gather_kernel"
            r.run("aten::embedding", gather, 5e-5, [table, tokens])
        for number in range(shape.layers):
            (layer or partial(_layer, layer=number, back=False))(r, shape)
        if layer is None:
            _product(r, shape, shape.hidden, shape.vocab, "forward")
        r.mark(f"ProfilerStep#{step}", begin)
        r.host_s = max(r.host_s, r.device_s - 5e-3)
    return trace(shape) | {"traceEvents": r.events}


def run_micro_batch(r: Recorder, shape: Shape) -> None:
    r.thread = MAIN
    r.host_s += r.faults.batch_s
    tokens, table = [shape.sequences, shape.length], [shape.vocab, shape.hidden]
    r.run("aten::embedding", "void at::native::vectorized_gather_kernel", 5e-5, [table, tokens])
    for layer in range(shape.layers):
        _layer(r, shape, layer, back=False)
        if r.faults.sync_s:
            r.block("cudaDeviceSynchronize", r.faults.sync_s)
        if r.faults.flush_s:
            r.block("cudaFree", r.faults.flush_s)
    if shape.head:
        _head(r, shape)
    r.thread = AUTOGRAD
    for of in ("inputs", "weights") if shape.head else ():
        _product(r, shape, shape.hidden, shape.vocab, of)
    for layer in reversed(range(shape.layers)):
        if r.faults.recompute:
            _layer(r, shape, layer, back=False)
        _layer(r, shape, layer, back=True)
    for _ in range(1 + shape.head if shape.micro_batches > 1 else 0):
        begin, kernel = r.host_s, "void at::native::vectorized_elementwise_kernel<8>"
        r.run("aten::add_", kernel, 6.0 * table[0] * table[1] / 3.3e12, [table, table, []])
        r.number += 1
        number = {"External id": r.number, "Input Dims": []}
        name = "torch::autograd::AccumulateGrad"
        r.add("cpu_op", name, begin - 1e-7, r.host_s + 1e-7, AUTOGRAD, **number)
        r.host_s += 1e-6


def _head(r: Recorder, shape: Shape) -> None:
    _product(r, shape, shape.hidden, shape.vocab, "forward")
    logits = shape.tokens * shape.vocab * 2.0 / 3.3e12
    compiled = r.faults.memory == 1.0
    name = "triton_red_fused__log_softmax_0" if compiled else "void cunn_SoftMaxForward"
    op = "triton_red_fused__log_softmax" if compiled else "aten::_log_softmax"
    r.run(op, name, 3.0 * logits, [[shape.tokens, shape.vocab]])


def trace(
    shape: Shape | None = None, faults: Faults | None = None, *, steps: int = 3
) -> dict[str, Any]:
    shape = shape or Shape()
    r = Recorder(faults or Faults())
    for step in range(steps):
        begin = r.host_s
        _step(r, shape)
        r.host_s += 1e-5
        r.mark(f"ProfilerStep#{step}", begin)
        # A host is at most a step ahead of its device.
        r.host_s = max(r.host_s, r.device_s - 5e-3) if not r.faults.loader_s else r.device_s
    return {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
        "distributedInfo": {"rank": 0, "world_size": 1, "pg_config": []},
        "traceEvents": r.events,
        "traceName": "rank0_trace.json",
    }


def slower(shape: Shape, **faults: Any) -> dict[str, Any]:
    return trace(shape, replace(Faults(), **faults))


def graphed(trace: dict[str, Any]) -> dict[str, Any]:
    """The same kernels as one CUDA graph launches them: without operators, but for the update."""
    events = []
    for one in trace["traceEvents"]:
        kind, number = one["cat"], one["args"].get("External id")
        if kind == "cpu_op" and "adamw" not in one["name"]:
            continue
        if kind == "cuda_runtime" and number:
            one = one | {"name": "cudaGraphLaunch"}
        events.append(one)
    return trace | {"traceEvents": events}
