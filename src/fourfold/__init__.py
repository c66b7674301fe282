"""Lay out language-model pretraining on GPUs: predict, choose, run, keep and show.

The verbs take a typed request and return a frozen dataclass; `docs/library.md` shows them at work.
They are imported when they are first used: `import fourfold` itself costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.installed import __version__

# ruff: noqa: F401
if TYPE_CHECKING:
    from fourfold.errors import UserError
    from fourfold.events import Event
    from fourfold.spec.batch import Batch
    from fourfold.spec.cluster import Cluster
    from fourfold.spec.layout import Layout
    from fourfold.spec.policy import Policy
    from fourfold.spec.run import RunSpec
    from fourfold.verbs.advise import AdviseRequest, advise
    from fourfold.verbs.bench import bench, submit_bench
    from fourfold.verbs.calendar import calendar
    from fourfold.verbs.calendar_request import CalendarRequest, TrainingPhase
    from fourfold.verbs.calibrate import calibrate, demo, submit_calibrate
    from fourfold.verbs.clusters import new_cluster
    from fourfold.verbs.collect import CollectRequest, collect
    from fourfold.verbs.conformance import EnginesRequest, conform, engines, install_engines, matrix
    from fourfold.verbs.diagnose import diagnose
    from fourfold.verbs.engine_memory import engine_memory
    from fourfold.verbs.engine_memory_request import EngineMemoryRequest
    from fourfold.verbs.export import SupportRequest, export, support
    from fourfold.verbs.fit import fit, score, suggest_runs
    from fourfold.verbs.front import front, largest
    from fourfold.verbs.one_rank import one_rank
    from fourfold.verbs.plan import explain, fit_check, plan, stacks
    from fourfold.verbs.predict import dryrun, predict, predict_table
    from fourfold.verbs.report import lint, lint_rules, report
    from fourfold.verbs.requests import (
        ClusterRequest,
        DiagnoseRequest,
        FitRequest,
        PlanRequest,
        ReportRequest,
        RunsRequest,
        ScoreRequest,
        TokensRequest,
        WeightsRequest,
    )
    from fourfold.verbs.run_requests import (
        BenchRequest,
        CalibrateRequest,
        MptSweep,
        OneRankRequest,
        PlanSweep,
        SweepRequest,
        TraceRequest,
        TrainRequest,
        VerifyRequest,
    )
    from fourfold.verbs.runs import diff, runs, show_run
    from fourfold.verbs.shapes import FlopsRequest, cluster, clusters, flops, gpus, model, models
    from fourfold.verbs.sweep import plan_sweep, submit_sweep, sweep
    from fourfold.verbs.tokens import make_tokens, show_tokens
    from fourfold.verbs.trace import trace
    from fourfold.verbs.train import show_training, submit_train, train
    from fourfold.verbs.verify import submit_verify, verify
    from fourfold.verbs.weights import export_weights


# Module -> its names; no submodule of this package has a verb's name.
_MODULES = {
    "errors": "UserError",
    "events": "Event",
    "spec.batch": "Batch",
    "spec.cluster": "Cluster",
    "spec.layout": "Layout",
    "spec.policy": "Policy",
    "spec.run": "RunSpec",
    "verbs.advise": "AdviseRequest advise",
    "verbs.bench": "bench submit_bench",
    "verbs.calibrate": "calibrate demo submit_calibrate",
    "verbs.calendar": "calendar",
    "verbs.calendar_request": "CalendarRequest TrainingPhase",
    "verbs.clusters": "new_cluster",
    "verbs.collect": "CollectRequest collect",
    "verbs.diagnose": "diagnose",
    "verbs.engine_memory": "engine_memory",
    "verbs.engine_memory_request": "EngineMemoryRequest",
    "verbs.export": "SupportRequest export support",
    "verbs.fit": "fit score suggest_runs",
    "verbs.front": "front largest",
    "verbs.one_rank": "one_rank",
    "verbs.plan": "explain fit_check plan stacks",
    "verbs.predict": "dryrun predict predict_table",
    "verbs.report": "lint lint_rules report",
    "verbs.conformance": "EnginesRequest conform engines install_engines matrix",
    "verbs.requests": "ClusterRequest DiagnoseRequest FitRequest PlanRequest "
    "ReportRequest RunsRequest ScoreRequest TokensRequest WeightsRequest",
    "verbs.run_requests": "BenchRequest CalibrateRequest MptSweep "
    "OneRankRequest PlanSweep SweepRequest TraceRequest TrainRequest VerifyRequest",
    "verbs.runs": "diff runs show_run",
    "verbs.shapes": "FlopsRequest cluster clusters flops gpus model models",
    "verbs.sweep": "plan_sweep submit_sweep sweep",
    "verbs.tokens": "make_tokens show_tokens",
    "verbs.trace": "trace",
    "verbs.train": "show_training submit_train train",
    "verbs.verify": "submit_verify verify",
    "verbs.weights": "export_weights",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"fourfold.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


__all__ = [*_HOMES, "__version__"]


def __dir__() -> list[str]:
    """Not what this file itself needs."""
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})
