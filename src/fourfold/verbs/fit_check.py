"""fit_check: whether a layout fits, what fills the fullest rank, and what would need less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.events import OnEvent, ignore
from fourfold.search.explain import Smallest
from fourfold.search.legal import Refusal
from fourfold.spec.layout import Layout
from fourfold.verbs import Answer
from fourfold.verbs.plan import explain
from fourfold.verbs.requests import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FitChecked(Answer):
    """One layout, in its fastest way to run of those that the request leaves open. `smallest`: of a
    layout that does not fit, the way that needs least; `refusals`: the rules that it breaks."""

    layout: str
    legal: bool
    fits: bool
    memory_bytes: float  # of a GPU
    refusals: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    micro_batch: int | None = None
    sharding: str | None = None
    recompute: str | None = None
    fit_chance: float | None = None
    peak_bytes: float | None = None
    peak_bytes_low: float | None = None
    peak_bytes_high: float | None = None
    parts_bytes: dict[str, float] | None = None
    provenance: str | None = None
    smallest: Smallest | None = None


def fit_check(
    request: PlanRequest, layout: str | Layout, *, on_event: OnEvent = ignore
) -> FitChecked:
    """What the request decides of micro batch, sharding and recompute is kept."""
    found = explain(request, layout, on_event=on_event).explanation
    row = found.row
    sizes: dict[str, Any] = {} if row is None else {
        "micro_batch": row.micro_batch, "sharding": row.policy.sharding,
        "recompute": row.policy.recompute, "fit_chance": row.fit_chance,
        "peak_bytes": row.peak_bytes, "peak_bytes_low": row.peak_bytes_low,
        "peak_bytes_high": row.peak_bytes_high, "parts_bytes": row.memory_bytes,
        "provenance": row.provenance,
    }  # fmt: skip
    return FitChecked(
        layout=str(found.layout),
        legal=found.legal,
        fits=found.fits,
        memory_bytes=found.memory_bytes,
        refusals=tuple(str(Refusal(**one)) for one in found.refusals),
        nearest=found.nearest,
        smallest=found.smallest,
        **sizes,
    )
