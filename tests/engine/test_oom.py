"""What the CUDA allocator's snapshot says after an out-of-memory; a snapshot without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fourfold.engine.observe import memory
from fourfold.result.machine import Sampler, parse_sample
from fourfold.result.one_rank import Large


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total", 2.5 * 2**30),
        ("Tried to allocate 20.00 MiB (GPU 0; ", 20 * 2**20),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 512 bytes.", 512),
        ("NCCL error: unhandled cuda error", 0),
    ],
)
def test_what_was_asked_for(message: str, size: float) -> None:
    assert memory.asked_bytes(message) == size


def test_blocks_in_use_are_told_with_what_python_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        {"size": 100, "state": "active_allocated", "address": 1000},
        {"size": 900, "state": "inactive", "address": 1100},
        {"size": 700, "state": "active_pending_free", "address": 2000},
    ]
    segments = [
        {"device": 0, "address": 1000, "blocks": blocks},
        {"device": 1, "address": 9000, "blocks": blocks},
    ]
    stats = {"allocated_bytes.all.current": 800, "reserved_bytes.all.current": 1700}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    facts = SimpleNamespace(total_memory=2000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5, raising=False
    )
    known = {1000: Large(bytes=0, kind="parameters", shape="5x5", dtype="float32", op="", phase="",
                         name="head.weight")}  # fmt: skip
    monkeypatch.setattr(memory, "_reachable", lambda trainer: known)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB.")
    found = memory.of_allocator(torch.device("cuda", 0), None, error)
    assert (found.live_bytes, found.reserved_bytes) == (800, 1700)
    assert (found.asked_bytes, found.limit_bytes) == (1024, 1000)
    assert {kind.name: kind.bytes for kind in found.kinds} == {
        "activations": 700,
        "parameters": 100,
    }
    assert [(one.bytes, one.name) for one in found.largest] == [(700, ""), (100, "head.weight")]


def test_clocks_are_read_while_the_sampler_runs() -> None:
    sampler = Sampler("")
    sampler._lines.write(b"1980, 600.0, 60, 0x0\n1900, 600.0, 60, 0x0\n17")
    sampler._lines.flush()
    assert sampler.clocks_since(0) == [1.98e9, 1.9e9]
    assert sampler.clocks_since(1) == [1.9e9]
    assert parse_sample("17", 0.0) is None
    assert len(sampler.stop()) == 2
