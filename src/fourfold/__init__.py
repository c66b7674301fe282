"""Lay out language-model pretraining on GPUs: predict, choose, run, keep and show.

The verbs take a typed request and return a frozen dataclass; `docs/library.md` shows them at work.
They are imported when they are first used: `import fourfold` itself costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.events import Event as Event
    from fourfold.spec.batch import Batch as Batch
    from fourfold.spec.cluster import Cluster as Cluster
    from fourfold.spec.layout import Layout as Layout
    from fourfold.spec.policy import Policy as Policy
    from fourfold.spec.run import RunSpec as RunSpec
    from fourfold.verbs.advise import advise as advise
    from fourfold.verbs.bench import bench as bench
    from fourfold.verbs.dryrun import dryrun as dryrun
    from fourfold.verbs.export import export as export
    from fourfold.verbs.machine import predictor as predictor
    from fourfold.verbs.one_rank import one_rank as one_rank
    from fourfold.verbs.plan import explain as explain
    from fourfold.verbs.plan import plan as plan
    from fourfold.verbs.plan import stacks as stacks
    from fourfold.verbs.predict import predict as predict
    from fourfold.verbs.predict import predict_table as predict_table
    from fourfold.verbs.report import report as report
    from fourfold.verbs.requests import AdviseRequest as AdviseRequest
    from fourfold.verbs.requests import PlanRequest as PlanRequest
    from fourfold.verbs.requests import ReportRequest as ReportRequest
    from fourfold.verbs.requests import RunsRequest as RunsRequest
    from fourfold.verbs.run_requests import BenchRequest as BenchRequest
    from fourfold.verbs.run_requests import MptSweep as MptSweep
    from fourfold.verbs.run_requests import OneRankRequest as OneRankRequest
    from fourfold.verbs.run_requests import SweepRequest as SweepRequest
    from fourfold.verbs.run_requests import VerifyRequest as VerifyRequest
    from fourfold.verbs.runs import diff as diff
    from fourfold.verbs.runs import runs as runs
    from fourfold.verbs.runs import show_run as show_run
    from fourfold.verbs.sweep import plan_sweep as plan_sweep
    from fourfold.verbs.sweep import sweep as sweep
    from fourfold.verbs.sweep_source import mpt_combinations as mpt_combinations
    from fourfold.verbs.sweep_source import planned_combinations as planned_combinations
    from fourfold.verbs.verify import verify as verify

__version__ = "0.1.0"

# name -> module; no submodule of this package has a verb's name.
_HOMES = {
    "AdviseRequest": "verbs.requests",
    "Batch": "spec.batch",
    "BenchRequest": "verbs.run_requests",
    "Cluster": "spec.cluster",
    "Event": "events",
    "Layout": "spec.layout",
    "MptSweep": "verbs.run_requests",
    "OneRankRequest": "verbs.run_requests",
    "PlanRequest": "verbs.requests",
    "Policy": "spec.policy",
    "ReportRequest": "verbs.requests",
    "RunSpec": "spec.run",
    "RunsRequest": "verbs.requests",
    "SweepRequest": "verbs.run_requests",
    "VerifyRequest": "verbs.run_requests",
    "advise": "verbs.advise",
    "bench": "verbs.bench",
    "diff": "verbs.runs",
    "dryrun": "verbs.dryrun",
    "explain": "verbs.plan",
    "export": "verbs.export",
    "mpt_combinations": "verbs.sweep_source",
    "one_rank": "verbs.one_rank",
    "plan": "verbs.plan",
    "plan_sweep": "verbs.sweep",
    "planned_combinations": "verbs.sweep_source",
    "predict": "verbs.predict",
    "predict_table": "verbs.predict",
    "predictor": "verbs.machine",
    "report": "verbs.report",
    "runs": "verbs.runs",
    "show_run": "verbs.runs",
    "stacks": "verbs.plan",
    "sweep": "verbs.sweep",
    "verify": "verbs.verify",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"fourfold.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
