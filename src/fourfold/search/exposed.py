"""Seconds of a candidate by part, and as a reader thinks of them."""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.search.ranking import Ranking

# Parts of a step as a reader thinks of them: work, and what is paid beside it.
EXPOSED = {
    "compute": ("gemm", "attention", "elementwise", "head"),
    "recompute": ("recompute",),
    "tp": ("tp_comm",),
    "cp": ("cp_comm",),
    "ep": ("ep_comm",),
    "pp": ("pp_comm", "bubble"),
    "dp": ("dp_comm", "fsdp_comm"),
    "host": ("host",),
    "other": ("optimizer", "fixed", "jitter"),
}


def parts_of(ranking: Ranking, i: int) -> dict[str, float]:
    """Seconds by part; of exchanges only where there are experts."""
    hidden = () if ranking.query.model.moe else EXPOSED["ep"]
    parts = ranking.predicted.times.parts.items()
    return {name: float(part[i]) for name, part in parts if name not in hidden}


def exposed(parts: Mapping[str, float]) -> dict[str, float]:
    known = {name: some for name, some in EXPOSED.items() if some[0] in parts}
    return {name: sum(parts[part] for part in some) for name, some in known.items()}
