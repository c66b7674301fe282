"""How long must a step take at least? The floor of its kernels, and bytes at the memory's speed.

Seconds of one rank's step by part, what can't be avoided beside what the engine took. The parts
exclude each other and sum to the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.step.own_engine import ends_bytes, layer_bytes, update_bytes
from fourfold.result.one_rank import OneRankResult


@dataclass(frozen=True, slots=True)
class Part:
    """`limit_s`: what can't be avoided. `engine_s`: what the step took."""

    name: str
    limit_s: float
    engine_s: float

    @property
    def gap_s(self) -> float:
        return self.engine_s - self.limit_s


def parts(found: OneRankResult) -> list[Part]:
    """Of a rank whose floor was measured. Recomputing is work that could be avoided;
    the last part is what the watched kernels leave of the step."""
    floor, n = found.floor, found.micro_batches
    assert floor is not None
    seen = _seen(found)
    again = n * (floor.again_products_s + floor.again_attention_s)
    products = seen.get("matrix products", 0.0) - n * floor.again_products_s
    attention = seen.get("attention", 0.0) - n * floor.again_attention_s
    update_s = found.phase("optimizer").seconds + found.phase("reduce").seconds
    rows = [
        Part("matrix products", n * floor.products_s, products),
        Part("attention", n * floor.attention_s, attention),
        Part("computed again", 0.0, again),
        Part(
            "norms, element-wise, loss",
            n * floor.moved_bytes / floor.bytes_per_s,
            seen.get("norms and element-wise", 0.0),
        ),
        Part("copies and casts", 0.0, seen.get("copies and casts", 0.0)),
        Part("norm of gradients, update", floor.update_bytes / floor.bytes_per_s, update_s),
    ]
    rest = found.compute_s - sum(row.engine_s for row in rows)
    return [*rows, Part("waiting for the host, rest", 0.0, rest)]


def _seen(found: OneRankResult) -> dict[str, float]:
    """Seconds of a step by kind of kernel. Small operators of a CPU take longer while they are
    watched: then their shares are those of the micro batch that was not."""
    n = found.micro_batches
    seen = {part.name: n * part.seconds for part in found.parts if part.name != "fills"}
    once_s = sum(found.phase(name).seconds for name in ("data", "reduce", "optimizer", "once"))
    room_s = found.compute_s - once_s
    watched_s = sum(seen.values())
    scale = min(1.0, room_s / watched_s) if watched_s else 1.0
    return {name: scale * seconds for name, seconds in seen.items()}


def total(rows: list[Part]) -> Part:
    return Part("step", sum(row.limit_s for row in rows), sum(row.engine_s for row in rows))


def least_bytes(c: Columns) -> tuple[float, float, float, float]:
    """What can't be avoided besides products and attention, of the one run in `c`: bytes of a
    micro batch in a layer, in the first and the last end; of the update, an element of this rank's
    own weights."""
    tokens = c.micro * c.seq / c.cp
    forward, backward = layer_bytes(c, tokens)
    shards = np.where(c.zero >= 1, c.shard, 1.0)
    return (
        float((forward + backward)[0]),
        float(ends_bytes(c, tokens, first=True, last=False)[0]),
        float(ends_bytes(c, tokens, first=False, last=True)[0]),
        float(update_bytes(c, shards)[0]),
    )
