"""Where did this run? Names, versions, sizes and limits of the machine, as a report keeps them."""

from __future__ import annotations

import platform
import socket
from datetime import UTC, datetime
from typing import Any

import torch

from fourfold.engine.process.task import Place
from fourfold.result.machine import cpu_name, gpu_facts, host_memory_bytes


def machine_facts(device: torch.device, cores: int) -> dict[str, Any]:
    """Fields of HardwareProfile that are read, not measured."""
    memory, units, power_w, name = host_memory_bytes(), cores, 0.0, cpu_name()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        memory, units, name = facts.total_memory, facts.multi_processor_count, facts.name
        limit = driver_facts(device).get("power.limit", "")
        power_w = float(limit) if limit.replace(".", "").isdecimal() else 0.0
    return {
        "device": device.type,
        "device_name": name,
        "host": socket.gethostname(),
        "torch": str(torch.__version__),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": cores,
        "units": units,
        "memory_bytes": memory,
        "power_w": power_w,
    }


def environment(device: torch.device, place: Place) -> tuple[tuple[str, str], ...]:
    """Everything of the surroundings that can change a number, as names and texts."""
    facts = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": cpu_name(),
        "cores": str(place.cores),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "allocator": torch.cuda.get_allocator_backend(),
        }
        facts |= {f"driver.{name}": text for name, text in driver_facts(device).items()}
    facts |= {f"env.{name}": text for name, text in place.variables}
    return tuple(sorted(facts.items()))


def driver_facts(device: torch.device) -> dict[str, str]:
    """What only the driver's own tool tells; empty where it is not installed."""
    names = ("driver_version", "power.limit", "clocks.max.sm", "pcie.link.gen.current")
    return gpu_facts(*names, uuid=uuid_of(device))


def uuid_of(device: torch.device) -> str:
    """As the driver's tool knows a GPU; '' for a CPU."""
    if device.type != "cuda":
        return ""
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
