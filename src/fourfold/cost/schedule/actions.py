"""The order in which each pipeline rank runs its micro batches: action lists, the same for
simulation, picture and engine. Chunk c of stages x virtual stages sits on rank c % stages."""

from __future__ import annotations

from typing import NamedTuple

from fourfold.spec.words import Schedule


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


def held_at_once(actions: list[Action]) -> int:
    """The most visits of a micro batch to a chunk whose activations a rank holds.

    A split backward lets go with its weights: until then inputs of all products are held.
    """
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, held)
    return most


def global_order(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int
) -> list[tuple[int, Action]]:
    """(rank, action) of all ranks in an order in which every input exists when it is needed.

    Every rank keeps its own order; a circle of waits would be a bug and is asserted against.
    """
    lists = [
        rank_actions(
            schedule, stages=stages, virtual_stages=virtual_stages, micros=micros, rank=rank
        )
        for rank in range(stages)
    ]
    last = stages * virtual_stages - 1
    done: set[tuple[str, int, int]] = set()
    places = [0] * stages
    order: list[tuple[int, Action]] = []
    while len(order) < sum(map(len, lists)):
        before = len(order)
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions) and _ready(actions[places[rank]], done, last):
                action = actions[places[rank]]
                done.add(("B" if action.kind == "I" else action.kind, action.chunk, action.micro))
                order.append((rank, action))
                places[rank] += 1
        assert len(order) > before, f"{schedule} p={stages} v={virtual_stages} m={micros} waits"
    return order


def _ready(action: Action, done: set[tuple[str, int, int]], last: int) -> bool:
    kind, chunk, micro = action
    if kind == "F":
        return chunk == 0 or ("F", chunk - 1, micro) in done
    if kind == "W":
        return True
    return ("F", chunk, micro) in done and (chunk == last or ("B", chunk + 1, micro) in done)
