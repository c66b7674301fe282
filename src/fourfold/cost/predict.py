"""What runs will take: seconds with an interval, bytes, and the parts of both. Calibrations were
fitted with the closed form: where a pipeline is played, its seconds change by the ratio of both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.interval import bounds
from fourfold.cost.memory.peak import Memory, memory
from fourfold.cost.schedule import SETTLED_ROUNDS, ChunkTimes, step_s
from fourfold.cost.step.estimate import LAYER_PARTS, Times, estimate
from fourfold.cost.step.pipeline import StageTimes, chunk_layers, pipeline_s
from fourfold.result.report import Prediction
from fourfold.spec.words import SCHEDULES, Schedule

_NOT_IN_PIPELINE = ("dp_comm", "optimizer", "fixed", "jitter")
# A run with more events than this is left to the closed form, whoever asks and beside whatever
# else: a step of 48 stages is 25,000 events.
MAX_EVENTS = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Of many runs, one element each. `closed_s` is the closed form's answer alone."""

    columns: Columns
    times: Times
    low_s: Floats
    high_s: Floats
    room: Memory
    closed_s: Floats
    played: int  # pipelines that were simulated

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def step_s(self) -> Floats:
        return self.times.step_s

    def take(self, index: NDArray[np.intp]) -> Predictions:
        """Those at these places, in that order; `played` stays what it was for all."""
        return replace(
            self,
            columns=self.columns.take(index),
            times=self.times.take(index),
            low_s=self.low_s[index],
            high_s=self.high_s[index],
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
    ratio, played = _pipeline_ratio(c, closed)
    extra = pipe * (ratio - 1.0) * (1.0 + parts["jitter"] / work)
    parts = parts | {"bubble": parts["bubble"] + extra}
    times = Times(closed.step_s + extra, parts, closed.launch_ratio)
    low_s, high_s = bounds(c, entry, times)
    return Predictions(
        columns=c,
        times=times,
        low_s=low_s,
        high_s=high_s,
        room=memory(c, entry.coefficients),
        closed_s=closed.step_s,
        played=played,
    )


def _pipeline_ratio(c: Columns, times: Times) -> tuple[Floats, int]:
    """(simulated over closed-form pipeline seconds, how many were played); 1 where none was."""
    ratio = np.ones(len(c))
    played = 0
    for (_, _, schedule, micros), places in _groups(c).items():
        index = np.array(places)
        if events(c)[index[0]] > MAX_EVENTS:
            continue
        played += len(places)
        parts = {name: part[index] for name, part in times.parts.items()}
        ratio[index] = _group(c.take(index), parts, schedule=SCHEDULES[schedule], micros=micros)
    return ratio, played


def _groups(c: Columns) -> dict[tuple[int, int, int, int], list[int]]:
    """Places of runs whose events come in the same order."""
    micros = c.micros
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for i in np.flatnonzero(c.pp > 1):
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


def chunk_times(c: Columns, parts: dict[str, Floats], micros: int) -> tuple[ChunkTimes, Floats]:
    """Seconds of each chunk, for candidates with the same stages, virtual stages and micro batches;
    and forward plus backward [chunks, candidates]. Hand-overs are part of them, as the closed form
    has them."""
    pp, vpp = int(c.pp[0]), int(c.vpp[0])
    last = (c.share - (micros - 1.0) * c.micro) / c.micro
    slots = micros - 1.0 + last
    layers_done = slots * c.layers / c.pp
    layer = sum((parts[name] for name in LAYER_PARTS), np.zeros(len(c))) / layers_done
    hop = parts["pp_comm"] / slots / vpp
    whole = chunk_layers(c, pp * vpp) * layer + hop
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


def _group(c: Columns, parts: dict[str, Floats], *, schedule: Schedule, micros: int) -> Floats:
    """The ratio of candidates with the same stages, virtual stages and number of micro batches."""
    pp, vpp = int(c.pp[0]), int(c.vpp[0])
    chunks, whole = chunk_times(c, parts, micros)
    played = step_s(schedule, chunks, stages=pp, virtual_stages=vpp, micros=micros)
    # In one order whatever else is asked about: `sum` adds one column in another than many.
    ranks = np.cumsum(whole.reshape(vpp, pp, len(c)), axis=0)[-1]
    middle = ranks[1:-1].max(axis=0) if pp > 2 else ranks[0]
    stages = StageTimes(ranks[0], middle, ranks[-1], np.cumsum(ranks, axis=0)[-1])
    return played / pipeline_s(c, stages, micros - 1.0 + chunks.last)
