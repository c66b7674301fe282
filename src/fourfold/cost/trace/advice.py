"""Which kind of context parallelism wins for a shape on its links, and up to what length: seconds
of one layer's attention and its keys, both ways, as the planner prices those operations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Floats, columns
from fourfold.cost.fit import coefficients
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.run import machine_facts
from fourfold.cost.step.estimate import layer_times
from fourfold.cost.trace.divided import PROGRAMS
from fourfold.cost.trace.steps import CP_KINDS, Ask
from fourfold.cost.trace.walk import step_rows, walk
from fourfold.errors import UserError
from fourfold.spec import words
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPE_BYTES

SHORTEST, LONGEST = 2**10, 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """One kind at the asked length; `refused` says why it cannot be had, then the rest is 0.
    `peak_bytes` is the forward trace's, one layer."""

    kind: str
    total_s: float = 0.0
    attention_s: float = 0.0
    exposed_s: float = 0.0
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
        k: _numbers(k, ask, cluster, lengths)["total_s"] for k in CP_KINDS if k not in refused
    }
    choices = tuple(
        KindTimes(kind=kind, refused=refused[kind])
        if kind in refused
        else KindTimes(kind=kind, peak_bytes=peaks[kind], **_at_asked(kind, ask, cluster))
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
            program = PROGRAMS[kind](replace(ask, attention="flash"))
        except UserError as error:
            refused[kind] = str(error)
            continue
        peaks[kind] = step_rows(program, walk(program), cluster)[-1].peak_bytes
        limit = cluster.device.memory_bytes
        if peaks[kind] > limit:
            refused[kind] = (
                f"needs {peaks[kind] / 1e9:.1f} GB of {limit / 1e9:.1f} GB, forward alone"
            )
    return peaks, refused


def _at_asked(kind: str, ask: Ask, cluster: Cluster) -> dict[str, Any]:
    numbers = _numbers(kind, ask, cluster, np.array([float(ask.tokens)]))
    return {name: float(column[0]) for name, column in numbers.items()}


def _reason(taken: list[KindTimes]) -> str:
    """What the runner-up pays more for."""
    if len(taken) < 2:
        return "no other kind is possible" if taken else "no kind is possible"
    best, second = taken[:2]
    extra = {
        "waits longer for its messages": second.exposed_s - best.exposed_s,
        "runs attention in smaller pieces": second.attention_s - best.attention_s,
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


def _numbers(kind: str, ask: Ask, cluster: Cluster, lengths: Floats) -> dict[str, Floats]:
    """Of each length, by names of KindTimes: kernels, messages waited for, bytes of a rank."""
    c = columns(
        len(lengths),
        layers=1,
        hidden=ask.hidden,
        heads=ask.heads,
        kv_heads=ask.kv_heads,
        ffn=1,
        vocab=1,
        seq=lengths,
        micro=1,
        batch=1,
        gpus=ask.ranks,
        pp=1,
        dp=1,
        tp=1,
        cp=ask.ranks,
        cp_kind=words.CP_KINDS.index(kind),
        act_bytes=DTYPE_BYTES[ask.dtype],
        **machine_facts(cluster, ask.dtype),
    )
    parts = layer_times(c, coefficients.defaults(), micro=c.micro).parts
    keys = [op for op in decoder_layer(c, c.micro) if op.axis == "cp"]
    whole = sum((op.halves * op.bytes for op in keys), np.zeros(len(c)))
    return {
        "total_s": parts["attention"] + parts["cp_comm"],
        "attention_s": parts["attention"],
        "exposed_s": parts["cp_comm"],
        "sent_bytes": whole * (c.cp - 1.0) / c.cp,
    }
