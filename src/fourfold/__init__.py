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
    from fourfold.verbs.calibrate import calibrate as calibrate
    from fourfold.verbs.clusters import new_cluster as new_cluster
    from fourfold.verbs.demo import demo as demo
    from fourfold.verbs.dryrun import dryrun as dryrun
    from fourfold.verbs.export import export as export
    from fourfold.verbs.fit import fit as fit
    from fourfold.verbs.fit import score as score
    from fourfold.verbs.fit import suggest_runs as suggest_runs
    from fourfold.verbs.lint import lint as lint
    from fourfold.verbs.lint import lint_rules as lint_rules
    from fourfold.verbs.machine import predictor as predictor
    from fourfold.verbs.one_rank import one_rank as one_rank
    from fourfold.verbs.plan import explain as explain
    from fourfold.verbs.plan import plan as plan
    from fourfold.verbs.plan import stacks as stacks
    from fourfold.verbs.predict import predict as predict
    from fourfold.verbs.predict import predict_table as predict_table
    from fourfold.verbs.report import report as report
    from fourfold.verbs.requests import PlanRequest as PlanRequest
    from fourfold.verbs.requests import ReportRequest as ReportRequest
    from fourfold.verbs.requests import RunsRequest as RunsRequest
    from fourfold.verbs.run_requests import BenchRequest as BenchRequest
    from fourfold.verbs.run_requests import MptSweep as MptSweep
    from fourfold.verbs.run_requests import OneRankRequest as OneRankRequest
    from fourfold.verbs.run_requests import SweepRequest as SweepRequest
    from fourfold.verbs.run_requests import TrainRequest as TrainRequest
    from fourfold.verbs.run_requests import VerifyRequest as VerifyRequest
    from fourfold.verbs.runs import diff as diff
    from fourfold.verbs.runs import runs as runs
    from fourfold.verbs.runs import show_run as show_run
    from fourfold.verbs.shapes import cluster as cluster
    from fourfold.verbs.shapes import clusters as clusters
    from fourfold.verbs.shapes import flops as flops
    from fourfold.verbs.shapes import gpus as gpus
    from fourfold.verbs.shapes import model as model
    from fourfold.verbs.shapes import models as models
    from fourfold.verbs.sweep import plan_sweep as plan_sweep
    from fourfold.verbs.sweep import sweep as sweep
    from fourfold.verbs.sweep_source import mpt_combinations as mpt_combinations
    from fourfold.verbs.sweep_source import planned_combinations as planned_combinations
    from fourfold.verbs.tokens import make_tokens as make_tokens
    from fourfold.verbs.tokens import show_tokens as show_tokens
    from fourfold.verbs.tool_requests import AdviseRequest as AdviseRequest
    from fourfold.verbs.tool_requests import ClusterRequest as ClusterRequest
    from fourfold.verbs.tool_requests import TraceRequest as TraceRequest
    from fourfold.verbs.trace import trace as trace
    from fourfold.verbs.train import show_training as show_training
    from fourfold.verbs.train import train as train
    from fourfold.verbs.verify import verify as verify
    from fourfold.verbs.weights import export_weights as export_weights

__version__ = "0.1.0"

# name -> module; no submodule of this package has a verb's name.
_HOMES = {
    "AdviseRequest": "verbs.tool_requests",
    "Batch": "spec.batch",
    "BenchRequest": "verbs.run_requests",
    "Cluster": "spec.cluster",
    "ClusterRequest": "verbs.tool_requests",
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
    "TraceRequest": "verbs.tool_requests",
    "TrainRequest": "verbs.run_requests",
    "VerifyRequest": "verbs.run_requests",
    "advise": "verbs.advise",
    "bench": "verbs.bench",
    "calibrate": "verbs.calibrate",
    "cluster": "verbs.shapes",
    "clusters": "verbs.shapes",
    "demo": "verbs.demo",
    "diff": "verbs.runs",
    "dryrun": "verbs.dryrun",
    "explain": "verbs.plan",
    "export": "verbs.export",
    "export_weights": "verbs.weights",
    "fit": "verbs.fit",
    "flops": "verbs.shapes",
    "gpus": "verbs.shapes",
    "lint": "verbs.lint",
    "lint_rules": "verbs.lint",
    "make_tokens": "verbs.tokens",
    "model": "verbs.shapes",
    "models": "verbs.shapes",
    "mpt_combinations": "verbs.sweep_source",
    "new_cluster": "verbs.clusters",
    "one_rank": "verbs.one_rank",
    "plan": "verbs.plan",
    "plan_sweep": "verbs.sweep",
    "planned_combinations": "verbs.sweep_source",
    "predict": "verbs.predict",
    "predict_table": "verbs.predict",
    "predictor": "verbs.machine",
    "report": "verbs.report",
    "runs": "verbs.runs",
    "score": "verbs.fit",
    "show_run": "verbs.runs",
    "show_tokens": "verbs.tokens",
    "show_training": "verbs.train",
    "stacks": "verbs.plan",
    "suggest_runs": "verbs.fit",
    "sweep": "verbs.sweep",
    "trace": "verbs.trace",
    "train": "verbs.train",
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
