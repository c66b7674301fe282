"""Entry point of the torch processes: `python -m fourfold.engine.worker JOB.json`.

Started by `fourfold.launch` it forks the ranks of this host. Started by torchrun or srun (RANK is
set) it is that one rank. Besides `launch`, the only file that reads environment variables.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.engine.process.host import Host
from fourfold.spec import codec
from fourfold.spec.job import Job

if TYPE_CHECKING:
    from fourfold.engine.process.task import Place

# kind of job -> the module whose perform(task) does it.
PERFORMERS = {
    "run": "fourfold.engine.jobs.run",
    "train": "fourfold.engine.jobs.train",
    "verify": "fourfold.engine.jobs.verify",
    "trace": "fourfold.engine.jobs.trace",
    "dryrun": "fourfold.engine.jobs.dryrun",
    "calibrate": "fourfold.engine.jobs.calibrate",
    "one-rank": "fourfold.engine.jobs.one_rank",
    "weights": "fourfold.engine.jobs.weights",
    "ping": "fourfold.engine.jobs.ping",
}
NO_TORCH_EXIT = 78


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    one_rank = "RANK" in os.environ and not args.launcher
    host = None if one_rank else Host(args.job.parent, args.launcher)
    job = codec.from_json(Job, args.job.read_text(encoding="utf-8"))
    if host is not None and job.patient:
        host.be_patient()
    try:
        import torch  # noqa: F401  (the slow part; the ranks inherit it)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch is not installed: pip install torch", file=sys.stderr)
        return NO_TORCH_EXIT
    from fourfold.engine.process.task import work

    tasks = [int(word) for word in args.tasks.split(",")] if args.tasks else list(range(job.tasks))
    performer = importlib.import_module(PERFORMERS[job.job])

    def become(rank: int) -> int:
        place = _place(rank, job.processes(tasks[0]))
        return work(job, tasks, place=place, folder=args.job.parent, perform=performer.perform)

    if host is None:
        return become(int(os.environ["RANK"]))
    host.fork(range(job.processes(tasks[0])), become)
    return host.wait()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fourfold.engine.worker", description=__doc__)
    parser.add_argument("job", type=Path, help="the job file; reports go into its folder")
    parser.add_argument("--tasks", default="", help="which of the job's runs, as 0,1,2")
    parser.add_argument("--launcher", type=int, default=0, help="process to die with")
    parser.add_argument("--mark", default="", help="of the job, for who looks at processes")
    return parser.parse_args(argv)


def _place(rank: int, world: int) -> Place:
    """torchrun's variables where it set them; else what it would have set, for who looks there."""
    from fourfold.engine.process.task import Place

    if "WORLD_SIZE" not in os.environ:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
        }
    return Place(
        rank=rank,
        world=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        by_address="MASTER_ADDR" in os.environ,
        started_at=float(os.environ.get("FOURFOLD_STARTED_AT", time.time())),
        variables=_variables(),
    )


def _variables() -> tuple[tuple[str, str], ...]:
    """What of the environment can change a run; kept with its report."""
    prefixes = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "MKL_", "KMP_", "TRITON_")
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(prefixes)))


if __name__ == "__main__":
    sys.exit(main())
