"""This machine in the words of a stored run's key (device and torch version, so that a store can be
shared), how its GPU does, without importing torch, and its processes: by pid and start time, so
that a number that was given to another process since is not mistaken for the first.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

from fourfold.errors import lacks
from fourfold.result.report import DeviceSample

CPU_INFO = Path("/proc/cpuinfo")
_EVERY_S = 0.2
_SAMPLED = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")


@dataclass(frozen=True, slots=True)
class MachineKey:
    device: str
    torch: str


def this_machine(kind: str) -> MachineKey:
    """`kind` is cpu or cuda."""
    return MachineKey(gpu_name() if kind == "cuda" else cpu_name(), torch_version())


def torch_version() -> str:
    from importlib import metadata  # 15 ms

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The model's name where the system tells it, else the architecture."""
    return _of_cpu("model name") or platform.processor() or platform.machine()


def _of_cpu(*names: str) -> str:
    """The first line of the kernel's list with one of these names; '' where there is none."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


# Instructions for products of 16 bits by the kernel's names, of x86 and Arm.
_INSTRUCTIONS = {
    "bf16": {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp"},
}


def lacks_instructions(dtype: str) -> bool:
    """Whether this CPU's list of instructions has none for a dtype; False without one."""
    known, wanted = _of_cpu("flags", "Features").split(), _INSTRUCTIONS.get(dtype, set())
    return bool(known and wanted) and wanted.isdisjoint(known)


def gpu_name() -> str:
    """Of the first GPU, as the driver's tool prints it (and torch too)."""
    return gpu_facts("name").get("name", "")


def gpu_facts(*names: str, uuid: str = "") -> dict[str, str]:
    """What the driver's tool tells of one GPU, else of the first; empty without the tool."""
    which = ["-i", uuid] if uuid else []
    first = nvidia_smi(*_query(names), *which).partition("\n")[0]
    texts = (word.strip() for word in first.split(","))
    return dict(zip(names, texts, strict=False)) if first else {}


def listed_gpus() -> int:
    """GPUs that the driver's tool lists; 0 where it is not installed."""
    return sum(line.startswith("GPU ") for line in nvidia_smi("-L").splitlines())


def nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _query(names: Sequence[str]) -> list[str]:
    return [f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


def host_memory_bytes() -> int:
    """What this process may use: the machine's memory, or the control group's limit on it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


class Sampler:
    """Clock, power and temperature of a GPU, from the first timed step to the last. The driver's
    tool runs as a child and writes a line every fifth of a second: no thread of ours wakes inside a
    timed step. Without a `uuid` there is no GPU to sample."""

    def __init__(self, uuid: str) -> None:
        import tempfile  # 15 ms with what it imports

        self._process: subprocess.Popen[bytes] | None = None
        self._lines: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in stop)
        if not uuid:
            return
        command = ["nvidia-smi", *_query(_SAMPLED), "-lms", str(round(_EVERY_S * 1e3)), "-i", uuid]
        try:
            self._process = subprocess.Popen(
                command, stdout=self._lines, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )
        except OSError:
            self._process = None  # no such tool: no samples, which the report shows as none

    def clocks_since(self, count: int) -> list[float]:
        """Hertz of the samples so far, less the first `count`."""
        text = os.pread(self._lines.fileno(), 2**20, 0).decode(errors="replace")
        whole = text.splitlines()[: text.count("\n")]
        samples = [sample for line in whole if (sample := parse_sample(line, 0.0)) is not None]
        return [sample.clock_hz for sample in samples[count:]]

    def stop(self) -> tuple[DeviceSample, ...]:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._lines.seek(0)
        text = self._lines.read().decode(errors="replace")
        self._lines.close()
        samples = (parse_sample(line, i * _EVERY_S) for i, line in enumerate(text.splitlines()))
        return tuple(sample for sample in samples if sample is not None)


def parse_sample(line: str, at_s: float) -> DeviceSample | None:
    """'1980, 689.42, 61, 0x0000000000000004'; None for a line cut off in the middle."""
    words = [word.strip() for word in line.split(",")]
    try:
        clock_mhz, watts, celsius = (float(word) for word in words[:3])
        throttle = words[3]
    except (ValueError, IndexError):
        return None
    clock_hz = clock_mhz * 1e6
    return DeviceSample(
        at_s=at_s, clock_hz=clock_hz, power_w=watts, temperature_c=celsius, throttle=throttle
    )


def process_born(pid: int) -> str | None:
    """Return the seconds from the machine's start to that of a living process, which setting the
    clock does not change; None when it lives no more."""
    psutil = import_psutil()
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return f"{process.create_time() - psutil.boot_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped by a signal; one under a debugger is not."""
    psutil = import_psutil()
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def import_psutil() -> ModuleType:
    """A package of those who run: to plan, and to read stored runs, numpy is enough."""
    try:
        import psutil
    except ModuleNotFoundError:
        raise lacks("psutil") from None
    return psutil
