"""Weights of a layer by the ranks that hold them: all that FLOPs, seconds, traffic and memory know
of a kind is its entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Columns, Floats

_Told = Callable[[Columns], Floats]


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Weights of products that are divided over ranks of their own. `count`: of one layer, over all
    ranks, mean over layers; `met`: of these, what a token meets; `cut`: neighbours that hold a part
    each of one copy. `name` ends the names of its operations."""

    name: str
    count: _Told
    met: _Told
    cut: _Told

    def on_rank(self, c: Columns) -> Floats:
        return self.count(c) / self.cut(c)

    def copies(self, c: Columns) -> Floats:
        """Ranks that hold the same part, and see other tokens: their gradients are summed."""
        return c.dp * c.cp * c.tp / self.cut(c)

    def shards(self, c: Columns) -> Floats:
        """... over which ZeRO divides it."""
        return np.maximum(1.0, c.shard * c.tp / self.cut(c))


def _attention(c: Columns) -> Floats:
    plain = 2.0 * c.hidden * c.width + 2.0 * c.hidden * c.kv_width
    if not np.any(c.latent > 0):
        return plain
    narrow = c.q_latent * (c.hidden + c.width)
    queries = np.where(c.q_latent > 0, narrow, c.hidden * c.width)
    keys = c.hidden * (c.latent + c.shared_key) + c.latent * c.latent_width
    return np.where(c.latent > 0, queries + keys + c.hidden * c.values, plain)


def _dense(c: Columns) -> Floats:
    mlp = (2.0 + c.gated) * c.hidden
    dense = _attention(c) + mlp * c.ffn
    if not np.any(c.experts > 0):
        return dense
    own = _attention(c) + mlp * c.shared_ffn + c.hidden * c.experts
    return (1.0 - c.routed) * dense + c.routed * own


def _experts(c: Columns) -> Floats:
    """Of all routed ones."""
    each = (2.0 + c.gated) * c.hidden * c.expert_ffn
    return c.routed * c.experts * each


def _chosen(c: Columns) -> Floats:
    return _experts(c) * c.top_k / np.maximum(1, c.experts)


DENSE = WeightKind("", _dense, _dense, lambda c: c.tp)  # the ends of a model lie on the same ranks
_EXPERTS = WeightKind(" experts", _experts, _chosen, lambda c: c.ep * c.etp)
KINDS = {kind.name: kind for kind in (DENSE, _EXPERTS)}


def active_weights(c: Columns) -> Floats:
    """Of one layer, that a token meets."""
    return sum((kind.met(c) for kind in KINDS.values()), np.zeros(()))


def kinds_of(c: Columns) -> list[WeightKind]:
    """Those that any of these runs has."""
    return [kind for kind in KINDS.values() if kind is DENSE or np.any(kind.count(c) > 0)]
