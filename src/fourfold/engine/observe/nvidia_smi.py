"""Was the GPU slowed while it was timed? Clock, power and temperature, sampled beside the run.

The driver's own tool runs as a child and writes a line every fifth of a second: no thread of ours
wakes inside a timed step, and nothing needs to be installed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import IO

import torch

from fourfold.result.report import DeviceSample

_EVERY_S = 0.2
_FIELDS = "clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active"


class Sampler:
    """Started before the first timed step, read after the last; silent where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in stop)
        if device.type != "cuda":
            return
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
        command += ["-lms", str(round(_EVERY_S * 1e3)), "-i", f"GPU-{uuid.removeprefix('GPU-')}"]
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
        samples = [sample for line in whole if (sample := parse(line, 0.0)) is not None]
        return [sample.clock_hz for sample in samples[count:]]

    def stop(self) -> tuple[DeviceSample, ...]:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._lines.seek(0)
        text = self._lines.read().decode(errors="replace")
        self._lines.close()
        samples = (parse(line, i * _EVERY_S) for i, line in enumerate(text.splitlines()))
        return tuple(sample for sample in samples if sample is not None)


def parse(line: str, at_s: float) -> DeviceSample | None:
    """'1980, 689.42, 61, 0x0000000000000004'; None for a line cut off in the middle."""
    words = [word.strip() for word in line.split(",")]
    try:
        clock_mhz, power_w, temperature_c = (float(word) for word in words[:3])
        throttle = words[3]
    except (ValueError, IndexError):
        return None
    return DeviceSample(
        at_s=at_s,
        clock_hz=clock_mhz * 1e6,
        power_w=power_w,
        temperature_c=temperature_c,
        throttle=throttle,
    )
