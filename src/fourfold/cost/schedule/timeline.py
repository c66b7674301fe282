"""What does a pipeline's step look like? Every action of every rank with its time, from the list
that runs (cost/schedule/actions.py) and seconds per chunk. Seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.cost.schedule.simulate import ChunkTimes, Event, simulate
from fourfold.spec.words import Schedule


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
