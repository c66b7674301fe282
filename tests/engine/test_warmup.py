"""Warm-up until steady: rank 0's verdict binds, whatever this rank saw."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from fourfold.engine.observe.clock import by_count, until_steady
from fourfold.result.timing import ENDINGS, LEAD, MOST_STEPS, WINDOW

CPU = torch.device("cpu")


@dataclass
class Ticks:
    seconds: list[float] = field(default_factory=list)

    def step_s(self) -> list[float]:
        return self.seconds

    def busy_s(self) -> list[float]:
        return []


class Machine:
    """Steps that get faster until they don't."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.done = seconds, 0

    def run(self, count: int) -> Ticks:
        first, self.done = self.done, self.done + count
        last = len(self.seconds) - 1
        return Ticks([self.seconds[min(i, last)] for i in range(first, self.done)])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A broadcast among one rank; numbers put into the list come from rank 0."""
    told: list[int] = []

    def broadcast(place: torch.Tensor, source: int) -> None:
        assert source == 0
        if told:
            place[0] = told.pop(0)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    return told


def test_it_ends_when_steps_no_longer_get_faster() -> None:
    machine = Machine(9.0, 5.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 1.0)
    found = until_steady(machine.run, least=0, device=CPU, rank=0)
    # Windows of 3.0, 2.0, 1.0 and 1.0.
    assert (found.warmup.ended, found.warmup.steps) == ("steady", LEAD + 4 * WINDOW)
    assert machine.done == len(found.step_s()) == found.warmup.steps


def test_it_ends_at_a_limit() -> None:
    machine = Machine(*(float(100 - n) for n in range(99)))
    found = until_steady(machine.run, least=0, device=CPU, rank=0)
    assert found.warmup.ended == "most seconds"
    machine = Machine(*(0.5**n for n in range(99)))
    found = until_steady(machine.run, least=0, device=CPU, rank=0)
    assert (found.warmup.ended, machine.done) == ("most steps", MOST_STEPS)


def test_compiling_is_no_drift() -> None:
    found = until_steady(Machine(500.0, 90.0, 1.0).run, least=0, device=CPU, rank=0)
    assert (found.warmup.ended, found.warmup.steps) == ("steady", LEAD + 2 * WINDOW)


def test_other_ranks_follow_rank_0(alone: list[int]) -> None:
    alone += [0, 0, 0, ENDINGS.index("steady")]
    machine = Machine(1.0)  # this rank alone would have stopped after two windows
    found = until_steady(machine.run, least=0, device=CPU, rank=1)
    assert (machine.done, found.warmup.ended) == (LEAD + 4 * WINDOW, "steady")


def test_a_count_is_a_count() -> None:
    machine = Machine(9.0, 1.0)
    found = by_count(machine.run, 4)
    assert (machine.done, found.warmup.ended, found.warmup.steps) == (4, "count", 4)
