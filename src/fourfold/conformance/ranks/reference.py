"""One process, no parallel code: a tiny decoder (RMSNorm, rotary grouped attention, a gated MLP or
routed experts) in fp64, its weights and batches, and three clipped AdamW steps of it.

Every weight of the reference is an element with a number. A shard says which numbers it holds,
so that values of any rank, however cut, go back to their place, and copies can be compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# (numbers, values), both of any shape with as many elements.
Part = tuple[Tensor, Tensor]


class Elements:
    """`start[name]`: the numbers of a weight, in its shape. As fp32 weights they pass through an
    engine's own sharding, which then tells where each element went: exact below 2 ** 24."""

    def __init__(self, t: Tiny, seed: int) -> None:
        self.weights = weights(t, seed)
        self.flat = torch.cat([value.flatten() for value in self.weights.values()])
        assert self.flat.numel() < 2**24
        self.start: dict[str, Tensor] = {}
        at = 0
        for name, value in self.weights.items():
            self.start[name] = torch.arange(at, at + value.numel()).view(value.shape)
            at += value.numel()

    def numbers(self, tensor: Tensor) -> Tensor:
        """Read back from a weight that holds numbers."""
        return tensor.detach().double().round().long().clone()

    @torch.no_grad()
    def fill(self, tensor: Tensor, numbers: Tensor) -> None:
        """Give elements their values."""
        values = self.flat[numbers.cpu().clamp(min=0)].view(tensor.shape)
        tensor.copy_(values.to(device=tensor.device, dtype=tensor.dtype))

    def assemble(self, ranks: Iterable[list[Part]]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Whole weights, and by how much copies of each differ, relative to its largest value; a
        weight of which an element is nowhere is left out."""
        size = self.flat.numel()
        low, high, first = (torch.full((size,), v).double() for v in (torch.inf, -torch.inf, 0.0))
        seen = torch.zeros(size, dtype=torch.bool)
        for parts in ranks:
            for numbers, values in parts:
                at, value = numbers.flatten(), values.double().flatten()
                at, value = at[at >= 0], value[at >= 0]
                first[at] = torch.where(seen[at], first[at], value)
                low[at], high[at] = torch.minimum(low[at], value), torch.maximum(high[at], value)
                seen[at] = True
        whole, spread = {}, {}
        floor = 1e-3 * float(first.abs().max())
        for name, numbers in self.start.items():
            at = numbers.flatten()
            if bool(seen[at].all()):
                whole[name] = first[at].view(numbers.shape)
                most = max(float(whole[name].abs().max()), floor, 1e-30)
                spread[name] = float((high[at] - low[at]).max()) / most
        return whole, spread

    def sums(self, ranks: Iterable[list[Part]]) -> dict[str, tuple[Tensor, int]]:
        """What all copies of a weight add up to, and how many there are."""
        total = torch.zeros(self.flat.numel(), dtype=torch.float64)
        copies = torch.zeros(self.flat.numel(), dtype=torch.long)
        for numbers, values in (part for parts in ranks for part in parts):
            held = numbers.flatten() >= 0
            at = numbers.flatten()[held]
            total.index_add_(0, at, values.double().flatten()[held])
            copies.index_add_(0, at, torch.ones_like(at))
        return {name: (total[at], int(copies[at].max())) for name, at in self.start.items()}


def held_norm(parts: list[Part]) -> float:
    """Of the elements that one rank holds, each once."""
    at = torch.cat([numbers.flatten() for numbers, _ in parts])
    held = torch.zeros(int(at.max()) + 2, dtype=torch.float64)
    held[at] = torch.cat([value.double().flatten() for _, value in parts])
    return float(held[:-1].norm())  # a part that is another rank's has the number -1


def local(x: Tensor) -> Tensor:
    """The part of a (possibly sharded) tensor on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def gradient(p: Tensor) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is."""
    g: Any = p.grad
    if g is None:
        return torch.zeros_like(local(p.detach()))
    placed = getattr(p, "placements", None)
    if placed is not None and g.placements != placed:
        g = g.redistribute(placements=placed)
    return local(g).detach().clone()


STEPS, LR, BETAS, EPS, DECAY, CLIP = 3, 1e-2, (0.9, 0.95), 1e-5, 0.1, 1.0
ADAMW: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


@dataclasses.dataclass(frozen=True)
class Tiny:
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 48
    vocab: int = 64
    seq: int = 16
    batch: int = 4
    experts: int = 0
    top_k: int = 2
    renorm: bool = False  # divide the chosen scores by their sum
    pairs: bool = False  # rotary: adjacent channels, not halves
    theta: float = 10000.0
    eps: float = 1e-5
    qk_norm: bool = False
    sinks: bool = False
    tied: bool = False
    uneven: bool = False


def weights(t: Tiny, seed: int) -> dict[str, Tensor]:
    """Every weight by its canonical name, in canonical order: what elements are numbered by."""
    chance = torch.Generator().manual_seed(seed)
    w: dict[str, Tensor] = {}

    def new(name: str, *shape: int) -> None:
        drawn = torch.randn(shape, generator=chance, dtype=torch.float64)
        w[name] = drawn / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.1 * drawn

    new("embed", t.vocab, t.hidden)
    for i in range(t.layers):
        new(f"{i}.norm1", t.hidden)
        new(f"{i}.q", t.heads * t.head_dim, t.hidden)
        for name in ("k", "v"):
            new(f"{i}.{name}", t.kv_heads * t.head_dim, t.hidden)
        new(f"{i}.o", t.hidden, t.heads * t.head_dim)
        for name in ("qnorm", "knorm") if t.qk_norm else ():
            new(f"{i}.{name}", t.head_dim)
        if t.sinks:
            new(f"{i}.sink", t.heads)
            w[f"{i}.sink"] += 1.0  # a sink that takes nothing would hide what is wrong with it
        new(f"{i}.norm2", t.hidden)
        many, e = ((t.experts,), "e") if t.experts else ((), "")
        if t.experts:
            new(f"{i}.router", t.experts, t.hidden)
        for name in ("gate", "up"):
            new(f"{i}.{e}{name}", *many, t.ffn, t.hidden)
        new(f"{i}.{e}down", *many, t.hidden, t.ffn)
    new("norm", t.hidden)
    if not t.tied:
        new("head", t.vocab, t.hidden)
    return w


def batch(t: Tiny, step: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and which targets count: another share of them in every sequence."""
    chance = torch.Generator().manual_seed(1000 * seed + step + 7)
    x, y = (torch.randint(0, t.vocab, (t.batch, t.seq), generator=chance) for _ in range(2))
    keep = torch.linspace(1.0, 0.1 if t.uneven else 0.5, t.batch)[:, None]
    m = (torch.rand(t.batch, t.seq, generator=chance) < keep).double()
    m[:, 0] = 1.0  # no sequence without a target
    return x, y, m


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rotate(x: Tensor, t: Tiny) -> Tensor:
    d = t.head_dim
    frequency = 1.0 / t.theta ** (torch.arange(0, d, 2).double() / d)
    angle = torch.outer(torch.arange(x.shape[1]).double(), frequency).to(x)
    c, s = angle.cos()[None, :, None], angle.sin()[None, :, None]
    if t.pairs:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), -1).flatten(-2)
    x1, x2 = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def attend(a: Tensor, w: dict[str, Tensor], p: str, t: Tiny) -> Tensor:
    b, n, _ = a.shape
    q, k, v = ((a @ w[p + name].T).view(b, n, -1, t.head_dim) for name in "qkv")
    if t.qk_norm:
        q, k = rms_norm(q, w[p + "qnorm"], t.eps), rms_norm(k, w[p + "knorm"], t.eps)
    q, k = rotate(q, t), rotate(k, t)
    k, v = (z.repeat_interleave(t.heads // t.kv_heads, 2) for z in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(t.head_dim)
    s = s.masked_fill(torch.ones(n, n, device=s.device).triu(1).bool(), float("-inf"))
    if t.sinks:
        sink = w[p + "sink"].view(1, -1, 1, 1).expand(b, -1, n, 1)
        s = torch.cat([s, sink], -1).softmax(-1)[..., :-1]
    else:
        s = s.softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", s, v).flatten(2) @ w[p + "o"].T


def route(a: Tensor, w: dict[str, Tensor], p: str, t: Tiny, margins: list[float]) -> Tensor:
    """The experts' sum; `margins` collects how far the last chosen score is above the next."""
    score = (a @ w[p + "router"].T).softmax(-1)
    top, chosen = score.topk(t.top_k, -1)
    ordered = score.detach().sort(-1, descending=True).values
    margins.append(float((ordered[:, t.top_k - 1] - ordered[:, t.top_k]).min()))
    if t.renorm:
        top = top / top.sum(-1, keepdim=True)
    gate = torch.zeros_like(score).scatter(1, chosen, top)
    inner = F.silu(torch.einsum("td,efd->tef", a, w[p + "egate"]))
    inner = inner * torch.einsum("td,efd->tef", a, w[p + "eup"])
    return torch.einsum("tef,edf,te->td", inner, w[p + "edown"], gate)


def block(h: Tensor, w: dict[str, Tensor], p: str, t: Tiny, margins: list[float]) -> Tensor:
    """One layer, whose weights have the prefix `p`."""
    h = h + attend(rms_norm(h, w[p + "norm1"], t.eps), w, p, t)
    a = rms_norm(h, w[p + "norm2"], t.eps)
    if t.experts:
        return h + route(a.flatten(0, 1), w, p, t, margins).view_as(h)
    return h + (F.silu(a @ w[p + "gate"].T) * (a @ w[p + "up"].T)) @ w[p + "down"].T


def decode(w: dict[str, Tensor], x: Tensor, t: Tiny, margins: list[float]) -> Tensor:
    h = w["embed"][x]
    for i in range(t.layers):
        h = block(h, w, f"{i}.", t, margins)
    return rms_norm(h, w["norm"], t.eps) @ w["embed" if t.tied else "head"].T


def mean_of_means(ce: Tensor, m: Tensor, rows: int, cp: int) -> Tensor:
    """The mean of groups of `rows` sequences; of each context rank's head and tail chunk alone."""
    chunk = torch.arange(m.shape[1]) * 2 * cp // m.shape[1]
    owner = F.one_hot(torch.minimum(chunk, 2 * cp - 1 - chunk), cp).to(ce)
    total, count = (z.view(-1, rows, m.shape[1]).sum(1).to(ce) @ owner for z in (ce * m, m))
    return (total / count).mean()


def train(
    t: Tiny,
    seed: int,
    *,
    rows: int = 0,
    cp: int = 1,
    decays: Callable[[str], bool] = lambda name: True,
) -> dict:
    """Losses, norms, gradients of the first step, parameters after the last. The objective is the
    mean over all targets; with `rows`, the mean over groups of so many sequences of their means;
    with `cp`, of each context rank's part of a group."""
    w = {name: value.requires_grad_() for name, value in weights(t, seed).items()}
    margins: list[float] = []
    groups = [
        {"params": [v for k, v in w.items() if decays(k) is yes], "weight_decay": DECAY * yes}
        for yes in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        x, y, m = batch(t, step, seed)
        logits = decode(w, x, t, margins)
        ce = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(m)
        loss = mean_of_means(ce, m, rows or t.batch, cp)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {name: v.grad.clone() for name, v in w.items() if v.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(w.values()), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    params = {name: value.detach() for name, value in w.items()}
    margin = min(margins, default=1.0)
    return {"loss": losses, "norm": norms, "grad": first, "param": params, "margin": margin}


def steady_seed(t: Tiny, seed: int) -> int:
    """The first of seed, seed + 1000, ... whose routing no rounding can change."""
    while t.experts and train(t, seed)["margin"] < 1e-5:
        seed += 1000
    return seed
