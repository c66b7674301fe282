"""How long does the host wait for data? Seconds spent asking the source, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from fourfold.engine.data import Source


class TimedSource:
    """A source that is watched; `seconds` grows with every batch that is asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.seconds = 0.0

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        try:
            return self._source.batch(first, sequences, positions)
        finally:
            self.seconds += time.perf_counter() - began

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        """Nobody waits for what is fetched ahead; what is not there in time shows in `batch`."""
        self._source.ahead(first, sequences, positions)
