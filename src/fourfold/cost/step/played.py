"""How much do the closed forms of a pipeline miss? The event simulation's answer for a few hundred
runs, as a ratio to the closed form on the same stage times.

A ratio, because calibrations were fitted with the closed form: where that is exact (equal stages,
equal micro batches, whole rounds) nothing changes. For the same reason hand-overs between stages
are part of a chunk's time here, as the closed form has them, and not a stream of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.schedule.simulate import SETTLED_ROUNDS, ChunkTimes, step_s
from fourfold.cost.step.estimate import Times, estimate
from fourfold.cost.step.pipeline import chunk_layers, pipeline_s
from fourfold.spec.words import SCHEDULES, Schedule

LAYER_PARTS = ("gemm", "attention", "elementwise", "recompute", "tp_comm", "cp_comm", "fsdp_comm",
               "host")  # fmt: skip
_NOT_IN_PIPELINE = ("dp_comm", "optimizer", "fixed", "jitter")
# A run with more events than this is left to the closed form, whoever asks and beside whatever
# else: a step of 48 stages is 25,000 events.
MAX_EVENTS = 12_000


@dataclass(frozen=True, slots=True)
class Priced:
    """Seconds with pipelines played, the closed form's alone, and how many were played."""

    times: Times
    closed_s: Floats
    played: int


def priced(c: Columns, coef: Coefficients) -> Priced:
    """What runs take: the same seconds whoever asks, a search or the forecast of one run."""
    times = estimate(c, coef)
    work = times.step_s - times.parts["fixed"] - times.parts["jitter"]
    pipe = times.step_s - sum((times.parts[name] for name in _NOT_IN_PIPELINE), np.zeros(len(c)))
    ratio, played = pipeline_ratio(c, times)
    extra = pipe * (ratio - 1.0) * (1.0 + times.parts["jitter"] / work)
    parts = times.parts | {"bubble": times.parts["bubble"] + extra}
    return Priced(Times(times.step_s + extra, parts), times.step_s, played)


def pipeline_ratio(c: Columns, times: Times) -> tuple[Floats, int]:
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
    and forward plus backward [chunks, candidates]."""
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
        hop=np.zeros(len(c)),
        reduce=np.zeros((pp, len(c))),
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
    closed = pipeline_s(
        c,
        first=ranks[0],
        middle=middle,
        last=ranks[-1],
        total=np.cumsum(ranks, axis=0)[-1],
        slots=micros - 1.0 + chunks.last,
    )
    return played / closed
