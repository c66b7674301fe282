"""Parts of a decoder layer: norms, attention and MLP on one device.

Shapes: B micro batch, S tokens, D hidden, H heads, K key/value heads, C head size, F MLP width.
Parallelism replaces parts from outside: `input_comm` (what happens to a block's input), linears,
the attention core. A linear may compute several published matrices at once; `parts` says which
rows.

Latent attention (MLA) as it trains: keys and values of all heads from a few numbers a token; N
channels without positions, P with them. Tensor parallelism cuts heads; the ways down to the latents
stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fourfold.engine.model.positions import Tables, alibi_bias, rotate
from fourfold.spec.experts import Latent
from fourfold.spec.model import ModelShape


class LatentAttention(nn.Module):
    """`heads` are those at hand."""

    q_down: Linear | None
    q_norm: Norm

    def __init__(self, shape: ModelShape, latent: Latent) -> None:
        super().__init__()
        self.heads = self.kv_heads = shape.heads
        self.latent = latent
        self.input_comm: nn.Module = nn.Identity()
        hidden, q_from = shape.hidden, latent.q_rank or shape.hidden
        self.q_down = None
        if latent.q_rank:
            self.q_down = Linear(hidden, (("q_down", latent.q_rank),), bias=False)
            self.q_norm = Norm(shape, latent.q_rank)
        self.q = Linear(q_from, (("q", shape.attention_width),), bias=False)
        down = latent.kv_rank + latent.rope
        self.kv_down = Linear(hidden, (("kv_down", down),), bias=False)
        self.kv_norm = Norm(shape, latent.kv_rank)
        both = shape.heads * (latent.nope + latent.v)
        self.kv = Linear(latent.kv_rank, (("kv", both),), bias=False)
        self.core: nn.Module = Core()
        self.out = Linear(shape.value_width, (("out", hidden),), bias=False)

    def forward(self, x_BSD: Tensor, tables: Tables) -> Tensor:
        x_BSD, latent = self.input_comm(x_BSD), self.latent
        q = self.q(x_BSD if self.q_down is None else self.q_norm(self.q_down(x_BSD)))
        narrow, turning = self.kv_down(x_BSD).split([latent.kv_rank, latent.rope], dim=-1)
        kv = self._heads(self.kv(self.kv_norm(narrow)))
        q_still, q_turning = self._heads(q).split([latent.nope, latent.rope], dim=-1)
        k_still, v = kv.split([latent.nope, latent.v], dim=-1)
        k_turning = _turned(turning[:, :, None], tables).expand(-1, -1, self.heads, -1)
        # Tokens before heads in memory: what attention makes need not be copied for `out`.
        q = torch.cat([q_still, _turned(q_turning, tables)], dim=-1)
        k = torch.cat([k_still, k_turning], dim=-1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = self._attend(q, k, v, tables)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        """Context parallelism's cores want keys and values of one size."""
        lacking = q.shape[-1] - v.shape[-1]
        if isinstance(self.core, Core) or lacking <= 0:
            return self.core(q, k, v, tables)
        return self.core(q, k, F.pad(v, (0, lacking)), tables)[..., : v.shape[-1]]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


def _turned(x_BSHP: Tensor, tables: Tables) -> Tensor:
    """Adjacent channels are a pair, as in DeepSeek's published weights."""
    halves = x_BSHP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(halves.transpose(1, 2), tables).transpose(1, 2)


Parts = tuple[tuple[str, int], ...]
# (input, weight, bias) -> output
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Module):
    """One or more matrices with the same input, held as one: (("q", 64), ("k", 32), ("v", 32)).
    `product` may be replaced by one whose weight gradients come later (parallel/products.py)."""

    product: Product = staticmethod(F.linear)

    def __init__(self, ins: int, parts: Parts, *, bias: bool) -> None:
        super().__init__()
        self.parts = parts
        outs = sum(rows for _, rows in parts)
        self.weight = nn.Parameter(torch.empty(outs, ins))
        self.bias = nn.Parameter(torch.empty(outs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm with or without bias, or RMSNorm, over the hidden width or another `size`."""

    def __init__(self, shape: ModelShape, size: int | None = None) -> None:
        super().__init__()
        size = size or shape.hidden
        self.eps = shape.norm_eps
        self.root = shape.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.empty(size))
        has_bias = shape.norm == "layernorm"
        self.bias = nn.Parameter(torch.empty(size)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.root:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


# torch's kernels of the core; ring and all-gather attention bring their own (parallel/blocks.py).
KERNELS: dict[str, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "fused": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ],
    "unfused": [SDPBackend.MATH],
}


class Core(nn.Module):
    """Causal attention over whole sequences; context parallelism puts its own in this place.
    `backends`: which of torch's kernels may be used, the first that can; None: torch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: list[SDPBackend] | None = None

    def forward(self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, tables: Tables) -> Tensor:
        if self.backends is None:
            return self._attend(q_BHSC, k_BKSC, v_BKSC, tables)
        narrow, width = v_BKSC.shape[-1], q_BHSC.shape[-1]
        with sdpa_kernel(self.backends, set_priority=True):
            if narrow == width or (v_BKSC.is_cuda and self.backends != KERNELS["flash"]):
                return self._attend(q_BHSC, k_BKSC, v_BKSC, tables)
            # Latent attention's values. This kernel, a CPU's only fused one, wants them wider.
            wide = F.pad(v_BKSC, (0, width - narrow))
            return self._attend(q_BHSC, k_BKSC, wide, tables)[..., :narrow]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if tables.slopes is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        where = tables.positions
        # Four dimensions: with three the fused kernels of CPUs do not take it.
        bias = alibi_bias(tables.slopes, where, where).to(q.dtype)[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)


def norm_apart(q_norm: Norm, k_norm: Norm, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q_norm(q), k_norm(k)


class Attention(nn.Module):
    """`heads` and `kv_heads` are those at hand: tensor parallelism lowers them, and replaces
    `norm_widths`, since no rank then has the whole width of queries or keys."""

    qkv: Linear  # fused, or
    q: Linear
    k: Linear
    v: Linear
    q_norm: Norm
    k_norm: Norm
    norm_widths: Callable[[Norm, Norm, Tensor, Tensor], tuple[Tensor, Tensor]] = staticmethod(
        norm_apart
    )

    def __init__(self, shape: ModelShape, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = shape.heads, shape.kv_heads, shape.head_size
        self.rope = shape.positions.kind == "rope"
        self.fused = fused
        sizes = {"q": shape.attention_width, "k": shape.kv_width, "v": shape.kv_width}
        self.input_comm: nn.Module = nn.Identity()
        bias = shape.biased("qkv")
        if fused:
            self.qkv = Linear(shape.hidden, tuple(sizes.items()), bias=bias)
        else:
            for name, rows in sizes.items():
                setattr(self, name, Linear(shape.hidden, ((name, rows),), bias=bias))
        self.qk_norm = shape.qk_norm
        if self.qk_norm != "none":
            per_head = shape.head_size if self.qk_norm == "head" else None
            self.q_norm, self.k_norm = (Norm(shape, per_head or sizes[side]) for side in "qk")
        self.core: nn.Module = Core()
        self.out = Linear(shape.attention_width, (("out", shape.hidden),), bias=shape.biased("out"))

    def forward(self, x_BSD: Tensor, tables: Tables) -> Tensor:
        q, k, v = self._project(self.input_comm(x_BSD))
        if self.qk_norm == "width":
            q, k = self.norm_widths(self.q_norm, self.k_norm, q, k)
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, tables), rotate(k, tables)
        mixed_BHSC = self.core(q, k, v, tables)
        return self.out(mixed_BHSC.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.fused:
            return self.q(x), self.k(x), self.v(x)
        kv_width = self.kv_heads * self.head_size
        return self.qkv(x).split([self.heads * self.head_size, kv_width, kv_width], dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def plain_gelu_of(up: Linear, x: Tensor) -> Tensor:
    return F.gelu(up(x))


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Mlp(nn.Module):
    """GELU or squared ReLU with two matrices, or SwiGLU with a gate beside the up matrix. `gelu_of`
    (a linear's output) and `swiglu` (of gate and up side by side) may be replaced."""

    gelu_of: Callable[[Linear, Tensor], Tensor] = staticmethod(plain_gelu_of)
    swiglu: Callable[[Tensor], Tensor] = staticmethod(plain_swiglu)

    gate_up: Linear  # fused, or
    gate: Linear
    up: Linear

    def __init__(self, shape: ModelShape, *, fused: bool, ffn: int = 0) -> None:
        super().__init__()
        ffn = ffn or shape.ffn
        self.gated, self.fused = shape.gated, fused and shape.gated
        self.squared = shape.activation == "relu2"
        names = ("gate", "up") if shape.gated else ("up",)
        self.input_comm: nn.Module = nn.Identity()
        bias = shape.biased("mlp")
        if self.fused:
            parts = tuple((name, ffn) for name in names)
            self.gate_up = Linear(shape.hidden, parts, bias=bias)
        else:
            for name in names:
                setattr(self, name, Linear(shape.hidden, ((name, ffn),), bias=bias))
        self.down = Linear(ffn, (("down", shape.hidden),), bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.input_comm(x_BSD)
        if not self.gated:
            if self.squared:
                return self.down(F.relu(self.up(x_BSD)).square())
            return self.down(self.gelu_of(self.up, x_BSD))
        if self.fused:
            return self.down(self.swiglu(self.gate_up(x_BSD)))
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))
