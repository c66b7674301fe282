"""Work on arrays in pieces that stay in a core's cache, side by side on the cores there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

OnProgress = Callable[[float], None]  # hears what share of some work is done
T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8  # more wait for each other more than they help
CHUNK = 16384  # points at a time: what they need stays in a core's cache


def no_progress(share: float) -> None:
    """Short work tells nobody."""


def on_cores(
    work: Callable[[T], R], pieces: Iterable[T], tell: OnProgress = no_progress
) -> list[R]:
    """work(piece) of each, in their order; NumPy lets threads run side by side."""
    todo = list(pieces)
    done: list[R] = []
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for one in pool.map(work, todo) if len(todo) > 1 else map(work, todo):
            done.append(one)
            tell(len(done) / len(todo))
    return done
