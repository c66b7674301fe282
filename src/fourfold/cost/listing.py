"""A predicted step as rows, operation by operation, whose seconds add up to the step's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import numpy as np

from fourfold.cost.columns import Coefficients, Columns
from fourfold.cost.memory.held import kept_bytes
from fourfold.cost.ops.ends import embedding, handover, head
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op
from fourfold.cost.step.estimate import once_ops, part_of
from fourfold.cost.step.rates import rates_of

# What no operation does, and what a step shows of it.
WAITING = {
    "bubble": "pipeline, waiting",
    "fixed": "data, logging, clipping",
    "jitter": "waiting for later ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One operation of a step. `phase`: forward, recompute, gradients of inputs or of weights,
    update. `times` it is done on a rank, mean over stages, each time so many FLOPs and bytes, moved
    by a kernel or sent, of which it `keeps` some until its backward pass; seconds of all times that
    the step shows, and that it would take where nothing runs beside it."""

    name: str
    kind: str
    phase: str
    axis: str
    part: str
    shape: tuple[float, ...]
    times: float
    flops: float
    bytes: float
    keeps: float
    alone_s: float
    step_s: float


def operations(c: Columns, coef: Coefficients, parts_s: dict[str, float]) -> tuple[OpRow, ...]:
    """Of the one run in `c`, which takes `parts_s`: what overlaps, and what rows taught beyond the
    formulas, is shared out among the operations of a part by what each takes alone."""
    rows = _alone(c, coef)
    alone = {part: sum(row.alone_s for row in rows if row.part == part) for part in parts_s}
    shown = [row for row in rows if row.alone_s > 0.0 and parts_s[row.part] != 0.0]
    found = [
        replace(row, step_s=row.alone_s * parts_s[row.part] / alone[row.part]) for row in shown
    ]
    waiting = [
        OpRow(name=name, kind="waiting", phase="", axis="", part=part, shape=(), times=1.0,
              flops=0.0, bytes=0.0, keeps=0.0, alone_s=parts_s[part], step_s=parts_s[part])
        for part, name in WAITING.items()
    ]  # fmt: skip
    return (*found, *waiting)


def _alone(c: Columns, coef: Coefficients) -> list[OpRow]:
    """Every operation, forwards, computed again and backwards."""
    rates, micros = rates_of(c, coef), _one(c.share / c.micro)
    stages, layers = _one(c.pp), _one(c.layers)
    reductions, updates = once_ops(c)
    once = [*(op for both in reductions for op in both), *updates]
    lists: list[tuple[str, Iterable[Op], float]] = [
        ("head", embedding(c, c.micro), micros / stages),
        ("", decoder_layer(c, c.micro), micros * layers / stages),
        ("head", head(c, c.micro), micros / stages),
        ("pp_comm", handover(c, c.micro), micros),
        ("", once, 1.0),
    ]
    rows = []
    for part, ops, count in lists:
        for op in ops:
            axis = op.axis.partition(" ")[0]
            own = part or {"dp": "dp_comm", "": "optimizer"}.get(axis if op in once else "-", "")
            seconds = _one(_dp_s(c, op) if axis == "dp" else rates.seconds(op))
            again = _one(op.again) if op.phase == "forward" else 0.0
            row = _row(op, own or part_of(op), count, seconds)
            rows.append(row if part else replace(row, keeps=_one(kept_bytes(c, [op], coef))))
            if again:
                more = {"phase": "recompute", "part": part or "recompute", "times": again * count}
                rows.append(replace(row, **more, alone_s=again * row.alone_s))
    return rows


def _dp_s(c: Columns, op: Op) -> Any:
    """What a step's reductions are shared out by: their bytes at the network's rate."""
    return op.times * op.halves * op.bytes / c.net


def _row(op: Op, part: str, count: float, seconds: float) -> OpRow:
    shape = (_one(op.m), _one(op.n), _one(op.k)) if op.kind.endswith("product") else ()
    return OpRow(
        name=op.name,
        kind=op.kind,
        phase=op.phase,
        axis=op.axis,
        part=part,
        shape=shape,
        times=count * _one(op.share),
        flops=2.0 * float(np.prod(shape)) * _one(op.groups) if shape else 0.0,
        bytes=_one(op.bytes * op.halves),
        keeps=0.0,
        alone_s=count * seconds,
        step_s=0.0,
    )


def _one(value: Any) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def whole_units(values: Sequence[float], unit: float) -> list[int]:
    """In whole units that add up to the rounded sum: the largest remainders are rounded up."""
    exact = [value / unit for value in values]
    units = [floor(value) for value in exact]
    missing = round(sum(exact)) - sum(units)
    by_rest = sorted(range(len(exact)), key=lambda i: units[i] - exact[i])
    for i in by_rest[:missing]:
        units[i] += 1
    return units
