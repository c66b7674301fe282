"""Requests to stop a job, by a signal: at once, or after a training has saved."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_SAME_REQUEST_S = 1.0  # signals closer together are one request


class _StopRequests:
    """With a `stop_file` the first signal makes that file and only a later one raises; SIGUSR1 asks
    and never raises. Slurm sends SIGUSR1 before a time limit and SIGTERM at it, `timeout` sends its
    signal twice at once: neither may cut off the save that is under way."""

    def __init__(self, stop_file: Path | None) -> None:
        self._file = stop_file
        self._asked_at: float | None = None

    def stop(self, number: int, _: object) -> None:
        now = time.monotonic()
        asked = self._asked_at is not None and now - self._asked_at > _SAME_REQUEST_S
        if self._file is None or asked:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or now
        self.ask(number, _)

    def ask(self, number: int, _: object) -> None:
        assert self._file is not None
        what = "saving after this step, then stopping"
        try:
            self._file.touch()
        except OSError as error:  # a full disk: must not end the ranks without a word
            what = f"cannot ask the ranks to save ({error.strerror}); send it again to stop at once"
        # Not print: a handler may interrupt one.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{signal.Signals(number).name}: {what}\n".encode())


@contextlib.contextmanager
def stop_signals(stop_file: Path | None) -> Iterator[None]:
    """SIGTERM acts like Ctrl-C while ranks run. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requests = _StopRequests(stop_file)
    handlers = {signal.SIGTERM: requests.stop}
    if stop_file is not None:
        handlers |= {signal.SIGINT: requests.stop, signal.SIGUSR1: requests.ask}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs so: the keyboard's Ctrl-C is not meant for them.
        handlers.pop(signal.SIGINT, None)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
