"""Plain data in base units, derived from a run's report."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from statistics import median
from typing import Any

from fourfold.result.quality import flags, straggler, throttles
from fourfold.result.report import RunReport
from fourfold.result.stored_run import StoredRun
from fourfold.spec import Batch, RunSpec, catalog, codec
from fourfold.spec.policy import running
from fourfold.spec.words import OURS
from fourfold.verbs.shapes import utilisation

# A longer list is told by counting equal neighbours: "8 x 32, 5".
_LISTED = 8


def run_facts(report: RunReport) -> dict[str, Any]:
    spec, summary = report.spec, StoredRun.of(report)
    plain: dict[str, Any] = {
        "run_id": spec.run_id,
        "outcome": report.outcome,
        "model": spec.model.name,
        **_settings(spec),
        "settings": summary.unlisted,
        **_where(summary),
        "start_s": report.start_s,
        "peak_bytes": summary.peak_bytes,
        "reserved_bytes": max((rank.reserved_bytes for rank in report.memory), default=0),
        "device_bytes": max((rank.device_bytes for rank in report.memory), default=0),
        "loss": summary.loss,
        "loss_step": summary.loss_step,
        "flags": flags(report) if report.outcome == "ok" else [],
        "raw_step_s": [step.seconds for step in report.steps],
        "warmup": spec.warmup,
        "skipped_steps": sum(step.skipped for step in report.steps),
        "loss_scale": report.steps[-1].loss_scale if report.steps else None,
    }
    if report.predicted is not None:
        plain["predicted"] = codec.encode(report.predicted)
    if report.outcome == "oom":
        plain["post_mortem"] = post_mortem(report)
    step = summary.step
    if step and step.step_s and summary.tokens_s_gpu:
        plain |= {
            "step_s": step.step_s,
            "step_s_low": step.low_s,
            "step_s_high": step.high_s,
            "timed_steps": step.samples,
            "window_s": report.window_s,
            "samples_s": spec.batch.global_batch / step.step_s,
            "tokens_s": spec.batch.tokens / step.step_s,
            "tokens_s_gpu": summary.tokens_s_gpu,
            "conventions": _utilisation(report, summary.tokens_s_gpu, summary.device),
        }
    if report.failure is not None:
        plain["failure"] = codec.encode(report.failure)
    return plain | _surroundings(report) | _machine(report)


def _where(summary: StoredRun) -> dict[str, str]:
    return {
        "engine": summary.engine or OURS,
        "device": summary.device,
        "torch": summary.torch,
    }


def _settings(spec: RunSpec) -> dict[str, Any]:
    return {
        "layout": str(spec.layout),
        "seq_len": spec.batch.seq_len,
        "micro_batch": spec.batch.micro_batch,
        "global_batch": spec.batch.global_batch,
        "micro_sizes": [list(sizes) for sizes in spec.batch.micro_plan(spec.layout.dp)],
        "micro_words": micro_words(spec.batch, spec.layout.dp),
        "precision": spec.policy.precision_name,
        "data": spec.data or "synthetic",
        "formats": dataclasses.asdict(running(spec.policy, spec.layout)),
        "optimizer": spec.policy.optimizer,
        "recompute": spec.policy.recompute,
        "sharding": spec.policy.sharding,
        "virtual_stages": spec.policy.virtual_stages,
    }


def _surroundings(report: RunReport) -> dict[str, Any]:
    """What the steps needed besides themselves: warm-up, data, compiling, links."""
    plain: dict[str, Any] = {}
    if report.warmup is not None:
        names = ("steps", "ended", "drift", "clock_drift", "words")
        plain = {f"warmup_{name}": getattr(report.warmup, name) for name in names}
    warm = [step.warmup for step in report.steps]
    waits = [
        [wait for wait, early in zip(rank.data_s, warm, strict=False) if not early]
        for rank in report.ranks
        if rank.data_s
    ]
    if any(waits):
        plain["data_wait_s"] = max(median(one) for one in waits if one)
    compile_s = max((rank.compile_s for rank in report.ranks), default=0.0)
    if compile_s:
        plain["compile_s"] = compile_s
    if report.experts:
        plain["routing"] = report.spec.policy.routing
        plain["experts"] = codec.encode(report.experts)
    plain["recompiles"] = sum(rank.recompiles for rank in report.ranks)
    plain["retries"] = sum(rank.retries for rank in report.memory)
    plain["memory"] = codec.encode(report.memory)
    plain["links"] = [
        codec.encode(link) | {"bytes_per_s": link.bytes_per_s} for link in report.links
    ]
    return plain


def _utilisation(report: RunReport, speed: float, device: str) -> dict[str, Any]:
    peak = catalog.peak_of(device, report.spec.policy.precision_name)
    counted = codec.encode(utilisation(report.spec, None, speed, peak))
    for row in counted.values():
        del row["flops_per_token"]
    return counted


def _machine(report: RunReport) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    if report.samples:
        for name in ("clock_hz", "power_w", "temperature_c"):
            values = [getattr(sample, name) for sample in report.samples]
            plain[name] = {"low": min(values), "high": max(values)}
        plain["throttle"] = sorted({sample.throttle for sample in report.samples})
        plain["throttled_by"] = sorted({w for s in report.samples for w in throttles(s.throttle)})
    for probe in report.probes:
        rates = {"flops_per_s": probe.flops_per_s, "bytes_per_s": probe.bytes_per_s}
        plain[f"probe_{probe.when}"] = rates
    slowest = straggler(report)
    if slowest is not None:
        plain["straggler"] = {"rank": slowest[0], "busy_share": slowest[1]}
    return plain


def post_mortem(report: RunReport) -> dict[str, Any]:
    """Base units; empty unless the run ended in `oom`."""
    if report.outcome != "oom":
        return {}
    predicted, short, failure = report.predicted, report.shortage, report.failure
    limit = (short.limit_bytes if short else 0) or (predicted.limit_bytes if predicted else 0)
    return {
        **{name: getattr(failure, name, None) for name in ("rank", "stage", "phase")},
        "limit_bytes": limit or None,
        "predicted_bytes": predicted.peak_bytes if predicted else None,
        "predicted_fits": predicted.fits if predicted else None,
        "live_bytes": short.live_bytes if short else None,
        "asked_bytes": short.asked_bytes or None if short else None,
        "reserved_bytes": short.reserved_bytes or None if short else None,
        "kinds_bytes": {one.name: one.bytes for one in short.kinds} if short else {},
        "largest": codec.encode(short.largest) if short else [],
        "source": short.source if short else "",
        "fixes": codec.encode(report.remedies),
    }


def micro_words(batch: Batch, dp: int) -> str:
    """Ranks with the same sizes together, and the padding that keeps ranks in step."""
    count = batch.micro_count(dp)
    plans = []
    for sizes in batch.micro_plan(dp):
        padding = f" and {count - len(sizes)} of padding" if len(sizes) < count else ""
        plans.append(_sizes(sizes) + padding)
    groups, first = [], 0
    for words, same in groupby(plans):
        last = first + len(list(same)) - 1
        groups.append((f"{first}-{last}" if last > first else f"{first}", words))
        first = last + 1
    if len(groups) == 1:
        return groups[0][1]
    return "; ".join(f"dp {ranks}: {words}" for ranks, words in groups)


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _LISTED:
        return ", ".join(map(str, sizes))
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return ", ".join(f"{size} x {times}" if times > 1 else f"{size}" for size, times in runs)
