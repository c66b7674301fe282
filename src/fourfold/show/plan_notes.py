"""Notes of a plan: its first choice beside the best run that was measured; what was searched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.search.plan_answer import MeasuredBest, PlanAnswer, PlanRow


def compared(known: MeasuredBest, first: PlanRow) -> str:
    if not known.step_s:
        return f"{known.source} has no measured run of this model at this sequence length"
    low, mid, high = (
        100 * (first.tokens_s_gpu * first.step_s / step_s / known.tokens_s_gpu - 1)
        for step_s in (first.step_s_high, first.step_s, first.step_s_low)
    )
    run = f"{known.name} micro batch {known.micro_batch} {known.sharding} on {known.gpus:,} GPUs"
    return (
        f"best measured run, {known.row} of {known.source}: {run}, {known.step_s:.3g} s, "
        f"{known.tokens_s_gpu:,.0f} tokens/s/GPU; #1 is predicted {abs(mid):.1f}% "
        f"{'faster' if mid >= 0 else 'slower'} (80%: {low:+.1f}% to {high:+.1f}%)"
    )


def searched(plan: PlanAnswer) -> Iterable[str]:
    axes = "; ".join(f"{name} {_values(values)}" for name, values in plan.axes.items())
    refused = ", ".join(f"{name} {count:,}" for name, count in plan.refused.items())
    yield f"searched {plan.candidates:,} points: {axes}"
    yield (
        f"rejected: {refused or 'none'}; legal: {plan.legal:,}, of which "
        f"{plan.legal - plan.fitting:,} do not fit"
    )
    if plan.dropped_by_where:
        yield f"excluded by --where: {plan.dropped_by_where:,}"


def _values(values: list[Any]) -> str:
    if len(values) > 4 and all(isinstance(value, int) for value in values):
        return f"{len(values)} values {values[0]}-{values[-1]}"
    return "/".join(str(value) for value in values)
