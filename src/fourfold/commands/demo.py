"""The main job on this machine, start to end, in about two minutes.

Measures the machine briefly, plans a small model on it, runs the best layouts for a few steps, and
prints predicted beside measured. On a CPU four ranks share the cores (gloo); with GPUs each is one
rank (NCCL).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fourfold.commands import calibrate
from fourfold.commands.progress import end_line, progress_lines
from fourfold.launch.devices import gpu_count
from fourfold.launch.folder import scratch
from fourfold.launch.local import JobError, run_job
from fourfold.result.profile import HardwareProfile, cluster_of
from fourfold.result.read.quality import flags
from fourfold.result.report import RunReport
from fourfold.show.table import json_text, render
from fourfold.spec import AXES, Batch, Policy, RunSpec, catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.job import Job

EXAMPLES = """\
examples:
  fourfold demo
  fourfold demo --layouts 2 --steps 4
"""
CPU_RANKS = 4
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Scene:
    """What is trained where."""

    model: str
    batch: Batch
    policy: Policy
    ranks: int


def scene(gpus: int) -> Scene:
    if gpus:
        batch = Batch(seq_len=2048, micro_batch=1, global_batch=8 * gpus)
        return Scene("llama-3.2-1b-untied", batch, Policy(precision="bf16-mixed"), gpus)
    batch = Batch(seq_len=128, micro_batch=1, global_batch=16)
    return Scene("llama-mini", batch, Policy(precision="fp32"), CPU_RANKS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", type=int, default=3, metavar="N", help="how many to run")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="timed steps of each")
    parser.add_argument("--format", choices=("text", "md", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    layouts, steps = min(max(args.layouts, 1), 8), min(max(args.steps, 1), 1000)
    chosen = scene(gpu_count())
    try:
        _say("1 of 3: measuring this machine (fourfold calibrate --quick) ...")
        profile = calibrate.measure(quick=True, device="auto")
        cluster = cluster_of(profile, chosen.ranks)
        _say(f"2 of 3: planning {chosen.model} on {chosen.ranks} ranks (fourfold plan) ...")
        planned = _plan(chosen, cluster, profile, layouts)
        _say(f"3 of 3: running {len(planned)} layouts, {steps} timed steps each ...")
        reports = _measure([spec for spec, _ in planned], steps)
    except JobError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    rows = [_row(spec, said, report) for (spec, said), report in zip(planned, reports, strict=True)]
    _print(args.format, rows, chosen, cluster)
    return 0 if all(row["outcome"] == "ok" for row in rows) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _plan(
    chosen: Scene, cluster: Cluster, profile: HardwareProfile, layouts: int
) -> list[tuple[RunSpec, dict[str, float]]]:
    """The fastest plan and the best ones that divide the work in other ways."""
    from fourfold.cost.fit.calibration import calibration_of
    from fourfold.search.query import PlanQuery, entry_for
    from fourfold.search.ranking import rank_layouts

    known = calibration_of(profile, cluster)
    entry, _ = entry_for(known, "fourfold", cluster)
    ask = PlanQuery(
        model=catalog.model(chosen.model),
        cluster=cluster,
        gpus=chosen.ranks,
        batch=chosen.batch,
        policy=chosen.policy,
        stack="fourfold",
        entry=entry,
        calibration=known.name,
        no_rows="no run was measured here yet",
        evidence={},
        fixed={"virtual_stages": 1, "recompute": "none"},
        explore=True,
    )
    found = rank_layouts(ask)
    _say(f"   {found.grid.legal:,} legal plans, {found.fitting:,} fit")
    planned: dict[str, tuple[RunSpec, dict[str, float]]] = {}
    for i in range(len(found)):
        layout = found.layout(i)
        axes = " ".join(axis for axis in AXES if layout.size(axis) > 1)
        if axes in planned:
            continue
        spec = found.spec(i)
        planned[axes] = (
            spec,
            {
                "step_s": float(found.step_s[i]),
                "step_s_low": float(found.predicted.low_s[i]),
                "step_s_high": float(found.predicted.high_s[i]),
                "peak_bytes": float(found.points["peak_bytes"][i]),
            },
        )
        if len(planned) == layouts:
            break
    return list(planned.values())


def _measure(specs: list[RunSpec], steps: int) -> list[RunReport]:
    timed = tuple(replace(spec, steps=steps, warmup=2) for spec in specs)
    with scratch() as folder:
        # Probes before and after each run tell a changed machine from a wrong prediction.
        job = Job(job="run", specs=timed, options=(("probe_s", "0.5"),))
        report = run_job(job, folder, progress=progress_lines())
    end_line()
    return list(report.runs)


def _row(spec: RunSpec, said: dict[str, float], report: RunReport) -> dict[str, Any]:
    row: dict[str, Any] = {
        "layout": str(spec.layout),
        "sharding": spec.policy.sharding,
        "micro_batch": spec.batch.micro_batch,
        "predicted_s": said["step_s"],
        "predicted_s_low": said["step_s_low"],
        "predicted_s_high": said["step_s_high"],
        "predicted_peak_bytes": said["peak_bytes"],
        "outcome": report.outcome,
    }
    timed = [step for step in report.steps if not step.warmup]
    if report.outcome == "ok" and timed:
        row |= {
            "measured_s": median(step.seconds for step in timed),
            "measured_peak_bytes": max(memory.peak_bytes for memory in report.memory),
            "inside_interval": said["step_s_low"]
            <= median(step.seconds for step in timed)
            <= said["step_s_high"],
            "flags": flags(report),
            "loss": next((s.loss for s in reversed(timed) if s.loss is not None), None),
        }
    elif report.failure is not None:
        row["failure"] = report.failure.message
    return row


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """How the prediction did, and what to doubt about the measurement, as `bench` says it."""
    timed = [row for row in rows if "measured_s" in row]
    inside = [
        row
        for row in timed
        if row["predicted_s_low"] <= row["measured_s"] <= row["predicted_s_high"]
    ]
    if not timed:
        return []
    lines = [f"{len(inside)} of {len(timed)} measured inside their 80% interval"]
    if len(inside) < len(timed):
        ratio = median(row["measured_s"] / row["predicted_s"] for row in timed)
        lines[0] += (
            f"; they took {ratio:.2g} times the prediction, which is for a machine that does "
            "nothing else"
        )
    best = min(timed, key=lambda row: row["measured_s"])
    place = timed.index(best) + 1
    lines.append(f"fastest measured: {best['layout']}, predicted as number {place} of these")
    lines += [f"doubt {row['layout']}: {flag}" for row in timed for flag in row["flags"]]
    return lines


def _print(style: str, rows: list[dict[str, Any]], chosen: Scene, cluster: Cluster) -> None:
    if style == "json":
        print(json_text({"model": chosen.model, "cluster": cluster.name, "runs": rows}))
        return
    cells = []
    for row in rows:
        measured = row.get("measured_s")
        cells.append(
            [
                row["layout"],
                row["sharding"],
                str(row["micro_batch"]),
                f"{row['predicted_s']:.3f}",
                f"{row['predicted_s_low']:.2f}-{row['predicted_s_high']:.2f}",
                f"{measured:.3f}" if measured else row["outcome"],
                f"{100 * (row['predicted_s'] / measured - 1):+.0f}" if measured else "-",
                f"{chosen.batch.tokens / measured:,.0f}" if measured else "-",
                f"{row['predicted_peak_bytes'] / GIB:.2f}",
                f"{row['measured_peak_bytes'] / GIB:.2f}" if measured else "-",
                f"{row['loss']:.3f}" if row.get("loss") is not None else "-",
            ]
        )
    headings = [
        "layout", "sharding", "micro", "predicted s", "80% interval", "measured s", "error %",
        "tokens/s", "predicted GiB", "measured GiB", "loss",
    ]  # fmt: skip
    print(render(headings, cells, style))
    print(
        f"\n{chosen.model}, {chosen.batch.global_batch} sequences of {chosen.batch.seq_len} "
        f"tokens, {chosen.policy.precision}; {chosen.ranks} ranks on {cluster.device.name}\n"
        "predicted from kernels and links measured a minute ago, before any step was run; "
        "'fourfold fit' learns from runs"
    )
    for line in _verdict(rows):
        print(line)
    for row in rows:
        if "failure" in row:
            print(f"{row['layout']} {row['outcome']}: {row['failure']}", file=sys.stderr)
