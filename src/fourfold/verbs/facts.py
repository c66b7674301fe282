"""Derives plain data in base units from a run's report: speed with its interval, utilisation under
every convention, memory, machine, prediction, and the cause of an out-of-memory error."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from statistics import median
from typing import Any

from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery, utilisation_pct
from fourfold.errors import UserError
from fourfold.result.from_run import record_of
from fourfold.result.quality import flags, straggler, throttles
from fourfold.result.report import RunReport
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.cluster import Device, device_id
from fourfold.spec.policy import running
from fourfold.spec.run import RunSpec

# A longer list is told by counting equal neighbours: "8 x 32, 5".
_LISTED = 8


def run_facts(report: RunReport, *, device: Device | None = None) -> dict[str, Any]:
    """Everything that follows from a report, in base units."""
    spec, summary = report.spec, record_of(report)
    device = device or _device(summary.device)
    plain: dict[str, Any] = {
        "run_id": spec.run_id,
        "outcome": report.outcome,
        "model": spec.model.name,
        **_settings(spec),
        "device": summary.device,
        "torch": summary.torch,
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
    if summary.step_s and summary.tokens_s_gpu:
        plain |= {
            "step_s": summary.step_s,
            "step_s_low": summary.low_s,
            "step_s_high": summary.high_s,
            "timed_steps": summary.samples,
            "window_s": report.window_s,
            "samples_s": spec.batch.global_batch / summary.step_s,
            "tokens_s": spec.batch.tokens / summary.step_s,
            "tokens_s_gpu": summary.tokens_s_gpu,
            "conventions": _conventions(report, summary.tokens_s_gpu, device),
        }
    return plain | _surroundings(report) | _machine(report) | _failure(report)


def _settings(spec: RunSpec) -> dict[str, Any]:
    return {
        "layout": str(spec.layout),
        "seq_len": spec.batch.seq_len,
        "micro_batch": spec.batch.micro_batch,
        "global_batch": spec.batch.global_batch,
        "micro_sizes": [list(sizes) for sizes in spec.batch.micro_plan(spec.layout.dp)],
        "micro_words": micro_words(spec.batch, spec.layout.dp),
        "precision": spec.policy.precision,
        "data": spec.data or "synthetic",
        "formats": dataclasses.asdict(running(spec.policy, spec.layout)),
        "optimizer": spec.policy.optimizer,
        "recompute": spec.policy.recompute,
        "sharding": spec.policy.sharding,
    }


def _surroundings(report: RunReport) -> dict[str, Any]:
    """What the steps needed besides themselves: warm-up, data, compiling, links."""
    plain: dict[str, Any] = {}
    if report.warmup is not None:
        plain["warmup_steps"] = report.warmup.steps
        plain["warmup_ended"] = report.warmup.ended
        plain["warmup_drift"] = report.warmup.drift
        plain["warmup_clock_drift"] = report.warmup.clock_drift
        plain["warmup_words"] = report.warmup.words
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
    plain["recompiles"] = sum(rank.recompiles for rank in report.ranks)
    plain["retries"] = sum(rank.retries for rank in report.memory)
    plain["memory"] = [codec.encode(rank) for rank in report.memory]
    plain["links"] = [
        codec.encode(link) | {"bytes_per_s": link.bytes_per_s} for link in report.links
    ]
    return plain


def _device(name: str) -> Device | None:
    known = device_id(name, catalog.device_names())
    return catalog.device(known) if known else None


def _conventions(report: RunReport, speed: float, device: Device | None) -> dict[str, Any]:
    spec = report.spec
    ask = FlopsQuery.of_spec(spec)
    peak = None
    if device is not None:
        try:
            peak = device.peak(spec.policy.precision)
        except UserError:
            peak = None  # a format this device has no unit for has no utilisation
    found: dict[str, Any] = {}
    for name, convention in CONVENTIONS.items():
        count = convention.count(ask)
        row = {"tflops_gpu": count.printed * speed / 1e12}
        if peak is not None:
            row["mfu_pct"] = utilisation_pct(count.model, speed, peak)
            row["hfu_pct"] = utilisation_pct(count.hardware, speed, peak)
        found[name] = row
    return found


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


def _failure(report: RunReport) -> dict[str, Any]:
    failure = report.failure
    if failure is None:
        return {}
    return {
        "failure": {
            "rank": failure.rank,
            "stage": failure.stage,
            "phase": failure.phase,
            "message": failure.message,
        }
    }


def post_mortem(report: RunReport) -> dict[str, Any]:
    """Base units; empty unless the run ended in `oom`."""
    if report.outcome != "oom":
        return {}
    said, short, failure = report.predicted, report.shortage, report.failure
    limit = (short.limit_bytes if short else 0) or (said.limit_bytes if said else 0)
    return {
        "rank": failure.rank if failure else None,
        "stage": failure.stage if failure else None,
        "phase": failure.phase if failure else None,
        "limit_bytes": limit or None,
        "predicted_bytes": said.peak_bytes if said else None,
        "predicted_fits": said.fits if said else None,
        "live_bytes": short.live_bytes if short else None,
        "asked_bytes": short.asked_bytes or None if short else None,
        "reserved_bytes": short.reserved_bytes or None if short else None,
        "kinds_bytes": {one.name: one.bytes for one in short.kinds} if short else {},
        "largest": [codec.encode(one) for one in short.largest] if short else [],
        "source": short.source if short else "",
        "fixes": [codec.encode(one) for one in report.remedies],
    }


def micro_words(batch: Batch, dp: int) -> str:
    """Ranks with the same sizes together; padding that keeps ranks in step is said."""
    count = batch.micro_count(dp)
    told: list[tuple[list[int], str]] = []
    for rank, sizes in enumerate(batch.micro_plan(dp)):
        padding = f" and {count - len(sizes)} of padding" if len(sizes) < count else ""
        words = _sizes(sizes) + padding
        if not told or told[-1][1] != words:
            told.append(([], words))
        told[-1][0].append(rank)
    if len(told) == 1:
        return told[0][1]
    return "; ".join(f"dp {_ranks(ranks)}: {words}" for ranks, words in told)


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _LISTED:
        return ", ".join(map(str, sizes))
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return ", ".join(f"{size} x {times}" if times > 1 else f"{size}" for size, times in runs)


def _ranks(ranks: list[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
