"""kill -9 at random moments of a sweep: nothing finished is lost or run again, nothing is half
written, no process is left. Moments are drawn anew each time and shown when something is wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.result.files.run_file import WORK
from fourfold.result.files.store import Store
from tests import warm
from tests.processes import with_words

# By its whole path: the sweep runs in a folder of its own.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
SWEEP = """
model = "llama-tiny"
gpus = {gpus}
steps = 2
warmup = 1
device = "cpu"
[batch]
seq_len = 32
global_batch = 4
[policy]
precision = "fp32"
[sweep]
seed = {seeds}
"""


def _start(folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "fourfold", "sweep", "sweep.toml", "--runs", "runs"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return warm.Popen([*words, "--format", "json"], cwd=folder, env=ENVIRONMENT, **quiet)


def _stored(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> (time of writing, outcome). Every listed run must be whole."""
    unreadable: list[str] = []
    runs = Store(folder / "runs").runs(unreadable=unreadable)
    assert unreadable == []
    for stored in runs:
        stored.report()
    return {
        stored.name: ((stored.folder / "run.json").stat().st_mtime_ns, stored.summary.outcome)
        for stored in runs
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("gpus", "kills", "longest_s"), [(1, 20, 9.0), (4, 3, 15.0)])
def test_a_sweep_that_is_killed_loses_nothing(tmp_path, gpus, kills, longest_s) -> None:
    folder = tmp_path
    seeds = list(range(4))
    (folder / "sweep.toml").write_text(SWEEP.format(gpus=gpus, seeds=seeds))
    chosen = random.Random()
    moments, before = [], {}
    for _ in range(kills):
        sweep = _start(folder)
        moments.append(chosen.uniform(0.05, longest_s))
        time.sleep(moments[-1])
        os.kill(sweep.pid, signal.SIGKILL)
        sweep.wait()
        after = _stored(folder)
        assert before.items() <= after.items(), f"lost or run again, moments {moments}"
        before = after
    last = warm.run(
        [sys.executable, "-m", "fourfold", "sweep", "sweep.toml", "--runs", "runs",
         "--format", "json"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert last.returncode == 0, last.stderr
    data = json.loads(last.stdout)
    assert (data["total"], data["ok"]) == (4, 4), (moments, data)
    final = _stored(folder)
    assert before.items() <= final.items(), f"lost or run again, moments {moments}"
    assert len(final) == 4, f"a finished run was run again, moments {moments}"
    assert list((folder / "runs" / WORK).iterdir()) == []
    assert not with_words(str(folder / "runs" / WORK)), f"orphans, moments {moments}"
