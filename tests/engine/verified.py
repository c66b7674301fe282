"""Runs against one process, by the job of `fourfold verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.launch.local import run_job
from fourfold.result.job import Job, Limits, answer_file
from fourfold.spec.run import RunSpec


def verified(specs: list[RunSpec], folder: Path, **options: str) -> list[dict[str, Any]]:
    """What each run found; of one that did not end, why."""
    limits = Limits(start_s=600, step_s=600)
    given, ranks = tuple(options.items()), specs[0].gpus
    job = Job(job="verify", specs=tuple(specs), ranks=ranks, options=given, limits=limits)
    report = run_job(job, folder)
    rows = []
    for index, end in enumerate(report.runs):
        path = answer_file(folder, index, None)
        rows.append(json.loads(path.read_text()) if path.exists() else {"pass": False})
        if end.failure:
            rows[-1]["failure"] = end.failure.message[-400:]
    assert len(rows) == len(specs), report.failure
    return rows
