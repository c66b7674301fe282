"""Operations of Muon's iterations, once a step (engine/training/muon.py): products by the shapes of
a layer's matrices, and messages that bring matrices together or add up products of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.kinds import DENSE, WeightKind
from fourfold.cost.ops.op import Op

_SUM_BYTES = 4.0  # blocks add up their products in fp32


class MatrixShape(NamedTuple):
    """Matrices of one shape: `count` in the mean layer, over all ranks. `cut`: how tensor ranks
    divide them, where they do so evenly whatever the heads."""

    name: str
    outs: Floats
    ins: Floats
    count: Floats
    cut: Literal["rows", "columns", ""]

    @property
    def short(self) -> Floats:
        return np.minimum(self.outs, self.ins)

    @property
    def long(self) -> Floats:
        return np.maximum(self.outs, self.ins)

    def in_blocks(self, c: Columns) -> NDArray[np.bool_]:
        """Where tensor ranks iterate on their blocks: cut along the longer side."""
        if not self.cut:
            return np.zeros(c.tp.shape, dtype=bool)
        longer = self.outs >= self.ins if self.cut == "rows" else self.ins >= self.outs
        return (c.muon_blocks > 0) & (c.tp > 1) & longer


def shapes(c: Columns, kind: WeightKind) -> Iterator[MatrixShape]:
    """Yield the matrices of a layer, as published (cost/count/tensors.py)."""
    pair = 1.0 + c.gated
    if kind is not DENSE:
        each = c.routed * c.experts
        yield MatrixShape("mlp.experts.up", c.expert_ffn, c.hidden, each * pair, "")
        yield MatrixShape("mlp.experts.down", c.hidden, c.expert_ffn, each, "")
        return
    latent = np.where(c.latent > 0, 1.0, 0.0)
    one = np.ones_like(c.hidden)
    q_from = np.where(c.q_latent > 0, c.q_latent, c.hidden)
    yield MatrixShape("attention.q", c.width, q_from, one, "rows")
    yield MatrixShape("attention.k, v", c.kv_width, c.hidden, 2.0 * (1.0 - latent), "")
    if np.any(latent > 0):
        yield MatrixShape("attention.q_down", c.q_latent, c.hidden, latent * (c.q_latent > 0), "")
        yield MatrixShape("attention.kv_down", c.latent + c.shared_key, c.hidden, latent, "")
        yield MatrixShape("attention.kv", c.latent_width, c.latent, latent, "rows")
    yield MatrixShape("attention.out", c.hidden, c.values, one, "columns")
    dense = 1.0 - c.routed
    yield MatrixShape("mlp.up", c.ffn, c.hidden, dense * pair, "rows")
    yield MatrixShape("mlp.down", c.hidden, c.ffn, dense, "columns")
    if np.any(c.experts > 0):
        shared = c.routed * (c.shared_ffn > 0)
        yield MatrixShape("mlp.shared.up", c.shared_ffn, c.hidden, shared * pair, "rows")
        yield MatrixShape("mlp.shared.down", c.hidden, c.shared_ffn, shared, "columns")
        yield MatrixShape("mlp.router", c.experts, c.hidden, c.routed * c.muon_routers, "")


def adams_weights(c: Columns) -> Floats:
    """Return the weights of matrices of a mean layer that AdamW updates beside Muon: routers."""
    kept = np.where(c.muon_steps > 0, 1.0 - c.muon_routers, 0.0)
    return kept * c.routed * c.experts * c.hidden


def iterations(c: Columns, params: Floats, kind: WeightKind) -> Iterator[Op]:
    """Yield the products of the matrices that a rank owns of a stage, and what brings those of its
    `params` together. A stage with fewer matrices than owners keeps some of these idle."""
    shards = np.where(c.zero >= 1, kind.shards(c), 1.0)
    # Experts of other ep ranks are other matrices: those of this one lie on as many etp ranks.
    groups = np.ones_like(c.tp) if kind is DENSE else c.ep
    cut = kind.cut(c) / groups
    stage = np.where(c.muon_steps > 0, c.layers / c.pp, 0.0) / groups
    found = list(shapes(c, kind))
    number = np.maximum(1.0, stage * sum((one.count for one in found), np.zeros(())))
    owners = np.minimum(shards * cut, number)
    lying = np.zeros(())
    for one in found:
        here = one.in_blocks(c)
        times = stage * one.count * np.where(here, cut, 1.0) / np.maximum(1.0, owners)
        yield from _products(c, one, times * c.muon_steps, np.where(here, c.tp, 1.0))
        lying = lying + np.where(here, stage * one.count * one.short * one.long, 0.0)
    # Blocks that no shards divide stay where they are.
    moved = np.where(shards > 1, params / shards, np.maximum(0.0, params - lying / cut))
    rounds = np.ceil(number / np.maximum(1.0, shards * cut))
    some = np.where((c.muon_steps > 0) & (moved > 0), 2.0 * rounds, 0.0)
    for axis, where in ((f"shard{kind.name}", shards > 1), ("tp", (shards <= 1) & (cut > 1))):
        if not np.any(where):
            continue
        yield Op(
            name=f"muon{kind.name}, exchange",
            kind="collective",
            axis=axis if kind is DENSE or axis != "tp" else "etp",
            phase="update",
            bytes=moved * c.muon_bytes / rounds,
            share=np.where(where, some, 0.0),
        )


def _products(c: Columns, one: MatrixShape, times: Floats, parts: Floats) -> Iterator[Op]:
    """Of a step: the small product of a matrix with itself, that one's square, and the product of
    both with the matrix, of which a block has its part."""
    short, long = one.short, one.long / parts
    made = {
        "gram": (short, short, long),
        "square": (short, short, short),
        "update": (short, long, short),
    }
    for word, (m, n, k) in made.items():
        name = f"muon {one.name}, {word}"
        yield Op(name, "iteration product", "update", m=m, n=n, k=k, share=times)
    if np.any(parts > 1):
        yield Op(
            name=f"muon {one.name}, sum",
            kind="collective",
            axis="tp",
            phase="update",
            bytes=short**2 * _SUM_BYTES,
            halves=np.array(2.0),
            share=np.where(parts > 1, times, 0.0),
        )
