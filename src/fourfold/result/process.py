"""Processes by pid and start time within one boot of the kernel, so that a number that was given
to another process since is not mistaken for the first.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_HAS_PROC = os.path.isdir("/proc/self")


def state(pid: int) -> str:
    """One letter as `ps` has it (R, S, D; T stopped, t under a debugger, Z ended), '' for none."""
    if _HAS_PROC:
        fields = _stat(pid)
        return fields[0] if fields else ""
    return _ps(pid, "state=")[:1]


def born(pid: int) -> str | None:
    """When a living process was started, as the system counts; None when it lives no more."""
    if _HAS_PROC:
        fields = _stat(pid)
        return None if not fields or fields[0] in ("Z", "X") else fields[19]
    return "-".join(_ps(pid, "lstart=").replace(":", "-").split()) or None


def boot() -> str:
    """The kernel's name for the time since it started; '' where it has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _stat(pid: int) -> list[str]:
    """Fields after the command's name, which may hold spaces and parentheses."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (OSError, ValueError):
        return []
    return fields if len(fields) > 19 else []


def _ps(pid: int, column: str) -> str:
    command = ["ps", "-o", column, "-p", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
