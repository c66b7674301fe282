"""Runs somebody else's program as a job: watched by its log, ended with all it started.

The program writes one log. Whoever reads that log counts steps; silence beyond the run's limits is
a hang. Its processes carry the job's mark, so that those of a killed launcher are found and ended
by the next one, as our own ranks are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import UserError
from fourfold.launch.identity import VARIABLE, end_leftovers, new_mark
from fourfold.launch.outcomes import kernel_kills
from fourfold.launch.stop import stop_signals

LOG_FILE = "engine.log"
_POLL_S, _END_S, _SAY_EVERY_S = 0.2, 5.0, 2.0
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """`take` gets what the log has grown by and says how many steps it has seen. The program is
    ended after `enough` of them, `grace_s` later if it does not end by itself (0: at once)."""

    take: Callable[[bytes], int]
    start_limit_s: float
    step_limit_s: float
    enough: int
    grace_s: float
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """`code` None: it was ended here, since it had done `enough` or was silent for too long
    (`limit` names which)."""

    code: int | None
    limit: str
    steps: int
    seconds: float
    start_s: float
    kernel_kills: int

    @property
    def how(self) -> str:
        if self.limit:
            return f"no further step for longer than the {self.limit}"
        if self.code is not None and self.code < 0:
            return f"killed by signal {-self.code}"
        return f"exited with code {self.code}"


def run_command(
    command: Sequence[str], env: Mapping[str, str], folder: Path, watch: Watch
) -> Ended:
    """Returns when no process of it is left, however it ended; Ctrl-C and SIGTERM end it too."""
    began, kills = time.monotonic(), kernel_kills()
    mark = str(new_mark(folder))
    with open(folder / LOG_FILE, "ab") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, "PYTHONUNBUFFERED": "1", VARIABLE: mark},
                start_new_session=True,
            )
        except OSError as error:
            rule, hint = f"cannot be started ({error.strerror})", "check the engine's template"
            raise UserError(rule, field="command", value=command[0], hint=hint) from None
    try:
        with stop_signals(None):
            code, limit, steps, start_s = _watch(process, folder / LOG_FILE, watch)
    finally:
        _end(process, folder)
    return Ended(
        code=code,
        limit=limit,
        steps=steps,
        seconds=time.monotonic() - began,
        start_s=start_s,
        kernel_kills=kernel_kills() - kills,
    )


def _watch(
    process: subprocess.Popen[bytes], log: Path, watch: Watch
) -> tuple[int | None, str, int, float]:
    """(exit code, limit that passed, steps seen, seconds until the first)."""
    began = changed_at = said_at = time.monotonic()
    steps, start_s = 0, 0.0
    with open(log, "rb") as stream:
        while True:
            code = process.poll()  # before reading: its last words are then in the log
            seen = steps
            while chunk := stream.read(_CHUNK_BYTES):
                seen = watch.take(chunk)
            now = time.monotonic()
            if seen != steps:
                start_s = start_s or now - began
                steps, changed_at = seen, now
            if code is not None:
                return code, "", steps, start_s
            silent_s = now - changed_at
            if steps >= watch.enough and silent_s >= watch.grace_s:
                return None, "", steps, start_s
            limit_s = watch.step_limit_s if steps else watch.start_limit_s
            if silent_s > limit_s and steps < watch.enough:
                name = "step" if steps else "start"
                return None, f"{name} limit of {limit_s:g} s", steps, start_s
            if now - said_at > _SAY_EVERY_S:
                said_at = now
                watch.say(f"{steps} steps done" if steps else "starting")
            time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Asked first, then killed: the group, and whatever left it but carries the mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + _END_S
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_leftovers(folder, own=True)
