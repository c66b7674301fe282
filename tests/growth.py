"""How much longer four times the work takes: 4 where time grows linearly, 16 with the square."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

QUADRATIC = 9.0  # above it


def grows(work: Callable[[int], object], size: int, least: float = 0.0) -> float:
    """This thread's seconds for 4 x size over those for size (at least `least`, where a clock's
    tick would decide): the best of each, tried in turn up to five times, until the noise of a
    busy machine is out of the way."""
    best = [math.inf, math.inf]
    for _ in range(5):
        for at, count in enumerate((size, 4 * size)):
            gc.collect()
            began = time.thread_time()
            work(count)
            best[at] = max(min(best[at], time.thread_time() - began), least)
        if best[1] < QUADRATIC * best[0]:
            break
    return best[1] / best[0]
