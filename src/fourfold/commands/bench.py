"""Run one configuration and say how fast it is, how sure that is, and what to doubt.

The run is kept in the store with every step's raw time, versions, variables, clocks and probes.
Warm-up ends when steps no longer get faster, not only after a count. A prediction stands beside the
measurement when a cluster, a profile of this machine or a known GPU gives one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.commands import bench_auto, flags, progress
from fourfold.cost.flops import convention
from fourfold.errors import UserError
from fourfold.launch.campaign import Campaign, Say, kind_of
from fourfold.launch.local import run_job
from fourfold.result.profile import HardwareProfile
from fourfold.result.report import RunReport
from fourfold.result.store import Store
from fourfold.search.legal import Target, why_not
from fourfold.show import bench as shown
from fourfold.show.table import json_text, render
from fourfold.spec import catalog, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.job import Job
from fourfold.spec.nccl_tests import device_id
from fourfold.spec.run import RunSpec
from fourfold.units import show_bytes, show_seconds

EXAMPLES = """\
examples:
  fourfold bench --model llama-tiny --gpus 4 --tp 2 --seq-len 128 --global-batch 16 --precision fp32
  fourfold bench --spec run.toml --repeat 3
  fourfold bench --model llama-3.2-1b-untied --gpus 1 --seq-len 4096 --micro-batch 0   (0: auto)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_run(parser)
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps")
    parser.add_argument("--warmup", type=int, metavar="N", help="steps before them, at least")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs (1)")
    parser.add_argument("--probe-s", type=float, default=1.0, metavar="S", help="0: no probes")
    parser.add_argument("--tag", metavar="TEXT", help="a word kept with the run")
    parser.add_argument("--note", metavar="TEXT", help="words kept with the run")
    parser.add_argument("--convention", default="causal", metavar="ID", help="see 'flops'")
    parser.add_argument("--cluster", metavar="NAME", help="for the prediction")
    parser.add_argument("--profile", metavar="FILE", help="this machine, from 'calibrate --out'")
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    rule = convention(args.convention).id
    if args.repeat < 1:
        raise UserError("must be 1 or more", field="repeat", value=args.repeat)
    campaign = Campaign(
        Store(args.runs), runner=_runner(args.probe_s), say=progress.progress_lines()
    )
    campaign.clear_up()
    spec, trials = _decided(_spec(args), args, campaign)
    refused = why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus))
    if refused:
        campaign.refuse(spec, "; ".join(map(str, refused)))
        print(f"illegal: {'; '.join(map(str, refused))}", file=sys.stderr)
        return 1
    done = [campaign.run_new(spec) for _ in range(args.repeat)]
    progress.end_line()
    answers = [shown.facts(one.report()) | {"folder": str(one.folder)} for one in done]
    for plain in answers:
        plain["predicted"] = _predicted(args, [spec])[0]
        plain["micro_batch_trials"] = trials
        if plain["outcome"] == "oom":
            plain["post_mortem"] = _post_mortem(args, spec)
    _show(args, answers, rule)
    return 0 if all(plain["outcome"] == "ok" for plain in answers) else 1


def _spec(args: argparse.Namespace) -> RunSpec:
    spec = flags.run_spec(args)
    changes: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("steps", "warmup", "tag", "note")
        if getattr(args, name) is not None
    }
    return dataclasses.replace(spec, **changes)


def _runner(probe_s: float) -> Any:
    options = (("probe_s", f"{probe_s:g}"),) if probe_s > 0 else ()

    def launch(spec: RunSpec, folder: Path, say: Say) -> RunReport:
        return run_job(Job(job="run", specs=(spec,), options=options), folder, progress=say).runs[0]

    return launch


def _decided(
    spec: RunSpec, args: argparse.Namespace, campaign: Campaign
) -> tuple[RunSpec, list[dict[str, Any]]]:
    """The spec with its micro batch chosen, and the trials that chose it."""
    if spec.batch.micro_batch:
        return spec, []
    sizes = bench_auto.legal_sizes(spec)
    if not sizes:
        return bench_auto.with_micro(spec, 1), []
    limit = _limit_bytes(spec, args)
    answers = _forecast(args, [bench_auto.with_micro(spec, size) for size in sizes])
    guess = bench_auto.first_guess(sizes, answers, limit)
    short = dataclasses.replace(spec, steps=1, warmup=1, tag="auto-trial")

    def fits(size: int) -> bool:
        progress.end_line()
        print(f"trying micro batch {size}", file=sys.stderr, flush=True)
        (done,) = campaign.run(bench_auto.with_micro(short, size))
        return done.outcome == "ok"

    best, trials = bench_auto.largest_fitting(sizes, guess, fits)
    found = [{"micro_batch": size, "fits": good} for size, good in trials]
    return bench_auto.with_micro(spec, best or sizes[0]), found


def _limit_bytes(spec: RunSpec, args: argparse.Namespace) -> float:
    """What a rank may use: the run's own limit, the device's memory, or a share of the host's."""
    if spec.memory_limit is not None:
        return float(spec.memory_limit)
    cluster = _cluster(args, spec)
    if cluster is not None:
        return 0.95 * cluster.device.memory_bytes
    return 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / spec.gpus


def _cluster(args: argparse.Namespace, spec: RunSpec) -> Cluster | None:
    """The named cluster; on a GPU that the catalogue knows, this host with its usual links."""
    from fourfold.result.machine import gpu_name
    from fourfold.search.question import usual_cluster

    if args.cluster:
        return catalog.cluster(args.cluster)
    known = device_id(gpu_name(), catalog.device_names()) if kind_of(spec) == "cuda" else None
    return usual_cluster(catalog.device(known), spec.gpus) if known else None


def _profile(args: argparse.Namespace) -> HardwareProfile | None:
    if not args.profile:
        return None
    return codec.from_json(HardwareProfile, files.read_text(args.profile, field="profile"))


def _forecast(args: argparse.Namespace, specs: list[RunSpec]) -> list[Any]:
    from fourfold.search.forecast import forecast

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    cluster = _cluster(args, specs[0])
    return forecast(specs, cluster=cluster, profile=_profile(args), cores=cores)


def _predicted(args: argparse.Namespace, specs: list[RunSpec]) -> list[dict[str, Any]]:
    cluster = _cluster(args, specs[0])
    basis = cluster.name if cluster else args.profile or "a rough guess from the cores"
    return [
        {
            "step_s": answer.step_s,
            "step_s_low": answer.low_s,
            "step_s_high": answer.high_s,
            "peak_bytes": answer.peak_bytes,
            "basis": basis,
        }
        for answer in _forecast(args, specs)
    ]


def _post_mortem(args: argparse.Namespace, spec: RunSpec) -> dict[str, Any]:
    """Predicted memory of the run against its limit, and what would fit at which cost."""
    from fourfold.search.fixes import fixes, ranked

    limit = _limit_bytes(spec, args)
    own = _forecast(args, [spec])[0]
    found = fixes(spec)
    rows = ranked(found, _forecast(args, [fix.spec for fix in found]) if found else [], limit)
    return {
        "limit_bytes": limit,
        "predicted_bytes": own.peak_bytes,
        "fixes": [
            {
                "change": fix.words,
                "fits": fits,
                "peak_bytes": answer.peak_bytes,
                "step_s": answer.step_s,
                "slower_pct": 100 * (answer.step_s / own.step_s - 1),
            }
            for fix, answer, fits in rows
        ],
    }


def _show(args: argparse.Namespace, answers: list[dict[str, Any]], rule: str) -> None:
    if args.format == "json":
        print(json_text(answers[0] if len(answers) == 1 else {"runs": answers}))
        return
    for plain in answers:
        head = f"{plain['model']}, {plain['layout']}, micro batch {plain['micro_batch']}"
        if args.format != "csv":
            print(f"{head}, global batch {plain['global_batch']} x {plain['seq_len']} tokens, "
                  f"{plain['precision']}\n")  # fmt: skip
        print(render(["quantity", "value", "note"], shown.rows(plain, rule), args.format))
        if "post_mortem" in plain:
            _print_post_mortem(plain["post_mortem"], args.format)
        if args.format != "csv":
            print(f"\n{plain['device']}, torch {plain['torch']}; kept in {plain['folder']}\n")


def _print_post_mortem(said: dict[str, Any], style: str) -> None:
    print(
        f"\nout of memory: limit {show_bytes(said['limit_bytes'])}, predicted "
        f"{show_bytes(said['predicted_bytes'])}; what would help, by predicted cost:\n"
    )
    rows = [
        [
            fix["change"], "yes" if fix["fits"] else "no", show_bytes(fix["peak_bytes"]),
            show_seconds(fix["step_s"]), f"{fix['slower_pct']:+.0f}%",
        ]
        for fix in said["fixes"][:8]
    ]  # fmt: skip
    print(render(["change", "fits", "memory", "sec/it", "slower"], rows, style))
