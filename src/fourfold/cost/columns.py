"""Runs as the cost model sees them: one float64 array per fact, one element per run. Memory is
bytes, rates are bytes/s and FLOP/s, a closed choice (spec/words.py) is its word's index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.cost.dispatch import DISPATCHERS
from fourfold.spec.layers import LayerRun
from fourfold.spec.words import CP_KINDS, DTYPES, PRICED_ATTENTION, SCHEDULES

Floats = NDArray[np.float64]
Sequences = tuple[tuple[LayerRun, ...], ...]
Coefficients = Mapping[str, Any]  # fitted numbers by name (fit/coefficients.py), or arrays of them
BY_COST = 2.0  # `balanced` of our engine
# Moments that an optimizer keeps of a weight, and bytes that its update moves, as engines run it.
# Muon's: its passes as the engine makes them, each of fp32 values or of 16 bits; not measured.
OPTIMIZERS = {"adamw": (2.0, 45.0), "adamw-plain": (2.0, 45.0), "muon": (1.0, 100.0)}


@dataclass(frozen=True, slots=True)
class Columns:
    """Runs as struct of arrays. Build with `columns(n, **facts)`; the number beside a type is what
    a fact is where nobody says: a bf16 run with flash attention, fp32 gradients, plain 1F1B."""

    # model
    layers: Floats
    hidden: Floats
    heads: Floats
    kv_heads: Floats
    width: Floats  # heads x head size; equals hidden in most models
    ffn: Floats
    vocab: Floats
    tied: Annotated[Floats, 0]
    gated: Annotated[Floats, 1]
    window: Annotated[Floats, 0]  # tokens that a sliding window looks back; 0: none
    local: Annotated[Floats, 0]  # share of these layers with that window, 0..1
    sequence: Annotated[Floats, 0]  # the kind of each layer: index in `sequences`
    values: Floats  # heads x size of a head's values; equals width but in latent attention
    latent: Annotated[Floats, 0]  # numbers a token's keys and values come from; 0: plain attention
    q_latent: Annotated[Floats, 0]  # ... and its queries; 0: from the hidden state
    shared_key: Annotated[Floats, 0]  # channels of a latent key that all heads share
    mtp: Annotated[Floats, 0]  # layers that predict further tokens, counted among `layers`
    # experts: of `routed` of these layers (their share), each `expert_ffn` wide; shared ones in all
    experts: Annotated[Floats, 0]
    top_k: Annotated[Floats, 0]
    expert_ffn: Annotated[Floats, 0]
    shared_ffn: Annotated[Floats, 0]
    routed: Annotated[Floats, 0]
    expert_bias: Annotated[Floats, 0]  # 1: each expert adds its own vectors, and clips its gate
    # batch
    seq: Floats
    micro: Floats
    batch: Floats
    # layout: ranks per axis; shard = ranks over which ZeRO divides (dp x cp unless hybrid)
    gpus: Floats
    tp: Floats
    cp: Annotated[Floats, 1]
    pp: Floats
    vpp: Annotated[Floats, 1]
    dp: Floats
    shard: Floats
    ep: Annotated[Floats, 1]
    etp: Annotated[Floats, 1]
    # policy
    zero: Annotated[Floats, 1]
    sp: Annotated[Floats, 1]
    full_ckpt: Annotated[Floats, 0]  # share of layers recomputed whole, 0..1
    block_ckpt: Annotated[Floats, 0]  # ... where those are the first ones of each chunk: how many
    attn_ckpt: Annotated[Floats, 0]  # 1 when only the attention core is recomputed
    norm_ckpt: Annotated[Floats, 0]  # 1: outputs of norms and of the activation are recomputed
    mlp_ckpt: Annotated[Floats, 0]  # 1: the first product of the MLP is, too
    moe_ckpt: Annotated[Floats, 0]  # 1: routing, exchange and experts are recomputed
    moe_act_ckpt: Annotated[Floats, 0]  # 1: the experts' activation is
    latent_ckpt: Annotated[Floats, 0]  # 1: keys and values are made of the latent again
    dispatcher: Annotated[Floats, DISPATCHERS.index("alltoall")]  # index in DISPATCHERS
    hides_exchange: Annotated[Floats, 0]  # 1: under another micro batch's compute
    overlap: Annotated[Floats, 0]  # how: index in dispatch.OVERLAPS
    # Of tokens per expert: standard deviation over mean; 0: forced even.
    imbalance: Annotated[Floats, 0]
    dropped_above: Annotated[Floats, 0]  # an expert's most tokens, in even shares; 0: no limit
    graphed: Annotated[Floats, 0]  # 1: parts of layers with experts are CUDA graphs
    attention: Annotated[Floats, PRICED_ATTENTION.index("flash")]  # index in PRICED_ATTENTION
    split_inputs: Annotated[Floats, 0]  # 1: saved inputs of layers are divided over tp
    fused_norm: Annotated[Floats, 1]
    fused_host: Annotated[Floats, 0]  # 1: compiled, fewer launches and passes; 2: graphed, none
    precision: Annotated[Floats, DTYPES.index("bf16")]  # of the products: index in DTYPES
    cast_bytes: Annotated[Floats, 4]  # moved for a value that is cast to fp8 or fp4
    scaled_rate: Annotated[Floats, 1]  # of such products, against one scale a tensor
    cp_kind: Annotated[Floats, CP_KINDS.index("ring")]
    schedule: Annotated[Floats, SCHEDULES.index("1f1b")]
    grad_bytes: Annotated[Floats, 4]  # bytes of one gradient element on the wire
    acc_bytes: Annotated[Floats, 4]  # bytes of one gradient element held in memory
    opt_bytes: Annotated[Floats, 12]  # optimizer's of a parameter (fp32 master, two moments)
    fsdp2: Annotated[Floats, 0]  # 1: torch's FSDP2, whose tensors memory/moments.py counts
    reserved: Annotated[Floats, 1]  # bytes reserved and printed against tensors', with FSDP
    autocast: Annotated[Floats, 0]  # 1: without FSDP, weights are cast for each use
    selective_share: Annotated[Floats, 1]  # of what a layer keeps under "selective"
    act_bytes: Annotated[Floats, 2]  # bytes of one element of activations
    saved_bytes: Annotated[Floats, 2]  # ... of what a product keeps as its input
    gather_bytes: Annotated[Floats, 2]  # bytes of one weight as ZeRO-3 gathers it
    param_bytes: Annotated[Floats, 4]  # bytes of one weight as the optimizer updates it
    moment_bytes: Annotated[Floats, 8]  # all moments of one weight
    update_traffic: Annotated[Floats, OPTIMIZERS["adamw"][1]]  # bytes of updating one weight
    end_moment_bytes: Annotated[Floats, 0]  # ... of a weight of embedding or head beyond those
    muon_steps: Annotated[
        Floats, 0
    ]  # of the iteration that an update's matrices go through; 0: none
    muon_bytes: Annotated[Floats, 2]  # bytes of an element of it
    muon_peak: Annotated[Floats, 1]  # FLOP/s of its products by the data sheet, against `peak`
    muon_routers: Annotated[Floats, 1]  # 1: routers are matrices of it; 0: they are AdamW's
    muon_blocks: Annotated[Floats, 0]  # 1: tensor ranks iterate on blocks cut along the longer side
    rope: Annotated[Floats, 1]  # 1: queries and keys are turned (in fp32)
    positions: Annotated[Floats, 0]  # rows of a learned table; -1: one a token, 0: none
    alibi: Annotated[Floats, 0]  # 1: attention adds a bias to every score
    bias: Annotated[Floats, 0]  # 1: linears add a vector, whose gradient is a sum over all tokens
    fused_qkv: Annotated[Floats, 1]  # 1: queries, keys and values are one product
    overlap_dp: Annotated[Floats, 0]  # 1: reduction and gather run under compute
    prefetch: Annotated[Floats, 1]  # layers that ZeRO-3 gathers ahead; 0: none
    overlap_tp: Annotated[Floats, 0]  # 1: tp collectives run in pieces under GEMMs
    eager: Annotated[Floats, 0]  # 1: activation, rope and residual are not fused kernels
    split_loss: Annotated[Floats, 1]  # 1: logits and loss are divided over tp, 0: gathered whole
    loss_chunks: Annotated[Floats, 1]  # parts of the tokens whose logits exist at a time
    lean_loss: Annotated[Floats, 0]  # 1: logits' gradient takes their place
    our_kernels: Annotated[Floats, 0]  # 1: our engine, compiled: passes are counted
    compiled: Annotated[Floats, 0]  # 1: layers are, by torch.compile
    compiled_loss: Annotated[Floats, 0]  # 1: and the loss: no logits in fp32
    # 1: fewer layers in the last stage, for the head; 2: one ends as it exceeds its share; BY_COST
    balanced: Annotated[Floats, 0]
    even_stages: Annotated[Floats, 0]  # 1: equal stages, fewer layers at the ends only
    # hardware
    peak: Floats  # FLOP/s of a 16-bit GEMM
    peak_low: Floats  # FLOP/s of a GEMM in the precision asked for
    clock: Floats  # sustained clock share under the power limit, 0..1
    hbm: Floats
    sms: Floats
    # ... and what kernels reach on it (KernelRates in spec/cluster.py has these fields)
    product_share: Annotated[Floats, 0.8]
    narrow_share: Annotated[Floats, 0.85]  # of products in the precision asked for
    grouped_share: Annotated[Floats, 1.1]
    attention_share: Annotated[Floats, 0.6]
    small_head: Annotated[Floats, 1.3]
    large_head: Annotated[Floats, 0]
    large_head_backward: Annotated[Floats, 0]
    forward_keys: Annotated[Floats, 400]
    backward_keys: Annotated[Floats, 900]
    backward_rate: Annotated[Floats, 0.88]
    product_spread: Annotated[Floats, 0.05]
    attention_spread: Annotated[Floats, 0.2]
    older_flash: Annotated[Floats, 0]  # 1: known to have no attention beyond FlashAttention 2
    link: Floats  # one-way bytes/s of a GPU inside its NVLink domain
    domain: Floats  # ranks in the NVLink domain
    node: Floats  # ranks that share the node's network
    net: Floats  # one-way bytes/s of a whole node by its data sheet
    net_seen: Annotated[Floats, 0]  # of an all-reduce over the whole job, measured; 0 unknown
    net_open: Annotated[Floats, 0]  # 1: nobody stated the network; `net` is a usual one
    slow: Annotated[Floats, 0]  # 1: the network was in its slow state
    capacity: Floats  # bytes of device memory
    # of the models that these runs are of; none: all stages are as the mean
    sequences: Sequences = ()

    def __len__(self) -> int:
        return int(self.layers.shape[0])

    @property
    def head_size(self) -> Floats:
        """Numbers of a head's queries, and of its keys."""
        return self.width / self.heads

    @property
    def kv_copies(self) -> Floats:
        """Ranks to which Ulysses sends each KV head: more than one where they do not come out even,
        as many as are needed, at most to every query head."""
        heads, kv_heads = self.heads / self.tp, self.kv_heads / self.tp
        uneven = np.where(np.mod(self.cp, kv_heads) == 0, self.cp / kv_heads, heads / kv_heads)
        return np.where(np.mod(kv_heads, self.cp) == 0, 1.0, uneven)

    @property
    def kv_width(self) -> Floats:
        """Columns of the key projection, and of the value projection."""
        return self.width * self.kv_heads / self.heads

    @property
    def qkv_width(self) -> Floats:
        """Columns of queries, keys and values together."""
        plain = self.width + 2.0 * self.kv_width
        return np.where(self.latent > 0, 2.0 * self.width + self.values, plain)

    @property
    def core_width(self) -> Floats:
        """Mean of the widths of scores and of their product with values."""
        return (self.width + self.values) / 2.0

    @property
    def latent_width(self) -> Floats:
        """Columns of keys without positions and of values, which come from the latent."""
        return self.width - self.heads * self.shared_key + self.values

    @property
    def fullest(self) -> Floats:
        """Tokens of the fullest rank's experts against the mean: the largest of ep sums over the
        experts of a rank, by the tail of a normal distribution."""
        if not np.any(self.imbalance > 0):
            return np.ones(())
        local = np.maximum(1.0, self.experts / self.ep)
        spread = self.imbalance * np.sqrt(2.0 * np.log(np.maximum(1.0, self.ep)) / local)
        most = np.minimum(self.ep, 1.0 + spread)
        kept = np.where(self.dropped_above > 0, np.minimum(most, self.dropped_above), most)
        return np.where(self.experts > 0, kept, 1.0)

    @property
    def tokens(self) -> Floats:
        """Of a micro batch, on one rank."""
        return self.micro * self.seq / self.cp

    @property
    def split(self) -> Floats:
        """Ranks over which sequence parallelism divides what lies between blocks."""
        return np.where(self.sp > 0, self.tp, 1.0)

    @property
    def shards(self) -> Floats:
        """Ranks that divide the optimizer's state."""
        return np.where(self.zero >= 1, self.shard, 1.0)

    @property
    def is_alone(self) -> NDArray[np.bool_]:
        """Nobody else sees other tokens: whole weights stay, and nothing is sent. Under zero3 FSDP
        frees weights between uses even then (engine/parallel/order.py)."""
        return (self.dp * self.cp == 1) & (self.zero < 3)

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
        rows = {name: getattr(self, name)[index] for name in NAMES}
        return Columns(**rows, sequences=self.sequences)


NAMES = tuple(field.name for field in fields(Columns) if field.name != "sequences")
DEFAULTS: dict[str, float] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Columns, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def columns(n: int | None, sequences: Sequences = (), /, **facts: ArrayLike) -> Columns:
    """Columns of n runs; scalars are repeated, missing facts take DEFAULTS or what is set below.
    None: facts keep their own shapes, which broadcast against each other, as of an open mesh."""
    full = {
        name: np.atleast_1d(np.asarray(value, dtype=np.float64))
        for name, value in {**DEFAULTS, **facts}.items()
    }
    if n is not None:
        full = {k: np.ascontiguousarray(np.broadcast_to(v, (n,))) for k, v in full.items()}
    full.setdefault("kv_heads", full["heads"])
    full.setdefault("width", full["hidden"])
    full.setdefault("values", full["width"])
    full.setdefault("shard", full["dp"] * full["cp"])
    full.setdefault("domain", full["node"])
    full.setdefault("peak_low", full["peak"])
    full.setdefault("clock", np.ones_like(full["peak"]))
    return Columns(**full, sequences=sequences)


def joined(parts: list[Columns]) -> Columns:
    rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in NAMES}
    sequences = tuple(dict.fromkeys(sequence for part in parts for sequence in part.sequences))
    own = [
        np.array([sequences.index(sequence) for sequence in part.sequences] or [0], np.intp)
        for part in parts
    ]
    index = zip(own, (part.sequence.astype(np.intp) for part in parts), strict=True)
    rows["sequence"] = np.concatenate([places[of_run] for places, of_run in index]).astype(float)
    return Columns(**rows, sequences=sequences)
