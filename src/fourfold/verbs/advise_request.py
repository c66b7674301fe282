"""What `advise` is asked; the command line's flags are made from its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.flag import flag
from fourfold.spec.cluster import Cluster
from fourfold.verbs.requests import CALIBRATION, Count, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseRequest:
    """Sizes of one layer on a GPU; with `params` and `tokens`, whole models on machines."""

    gpu: str | None = flag("GPU to judge for (see 'fourfold clusters')", "ID")
    cluster: str | Cluster | None = flag(
        "take the GPU, and the machines for --params, from a cluster", "NAME"
    )
    model: str | None = flag("model preset for sizes that are not given", "NAME")
    hidden: Size | None = flag("hidden size", "N")
    heads: Size | None = flag("attention heads (default: head size 128)", "N")
    kv_heads: Size | None = flag("key-value heads (default: as many as heads)", "N")
    ffn: Size | None = flag("MLP width (default: 4 x hidden)", "N")
    vocab: int | None = flag("vocabulary size", "N")
    experts: Size | None = flag("experts of a layer", "N")
    expert_ffn: Size | None = flag("width of an expert", "N")
    top_k: Size | None = flag("experts of a token", "N")
    ep: Size | None = flag("ranks that experts are divided over (default 1)", "N")
    tp: Size | None = flag("tensor-parallel size (default 1)", "N")
    micro_batch: Size | None = flag("sequences per micro batch (default 1)", "N")
    seq_len: Size | None = flag("sequence length in tokens (default 2048)", "N")
    max_nodes: Size | None = flag("at most N hosts, for --params", "N")
    global_batch: Size | None = flag("sequences per step, for --params (default 2048)", "N")
    params: Count | None = flag("compare model shapes of about P parameters, such as 30B", "P")
    tokens: Count | None = flag("training tokens for --params, such as 1T", "T")
    attention: Literal["flash", "fused-softmax", "unfused"] = flag(
        "attention kernel (default flash)", default="flash"
    )
    precision: str = flag("precision, as in 'plan'", "X", default="bf16-mixed")
    stack: str | None = flag("engine to predict", "NAME")
    calibration: str | None = flag(*CALIBRATION, rare=True)
