"""What the first choice of a model with experts makes of its router: seconds with even and with
natural routing side by side, rows per expert, where tokens travel, and what a capacity would do."""

from __future__ import annotations

from dataclasses import replace
from math import erf, exp, hypot, log, sqrt

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.experts import SPREAD
from fourfold.cost.fit.interval import TWO_SIDED_80
from fourfold.cost.memory.peak import memory
from fourfold.cost.predict import predictions
from fourfold.cost.step.kernels import HALF_ROWS
from fourfold.cost.step.traffic import copies
from fourfold.search.plan_answer import Capacity, Routed
from fourfold.search.ranking import Ranking
from fourfold.units import three_digits

FACTORS = (1.0, 1.25, 1.5, 2.0)


def routed(ranking: Ranking, natural: float, *, capacity: bool) -> Routed | None:
    """`natural`: the imbalance of natural routing. None: nothing to say."""
    query = ranking.query
    if query.model.moe is None or not len(ranking):
        return None
    c = query.columns({name: column[:1] for name, column in ranking.points.items()})
    even, spread = (replace(c, imbalance=np.full(1, x)) for x in (0.0, natural))
    forced, uneven = (predictions(one, query.resolved.entry) for one in (even, spread))
    step_s, ends = float(uneven.step_s[0]), []
    differ = SPREAD if query.policy.imbalance is None else 0.0  # what was measured is known
    for way, end in ((-1.0, uneven.low_s), (1.0, uneven.high_s)):
        moved = np.full(1, natural * exp(way * TWO_SIDED_80 * differ))
        other = predictions(replace(c, imbalance=moved), query.resolved.entry).step_s
        half = hypot(log(float(end[0]) / step_s), log(float(other[0]) / step_s))
        ends.append(step_s * exp(way * half))
    peaks = [memory(one, query.resolved.entry.coefficients).worst_bytes for one in (even, spread)]
    tokens = float((c.tokens / c.split)[0])
    rows = tokens * query.model.top_k * float((c.ep * c.etp)[0]) / query.model.experts
    return Routed(
        imbalance=natural,
        fullest=float(np.max(spread.fullest)),
        forced_s=float(forced.step_s[0]),
        forced_range_s=(float(forced.low_s[0]), float(forced.high_s[0])),
        forced_bytes=float(peaks[0][0]),
        natural_s=step_s,
        natural_range_s=(ends[0], ends[1]),
        natural_bytes=float(peaks[1][0]),
        rows_per_expert=rows,
        remarks=(*_remarks(c, rows), *_ways(ranking)),
        capacities=_capacities(ranking, spread) if capacity else (),
    )


def _remarks(c: Columns, rows: float) -> list[str]:
    found = [f"{rows:,.0f} tokens per expert and micro batch"]
    rate = rows / (HALF_ROWS + rows)
    if rate < 0.8:
        found[0] += f": grouped GEMMs run at {rate:.0%}; raise ep or micro batch"
    ep, domain = int(c.ep[0] * c.etp[0]), int(c.domain[0])
    far = float(np.max(copies(c)[1]))
    if ep > domain and far > 0:
        found.append(f"EP spans NVLink domains ({domain} GPUs): {far:.1f} remote copies per token")
    return found


def _ways(ranking: Ranking) -> list[str]:
    """The fastest ranked layout of each way to spread a model with experts."""
    p = ranking.points
    spread, piped = p["ep"] * p["etp"] > 1, p["pp"] > 1
    ways = {
        "FSDP only": ~spread & ~piped & (p["zero"] == 3),
        "EP only": spread & ~piped,
        "PP only": piped & ~spread,
        "EP+PP": piped & spread,
    }
    best = {way: float(p["step_s"][some].min()) for way, some in ways.items() if some.any()}
    if len(best) < 2:
        return []
    listed = (f"{way} {three_digits(best[way])} s" for way in sorted(best, key=lambda w: best[w]))
    return [f"best with {', '.join(listed)}"]


def _capacities(ranking: Ranking, c: Columns) -> tuple[Capacity, ...]:
    """Experts of a rank that drop tokens bring it nearer to the mean; its rows are never taken as
    fewer than even ones, since engines keep room for them."""
    entry, experts = ranking.query.resolved.entry, ranking.query.model.experts
    spread, ep = float(c.imbalance[0]), float(c.ep[0])
    local = max(1.0, experts / ep)
    of_rank, tail = spread / sqrt(local), sqrt(2.0 * log(ep) / local)
    layers = ranking.query.model.count_layers("experts")
    found = []
    for factor in (*FACTORS, 0.0):
        lost, deviation = beyond(factor, spread) if factor else (0.0, spread)
        cut = max(0.0, deviation - lost / tail) if tail else 0.0
        limited = replace(c, dropped_above=np.full(1, factor))
        drops = replace(limited, imbalance=np.full(1, cut))
        below = _normal((factor - 1.0) / of_rank) if factor and of_rank else 1.0
        overflows = 1.0 - below ** (ep * layers)
        once = predictions(limited, entry).step_s
        found.append(
            Capacity(
                factor=factor,
                step_s=float(predictions(drops, entry).step_s[0]),
                peak_bytes=float(memory(drops, entry.coefficients).worst_bytes[0]),
                dropped=lost,
                overflows=overflows,
                again_s=float(once[0]) * (1.0 + overflows),
            )
        )
    return tuple(found)


def beyond(factor: float, spread: float) -> tuple[float, float]:
    """(share of tokens above `factor` even shares, standard deviation of what is kept), where
    shares are log-normal with mean 1: the price of a call option, and its second moment."""
    if spread <= 0.0:
        return max(0.0, 1.0 - factor), 0.0
    sigma = sqrt(log(1.0 + spread**2))
    above = (-log(factor) + sigma**2 / 2.0) / sigma
    lost = _normal(above) - factor * _normal(above - sigma)
    square = (1.0 + spread**2) * _normal(-above - sigma) + factor**2 * _normal(above - sigma)
    return lost, sqrt(max(0.0, square - (1.0 - lost) ** 2))


def _normal(z: float) -> float:
    return 0.5 * (1.0 + erf(z / sqrt(2.0)))
