"""How good predictions are where a stranger asks: each kind of fold, sources alike; each source.

Percent throughout. `nested`: in intervals whose weights the row's source had no say in, NaN where
there is no other source; `inside`: in those of the shipped weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.fit.widths import MANY_ROWS, Bools, Widths, shipped_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldScore:
    """One kind of fold, or of one source in it (`sources` 1). `nested_least_pct` and
    `nested_most_pct`: of its sources with MANY_ROWS rows; NaN where none has."""

    left_out: str
    source: str  # '' stands for all
    sources: int
    rows: int
    median_pct: float
    p90_pct: float
    inside_pct: float
    nested_pct: float
    nested_least_pct: float
    nested_most_pct: float
    width_pct: float
    interval_score: float


def fold_scores(widths: Widths) -> tuple[FoldScore, ...]:
    """Of every kind of fold, followed by its sources."""
    inside, width, score = widths.scores(shipped_weights())
    numbers = (np.abs(np.exp(-widths.error) - 1.0), inside, widths.nested(), width, score)
    found = []
    for kind in dict.fromkeys(widths.kind.tolist()):
        here = widths.kind == kind
        parts = [
            _of_source(kind, source, here & (widths.source == source), numbers)
            for source in sorted(set(widths.source[here].tolist()))
        ]
        found += [_mean(kind, parts), *parts]
    return tuple(found)


def _of_source(
    kind: str, source: str, rows: Bools, numbers: tuple[Floats | Bools, ...]
) -> FoldScore:
    off, inside, nested, width, score = (100.0 * column[rows] for column in numbers)
    count = int(rows.sum())
    checked = float(nested.mean()) if count >= MANY_ROWS else float("nan")
    return FoldScore(
        left_out=kind,
        source=source,
        sources=1,
        rows=count,
        median_pct=float(np.median(off)),
        p90_pct=float(np.percentile(off, 90)),
        inside_pct=float(inside.mean()),
        nested_pct=float(nested.mean()),
        nested_least_pct=checked,
        nested_most_pct=checked,
        width_pct=float(width.mean()),
        interval_score=float(score.mean()),
    )


def _mean(kind: str, parts: list[FoldScore]) -> FoldScore:
    """Sources alike, however many rows they have."""
    names = ("median_pct", "p90_pct", "inside_pct", "nested_pct", "width_pct", "interval_score")
    means = {name: float(np.mean([getattr(part, name) for part in parts])) for name in names}
    many = [part.nested_least_pct for part in parts if np.isfinite(part.nested_least_pct)]
    return FoldScore(
        left_out=kind,
        source="",
        sources=len(parts),
        rows=sum(part.rows for part in parts),
        nested_least_pct=min(many, default=float("nan")),
        nested_most_pct=max(many, default=float("nan")),
        **means,
    )
