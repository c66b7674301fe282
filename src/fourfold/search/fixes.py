"""A run went out of memory: what would make it fit, and what would that cost? Predicted, ranked.

Each fix changes one thing. Those that fit come first, the fastest of them on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.errors import UserError
from fourfold.search.forecast import Forecast
from fourfold.search.legal import Target, why_not
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class Fix:
    words: str
    spec: RunSpec


def fixes(spec: RunSpec) -> list[Fix]:
    """Legal runs of the same work on the same ranks, each one change away."""
    found = []
    for words, changed in _changes(spec):
        refused = why_not(
            changed.model, changed.layout, changed.batch, changed.policy, Target(gpus=changed.gpus)
        )
        if not refused:
            found.append(Fix(words, changed))
    return found


def _changes(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    micro = spec.batch.micro_batch
    while micro > 1:
        micro //= 2
        batch = replace(spec.batch, micro_batch=micro)
        yield f"micro_batch = {micro}", replace(spec, batch=batch)
    for kind in ("selective", "full"):
        if spec.policy.recompute != kind:
            policy = replace(spec.policy, recompute=kind)
            yield f"recompute = {kind}", replace(spec, policy=policy)
    for zero in range(spec.policy.zero + 1, 4):
        policy = replace(spec.policy, sharding=f"zero{zero}")  # type: ignore[arg-type]
        yield f"sharding = zero{zero}", replace(spec, policy=policy)
    for axis in ("tp", "pp", "cp"):
        layout = _moved(spec.layout, axis)
        if layout is not None:
            yield f"layout = {layout}", replace(spec, layout=layout)


def _moved(layout: Layout, axis: str) -> Layout | None:
    """Twice as much of an axis, half as much data parallelism."""
    if layout.shard % 2:
        return None
    try:
        return replace(
            layout, shard=layout.shard // 2, **{axis: 2 * layout.size(axis)}  # type: ignore[arg-type]
        )  # fmt: skip
    except UserError:
        return None


def ranked(
    found: list[Fix], answers: list[Forecast], limit_bytes: float
) -> list[tuple[Fix, Forecast, bool]]:
    """(fix, forecast, whether it fits), those that fit first, by seconds per step."""
    rows = [
        (fix, answer, answer.peak_bytes <= limit_bytes)
        for fix, answer in zip(found, answers, strict=True)
    ]
    return sorted(
        rows, key=lambda row: (not row[2], row[1].step_s if row[2] else row[1].peak_bytes)
    )
