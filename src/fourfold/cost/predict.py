"""What runs will take: seconds with an interval, bytes, and the parts of both. Calibrations were
fitted with the closed form: where a pipeline is played, its seconds change by the ratio of both.

A predicted step as rows, operation by operation, whose seconds add up to the step's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.interval import StepInterval
from fourfold.cost.memory.held import kept_bytes
from fourfold.cost.memory.peak import Memory, fit_chance, memory
from fourfold.cost.ops.ends import embedding, handover, head
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op, of_one
from fourfold.cost.schedule import SETTLED_ROUNDS, ChunkTimes, step_s
from fourfold.cost.step.estimate import LAYER_PARTS, Times, estimate, once_ops, part_of
from fourfold.cost.step.pipeline import StageTimes, chunk_layers, has_own_schedule, pipeline_s
from fourfold.cost.step.rates import rates_of
from fourfold.cost.step.stage_kinds import chunk_shares
from fourfold.cost.step.traffic import sent_copies
from fourfold.result.report import Prediction
from fourfold.spec.words import SCHEDULES, Schedule

_NOT_IN_PIPELINE = ("dp_comm", "optimizer", "fixed", "jitter")
# A run with more events than this is left to the closed form, whoever asks and beside whatever
# else: a step of 48 stages is 25,000 events.
MAX_EVENTS = 12_000


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Of many runs, one element each. `closed_s` is the closed form's answer alone."""

    entry: FittedStack
    columns: Columns
    times: Times
    room: Memory
    closed_s: Floats
    played: int  # pipelines that were simulated

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def step_s(self) -> Floats:
        return self.times.step_s

    @cached_property
    def interval(self) -> StepInterval:
        """Found when it is asked for, which most of what a search looks at is not."""
        return StepInterval(self.columns, self.entry, self.times)

    @cached_property
    def fits(self) -> Floats:
        """The chance of each (0..1) to stay below the limit."""
        return fit_chance(self.columns, self.entry, self.room.worst_bytes)

    @property
    def low_s(self) -> Floats:
        return self.interval.ends_s[0]

    @property
    def high_s(self) -> Floats:
        return self.interval.ends_s[1]

    def take(self, index: NDArray[np.intp]) -> Predictions:
        """Those at these places, in that order; `played` stays what it was for all."""
        return replace(
            self,
            columns=self.columns.take(index),
            times=self.times.take(index),
            room=self.room.take(index),
            closed_s=self.closed_s[index],
        )

    def one(self, i: int) -> Prediction:
        return Prediction(
            step_s=float(self.step_s[i]),
            step_s_low=float(self.low_s[i]),
            step_s_high=float(self.high_s[i]),
            peak_bytes=float(self.room.worst_bytes[i]),
        )


def predictions(c: Columns, entry: FittedStack) -> Predictions:
    closed = estimate(c, entry.coefficients)
    parts = closed.parts
    work = closed.step_s - parts["fixed"] - parts["jitter"]
    pipe = closed.step_s - sum((parts[name] for name in _NOT_IN_PIPELINE), np.zeros(len(c)))
    ratio, played = _pipeline_ratio(c, entry.coefficients, closed)
    extra = pipe * (ratio - 1.0) * (1.0 + parts["jitter"] / work)
    parts = parts | {"bubble": parts["bubble"] + extra}
    times = Times(closed.step_s + extra, parts, closed.layer)
    return Predictions(
        entry=entry,
        columns=c,
        times=times,
        room=memory(c, entry.coefficients),
        closed_s=closed.step_s,
        played=played,
    )


def _pipeline_ratio(c: Columns, coef: Coefficients, times: Times) -> tuple[Floats, int]:
    """(simulated over closed-form pipeline seconds, how many were played); 1 where none was."""
    ratio = np.ones(len(c))
    played = 0
    for (_, _, schedule, micros), places in _groups(c).items():
        index = np.array(places)
        if events(c)[index[0]] > MAX_EVENTS:
            continue
        played += len(places)
        group = c.take(index)
        own = chunk_times(group, coef, times.take(index), micros)
        ratio[index] = _group(group, *own, schedule=SCHEDULES[schedule], micros=micros)
    return ratio, played


def _groups(c: Columns) -> dict[tuple[int, int, int, int], list[int]]:
    """Places of runs whose events come in the same order."""
    micros = c.micros
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for i in np.flatnonzero((c.pp > 1) & ~has_own_schedule(c)):
        key = (int(c.pp[i]), int(c.vpp[i]), int(c.schedule[i]), int(micros[i]))
        groups.setdefault(key, []).append(int(i))
    return groups


def events(c: Columns) -> Floats:
    """Events to play of each run's step: a long one plays some of its rounds, twice."""
    micros = c.micros
    rounds = np.where(micros <= SETTLED_ROUNDS * c.pp, 1.0, 2.0)
    return 2.0 * c.pp * c.vpp * np.minimum(micros, rounds * (SETTLED_ROUNDS + 1.0) * c.pp)


def playable(c: Columns, most: int) -> int:
    """How many of the first runs take at most `most` events in all."""
    need, spent = events(c), np.zeros(len(c))
    for places in _groups(c).values():
        spent[places[0]] = need[places[0]] if need[places[0]] <= MAX_EVENTS else 0.0
    return int((np.cumsum(spent) <= most).sum())


def chunk_times(
    c: Columns, coef: Coefficients, times: Times, micros: int
) -> tuple[ChunkTimes, Floats]:
    """Seconds of each chunk, for candidates with the same stages, virtual stages and micro batches;
    and forward plus backward [chunks, candidates]. Hand-overs are part of them, as the closed form
    has them."""
    pp, vpp, parts = int(c.pp[0]), int(c.vpp[0]), times.parts
    last = (c.share - (micros - 1.0) * c.micro) / c.micro
    slots = micros - 1.0 + last
    layers_done = slots * c.layers / c.pp
    layer = sum((parts[name] for name in LAYER_PARTS), np.zeros(len(c))) / layers_done
    hop = parts["pp_comm"] / slots / vpp
    counts = chunk_layers(c, pp * vpp)
    whole = counts * layer * _against_mean(c, coef, times, counts) + hop
    whole[-1] += parts["head"] * c.pp / slots
    forward = whole / (3.0 + c.full_ckpt)
    weights = parts["gemm"] / layers_done / layer / 3.0 * whole
    chunks = ChunkTimes(
        forward=forward,
        backward=whole - forward,
        weights=np.minimum(weights, (whole - forward) / 2.0),
        last=last,
    )
    return chunks, whole


def _against_mean(c: Columns, coef: Coefficients, times: Times, counts: Floats) -> Floats:
    """Seconds of a layer of each chunk, by the kinds of layers in it, against those of the model's
    mean layer."""
    if not times.layer.kinds:
        return np.ones(())
    shares = chunk_shares(c, times.layer.kinds, counts)
    return times.layer.total_of(shares, rates_of(c, coef)) / times.layer.total


def _group(
    c: Columns, chunks: ChunkTimes, whole: Floats, *, schedule: Schedule, micros: int
) -> Floats:
    """The ratio of candidates with the same stages, virtual stages and number of micro batches."""
    pp, vpp = int(c.pp[0]), int(c.vpp[0])
    played = step_s(schedule, chunks, stages=pp, virtual_stages=vpp, micros=micros)
    # In one order whatever else is asked about: `sum` adds one column in another than many.
    ranks = np.cumsum(whole.reshape(vpp, pp, len(c)), axis=0)[-1]
    middle = ranks[1:-1].max(axis=0) if pp > 2 else ranks[0]
    stages = StageTimes(ranks[0], middle, ranks[-1], np.cumsum(ranks, axis=0)[-1])
    return played / pipeline_s(c, stages, micros - 1.0 + chunks.last)


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
        OpRow(
            name=name,
            kind="waiting",
            phase="",
            axis="",
            part=part,
            shape=(),
            times=1.0,
            flops=0.0,
            bytes=0.0,
            keeps=0.0,
            alone_s=parts_s[part],
            step_s=parts_s[part],
        )
        for part, name in WAITING.items()
    ]
    return (*found, *waiting)


def _alone(c: Columns, coef: Coefficients) -> list[OpRow]:
    """Every operation, forwards, computed again and backwards."""
    rates, micros = rates_of(c, coef), of_one(c.share / c.micro)
    stages, layers = of_one(c.pp), of_one(c.layers)
    reductions, updates = once_ops(c)
    lists: list[tuple[str, Iterable[Op], float]] = [
        ("head", embedding(c, c.micro), micros / stages),
        ("", decoder_layer(c, c.micro), micros * layers / stages),
        ("head", head(c, c.micro), micros / stages),
        ("pp_comm", handover(c, c.micro), micros),
        ("dp_comm", [op for both in reductions for op in both], 1.0),
        ("optimizer", updates, 1.0),
    ]
    rows = []
    for part, ops, count in lists:
        for op in ops:
            axis = op.axis.partition(" ")[0]
            seconds = of_one(_dp_s(c, op) if axis == "dp" else rates.seconds(op))
            again = of_one(op.again) if op.phase == "forward" else 0.0
            row = _row(c, op, part or part_of(op), count, seconds)
            rows.append(row if part else replace(row, keeps=of_one(kept_bytes(c, [op], coef))))
            if again:
                more = {"phase": "recompute", "part": part or "recompute", "times": again * count}
                rows.append(replace(row, **more, alone_s=again * row.alone_s))
    return rows


def _dp_s(c: Columns, op: Op) -> Any:
    """What a step's reductions are shared out by: their bytes at the network's rate."""
    return op.times * op.halves * op.bytes / c.net


def _row(c: Columns, op: Op, part: str, count: float, seconds: float) -> OpRow:
    shape = (of_one(op.m), of_one(op.n), of_one(op.k)) if op.kind.endswith("product") else ()
    copies = sent_copies(c) if op.axis == "ep" else 1.0
    return OpRow(
        name=op.name,
        kind=op.kind,
        phase=op.phase,
        axis=op.axis,
        part=part,
        shape=shape,
        times=count * of_one(op.share * op.times),
        flops=of_one(op.flops),
        bytes=of_one(op.bytes * op.halves * copies),
        keeps=0.0,
        alone_s=count * seconds,
        step_s=0.0,
    )
