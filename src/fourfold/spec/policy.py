"""How a run does its work: dtypes, sharding, schedule, recompute, overlap. A policy changes speed
and memory, but not which model is trained.

`precision` names a bundle of five dtypes; each can be overridden. In our engine two of them have
limits: with zero2 and zero3 only a shard of the gradient is kept, in the weights' dtype, and
replicas (zero0, or `dp2x4`) are summed in the dtype gradients accumulate in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from fourfold.flag import flag
from fourfold.spec import check, codec, words
from fourfold.spec.layout import Layout
from fourfold.spec.muon import Muon
from fourfold.spec.site import require_form
from fourfold.units import number_from, size_from

Loss = Literal["auto", "torch", "lean"]

_RECOMPUTE = re.compile(
    rf"{'|'.join(map(re.escape, (*words.RECOMPUTE, *words.MOE_RECOMPUTE)))}"
    rf"|(?:{'|'.join(words.NUMBERED_RECOMPUTE)})-[1-9][0-9]{{0,4}}\Z"
)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The five formats a policy comes down to."""

    param: words.Dtype
    compute: words.Dtype
    reduce: words.Dtype
    grad: words.Dtype
    optimizer: words.Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`recompute`: none, full, selective (attention core), every-N (each N-th layer in full),
    block-N (the first N layers of each model chunk), moe and moe-act (of layers with experts all
    that experts do, or their activation).

    `loss`: torch's cross-entropy, which widens all logits; or a lean one, whose gradient takes the
    logits' place in memory; auto: the lean one in compiled runs.

    `muon`: the recipe of optimizer muon (spec/muon.py).
    """

    precision: words.Precision = flag(
        f"one of {', '.join(words.BUNDLES)}; bf16 is bf16-mixed; or mxfp8, fp8-blockwise, fp8-cs, "
        "nvfp4, which say the scaling too",
        "X",
        default="bf16-mixed",
    )
    param_dtype: words.Dtype | None = None
    compute_dtype: words.Dtype | None = None
    reduce_dtype: words.Dtype | None = None
    grad_dtype: words.Dtype | None = None
    optimizer_dtype: words.Dtype | None = None
    scaling: words.Scaling = flag(
        "scales of products in fp8: tensor, delayed, block, mx or row",
        "X",
        rare=True,
        default="auto",
    )
    sharding: words.Sharding = flag(
        "zero0 to zero3, or ddp (zero0), fsdp (zero3), hsdp (with --dp 2x4)", "X", default="zero1"
    )
    sequence_parallel: bool = True
    cp_kind: words.CpKind = flag(
        "context-parallel attention: ring, allgather or ulysses", "X", rare=True, default="ring"
    )
    schedule: words.Schedule = flag(
        "pipeline schedule: gpipe, 1f1b, interleaved or zero-bubble", "X", rare=True, default="1f1b"
    )
    virtual_stages: Annotated[int, size_from] = flag(
        "model chunks per pipeline rank", "N", rare=True, default=1
    )
    recompute: str = flag(
        "activation recompute: none, full, selective, every-N, block-N, moe or moe-act",
        "X",
        rare=True,
        default="none",
    )
    attention: words.Attention = "auto"
    dispatcher: words.Dispatcher = flag(
        "how tokens reach experts: local, alltoall, allgather, deepep, hybridep or ncclep",
        "X",
        rare=True,
        default="auto",
    )
    routing: words.Routing = flag(
        "natural, or forced: round-robin, equally many tokens per expert",
        "X",
        rare=True,
        default="natural",
    )
    imbalance: Annotated[float, number_from] | None = flag(
        "standard deviation over mean of the experts' tokens (default: up to 1 by model, forced 0)",
        "X",
        rare=True,
        default=None,
    )
    overlap_exchange: bool = False
    overlap_kind: words.OverlapKind = "auto"
    optimizer: words.Optimizer = "adamw"
    muon: Muon = field(default_factory=Muon)
    compile: bool = False
    cuda_graph: bool = False
    async_tp: bool = False
    prefetch: int = 1
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    fused_projections: bool = True
    loss_chunks: int = 1
    loss: Loss = "auto"
    offload: Literal["none", "activations"] = "none"
    env: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check.whole(1, 1024, virtual_stages=self.virtual_stages, loss_chunks=self.loss_chunks)
        check.whole(0, 64, prefetch=self.prefetch)
        spread = self.imbalance
        fair = spread is None or 0 <= spread <= 100
        check.that(fair, "imbalance", spread, "must be from 0 (even) to 100")
        known = _RECOMPUTE.fullmatch(self.recompute) is not None
        hint = f"use {', '.join((*words.RECOMPUTE, *words.MOE_RECOMPUTE))}, every-2, block-4, ..."
        if ":" in self.recompute:
            modules = words.RECOMPUTE_MODULES.items()
            hint = "use " + ", ".join(f"{kind} (Megatron's {name})" for name, kind in modules)
        check.that(known, "recompute", self.recompute, "is not a recompute mode", hint)
        require_form(self.env)
        has_part = self.optimizer == "muon" or self.muon == Muon()
        rule = f"has no part in optimizer={self.optimizer}"
        check.that(has_part, "muon", codec.encode(self.muon, sparse=True), rule, "optimizer=muon")

    @property
    def dtypes(self) -> Dtypes:
        names = (field.name for field in fields(Dtypes))
        chosen = (getattr(self, f"{name}_dtype") for name in names)
        pairs = zip(chosen, words.BUNDLES[self.precision], strict=True)
        return Dtypes(*(own or usual for own, usual in pairs))

    @property
    def scaling_kind(self) -> str:
        """Of data/scalings.toml: as asked for, or one scale a tensor; fp4 has its own."""
        usual = "tensor" if self.scaling == "auto" else self.scaling
        return "nv" if self.dtypes.compute == "fp4" else usual

    @property
    def precision_name(self) -> str:
        """The bundle that its dtypes are, or nearly: bf16-pure with products in fp8 is fp8-pure."""
        return words.precision_name(self.precision, self.dtypes.compute)

    @property
    def scaled_name(self) -> str:
        """The same with its scaling, where that is stated: 'mxfp8', 'fp8-block'."""
        return words.scaled_name(self.precision_name, self.scaling)

    @property
    def recompute_kind(self) -> str:
        """Of words.RECOMPUTE_KINDS: without its number."""
        whole = self.recompute in words.MOE_RECOMPUTE
        return self.recompute if whole else self.recompute.partition("-")[0]

    @property
    def recompute_number(self) -> int:
        """N of every-N and block-N; 0: none of them."""
        is_numbered = self.recompute_kind in words.NUMBERED_RECOMPUTE
        return int(self.recompute.partition("-")[2]) if is_numbered else 0

    def recompute_share(self, layers: int, stages: int) -> float:
        """Share of a model's layers whose whole forward runs twice, on `stages` pipeline ranks."""
        match self.recompute_kind:
            case "every":
                return 1.0 / self.recompute_number
            case "block":
                return min(1.0, self.recompute_number * stages * self.virtual_stages / layers)
            case kind:
                return 1.0 if kind == "full" else 0.0

    def recomputed_layers(self, chunk: Sequence[int]) -> tuple[int, ...]:
        """Of the layers of one model chunk, by their place in the model, those computed again."""
        match self.recompute_kind:
            case "every":
                return tuple(layer for layer in chunk if layer % self.recompute_number == 0)
            case "block":
                return tuple(chunk[: self.recompute_number])
            case kind:
                return tuple(chunk) if kind == "full" else ()

    @property
    def is_loss_lean(self) -> bool:
        return self.loss == "lean" or (self.loss == "auto" and self.compile)

    @property
    def optimizer_name(self) -> str:
        """The optimizer, and the format that Muon iterates in: 'muon, iterations in bf16'."""
        is_muon = self.optimizer == "muon"
        return self.optimizer + (f", iterations in {self.muon.dtype}" if is_muon else "")

    @property
    def zero(self) -> int:
        return int(self.sharding[-1])

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> Policy:
        """Read a table in anybody's words: `precision = "bf16"` means bf16-mixed, "mxfp8" fp8 with
        scaling mx, `sharding = "fsdp"` zero3, `schedule = "1F1B"` 1f1b."""
        if isinstance(data, dict):
            data = words.with_scaling(data)
            data = {name: words.policy_word(str(name), value) for name, value in data.items()}
        return codec.decode_fields(cls, data, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """`products`: matrix products of layers; `activations`: everything else that computes.

    `reduce`: gradients on their way between ranks that saw other tokens; None: there are none.
    `copies`: the same between copies of a shard, where there are copies and shards.
    """

    weights: words.Dtype
    products: words.Dtype
    activations: words.Dtype
    grads: words.Dtype
    reduce: words.Dtype | None
    copies: words.Dtype | None
    moments: words.Dtype


def running(policy: Policy, layout: Layout) -> Formats:
    """The formats that our engine uses where: a report must say what ran."""
    dtypes = policy.dtypes
    alone = layout.dp * layout.cp == 1
    shards = layout.shard * layout.cp if policy.zero else 1
    copies = layout.dp * layout.cp // shards
    reduce: words.Dtype | None = dtypes.reduce if shards > 1 else dtypes.grad
    return Formats(
        weights=dtypes.param,
        products=dtypes.compute,
        activations=words.AROUND.get(dtypes.compute, dtypes.compute),
        grads=dtypes.param if policy.zero >= 2 else dtypes.grad,
        reduce=None if alone else reduce,
        copies=dtypes.grad if copies > 1 and shards > 1 else None,
        moments=dtypes.optimizer,
    )
