"""What will runs take? Seconds with an interval, bytes, and the parts of both: the same numbers
whoever asks, a search about hundreds of layouts or a command about one run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.interval import bounds
from fourfold.cost.memory.peak import Memory, memory
from fourfold.cost.step.estimate import Times
from fourfold.cost.step.played import priced
from fourfold.result.report import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Of many runs, one element each. `closed_s` is the closed form's answer alone."""

    columns: Columns
    times: Times
    low_s: Floats
    high_s: Floats
    room: Memory
    closed_s: Floats
    played: int  # pipelines that were simulated

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def step_s(self) -> Floats:
        return self.times.step_s

    def take(self, index: NDArray[np.intp]) -> Predictions:
        """Those at these places, in that order; `played` stays what it was for all."""
        parts, room = self.times.parts, self.room
        return Predictions(
            columns=self.columns.take(index),
            times=Times(self.step_s[index], {name: part[index] for name, part in parts.items()}),
            low_s=self.low_s[index],
            high_s=self.high_s[index],
            room=Memory(
                room.first_bytes[index],
                room.last_bytes[index],
                room.worst_bytes[index],
                {name: part[index] for name, part in room.parts.items()},
            ),
            closed_s=self.closed_s[index],
            played=self.played,
        )

    def one(self, i: int) -> Prediction:
        return Prediction(
            step_s=float(self.step_s[i]),
            step_s_low=float(self.low_s[i]),
            step_s_high=float(self.high_s[i]),
            peak_bytes=float(self.room.worst_bytes[i]),
        )


def predictions(c: Columns, entry: FittedStack) -> Predictions:
    """Pipelines are played where a step has few enough events (cost/step/played.py)."""
    answer = priced(c, entry.coefficients)
    low_s, high_s = bounds(c, entry, answer.times.step_s)
    return Predictions(
        columns=c,
        times=answer.times,
        low_s=low_s,
        high_s=high_s,
        room=memory(c, entry.coefficients),
        closed_s=answer.closed_s,
        played=answer.played,
    )
