"""Ranks of a real training, stopped wherever they stand: named within half a minute, by default."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.result.job import Beat, beat_file, read_beat
from tests import warm
from tests.processes import children

WORDS = (
    "--model llama-tiny --gpus 2 --seq-len 64 --global-batch 8 --micro-batch 1 --precision fp32 "
    "--steps 100000 --save-every 1 --keep 1 --no-async --log-every 1 --format json"
)
RUN = WORDS.split()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    out = tmp_path / "out"
    process = warm.Popen(
        warm.command("train", "--out", str(out), *RUN),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process, out
    if process.poll() is None:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """As soon as they are forked."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        for worker in children(process.pid):
            found = children(worker)
            if len(found) >= 2:
                return found[:2]
        time.sleep(0.001)
    raise AssertionError("no ranks came up")


def beat_of(out: Path, rank: int) -> Beat | None:
    return read_beat(beat_file(out / "job", rank))


def stop_in(process: subprocess.Popen[str], out: Path, phase: str, pids: list[int]) -> None:
    """Stop rank 1 in a phase, whatever number of attempts it takes."""
    if phase == "start":
        os.kill(pids[1], signal.SIGSTOP)
        return
    if phase == "join":  # rank 0 keeps it waiting there
        os.kill(pids[0], signal.SIGSTOP)
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        found = beat_of(out, 1)
        if found is None or found.phase != phase:
            time.sleep(0.0005)
            continue
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.05)
        found = beat_of(out, 1)
        if found is not None and found.phase == phase:
            break
        os.kill(pids[1], signal.SIGCONT)
    else:
        raise AssertionError(f"never seen in {phase}")
    if phase == "join":
        os.kill(pids[0], signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "join", "forward", "backward", "optimizer", "save"])
def test_a_rank_stopped_in_any_phase_is_named(training, phase: str) -> None:
    process, out = training
    pids = ranks_of(process)
    stop_in(process, out, phase, pids)
    began = time.monotonic()
    printed, said = process.communicate(timeout=240)
    print(f"{phase}: named and ended after {time.monotonic() - began:.1f} s")
    assert process.returncode == 1, said
    plain = json.loads(printed)
    assert (plain["outcome"], plain["failure"]["rank"]) == ("hung", 1), said
    assert plain["failure"]["phase"] == phase
    message = plain["failure"]["message"]
    assert message.startswith(f"rank 1 (pid {pids[1]} on {socket.gethostname()}, stage 0, {phase})")
    # 15 s, and more on a busy machine.
    assert re.search(r"has been suspended by SIGSTOP for \d\d s", message)
    assert f"hung: rank 1, stage 0, {phase}: {message}" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
