"""The matrix products and attention kernels of a rank's stage: calls of one micro batch over all
its layers. Norms, element-wise work and copies are not listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from fourfold.cost.count.params import Param, embedding_tensors, layer_tensors, tp_shape
from fourfold.engine.parallel.blocks import Span
from fourfold.engine.parallel.context import span_of, spans_of
from fourfold.engine.parallel.groups import World
from fourfold.spec.layers import LayerKind
from fourfold.spec.model import kv_copies
from fourfold.spec.run import RunSpec

Part = Literal["attention", "mlp", "head"]
When = Literal["forward", "backward"]
# What a product makes: the layer's output, or one of its two gradients.
Makes = Literal["output", "input gradient", "weight gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """[m, k] x [k, n], or of `groups` of rows, each by its own matrix. A product of the forward
    pass that runs again is `when` backward."""

    part: Part
    name: str
    when: When
    makes: Makes
    m: int
    n: int
    k: int
    calls: int
    groups: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def shape(self) -> str:
        groups = f" in {self.groups}" if self.groups > 1 else ""
        return f"{self.m}x{self.n}x{self.k}{groups}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Attention of `queries` to `keys`. `block`: one of several that are joined afterwards. A value
    may be smaller than a query and a key."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    value_size: int
    causal: bool
    block: bool
    calls: int = 1
    name: str = "core"
    when: When = "forward"
    backward: bool = False
    part: Part = "attention"
    products: int = 2  # over all query-key pairs; the mask is not subtracted

    @property
    def flops(self) -> int:
        pairs = self.batch * self.heads * self.queries * self.keys
        of_values = self.products // 2
        widths = (self.products - of_values) * self.head_size + of_values * self.value_size
        return 2 * pairs * widths

    @property
    def shape(self) -> str:
        mask = " causal" if self.causal else ""
        return f"{self.batch}x{self.heads}x{self.queries}x{self.keys}x{self.head_size}{mask}"


Kernel = Product | Attend


def is_again(kernel: Kernel) -> bool:
    """Whether the backward pass computes something of the forward pass once more."""
    if isinstance(kernel, Product):
        return kernel.when == "backward" and kernel.makes == "output"
    return kernel.when == "backward" and not kernel.backward


def stage_kernels(
    spec: RunSpec, world: World, layers: Sequence[int], *, micro: int, head: bool
) -> list[Kernel]:
    """All kernels of one micro batch of `micro` sequences through these layers (and the head)."""
    repeated = [i for c in _chunks(layers) for i in spec.policy.recomputed_layers(c)]
    kernels: list[Kernel] = []
    tokens = micro * spec.batch.seq_len // spec.layout.cp
    kinds = spec.model.layer_kinds()
    for kind in sorted({kinds[layer] for layer in layers}):
        alike = [layer for layer in layers if kinds[layer] == kind]
        of_moe = kind.feed_forward == "experts" and spec.policy.recompute == "moe"
        again = len(alike) if of_moe else sum(layer in alike for layer in repeated)
        linears = list(_linears(spec, world, tokens, kind))
        for one in linears:
            kernels += _linear(one, len(alike))
            # A recomputed layer repeats its forward but for the last product.
            if again and one is not linears[-1] and (one.part == "mlp" or not of_moe):
                kernels.append(one.product("backward", "output", again))
    again = len(repeated)
    core_again = len(layers) if spec.policy.recompute == "selective" else again
    for core, count in _attention(spec, world, micro):
        kernels += _core(core, spec, count * len(layers), count * core_again)
    if head:
        kernels += _head(spec, world, tokens)
    return kernels


def _chunks(layers: Sequence[int]) -> Iterator[list[int]]:
    """The model chunks of a rank: only layers of one are neighbours."""
    for _, chunk in groupby(enumerate(layers), lambda place: place[1] - place[0]):
        yield [layer for _, layer in chunk]


@dataclass(frozen=True, slots=True)
class Linears:
    """A matrix, or one of each of `groups` experts: `rows` go through it, or through all."""

    part: Part
    name: str
    rows: int
    outs: int
    ins: int
    groups: int = 1

    def product(self, when: When, makes: Makes, calls: int) -> Product:
        m, n, k = {
            "output": (self.rows, self.outs, self.ins),
            "input gradient": (self.rows, self.ins, self.outs),
            "weight gradient": (self.outs, self.ins, self.rows),
        }[makes]
        return Product(
            part=self.part,
            name=self.name,
            when=when,
            makes=makes,
            m=m,
            n=n,
            k=k,
            calls=calls,
            groups=self.groups,
        )


def _linear(one: Linears, calls: int) -> list[Product]:
    return [
        one.product("forward", "output", calls),
        one.product("backward", "input gradient", calls),
        one.product("backward", "weight gradient", calls),
    ]


def _linears(spec: RunSpec, world: World, tokens: int, kind: LayerKind) -> Iterator[Linears]:
    """A layer's matrices on this rank, in their order; but a router's, which is small and fp32."""
    model, fused = spec.model, spec.policy.fused_projections
    matrices = [
        tensor
        for tensor in layer_tensors(model, kind)
        if len(tensor.shape) == 2 and tensor.expert is None and ".router." not in tensor.name
    ]
    joined: dict[tuple[Part, str], list[tuple[int, ...]]] = {}
    for tensor in matrices:
        block, *inner, name, _ = tensor.name.split(".")
        part: Part = "attention" if block == "attention" else "mlp"
        if fused and name in ("q", "k", "v") and model.latent is None:
            name = "qkv"
        if fused and model.gated and name in ("gate", "up"):
            name = "gate_up"
        shape = tp_shape(model, tensor, spec.layout.tp, world.tp.rank)
        joined.setdefault((part, "_".join((*inner, name))), []).append(shape)
    for (part, name), shapes in joined.items():
        yield Linears(part, name, tokens, sum(shape[0] for shape in shapes), shapes[0][1])
    if model.moe is not None and kind.feed_forward == "experts":
        layout, ffn = spec.layout, model.moe.ffn // spec.layout.etp
        rows, groups = tokens // layout.tp * model.top_k * layout.etp, model.experts // layout.ep
        yield Linears("mlp", "experts_gate_up", rows, 2 * ffn, model.hidden, groups)
        yield Linears("mlp", "experts_down", rows, model.hidden, ffn, groups)


def _attention(spec: RunSpec, world: World, micro: int) -> Iterator[tuple[Attend, int]]:
    """Forward attention kernels of one layer, equal ones counted together."""
    model, group, kind = spec.model, world.cp, spec.policy.cp_kind
    heads, kv_heads = model.heads // spec.layout.tp, max(1, model.kv_heads // spec.layout.tp)
    seq_len, latent = spec.batch.seq_len, model.latent
    plain = group.size == 1 and latent is not None
    value = latent.v if plain and latent is not None else model.head_size
    if group.size == 1 or kind == "ulysses":
        # Fewer KV heads than ranks are repeated just enough (UlyssesCore).
        kv_heads *= kv_copies(heads, kv_heads, group.size)
        heads, kv_heads = heads // group.size, kv_heads // group.size
        spans, is_block = [Span((0, seq_len), (0, seq_len), True)], False
    else:
        tokens, is_block = seq_len // group.size, True
        ring = (span_of(step, group.rank, group.size, tokens) for step in range(group.size))
        spans = list(ring if kind == "ring" else spans_of(group, tokens // 2))
    cores = (
        Attend(
            batch=micro,
            heads=heads,
            kv_heads=kv_heads,
            queries=span.queries[1] - span.queries[0],
            keys=span.keys[1] - span.keys[0],
            head_size=spec.model.head_size,
            value_size=value,
            causal=span.causal,
            block=is_block,
        )
        for span in spans
    )
    yield from Counter(cores).items()


def _core(core: Attend, spec: RunSpec, calls: int, again: int) -> Iterator[Attend]:
    # Backward: scores again (but where they were kept), then four gradients.
    keeps_scores = spec.policy.attention == "unfused" and not core.block
    products = 4 if keeps_scores else 5
    yield replace(core, calls=calls)
    yield replace(core, when="backward", backward=True, calls=calls, products=products)
    if again:
        yield replace(core, when="backward", calls=again)


def _head(spec: RunSpec, world: World, tokens: int) -> Iterator[Product]:
    """The logits; in pieces they are computed again in the backward pass, but for the lean loss."""
    table: Param = next(embedding_tensors(spec.model, spec.batch.seq_len))
    rows, hidden = tp_shape(spec.model, table, spec.layout.tp, world.tp.rank)
    chunks = spec.policy.loss_chunks
    sizes = [tokens // chunks + (i < tokens % chunks) for i in range(chunks)]
    for size in sorted(set(sizes)):
        calls = sizes.count(size)
        logits = Linears("head", "logits", size, rows, hidden)
        yield from _linear(logits, calls)
        if chunks > 1 and not spec.policy.is_loss_lean:
            yield logits.product("backward", "output", calls)
