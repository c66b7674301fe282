"""What may be asked of advise, trace and new_cluster? As in `requests`: fields make the flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fourfold.cost.trace.steps import KINDS, Kind
from fourfold.flag import flag
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPES, CpKind, Dtype
from fourfold.verbs.requests import CALIBRATION, Count, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseRequest:
    """Sizes of one layer on a GPU; with `params` and `tokens`, whole models on machines."""

    gpu: str | None = field(
        default=None, metadata=flag("GPU to judge for (see 'fourfold clusters')", "ID")
    )
    cluster: str | Cluster | None = field(
        default=None,
        metadata=flag("take the GPU, and the machines for --params, from a cluster", "NAME"),
    )
    model: str | None = field(
        default=None, metadata=flag("model preset for sizes that are not given", "NAME")
    )
    hidden: Size | None = field(default=None, metadata=flag("hidden size", "N"))
    heads: Size | None = field(
        default=None, metadata=flag("attention heads (default: head size 128)", "N")
    )
    kv_heads: Size | None = field(
        default=None, metadata=flag("key-value heads (default: as many as heads)", "N")
    )
    ffn: Size | None = field(default=None, metadata=flag("MLP width (default: 4 x hidden)", "N"))
    vocab: int | None = field(default=None, metadata=flag("vocabulary size", "N"))
    tp: Size | None = field(default=None, metadata=flag("tensor-parallel size (default 1)", "N"))
    micro_batch: Size | None = field(
        default=None, metadata=flag("sequences per micro batch (default 1)", "N")
    )
    seq_len: Size | None = field(
        default=None, metadata=flag("sequence length in tokens (default 2048)", "N")
    )
    max_nodes: Size | None = field(
        default=None, metadata=flag("at most N hosts, for --params", "N")
    )
    global_batch: Size | None = field(
        default=None, metadata=flag("sequences per step, for --params (default 2048)", "N")
    )
    params: Count | None = field(
        default=None, metadata=flag("compare model shapes of about P parameters, such as 30B", "P")
    )
    tokens: Count | None = field(
        default=None, metadata=flag("training tokens for --params, such as 1T", "T")
    )
    attention: Literal["flash", "fused-softmax", "unfused"] = field(
        default="flash", metadata=flag("attention kernel (default flash)")
    )
    precision: str = field(default="bf16-mixed", metadata=flag("precision, as in 'plan'", "X"))
    stack: str | None = field(default=None, metadata=flag("engine to predict", "NAME"))
    calibration: str | None = field(default=None, metadata=CALIBRATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """What is known of a cluster. A measurement replaces the data sheet's rate, a value given here
    replaces both."""

    gpu: str | None = field(default=None, metadata=flag("a GPU's id or file", "ID"))
    name: str | None = field(default=None, metadata=flag("name of the cluster", "NAME"))
    hosts: int | None = field(default=None, metadata=flag("number of hosts", "N"))
    host_gpus: int | None = field(default=None, metadata=flag("GPUs per host", "N"))
    nvlink_ranks: int | None = field(
        default=None, metadata=flag("GPUs joined by NVLink (default: those of a host)", "N")
    )
    nvlink: str | None = field(
        default=None, metadata=flag("NVLink rate of one GPU per direction, such as 450GB/s", "RATE")
    )
    nvlink_latency: str | None = field(
        default=None, metadata=flag("NVLink latency, such as 3us", "TIME")
    )
    pcie: str | None = field(
        default=None, metadata=flag("PCIe rate of one GPU per direction, beyond NVLink", "RATE")
    )
    network: str | None = field(
        default=None,
        metadata=flag("network rate of one host per direction, such as 3200Gbit/s", "RATE"),
    )
    network_latency: str | None = field(
        default=None, metadata=flag("network latency, such as 10us", "TIME")
    )
    nics: int | None = field(default=None, metadata=flag("network cards per host", "N"))
    nic_rate: str | None = field(
        default=None, metadata=flag("rate of one network card, such as 400Gbit/s", "RATE")
    )
    price: float | None = field(
        default=None, metadata=flag("price of a GPU-hour, in any currency", "X")
    )
    topo: str | None = field(
        default=None, metadata=flag("output of 'nvidia-smi topo -m' on one host", "FILE")
    )
    nccl_tests: tuple[str, ...] = field(
        default=(), metadata=flag("logs of nccl-tests", "FILE", nargs="+")
    )


_TRACED = "sizes (each overrides the model's)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One rank's part of a parallel layer."""

    kind: Kind = field(metadata=flag(", ".join(KINDS), "KIND", names=("kind",), choices=KINDS))
    tokens: Size = field(metadata=flag("sequence length in tokens", "N", required=True))
    model: str | None = field(
        default=None, metadata=flag("model preset or config.json for the sizes", "NAME")
    )
    hidden: Size | None = field(default=None, metadata=flag("hidden size", "N", group=_TRACED))
    heads: Size | None = field(default=None, metadata=flag("query heads", "N", group=_TRACED))
    kv_heads: Size | None = field(
        default=None,
        metadata=flag("key-value heads (default: as many as heads)", "N", group=_TRACED),
    )
    ffn: Size | None = field(default=None, metadata=flag("width of the MLP", "N", group=_TRACED))
    layers: Size | None = field(
        default=None,
        metadata=flag("layers whose weights a rank holds, in mlp and mlp2d", "N", group=_TRACED),
    )
    tp: int = field(default=1, metadata=flag("tensor parallel ranks", "N", group="layout"))
    cp: int = field(default=1, metadata=flag("context parallel ranks", "N", group="layout"))
    dp: int = field(default=1, metadata=flag("data parallel ranks", "N", group="layout"))
    rank: int = field(default=0, metadata=flag("rank to show", "R", group="layout"))
    cp_kind: CpKind | None = field(
        default=None, metadata=flag("default: ring", group="of kind layer")
    )
    sharding: str | None = field(
        default=None,
        metadata=flag("zero0, zero1 (default), zero2 or zero3", "X", group="of kind layer"),
    )
    dtype: Dtype = field(
        default="bf16",
        metadata=flag(
            "dtype of tensors and weights (default bf16)",
            choices=tuple(name for name in DTYPES if name != "fp4"),
        ),
    )
    attention: Literal["flash", "naive"] = field(
        default="flash", metadata=flag("naive keeps the N x N scores")
    )
    cluster: str | None = field(
        default=None,
        metadata=flag(
            "cluster for link levels (default: hosts of 8 H100, 400 Gbit/s per GPU)",
            "NAME",
        ),
    )
    run_steps: bool = field(
        default=False,
        metadata=flag(
            "run the steps on this host, one process per rank, and compare",
            names=("--run",),
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata=flag("device for --run (default auto)")
    )
