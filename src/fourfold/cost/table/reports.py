"""Rows of stored run reports for a fit: the median step after warm-up, the fullest rank's memory.
Reports of other outcomes than `ok` and `oom` teach nothing about speed and are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from fourfold.cost.memory.peak import GIB
from fourfold.cost.run import columns_of
from fourfold.cost.table.cells import engines
from fourfold.cost.table.reference import SCHEMA, RowTable
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.result.files.run_file import NAME, RUN_FILE, read_run, read_run_folder
from fourfold.result.files.stored import read_stored
from fourfold.result.report import RunReport
from fourfold.spec import check
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.words import OURS
from fourfold.units import counted


def read_reports(folder: str, warn: Callable[[str], None] = lambda text: None) -> list[RunReport]:
    """All RunReports under a folder, in the order of their names; other files are passed over, and
    damaged ones named."""
    root = Path(folder)
    check.that(root.is_dir(), "--runs", folder, "is not a folder", "pass the folder of a store")
    reports = []
    for path in sorted(root.rglob("*.json")):
        if path.name.startswith("."):  # the store's own cache
            continue
        in_store = path.name == RUN_FILE and NAME.match(path.parent.name)
        try:
            if in_store or read_stored(path, field="--runs").get("type") == "RunReport":
                reports.append(read_run_folder(path.parent) if in_store else read_run(path)[0])
        except UserError as error:
            warn(f"{path} is skipped: {error}")
    return reports


def report_rows(
    folder: str, cluster: Cluster, warn: Callable[[str], None] = lambda text: None
) -> Rows:
    """Rows of our engine's reports that ran or ran out of memory; another engine's speed is its
    own, and its log makes rows of it."""
    reports = [r for r in read_reports(folder, warn) if r.outcome in ("ok", "oom")]
    others = [r for r in reports if dict(r.environment).get("engine")]
    if others:
        left = counted(len(others), "run")
        warn(f"left out: {left} of other engines, which 'fourfold collect {folder}' reads")
    reports = [r for r in reports if not dict(r.environment).get("engine")]
    if not reports:
        hint = "measure one with 'fourfold bench' first"
        raise UserError("contains no run", field="--runs", value=folder, hint=hint)
    n = len(reports)
    runs = [MeasuredAs(OURS, experts=report.spec.model.moe is not None) for report in reports]
    return Rows(
        table=_table(folder, reports, cluster),
        columns=columns_of([r.spec for r in reports], cluster=cluster, engine=engine_of(OURS)),
        usable=np.ones(n, dtype=bool),
        reasons=[""] * n,
        measured_as=engines(runs),
        cluster=np.array([run.place(cluster.name) for run in runs]),
        hardware=np.array([cluster.device.id] * n),
        step_s=np.array([_step_s(r) for r in reports]),
        mem_gb=np.array([_gib(r) for r in reports]),
        status=np.array([r.outcome for r in reports]),
    )


def _step_s(report: RunReport) -> float:
    times = [step.seconds for step in report.steps if not step.warmup]
    return median(times) if times else float("nan")


def _gib(report: RunReport) -> float:
    peaks = [max(m.peak_bytes, m.reserved_bytes) for m in report.memory]
    return max(peaks) / GIB if peaks else float("nan")


def _table(folder: str, reports: list[RunReport], cluster: Cluster) -> RowTable:
    """The columns that folds and groups look at; the rest stays blank."""
    texts = {name: [""] * len(reports) for name in SCHEMA}
    for i, report in enumerate(reports):
        spec, layout = report.spec, report.spec.layout
        cells = {
            "row_id": spec.run_id,
            "source": OURS,
            "stack": OURS,
            "cluster": cluster.name,
            "hardware": cluster.device.id,
            "family": spec.model.family,
            "n_layers": spec.model.layers,
            "d_model": spec.model.hidden,
            "n_heads": spec.model.heads,
            "seq_len": spec.batch.seq_len,
            "n_gpus": spec.gpus,
            **layout.sizes,
            "mbs": spec.batch.micro_batch,
            "gbs": spec.batch.global_batch,
            "precision": spec.policy.precision_name,
            "act_ckpt": spec.policy.recompute,
            "status": report.outcome,
        }
        for name, value in cells.items():
            texts[name][i] = str(value)
    return RowTable(Path(folder).name, texts, len(reports))
