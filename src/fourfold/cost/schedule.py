"""The order in which each pipeline rank runs its micro batches: action lists, the same for
simulation, picture and engine. Chunk c of stages x virtual stages sits on rank c % stages.

And an event simulation of every rank's compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.spec.words import Schedule

# Rounds after which a pipeline repeats itself: fill and drain are behind, the slowest rank leads.
SETTLED_ROUNDS = 6


class Action(NamedTuple):
    """F forward, B whole backward, I backward to the input, W backward to the weights.

    `chunk` counts over all ranks: of stages x virtual stages.
    """

    kind: str
    chunk: int
    micro: int


def rank_actions(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int, rank: int
) -> list[Action]:
    """Everything one pipeline rank does in a step, in order; compute only. 1F1B and interleaving
    after Narayanan et al. (arXiv 2104.04473), zero-bubble H1 after Qi et al. (arXiv 2401.10241).

    Interleaving goes in rounds of `stages` micro batches. A last round that is cut short is planned
    whole and its missing visits left out: what remains never waits in a circle. One stage has
    nobody to wait for: each backward follows its forward.
    """
    planned = micros if virtual_stages == 1 else -(-micros // stages) * stages
    order = _visits(stages, virtual_stages, planned)
    total = len(order)
    if schedule == "gpipe" and stages > 1:
        warmup = total
    elif virtual_stages == 1:
        warmup = min(total, stages - rank - 1)
    else:
        warmup = min(total, 2 * (stages - rank - 1) + (virtual_stages - 1) * stages)
    forward = [Action("F", v * stages + rank, micro) for v, micro in order]
    kind = "I" if schedule == "zero-bubble" else "B"
    backward = [Action(kind, (virtual_stages - 1 - v) * stages + rank, micro) for v, micro in order]
    actions = [a for a in _alternate(forward, backward, warmup) if a.micro < micros]
    return _with_late_weights(actions, delay=rank) if schedule == "zero-bubble" else actions


@lru_cache(maxsize=1)
def _visits(stages: int, virtual_stages: int, micros: int) -> list[tuple[int, int]]:
    """(virtual stage, micro) in order of forwards: rounds of `stages` micros through each chunk."""
    order = []
    for start in range(0, micros, stages):
        round_of = range(start, min(start + stages, micros))
        order += [(v, micro) for v in range(virtual_stages) for micro in round_of]
    return order


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """Warm up by forwards, then one forward and one backward, then the rest of the backwards."""
    actions = forward[:warmup]
    for late, action in enumerate(forward[warmup:]):
        actions += [action, backward[late]]
    return actions + backward[len(forward) - warmup :]


def _with_late_weights(actions: list[Action], *, delay: int) -> list[Action]:
    """Weight gradients start `delay` backwards late: later ranks keep work for the drain."""
    late: list[Action] = []
    waiting: list[Action] = []
    started = 0
    for action in actions:
        late.append(action)
        if action.kind != "I":
            continue
        waiting.append(Action("W", action.chunk, action.micro))
        started += 1
        if started > delay:
            late.append(waiting.pop(0))
    return late + waiting


@lru_cache(maxsize=4)
def global_order(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int
) -> tuple[tuple[int, Action], ...]:
    """(rank, action) of all ranks in an order in which every input exists when it is needed.

    Every rank keeps its own order; a circle of waits would be a bug and is asserted against.
    """
    lists = [
        rank_actions(
            schedule, stages=stages, virtual_stages=virtual_stages, micros=micros, rank=rank
        )
        for rank in range(stages)
    ]
    # Whether (chunk, micro) has its input: the first chunk's is there, and the last one's gradient.
    count = stages * virtual_stages * micros
    forward, backward = bytearray(count), bytearray(count)
    forward[:micros] = backward[count - micros :] = b"\1" * micros
    handed = {"F": (forward, micros), "B": (backward, -micros), "I": (backward, -micros)}
    places = [0] * stages
    order: list[tuple[int, Action]] = []
    total = sum(map(len, lists))
    while len(order) < total:
        before = len(order)
        for rank, actions in enumerate(lists):
            place = places[rank]
            for action in islice(actions, place, None):
                kind, chunk, micro = action
                # A rank's own forward comes before its backward in its list.
                if kind != "W":
                    (has_input, way), at = handed[kind], chunk * micros + micro
                    if not has_input[at]:
                        break
                    if 0 <= at + way < count:
                        has_input[at + way] = 1
                order.append((rank, action))
                place += 1
            places[rank] = place
        assert len(order) > before, f"{schedule} p={stages} v={virtual_stages} m={micros} waits"
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """[chunks, candidates] unless said otherwise. `weights` is the part of `backward` that no other
    rank waits for; `last` scales the times of the last micro batch, [candidates]."""

    forward: Floats
    backward: Floats
    weights: Floats
    last: Floats

    def of(self, candidate: int) -> list[float]:
        """By kind of action and chunk, of a whole micro batch, then of the last one: `_program`."""
        inputs = self.backward - self.weights
        kinds = np.array([self.forward, self.backward, inputs, self.weights])[:, :, candidate]
        return [*kinds.ravel().tolist(), *(kinds * self.last[candidate]).ravel().tolist()]


@dataclass(frozen=True, slots=True)
class ActionTime:
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
    events: tuple[ActionTime, ...] = ()


@lru_cache(maxsize=128)  # engines compared side by side, and intervals, ask for the same ones
def _program(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int
) -> tuple[tuple[int, int, int, int], ...]:
    """(rank, place in ChunkTimes.of, slot of its input, slot of what it hands over) of each action.
    The last slot but one is there from the start, the last takes what nobody waits for."""
    chunks = stages * virtual_stages
    count = chunks * micros
    starts = {"F": 0, "B": 1, "I": 2, "W": 3}
    program = []
    order = global_order(schedule, stages=stages, virtual_stages=virtual_stages, micros=micros)
    for rank, (kind, chunk, micro) in order:
        which = (starts[kind] + 4 * (micro == micros - 1)) * chunks + chunk
        at = chunk * micros + micro
        if kind == "W":
            program.append((rank, which, -2, -1))
        elif kind == "F":
            gives = at + micros if chunk + 1 < chunks else -1
            program.append((rank, which, at if chunk else -2, gives))
        else:
            gives = count + at - micros if chunk else -1
            program.append((rank, which, count + at if chunk + 1 < chunks else -2, gives))
    return tuple(program)


def simulate(
    schedule: Schedule,
    times: ChunkTimes,
    *,
    stages: int,
    virtual_stages: int,
    micros: int,
    keep_events: bool = False,
) -> Simulated:
    """Every event of a step. All micro batches are played: see `step_s` for long steps. Candidates
    are few: each is played in plain numbers, which costs less than arrays of all."""
    shape = {"stages": stages, "virtual_stages": virtual_stages, "micros": micros}
    chunks, count = times.forward.shape
    assert chunks == stages * virtual_stages
    program = _program(schedule, **shape)
    ends: list[float] = []
    events: list[tuple[float, float]] = []
    for candidate in range(count):
        seconds, free = times.of(candidate), [0.0] * stages
        arrived = [0.0] * (2 * chunks * micros + 2)
        is_kept = keep_events and candidate == 0
        for rank, which, needs, gives in program:
            start = max(free[rank], arrived[needs])
            arrived[gives] = free[rank] = end = start + seconds[which]
            if is_kept:
                events.append((start, end))
        ends.append(max(free))
    ranks = (times.forward + times.backward).reshape(virtual_stages, stages, -1).sum(axis=0)
    order = zip(global_order(schedule, **shape), events, strict=True) if events else ()
    return Simulated(
        np.array(ends),
        ranks * (micros - 1.0 + times.last),
        tuple(ActionTime(rank, action, *at) for (rank, action), at in order),
    )


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
    events: tuple[ActionTime, ...]

    def of_rank(self, rank: int) -> list[ActionTime]:
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
