"""Why a step takes longer than it should: seconds outside of what is expected, each with a cause,
its evidence and a remedy; the largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fourfold.traces import kernels, parts, waits
from fourfold.traces.cause import LEAST_SHARE, Cause, TraceCase, ratio
from fourfold.traces.imbalance import expert_imbalance


def find_causes(case: TraceCase) -> list[Cause]:
    least = LEAST_SHARE * case.step_s
    found = [cause for look in _LOOKS for cause in look(case) if cause.seconds > least]
    return sorted(found, key=lambda cause: -cause.seconds)


def _communication(case: TraceCase) -> Iterator[Cause]:
    for name, shown in case.measured.items():
        if not name.startswith(parts.COMMUNICATION):
            continue
        axis = name.removeprefix(parts.COMMUNICATION)
        moved = sum(t.moved.get(name, 0.0) for t in case.times) / len(case.times)
        hidden = 100.0 * max(0.0, 1.0 - shown / moved) if moved else 0.0
        over = shown - (case.expected.parts[name].mid if name in case.expected.parts else 0.0)
        yield Cause(
            f"exposed communication: {axis}", over, 0.3 * over, over, "measured",
            f"{1e3 * moved:.0f} ms of collectives, {hidden:.0f}% of them beside computation",
            _COMM_REMEDY.get(axis, "overlap it with computation, or use fewer ranks of this axis"),
            f"{axis}_comm=0", (name,),
        )  # fmt: skip


_COMM_REMEDY = {
    "dp": "prefetch weights, reduce in larger buckets, accumulate more micro batches a step",
    "tp": "fewer tensor ranks, within one host; overlap with products (async TP)",
    "ep": "experts within a host, a fused dispatcher, overlap with another micro batch",
    "pp": "more micro batches, interleaved stages",
}


def _imbalance(case: TraceCase) -> Iterator[Cause]:
    found = expert_imbalance(case.linked, case.run.placed, len(case.times))
    if found is None:
        return
    over = found.seconds
    yield Cause(
        "imbalance of experts", over, 0.7 * over, 1.3 * over, "measured",
        f"grouped products of one shape take {found.fastest_ms:.2f} to {found.slowest_ms:.2f} ms "
        f"from layer to layer; their shapes are the same, so their tokens are spread unevenly",
        "balance the router (auxiliary loss or bias), or a capacity; forced routing is the bound",
        "routing=even", (parts.EXPERTS,),
    )  # fmt: skip


def _slow_experts(case: TraceCase) -> Iterator[Cause]:
    for name, what, remedy in (
        (
            parts.ROUTING,
            "routing of tokens to experts",
            "fused permutation, fewer copies and casts",
        ),
        (parts.OPTIMIZER, "slow optimizer", "fused AdamW, one flat buffer, compiled update"),
    ):
        if case.is_outside(name):
            over = case.over(name)
            slow = ratio(case, (name,))
            yield Cause(what, over, 0.5 * over, 1.2 * over, "likely",
                        f"{slow:.1f} times what is expected", remedy, f"{name.split(',')[0]}=1",
                        (name,))  # fmt: skip


_LOOKS: tuple[Callable[[TraceCase], Iterator[Cause]], ...] = (
    waits.data, waits.sync, waits.memory, waits.launches, waits.outside, kernels.fp32,
    kernels.clock, kernels.attention, kernels.uncompiled, kernels.recompute,
    _communication, _imbalance, _slow_experts,
)  # fmt: skip
