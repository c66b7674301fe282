"""When does a pipeline rank send and receive? Transfers between the actions of its list.

All ranks' lists are played against each other in one rough time (a forward 1, a backward 2, half of
it 1); a transfer happens when its sender's action ends. What a rank sends and receives at one
moment is one exchange, posted together; a receive that falls into an action is posted before it, so
that it is under way meanwhile. Everybody posts in the order of time: whatever a rank waits for is
earlier on every other rank too, so no list can deadlock (a test plays them), and between two ranks
messages come in the same order on both sides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.cost.schedule.actions import Action, global_order
from fourfold.spec.words import Schedule

_TIME = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Of the activations into `chunk` (kind F), or of the gradient of its output (kind B).

    `peer` is a pipeline rank.
    """

    is_send: bool
    kind: str
    chunk: int
    micro: int
    peer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    transfers: tuple[Transfer, ...]


Step = Action | Exchange


@dataclass(frozen=True, slots=True)
class _Moment:
    """An action with its time."""

    rank: int
    action: Action
    start: int
    end: int


def plan(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int, rank: int
) -> list[Step]:
    """Everything pipeline rank `rank` does in a step, in order."""
    chunks = stages * virtual_stages
    moments = _moments(schedule, stages=stages, virtual_stages=virtual_stages, micros=micros)
    own = [moment for moment in moments if moment.rank == rank]
    starts = [moment.start for moment in own]
    posted: dict[tuple[int, int], list[Transfer]] = {}
    for moment in moments:
        for transfer in _transfers(moment, rank, stages, chunks):
            at = moment.end
            if not transfer.is_send:
                before = own[max(0, bisect_left(starts, at) - 1)]
                at = before.start if before.start < at < before.end else at
            posted.setdefault((at, moment.end), []).append(transfer)
    # At one time exchanges come before the action that starts, in the order of their own time.
    steps: list[tuple[tuple[int, int, int], Step]] = []
    for (at, end), transfers in posted.items():
        steps.append(((at, 0, end), Exchange(tuple(sorted(transfers)))))
    steps += [((moment.start, 1, 0), moment.action) for moment in own]
    return [step for _, step in sorted(steps, key=lambda pair: pair[0])]


def _moments(schedule: Schedule, *, stages: int, virtual_stages: int, micros: int) -> list[_Moment]:
    last = stages * virtual_stages - 1
    order = global_order(schedule, stages=stages, virtual_stages=virtual_stages, micros=micros)
    free = [0] * stages
    ready: dict[tuple[str, int, int], int] = {}
    moments = []
    for rank, action in order:
        kind = "F" if action.kind == "F" else "B"
        needs = 0 if action.kind == "W" else ready.get((kind, action.chunk, action.micro), 0)
        start = max(free[rank], needs)
        end = free[rank] = start + _TIME[action.kind]
        moments.append(_Moment(rank, action, start, end))
        target = action.chunk + (1 if kind == "F" else -1)
        if action.kind != "W" and 0 <= target <= last:
            ready[kind, target, action.micro] = end
    return moments


def _transfers(moment: _Moment, rank: int, stages: int, chunks: int) -> Iterator[Transfer]:
    """What `rank` sends or receives when this action ends."""
    action = moment.action
    if action.kind == "W":
        return
    kind = "F" if action.kind == "F" else "B"
    target = action.chunk + (1 if kind == "F" else -1)
    if not 0 <= target < chunks:
        return
    receiver = target % stages
    if moment.rank == rank:
        yield Transfer(True, kind, target, action.micro, receiver)
    elif receiver == rank:
        yield Transfer(False, kind, target, action.micro, moment.rank)
