"""Notes of a plan: its first choice beside the best run that was measured; what its router makes of
it; what was searched."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose
from typing import TYPE_CHECKING, Any

from fourfold.text_table import Grid, named, table
from fourfold.units import short_s, three_digits

if TYPE_CHECKING:
    from fourfold.search.plan_answer import MeasuredBest, PlanAnswer, PlanRow


def compared(known: MeasuredBest, first: PlanRow) -> str:
    if not known.step_s:
        return f"{known.source} has no measured run of this model at this sequence length"
    low, mid, high = (
        100 * (first.tokens_s_gpu * first.step_s / step_s / known.tokens_s_gpu - 1)
        for step_s in (first.step_s_high, first.step_s, first.step_s_low)
    )
    is_first = first.measured_s is not None and isclose(first.measured_s, known.step_s)
    what = "#1 itself, predicted" if is_first else "#1 is predicted"
    run = f"{known.name} micro batch {known.micro_batch} {known.sharding} on {known.gpus:,} GPUs"
    return (
        f"best measured run, {known.row} of {known.source}: {run}, {three_digits(known.step_s)} s, "
        f"{known.tokens_s_gpu:,.0f} tokens/s/GPU; {what} {abs(mid):.1f}% "
        f"{'faster' if mid >= 0 else 'slower'} (80%: {low:+.1f}% to {high:+.1f}%)"
    )


def searched(plan: PlanAnswer) -> Iterable[str]:
    axes = "; ".join(f"{name} {_values(values)}" for name, values in plan.axes.items() if values)
    refused = ", ".join(f"{name} {count:,}" for name, count in plan.refused.items())
    yield f"searched {plan.candidates:,} points: {axes}"
    does_not_fit = plan.legal - plan.too_slow - plan.fitting
    slow = f", {plan.too_slow:,} too slow to be listed" if plan.too_slow else ""
    yield f"legal: {plan.legal:,} ({plan.fitting:,} fit, {does_not_fit:,} do not{slow})"
    yield f"rejected: {sum(plan.refused.values()):,} ({refused})" if refused else "rejected: none"
    if plan.dropped_by_where:
        yield f"excluded by --where: {plan.dropped_by_where:,}"


def _values(values: list[Any]) -> str:
    if len(values) > 4 and all(isinstance(value, int) for value in values):
        return f"{len(values)} values {values[0]}-{values[-1]}"
    return "/".join(str(value) for value in values)


def routing(plan: PlanAnswer) -> Iterable[str]:
    """Of a model with experts."""
    one = plan.routed
    if one is None:
        return
    first = plan.best.step_s_high if plan.best else 0.0  # which takes the imbalance as known
    differ = " as routers differ" * (not isclose(one.natural_range_s[1], first, rel_tol=1e-3))
    even, natural = (
        f"{short_s(step_s)} s (80%: {short_s(low)} to {short_s(high)}{why}), {peak / 2**30:.0f} GiB"
        for step_s, (low, high), peak, why in (
            (one.forced_s, one.forced_range_s, one.forced_bytes, ""),
            (one.natural_s, one.natural_range_s, one.natural_bytes, differ),
        )
    )
    yield (
        f"routing: forced even {even}; natural {natural}; the busiest EP rank gets "
        f"{one.fullest:.2f}x the mean tokens (--imbalance {one.imbalance:.2g})"
    )
    yield "; ".join(one.remarks)


def capacities(plan: PlanAnswer) -> list[Grid]:
    if plan.routed is None or not plan.routed.capacities:
        return []
    shown = table(
        plan.routed.capacities,
        ("capacity", lambda one: f"{one.factor:.2f}" if one.factor else "none"),
        *named("s/step=step_s:short"),
        ("GiB", lambda one: f"{one.peak_bytes / 2**30:.1f}"),
        *named("dropped tokens=dropped:.1%"),
        ("steps rerun", lambda one: f"{one.overflows:.0%}" if one.factor else "-"),
        *named("s/step with reruns=again_s:short"),
    )
    return [shown]
