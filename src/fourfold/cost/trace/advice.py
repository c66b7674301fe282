"""Which kind of context parallelism wins for a shape on its links, and up to what length: seconds
of one layer's attention, both ways, by the planner's rates and the traces' bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats, columns
from fourfold.cost.fit import coefficients
from fourfold.cost.run import device_facts, fabric_facts
from fourfold.cost.step.kernels import attention_s
from fourfold.cost.step.traffic import RING_EXPOSED, RING_HIDES, group_rate, hop_s, p2p_rate
from fourfold.cost.trace.steps import CP_KINDS, Ask, kv_copies
from fourfold.cost.trace.walk import PROGRAMS, walk
from fourfold.errors import UserError
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPE_BYTES

# Memory passes in bytes per element, read and written, of what the engine does around its kernels.
JOIN_BYTES = 26.0  # scale the fp32 sum, scale the block, add: per element of a block
ADD_BYTES = 10.0  # add a 16-bit gradient to its fp32 sum
COPY_BYTES = 8.0  # two 16-bit copies: before an all-to-all and after it
# About ten kernels, launched one by one at 10 us: exchange, attention, join.
ROUND_S = 1e-4
SHORTEST, LONGEST = 2**10, 2**26


class Parts(NamedTuple):
    """Seconds by length: kernels, messages waited for, messages hidden, copies and launches."""

    attention_s: Floats
    exposed_s: Floats
    hidden_s: Floats
    around_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.attention_s + self.exposed_s + self.around_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """One kind at the asked length; `refused` says why it cannot be had, then the rest is 0.

    `around_s` is copies, joins and launches; `peak_bytes` is the forward trace's, one layer.
    """

    kind: str
    total_s: float = 0.0
    attention_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    around_s: float = 0.0
    sent_bytes: float = 0.0
    peak_bytes: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two kinds over all lengths: `first` is faster at the shortest, and at each length of
    `crossover_tokens` the other one takes over."""

    first: str
    second: str
    crossover_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindAdvice:
    """`best` wins at the asked length; `pairs` say where that would change."""

    best: str
    reason: str
    choices: tuple[KindTimes, ...]
    pairs: tuple[Crossover, ...]
    from_tokens: int
    to_tokens: int


def advise(ask: Ask, cluster: Cluster) -> KindAdvice:
    """Compare the kinds at the asked length, and find the lengths at which their order changes."""
    peaks, refused = _peaks(ask, cluster)
    lengths = np.unique(np.round(np.geomspace(max(SHORTEST, 2 * ask.ranks), LONGEST, 400)))
    scanned: dict[str, Floats] = {
        k: _parts(k, ask, cluster, lengths).total_s for k in CP_KINDS if k not in refused
    }
    choices = tuple(
        KindTimes(kind=kind, refused=refused[kind])
        if kind in refused
        else _choice(kind, ask, cluster, peaks[kind])
        for kind in CP_KINDS
    )
    taken = sorted((choice for choice in choices if not choice.refused), key=lambda c: c.total_s)
    return KindAdvice(
        best=taken[0].kind if taken else "",
        reason=_reason(taken),
        choices=choices,
        pairs=_pairs(lengths, scanned),
        from_tokens=int(lengths[0]),
        to_tokens=int(lengths[-1]),
    )


def _peaks(ask: Ask, cluster: Cluster) -> tuple[dict[str, int], dict[str, str]]:
    """Peak bytes of each kind's trace; why a kind cannot be had, by its own rules or by memory."""
    peaks: dict[str, int] = {}
    refused: dict[str, str] = {}
    for kind in CP_KINDS:
        try:
            rows = walk(PROGRAMS[kind](replace(ask, attention="flash")), cluster)
        except UserError as error:
            refused[kind] = str(error)
            continue
        peaks[kind] = rows[-1].peak_bytes
        limit = cluster.device.memory_bytes
        if peaks[kind] > limit:
            refused[kind] = (
                f"needs {peaks[kind] / 1e9:.1f} GB of {limit / 1e9:.1f} GB, forward alone"
            )
    return peaks, refused


def _choice(kind: str, ask: Ask, cluster: Cluster, peak_bytes: int) -> KindTimes:
    parts = _parts(kind, ask, cluster, np.array([float(ask.tokens)]))
    attention_s, exposed_s, hidden_s, around_s = (float(part[0]) for part in parts)
    return KindTimes(
        kind=kind,
        total_s=float(parts.total_s[0]),
        attention_s=attention_s,
        exposed_s=exposed_s,
        hidden_s=hidden_s,
        around_s=around_s,
        sent_bytes=_sent(kind, ask, float(ask.tokens)),
        peak_bytes=peak_bytes,
    )


def _reason(taken: list[KindTimes]) -> str:
    """What the runner-up pays more for."""
    if len(taken) < 2:
        return "no other kind is possible" if taken else "no kind is possible"
    best, second = taken[:2]
    extra = {
        "waits longer for its messages": second.exposed_s - best.exposed_s,
        "runs attention in smaller pieces": second.attention_s - best.attention_s,
        "spends more on copies, joins and launches": second.around_s - best.around_s,
    }
    why = max(extra, key=lambda words: extra[words])
    percent = 100.0 * (second.total_s / best.total_s - 1.0)
    return f"{second.kind} takes {percent:.1f}% longer: it {why}"


def _pairs(lengths: Floats, scanned: Mapping[str, Floats]) -> tuple[Crossover, ...]:
    pairs = []
    for one, other in itertools.combinations(scanned, 2):
        ahead = scanned[one] < scanned[other]
        first, second = (one, other) if ahead[0] else (other, one)
        gap = scanned[one] - scanned[other]
        changes = np.flatnonzero(ahead[1:] != ahead[:-1])
        pairs.append(Crossover(first, second, tuple(_zero(lengths, gap, int(i)) for i in changes)))
    return tuple(pairs)


def _zero(lengths: Floats, gap: Floats, i: int) -> int:
    """The length between points i and i + 1 of the grid at which the gap closes."""
    share = gap[i] / (gap[i] - gap[i + 1])
    return int(np.ceil(lengths[i] * (lengths[i + 1] / lengths[i]) ** share))


def _columns(ask: Ask, cluster: Cluster, lengths: Floats, *, by_heads: bool) -> Columns:
    """The planner's question. Dividing heads is tensor parallelism to an attention kernel."""
    facts = device_facts(cluster.device, ask.dtype) | fabric_facts(
        cluster.device, cluster, float(cluster.host_gpus)
    )
    return columns(
        len(lengths),
        layers=1, hidden=ask.hidden, heads=ask.heads, kv_heads=ask.kv_heads, ffn=1, vocab=1,
        seq=lengths, micro=1, batch=1, gpus=ask.ranks, pp=1, dp=1,
        tp=ask.ranks if by_heads else 1, cp=1 if by_heads else ask.ranks,
        **facts,
    )  # fmt: skip


def _parts(kind: str, ask: Ask, cluster: Cluster, lengths: Floats) -> Parts:
    # Without the planner's lump sum for attention in pieces: here each piece is counted.
    coef = coefficients.defaults() | {"cp_attention": 1.0}
    c = _columns(ask, cluster, lengths, by_heads=False)
    kernels = _columns(ask, cluster, lengths, by_heads=True) if kind == "ulysses" else c
    forward, backward = attention_s(kernels, coef, micro=np.ones_like(lengths))
    if kind == "ring":
        return _ring(ask, c, coef, forward, backward)
    exposed_s, around_s = (_ulysses if kind == "ulysses" else _allgather)(ask, c, coef)
    return Parts(forward + backward, exposed_s, np.zeros_like(lengths), around_s)


def _sent(kind: str, ask: Ask, tokens: Any) -> Any:
    """Bytes a rank sends, forward and backward, as the traces count them."""
    item = DTYPE_BYTES[ask.dtype]
    part, ranks = tokens / ask.ranks, ask.ranks
    kv = part * 2.0 * ask.hidden * ask.kv_heads / ask.heads
    if kind == "ulysses":
        copies = kv_copies(ask.heads, ask.kv_heads, ranks)
        return 2.0 * item * (2.0 * part * ask.hidden + kv * copies) * (ranks - 1) / ranks
    if kind == "allgather":
        return 2.0 * item * kv * (ranks - 1)
    # Back: keys and values again, and their fp32 gradients, which also travel home.
    return kv * (2.0 * item * (ranks - 1) + 4.0 * ranks)


def _ulysses(ask: Ask, c: Columns, coef: Coefficients) -> tuple[Floats, Floats]:
    """(messages waited for, copies and launches)."""
    sent = _sent("ulysses", ask, c.seq)
    near = (np.minimum(c.cp, c.domain) - 1.0) / np.maximum(1.0, c.cp - 1.0)
    inside_s = sent * near / (coef["nvlink"] * c.link)
    outside_s = sent * (1.0 - near) / (coef["net"] * c.net / c.node)
    # Links of different levels work at the same time; six messages, each with one latency.
    wait_s = np.maximum(inside_s, outside_s) + 6.0 * hop_s(c, coef, c.cp, c.tp)
    copies = kv_copies(ask.heads, ask.kv_heads, ask.ranks)
    moved = c.seq / ask.ranks * ask.hidden * (2.0 + 2.0 * copies * ask.kv_heads / ask.heads)
    return wait_s, 2.0 * COPY_BYTES * moved / c.hbm + 2.0 * ROUND_S


def _allgather(ask: Ask, c: Columns, coef: Coefficients) -> tuple[Floats, Floats]:
    """(messages waited for, copies, joins and launches)."""
    hops = 2.0 * (c.cp - 1.0) * hop_s(c, coef, c.cp, c.tp)
    wait_s = _sent("allgather", ask, c.seq) / group_rate(c, coef, c.cp, c.tp) + hops
    part, kv = c.seq / ask.ranks, ask.hidden * ask.kv_heads / ask.heads
    # Four blocks: either half of the queries against what lies before it, and against itself.
    joined = 2.0 * part * ask.hidden * (JOIN_BYTES + ADD_BYTES)
    ordered = 2.0 * c.seq * kv * (COPY_BYTES + 2.0 * ADD_BYTES)
    return wait_s, (joined + ordered) / c.hbm + 2.0 * 4.0 * ROUND_S


def _ring(ask: Ask, c: Columns, coef: Coefficients, forward: Floats, backward: Floats) -> Parts:
    # A hop is one message of one rank: where the ring leaves a host it has one rank's share of
    # the network, not the host's.
    stride = np.where(c.cp > c.domain, c.domain, 1.0)
    rate, latency = p2p_rate(c, coef, stride), hop_s(c, coef, c.cp, c.tp)
    kv = c.seq / ask.ranks * 2.0 * ask.hidden * ask.kv_heads / ask.heads
    there = (c.cp - 1.0) * (kv * DTYPE_BYTES[ask.dtype] / rate + latency)
    back = there + c.cp * (kv * 4.0 / rate + latency)
    exposed = sum(
        RING_EXPOSED * hops + np.maximum(0.0, hops - RING_HIDES * kernel)
        for hops, kernel in ((there, forward), (back, backward))
    )
    block = c.seq / ask.ranks * ask.hidden * (JOIN_BYTES + ADD_BYTES) + kv * ADD_BYTES
    around = c.cp * (block / c.hbm + 2.0 * ROUND_S)
    hidden = np.maximum(0.0, there + back - exposed)
    return Parts(forward + backward, np.asarray(exposed), hidden, around)
