"""What does the cost model need to know of a run? One NumPy array per fact, one element per run.

Counts are plain numbers, memory is bytes, rates are bytes/s and FLOP/s; every array is float64 of
the same length. A column of a closed choice (spec/words.py) holds the word's index. All formulas in
this package broadcast over these arrays, so a question about one layout and a question about a
million are the same call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.spec.words import CP_KINDS, DTYPES, PRICED_ATTENTION, SCHEDULES

Floats = NDArray[np.float64]
Coefficients = Mapping[str, Any]  # fitted numbers by name (fit/coefficients.py), or arrays of them


@dataclass(frozen=True, slots=True)
class Columns:
    """Runs as struct of arrays. Build with `columns(n, **facts)`."""

    # model
    layers: Floats
    hidden: Floats
    heads: Floats
    kv_heads: Floats
    width: Floats  # heads x head size; equals hidden in most models
    ffn: Floats
    vocab: Floats
    tied: Floats
    gated: Floats
    window: Floats  # tokens that a layer with a sliding window looks back; 0: none
    local: Floats  # share of layers with that window, 0..1
    # batch
    seq: Floats
    micro: Floats
    batch: Floats
    # layout: ranks per axis; shard = ranks over which ZeRO divides (dp x cp unless hybrid)
    gpus: Floats
    tp: Floats
    cp: Floats
    pp: Floats
    vpp: Floats
    dp: Floats
    shard: Floats
    # policy
    zero: Floats
    sp: Floats
    full_ckpt: Floats  # share of layers recomputed whole, 0..1
    attn_ckpt: Floats  # 1 when only the attention core is recomputed
    attention: Floats  # index in PRICED_ATTENTION
    fused_norm: Floats
    fused_host: Floats  # 1 when compiled or graphed: fewer launches, fewer passes over memory
    precision: Floats  # of the products: index in DTYPES
    block_scale: Floats  # fp8/fp4 scales per block (mxfp8, nvfp4) instead of per tensor
    cp_kind: Floats
    schedule: Floats
    grad_bytes: Floats  # bytes of one gradient element on the wire
    acc_bytes: Floats  # bytes of one gradient element held in memory
    opt_bytes: Floats  # optimizer bytes a parameter (fp32 master + two moments = 12)
    own: Floats  # 1: our own engine or one like it: tensors are counted one by one (own_engine.py)
    reserved: Floats  # bytes its allocator reserves and prints, against those of its tensors
    selective_share: Floats  # share of what a layer keeps that "selective" leaves
    act_bytes: Floats  # bytes of one element of activations
    saved_bytes: Floats  # ... of what a product keeps as its input
    gather_bytes: Floats  # bytes of one weight as ZeRO-3 gathers it
    param_bytes: Floats  # bytes of one weight as the optimizer updates it
    moment_bytes: Floats  # all moments of one weight
    update_traffic: Floats  # bytes that the update of one weight moves
    rope: Floats  # 1: queries and keys are turned (in fp32)
    positions: Floats  # rows of a learned table of positions; -1: one a token, 0: none
    alibi: Floats  # 1: attention adds a bias to every score
    bias: Floats  # 1: linears add a vector, whose gradient is a sum over all tokens
    fused_qkv: Floats  # 1: queries, keys and values are one product
    overlap_dp: Floats  # 1: gradient reduction and parameter gather run under compute
    prefetch: Floats  # layers that ZeRO-3 gathers ahead while one computes; 0: none
    overlap_tp: Floats  # 1: tensor-parallel collectives run in pieces under their GEMMs
    eager: Floats  # 1: activation, rope and residual are plain framework calls, not fused kernels
    split_loss: Floats  # 1: logits and loss are divided over tp, 0: gathered whole on every rank
    loss_chunks: Floats  # parts of the tokens whose logits exist one after the other
    lean_loss: Floats  # 1 when logits' gradient takes their place, and none are computed again
    own_kernels: Floats  # 1: our engine, compiled: passes over memory are counted (own_engine.py)
    # 1: the engine gives the last stage fewer layers to pay for the head; 2: each stage ends with
    # the layer that exceeds its share of layers and head
    balanced: Floats
    even_stages: Floats  # 1: equal stages, only the first and the last may hold fewer layers
    # hardware
    peak: Floats  # FLOP/s of a 16-bit GEMM
    peak_low: Floats  # FLOP/s of a GEMM in the precision asked for
    clock: Floats  # sustained clock share under the power limit, 0..1
    hbm: Floats
    sms: Floats
    link: Floats  # one-way bytes/s of a GPU inside its NVLink domain
    domain: Floats  # ranks in the NVLink domain
    node: Floats  # ranks that share the node's network
    net: Floats  # one-way bytes/s of a whole node by its data sheet
    net_seen: Floats  # bytes/s of an all-reduce over the whole job, measured in it; 0 unknown
    slow: Floats  # 1: the network was in its slow state
    capacity: Floats  # bytes of device memory

    def __len__(self) -> int:
        return int(self.layers.shape[0])

    @property
    def kv_width(self) -> Floats:
        """Columns of the key projection, and of the value projection."""
        return self.width * self.kv_heads / self.heads

    @property
    def qkv_width(self) -> Floats:
        """Columns of queries, keys and values together."""
        return self.width + 2.0 * self.kv_width

    @property
    def layer_weights(self) -> Floats:
        """Weights of one layer that take part in a matrix product, over all tensor ranks."""
        attention = 2.0 * self.hidden * self.width + 2.0 * self.hidden * self.kv_width
        return attention + (2.0 + self.gated) * self.hidden * self.ffn

    @property
    def share(self) -> Floats:
        """Sequences of the busiest rank: shares that do not come out even differ by one."""
        return np.ceil(self.batch / self.dp)

    @property
    def micros(self) -> Floats:
        """Micro batches of the busiest rank; the last one may be smaller."""
        return np.ceil(self.share / self.micro)

    @property
    def reach(self) -> Floats:
        """Tokens each token attends to, mean over layers, the causal mask not counted: all of the
        sequence s, or of a window w as many as make the same causal area, w (2 - w/s)."""
        seen = np.where(self.window > 0, np.minimum(self.window, self.seq), self.seq)
        near = seen * (2.0 - seen / self.seq)
        return self.seq - self.local * (self.seq - near)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Columns:
        """The runs at these places, in that order."""
        return Columns(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


# Moments that an optimizer keeps of a weight, and bytes that its update moves, as engines run it.
OPTIMIZERS = {"adamw": (2.0, 45.0), "adamw-plain": (2.0, 45.0)}

# What a fact is when nobody says: a bf16 run with flash attention, fp32 gradients, plain 1F1B.
DEFAULTS: dict[str, float] = {
    "tied": 0,
    "gated": 1,
    "window": 0,
    "local": 0,
    "vpp": 1,
    "cp": 1,
    "zero": 1,
    "sp": 1,
    "full_ckpt": 0,
    "attn_ckpt": 0,
    "attention": PRICED_ATTENTION.index("flash"),
    "fused_norm": 1,
    "fused_host": 0,
    "precision": DTYPES.index("bf16"),
    "block_scale": 0,
    "cp_kind": CP_KINDS.index("ring"),
    "schedule": SCHEDULES.index("1f1b"),
    "grad_bytes": 4,
    "acc_bytes": 4,
    "opt_bytes": 12,
    "own": 0,
    "reserved": 1,
    "selective_share": 1,
    "act_bytes": 2,
    "saved_bytes": 2,
    "gather_bytes": 2,
    "param_bytes": 4,
    "moment_bytes": 8,
    "update_traffic": OPTIMIZERS["adamw"][1],
    "rope": 1,
    "alibi": 0,
    "bias": 0,
    "positions": 0,
    "fused_qkv": 1,
    "overlap_dp": 0,
    "prefetch": 1,
    "overlap_tp": 0,
    "eager": 0,
    "split_loss": 1,
    "loss_chunks": 1,
    "lean_loss": 0,
    "own_kernels": 0,
    "balanced": 0,
    "even_stages": 0,
    "net_seen": 0,
    "slow": 0,
}


def columns(n: int, **facts: ArrayLike) -> Columns:
    """Columns of n runs; scalars are repeated, missing facts take DEFAULTS.

    `shard` defaults to dp x cp, `domain` to `node`, `peak_low` to `peak`, `clock` to 1,
    `kv_heads` to `heads`, `width` to `hidden`.
    """
    full = {name: _repeat(value, n) for name, value in {**DEFAULTS, **facts}.items()}
    full.setdefault("kv_heads", full["heads"])
    full.setdefault("width", full["hidden"])
    full.setdefault("shard", full["dp"] * full["cp"])
    full.setdefault("domain", full["node"])
    full.setdefault("peak_low", full["peak"])
    full.setdefault("clock", np.ones(n))
    return Columns(**full)


def _repeat(value: ArrayLike, n: int) -> Floats:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype=np.float64), (n,)))


def joined(parts: list[Columns]) -> Columns:
    """Several sets of runs as one."""
    return Columns(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Columns)}
    )
