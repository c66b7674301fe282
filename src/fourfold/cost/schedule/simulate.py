"""An event simulation of the compute, send and gradient streams of every pipeline rank. Candidates
share the order of events, so each event is one array operation over all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.schedule.actions import Action, global_order
from fourfold.spec.words import Schedule

# Rounds after which a pipeline repeats itself: fill and drain are behind, the slowest rank leads.
SETTLED_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """[chunks, candidates] unless said otherwise. `weights` is the part of `backward` that no other
    rank waits for; `last` scales the times of the last micro batch, [candidates]."""

    forward: Floats
    backward: Floats
    weights: Floats
    last: Floats
    hop: Floats  # [candidates] handing one micro batch over, on its own stream
    reduce: Floats  # [stages, candidates] gradient reduction of a rank
    overlap_reduce: bool = False

    def seconds(self, action: Action, micros: int) -> Floats:
        if action.kind == "F":
            spent = self.forward[action.chunk]
        elif action.kind == "W":
            spent = self.weights[action.chunk]
        elif action.kind == "I":
            spent = self.backward[action.chunk] - self.weights[action.chunk]
        else:
            spent = self.backward[action.chunk]
        return spent * self.last if action.micro == micros - 1 else spent


@dataclass(frozen=True, slots=True)
class Event:
    """One action of one rank for the first candidate, for pictures."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """`step_s` [candidates]; `busy_s` [stages, candidates] computing; `events` in order."""

    step_s: Floats
    busy_s: Floats
    events: tuple[Event, ...] = ()


def simulate(
    schedule: Schedule,
    times: ChunkTimes,
    *,
    stages: int,
    virtual_stages: int,
    micros: int,
    keep_events: bool = False,
) -> Simulated:
    """Every event of a step. All micro batches are played: see `step_s` for long steps."""
    chunks = stages * virtual_stages
    assert times.forward.shape[0] == chunks
    zero = np.zeros(times.forward.shape[1])
    free = [zero] * stages
    busy = [zero] * stages
    wire = {(rank, way): zero for rank in range(stages) for way in (1, -1)}
    arrived: dict[tuple[str, int, int], Floats] = {}
    ended = [zero] * chunks
    events: list[Event] = []
    order = global_order(schedule, stages=stages, virtual_stages=virtual_stages, micros=micros)
    for rank, action in order:
        way = 1 if action.kind == "F" else -1
        needed = arrived.pop((action.kind, action.chunk, action.micro), None)
        start = free[rank] if needed is None else np.maximum(free[rank], needed)
        spent = times.seconds(action, micros)
        end = free[rank] = start + spent
        busy[rank] = busy[rank] + spent
        ended[action.chunk] = end
        target = action.chunk + way
        if action.kind != "W" and 0 <= target < chunks:
            wire[rank, way] = np.maximum(end, wire[rank, way]) + times.hop
            arrived[action.kind, target, action.micro] = wire[rank, way]
        if keep_events:
            events.append(Event(rank, action, float(start[0]), float(end[0])))
    finish = _reduced(times, free, ended, stages)
    return Simulated(np.max(finish, axis=0), np.array(busy), tuple(events))


def _reduced(times: ChunkTimes, free: list[Floats], ended: list[Floats], stages: int) -> Floats:
    """When each rank has also reduced its gradients, chunk by chunk as they become final."""
    if not times.overlap_reduce:
        return np.array(free) + times.reduce
    finish = []
    for rank in range(stages):
        chunks = range(rank, len(ended), stages)
        stream = np.zeros_like(free[rank])
        for chunk in reversed(chunks):
            stream = np.maximum(stream, ended[chunk]) + times.reduce[rank] / len(chunks)
        finish.append(np.maximum(free[rank], stream))
    return np.array(finish)


def step_s(
    schedule: Schedule, times: ChunkTimes, *, stages: int, virtual_stages: int, micros: int
) -> Floats:
    """Seconds of a step of any length: a long one repeats its settled rounds.

    A pipeline is a max-plus linear system: once the slowest rank leads, each round of `stages`
    micro batches adds the same time.
    """
    shape = {"stages": stages, "virtual_stages": virtual_stages}
    short = SETTLED_ROUNDS * stages + micros % stages
    if micros <= short + stages:
        return simulate(schedule, times, micros=micros, **shape).step_s
    before = simulate(schedule, times, micros=short, **shape).step_s
    after = simulate(schedule, times, micros=short + stages, **shape).step_s
    return after + (micros - short - stages) / stages * (after - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """`events` of each rank are in its order; `bubble` is the idle share of all ranks' time."""

    name: str
    schedule: Schedule
    stages: int
    virtual_stages: int
    micros: int
    step_s: float
    bubble: float
    events: tuple[Event, ...]

    def of_rank(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank]


def play(
    name: str,
    schedule: Schedule,
    times: ChunkTimes,
    *,
    stages: int,
    virtual_stages: int,
    micros: int,
) -> Timeline:
    """The step of the first candidate in `times`, all micro batches played."""
    shape = {"stages": stages, "virtual_stages": virtual_stages, "micros": micros}
    played = simulate(schedule, times, keep_events=True, **shape)
    step_s = max(event.end_s for event in played.events)
    busy_s = float(played.busy_s[:, 0].sum())
    return Timeline(
        name=name,
        schedule=schedule,
        **shape,
        step_s=step_s,
        bubble=1.0 - busy_s / (stages * step_s),
        events=played.events,
    )
