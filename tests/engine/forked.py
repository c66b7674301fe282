"""Work for several ranks: a script of this folder has it, in a process that is no test's."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.engine import compat
from tests import warm

HERE = Path(__file__).parent


def findings(script: str, *words: str) -> Any:
    """What the script prints when it is called with these words."""
    paths = os.pathsep.join(map(str, (warm.ROOT / "src", warm.ROOT)))
    done = warm.run(
        [sys.executable, str(HERE / script), *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=590,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def on_ranks(count: int, work: Callable[[Path], Any]) -> list[Any]:
    """What the work finds on each rank; its folder is one for all. For scripts: it exits with 1 if
    a rank fails."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            fork.Process(target=_rank, args=(rank, count, folder, work)) for rank in range(count)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def _rank(rank: int, count: int, folder: Path, work: Callable[[Path], Any]) -> None:
    compat.quiet()
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    found = work(folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
