"""In which order does a pipeline rank work? A list of actions per rank, made before the step.

An exchange is a set of transfers posted together. Neighbours' lists pair up: what one posts as a
send the other posts as a receive, in the same order, so no schedule can deadlock (a test runs all
lists against each other). Kinds: gpipe (all forwards, then all backwards: every micro batch is
held), 1f1b (one forward, one backward: at most `stages` are held). Fewer micro batches than stages
are fine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]
What = Literal["send-output", "receive-input", "send-grad", "receive-grad"]


@dataclass(frozen=True, slots=True)
class Compute:
    kind: Kind
    micro: int


@dataclass(frozen=True, slots=True)
class Transfer:
    what: What
    micro: int


@dataclass(frozen=True, slots=True)
class Exchange:
    transfers: tuple[Transfer, ...]


Action = Compute | Exchange


def actions(kind: str, stage: int, stages: int, micros: int) -> list[Action]:
    """Everything stage `stage` does in a step, in order."""
    if kind == "gpipe" and stages > 1:
        return _tidy(_gpipe(stage, stages, micros))
    assert kind in ("gpipe", "1f1b"), f"no such schedule here: {kind}"
    return _tidy(_1f1b(stage, stages, micros))


def _gpipe(stage: int, stages: int, micros: int) -> list[Action]:
    first, last = stage == 0, stage == stages - 1
    plan: list[Action] = []
    for i in range(micros):
        plan.append(_exchange(("receive-input", i, not first)))
        plan.append(Compute("forward", i))
        plan.append(_exchange(("send-output", i, not last)))
    for i in range(micros):
        plan.append(_exchange(("receive-grad", i, not last)))
        plan.append(Compute("backward", i))
        plan.append(_exchange(("send-grad", i, not first)))
    return plan


def _1f1b(stage: int, stages: int, micros: int) -> list[Action]:
    """Warm up with a forward per later stage, alternate, then drain (Narayanan et al. 2021)."""
    first, last = stage == 0, stage == stages - 1
    ahead = min(stages - stage - 1, micros)
    plan: list[Action] = []
    for i in range(ahead):
        plan.append(_exchange(("receive-input", i, not first)))
        plan.append(Compute("forward", i))
        plan.append(_exchange(("send-output", i, not last)))
    if ahead < micros:
        plan.append(_exchange(("receive-input", ahead, not first)))
    for back in range(micros - ahead):
        i = back + ahead
        plan.append(Compute("forward", i))
        plan.append(_exchange(("send-output", i, not last), ("receive-grad", back, not last)))
        plan.append(Compute("backward", back))
        more = not first and i + 1 < micros
        plan.append(_exchange(("send-grad", back, not first), ("receive-input", i + 1, more)))
    for back in range(micros - ahead, micros):
        plan.append(_exchange(("receive-grad", back, not last)))
        plan.append(Compute("backward", back))
        plan.append(_exchange(("send-grad", back, not first)))
    return plan


def _exchange(*wanted: tuple[What, int, bool]) -> Exchange:
    return Exchange(tuple(Transfer(what, micro) for what, micro, wants in wanted if wants))


def _tidy(plan: list[Action]) -> list[Action]:
    return [step for step in plan if isinstance(step, Compute) or step.transfers]


def held_at_once(plan: list[Action]) -> int:
    """The most micro batches whose activations a rank holds."""
    held = most = 0
    for step in plan:
        if isinstance(step, Compute):
            held += 1 if step.kind == "forward" else -1
            most = max(most, held)
    return most
