"""The order in which each pipeline rank runs its micro batches: action lists, the same for
simulation, picture and engine. Chunk c of stages x virtual stages sits on rank c % stages.

And an event simulation of every rank's compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
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


_Plain = tuple[str, int, int]  # an Action before anybody asks for its names: made ten times as fast


def rank_actions(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int, rank: int
) -> list[Action]:
    """Everything one pipeline rank does in a step, in order; compute only. 1F1B and interleaving
    after Narayanan et al. (arXiv 2104.04473), zero-bubble H1 after Qi et al. (arXiv 2401.10241).

    Interleaving goes in rounds of `stages` micro batches. A last round that is cut short is planned
    whole and its missing visits left out: what remains never waits in a circle. One stage has
    nobody to wait for: each backward follows its forward.
    """
    return [Action(*plain) for plain in _plain(schedule, stages, virtual_stages, micros, rank)]


def _plain(
    schedule: Schedule, stages: int, virtual_stages: int, micros: int, rank: int
) -> list[_Plain]:
    planned = micros if virtual_stages == 1 else -(-micros // stages) * stages
    order = _visits(stages, virtual_stages, planned)
    total = len(order)
    if schedule == "gpipe" and stages > 1:
        warmup = total
    elif virtual_stages == 1:
        warmup = min(total, stages - rank - 1)
    else:
        warmup = min(total, 2 * (stages - rank - 1) + (virtual_stages - 1) * stages)
    forward = [("F", v * stages + rank, micro) for v, micro in order]
    kind = "I" if schedule == "zero-bubble" else "B"
    backward = [(kind, (virtual_stages - 1 - v) * stages + rank, micro) for v, micro in order]
    actions = _alternate(forward, backward, warmup)
    if planned > micros:
        actions = [action for action in actions if action[2] < micros]
    return _with_late_weights(actions, delay=rank) if schedule == "zero-bubble" else actions


@lru_cache(maxsize=1)
def _visits(stages: int, virtual_stages: int, micros: int) -> list[tuple[int, int]]:
    """(virtual stage, micro) in order of forwards: rounds of `stages` micros through each chunk."""
    order = []
    for start in range(0, micros, stages):
        round_of = range(start, min(start + stages, micros))
        order += [(v, micro) for v in range(virtual_stages) for micro in round_of]
    return order


def _alternate(forward: list[_Plain], backward: list[_Plain], warmup: int) -> list[_Plain]:
    """Warm up by forwards, then one forward and one backward, then the rest of the backwards."""
    pairs = zip(forward[warmup:], backward, strict=False)
    return [*forward[:warmup], *chain.from_iterable(pairs), *backward[len(forward) - warmup :]]


def _with_late_weights(actions: list[_Plain], *, delay: int) -> list[_Plain]:
    """Weight gradients start `delay` backwards late: later ranks keep work for the drain."""
    late: list[_Plain] = []
    waiting: list[_Plain] = []
    started = 0
    for action in actions:
        late.append(action)
        kind, chunk, micro = action
        if kind != "I":
            continue
        waiting.append(("W", chunk, micro))
        started += 1
        if started > delay:
            late.append(waiting.pop(0))
    return late + waiting


@lru_cache(maxsize=4)
def global_order(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int
) -> tuple[tuple[int, Action], ...]:
    """(rank, action) of all ranks in an order in which every input exists when it is needed; every
    rank keeps its own order."""
    shape = {"stages": stages, "virtual_stages": virtual_stages, "micros": micros}
    lists = [iter(rank_actions(schedule, rank=rank, **shape)) for rank in range(stages)]
    return tuple((rank, next(lists[rank])) for rank, *_ in _program(schedule, **shape))


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

    Of each way there is a slot for every micro batch before every chunk and behind the last: those
    of the batch and of the loss are filled from the start. A circle of waits would be a bug.
    """
    chunks = stages * virtual_stages
    way = (chunks + 1) * micros
    backwards = (way + micros, way)
    slots = {"F": (0, micros), "B": backwards, "I": backwards, "W": (way, 2 * way)}
    kinds = {kind: (at, *slots[kind]) for at, kind in enumerate(slots)}

    def listed(rank: int) -> Iterator[tuple[int, int, int, int]]:
        for kind, chunk, micro in _plain(schedule, stages, virtual_stages, micros, rank):
            start, needs, gives = kinds[kind]
            which = (start + 4 * (micro == micros - 1)) * chunks + chunk
            at = chunk * micros + micro
            yield rank, which, at + needs, at + gives

    is_filled = bytearray(3 * way)
    is_filled[:micros] = is_filled[2 * way - micros : 2 * way] = b"\1" * micros
    lists = [listed(rank) for rank in range(stages)]
    waiting = [next(actions, None) for actions in lists]
    program: list[tuple[int, int, int, int]] = []
    while any(waiting):
        before = len(program)
        for rank, actions in enumerate(lists):
            action = waiting[rank]
            while action and is_filled[action[2]]:
                is_filled[action[3]] = 1
                program.append(action)
                action = next(actions, None)
            waiting[rank] = action
        assert len(program) > before, f"{schedule} p={stages} v={virtual_stages} m={micros} waits"
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
        arrived = [0.0] * (3 * (chunks + 1) * micros)
        is_kept = keep_events and candidate == 0
        for rank, which, needs, gives in program:
            start, input_s = free[rank], arrived[needs]
            if input_s > start:  # max() takes longer than all the rest
                start = input_s
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
