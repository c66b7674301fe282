"""Works timed in rounds: what a neighbour takes of one round is not what a work takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fourfold.engine.microbench import rounds
from fourfold.engine.microbench.rounds import in_rounds
from fourfold.engine.parallel.groups import Group
from fourfold.engine.process.task import CPU


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    assert dist.group.WORLD is not None
    yield Group(axis="", ranks=(0,), rank=0, handle=dist.group.WORLD)
    dist.destroy_process_group()


class Clock:
    """Seconds of each work by name, three times as many in the rounds that a neighbour takes."""

    def __init__(self, disturbed: set[int]) -> None:
        self.disturbed, self.asked = disturbed, 0
        self.calls: dict[str, list[int]] = {"short": [], "long": []}

    def reading(self, work: object, device: object, calls: int) -> float:
        assert device == CPU
        name = str(work())  # type: ignore[operator]
        self.calls[name].append(calls)
        turn, self.asked = self.asked // 2 - 1, self.asked + 1  # the first two say how long
        slower = 3.0 if turn in self.disturbed else 1.0
        return slower * {"short": 1e-3, "long": 4e-3}[name]


@pytest.mark.parametrize("disturbed", [set(), {0}, {1, 2}, {4}])
def test_a_neighbour_changes_no_seconds(alone, monkeypatch, disturbed) -> None:
    clock = Clock(disturbed)
    monkeypatch.setattr(rounds, "reading", clock.reading)
    found = in_rounds([lambda: "short", lambda: "long"], alone, 0.0, cores=2)
    assert found.seconds == [1e-3, 4e-3]
    assert (found.unsteady > 0) == (len(disturbed) > 1)
    assert len(clock.calls["short"]) == len(clock.calls["long"]) == 6
    assert clock.calls["short"][1:] == [12] * 5
    assert clock.calls["long"][1:] == [3] * 5


def test_more_seconds_make_more_rounds(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(set())
    monkeypatch.setattr(rounds, "reading", clock.reading)
    in_rounds([lambda: "short", lambda: "long"], alone, 0.241, cores=2)
    assert len(clock.calls["long"]) == 1 + 10  # of 24 ms
