"""Where a job runs: this host, or a site whose scheduler is asked for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.batch_script import BatchJob
from fourfold.launch.folder import job_folder
from fourfold.launch.local import require_torch
from fourfold.launch.queue import Queue, described_job
from fourfold.launch.slurm import Slurm
from fourfold.result.job import JOB_FILE, Job
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.site import Site, read_site
from fourfold.verbs import Answer
from fourfold.verbs.run_requests import Launch, MeasureRequest


@dataclass(frozen=True, slots=True)
class Submission(Answer):
    """Jobs that were left to a scheduler, or batch scripts that nobody has submitted yet."""

    jobs: tuple[dict[str, str], ...] = ()
    scripts: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        return [dict(job) for job in self.jobs]


def site_of(request: Launch) -> Site | None:
    """None: this host."""
    site = read_site(request.on)
    asked = {"print-launch": request.print_launch, "detach": getattr(request, "detach", False)}
    for flag, given in asked.items():
        if given and site is None:
            raise UserError("needs a site", field=f"--{flag}", hint="add --on slurm or --on SITE")
    return site


def shared_folder(site: Site | None) -> Path | None:
    """Where a job that keeps nothing works; None: on this host alone."""
    return Path(site.shared or ".").absolute() if site else None


def submission(queue: Queue, specs: Sequence[RunSpec], request: MeasureRequest) -> Submission:
    if request.print_launch:
        return Submission(scripts=tuple(queue.prepare(specs)))
    if not request.engine:
        require_torch()
    return Submission(tuple(described_job(place) for place in queue.detach(specs)))


def submission_of(job: Job, folder: Path, on: Slurm, *, only_print: bool) -> Submission:
    """One job that is no run of a store, in the folder where it works."""
    batch = BatchJob(job, tuple(range(job.tasks)), (folder,), folder)
    with job_folder(folder):
        files.write_text(folder / JOB_FILE, codec.to_json(job))
        if only_print:
            return Submission(scripts=(on.write_script(batch).read_text(encoding="utf-8"),))
        require_torch()
        on.submit(batch)
    return Submission((described_job(folder),))


def printed(job: Job, site: Site) -> Submission:
    """The script of a job whose command keeps nothing, in a new folder that stays."""
    folder = Path(site.shared or ".").absolute() / f"fourfold-{job.job}-{secrets.token_hex(4)}"
    return submission_of(job, folder, Slurm(site), only_print=True)


def launcher_of(site: Site | None) -> Slurm | None:
    return Slurm(site) if site else None
