"""Processes of this machine: by their words, by their parent, and what a test waits for."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def with_words(*words: str) -> dict[int, str]:
    """The command lines that have all of these, but of those that only wait to be reaped."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if all(word in line for word in words):
                found[process.pid] = line
    return found


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def wait_for(
    done: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    *,
    at_most_s: float = 240,
) -> None:
    """That this process, if one is given, goes on meanwhile."""
    until = time.monotonic() + at_most_s
    while not done():
        assert time.monotonic() < until, "waited too long"
        assert process is None or process.poll() is None, process and process.communicate()
        time.sleep(0.02)
