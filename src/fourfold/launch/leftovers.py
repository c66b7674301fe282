"""Does anything of a stopped launcher still run? Found by its job folder, and ended.

The kernel tells a worker when its launcher dies; a worker that is deep in an import, stopped or on
a system without that signal may still be there when the next one starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_END_S = 10.0


def end_processes_of(folder: Path) -> int:
    """Kill every process that was started for this job folder; how many there were."""
    ended = set()
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        living = [pid for pid, command in _commands() if _is_of(command, folder)]
        if not living:
            break
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            ended.add(pid)
        time.sleep(0.05)
    return len(ended)


def _is_of(command: str, folder: Path) -> bool:
    return "fourfold.engine.worker" in command and f"{folder}{os.sep}" in command


def _commands() -> Iterator[tuple[int, str]]:
    """(pid, command line) of every process that is not a zombie, except this one."""
    if os.path.isdir("/proc/self"):
        for name in os.listdir("/proc"):
            if not name.isdecimal() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                raw = Path("/proc", name, "cmdline").read_bytes()
                yield int(name), raw.replace(b"\0", b" ").decode(errors="replace")
        return
    listed = subprocess.run(
        ["ps", "-axo", "pid=,command="], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        if pid.isdecimal() and int(pid) != os.getpid():
            yield int(pid), command
