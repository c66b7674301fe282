"""Which machine is this, in the words of a stored run's key? Asked without importing torch.

A key names the device and the torch version, so that a store shared by several machines keeps their
runs apart, and a sweep knows which of its runs were finished here.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    device: str
    torch: str


def this_machine(kind: str) -> Machine:
    """`kind` is cpu or cuda."""
    return Machine(gpu_name() if kind == "cuda" else cpu_name(), torch_version())


def torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The model's name where the system tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def gpu_name() -> str:
    """Of the first GPU, as the driver's tool prints it (and torch too)."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0].strip()


def host_memory_bytes() -> int:
    """What this process may use: the machine's memory, or the control group's limit on it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
