"""What does one run say, in full? Speed with interval, utilisation, memory, machine, prediction."""

from __future__ import annotations

import dataclasses
from statistics import median
from typing import Any

from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery, utilisation_pct
from fourfold.errors import UserError
from fourfold.result.read.from_run import record_of
from fourfold.result.read.quality import flags, straggler, throttles
from fourfold.result.report import Failure, RunReport
from fourfold.show import oom as post_mortem
from fourfold.show.micro import micro_words
from fourfold.show.table import render
from fourfold.spec import catalog, codec
from fourfold.spec.device import Device, device_id
from fourfold.spec.formats import running
from fourfold.units import show_bytes, show_seconds


def facts(report: RunReport, *, device: Device | None = None) -> dict[str, Any]:
    """Everything that follows from a report, in base units."""
    spec, summary = report.spec, record_of(report)
    device = device or _device(summary.device)
    plain: dict[str, Any] = {
        "run_id": spec.run_id,
        "outcome": report.outcome,
        "model": spec.model.name,
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
        plain["post_mortem"] = post_mortem.facts(report)
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
    ask = FlopsQuery.of(
        model=spec.model, seq_len=spec.batch.seq_len, layout=spec.layout, policy=spec.policy
    )
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


def head(plain: dict[str, Any]) -> str:
    """Which run, on one line."""
    data = "" if plain["data"] == "synthetic" else f", data {plain['data']}"
    return (
        f"{plain['model']}, {plain['layout']}, micro batch {plain['micro_batch']}, global batch "
        f"{plain['global_batch']} x {plain['seq_len']} tokens, {plain['precision']}{data}"
    )


def text(plain: dict[str, Any], convention: str, style: str) -> str:
    """All of it: what was run, its quantities, why it ran out of memory, where it is kept."""
    table = render(["quantity", "value", "note"], rows(plain, convention), style)
    table += f"\n{post_mortem.text(plain.get('post_mortem', {}), style)}"
    if style == "csv":
        return table
    kept = f"{plain['device']}, torch {plain['torch']}; kept in {plain['folder']}"
    return f"{head(plain)}\n\n{table}\n{kept}\n"


def rows(plain: dict[str, Any], convention: str) -> list[list[str]]:
    """The same for a reader: one line for each quantity."""
    lines = [["outcome", plain["outcome"], ""]]
    lines.append(["micro batches", plain["micro_words"], "sequences each, in a step"])
    if "step_s" in plain:
        spread = f"{show_seconds(plain['step_s_low'])} to {show_seconds(plain['step_s_high'])}"
        lines += [
            ["sec/it", show_seconds(plain["step_s"]), f"median of {plain['timed_steps']} steps; "
             f"95%: {spread}"],
            ["samples/s", f"{plain['samples_s']:,.2f}", ""],
            ["tokens/s", f"{plain['tokens_s']:,.0f}", ""],
            ["tokens/s/GPU", f"{plain['tokens_s_gpu']:,.0f}", ""],
        ]  # fmt: skip
        lines += _utilisation_rows(plain["conventions"][convention], convention)
    lines += _format_rows(plain)
    predicted = plain.get("predicted")
    if predicted:
        note = (
            f"{show_seconds(predicted['step_s_low'])} to {show_seconds(predicted['step_s_high'])}"
        )
        if "step_s" in plain:
            note += f"; off by {100 * (predicted['step_s'] / plain['step_s'] - 1):+.0f}%"
        lines.append(["predicted sec/it", show_seconds(predicted["step_s"]), note])
        lines.append(["predicted memory", show_bytes(predicted["peak_bytes"]), predicted["basis"]])
    lines += _memory_rows(plain)
    lines += _surrounding_rows(plain)
    lines += _machine_rows(plain)
    for flag in plain["flags"]:
        lines.append(["flag", flag, ""])
    if "failure" in plain:
        said = plain["failure"]
        where = Failure(**said).who
        words = said["message"].strip().split("\n")[-1]
        # The largest tensors have a table of their own.
        lines.append(["failed at", where, words.partition("; largest:")[0][:240]])
    return lines


def _memory_rows(plain: dict[str, Any]) -> list[list[str]]:
    """The fullest rank, and each stage's fullest where there are several."""
    if not plain["peak_bytes"]:
        return [["memory", "not measured", ""]] if plain["outcome"] == "ok" else []
    reserved, device = plain["reserved_bytes"], plain["device_bytes"]
    note = f"reserved {show_bytes(reserved)}" if reserved else "live tensors"
    note += f", device {show_bytes(device)}" if device else ""
    lines = [["memory", show_bytes(plain["peak_bytes"]), f"fullest rank; {note}"]]
    updating = max(rank["optimizer_bytes"] for rank in plain["memory"])
    if updating:
        lines.append(["in the update", show_bytes(updating), "fullest rank, while weights change"])
    stages: dict[int, dict[str, Any]] = {}
    for rank in plain["memory"]:
        if rank["peak_bytes"] > stages.get(rank["stage"], {"peak_bytes": -1})["peak_bytes"]:
            stages[rank["stage"]] = rank
    if len(stages) > 1:
        told = [f"{at}: {show_bytes(rank['peak_bytes'])}" for at, rank in sorted(stages.items())]
        lines.append(["memory by stage", "; ".join(told[:8]), "..." if len(told) > 8 else ""])
    return lines


def _surrounding_rows(plain: dict[str, Any]) -> list[list[str]]:
    lines = []
    if "warmup_words" in plain:
        lines.append(["warm-up", f"{plain['warmup_steps']} steps", plain["warmup_words"]])
    if "compile_s" in plain:
        first = plain["raw_step_s"][0] if plain["raw_step_s"] else 0.0
        note = f"the compiler's own clock; first step {show_seconds(first)}"
        lines.append(["compiling", show_seconds(plain["compile_s"]), note])
    if "data_wait_s" in plain:
        made = plain["data"] == "synthetic"
        share = "tokens are made where they are needed" if made else ""
        if not made and "step_s" in plain:
            share = f"{100 * plain['data_wait_s'] / plain['step_s']:.1f}% of a step"
        lines.append(["data wait", show_seconds(plain["data_wait_s"]), share])
    for link in plain["links"]:
        text = f"{link['bytes_per_s'] / 1e9:,.2f} GB/s"
        place = "within a host" if link["level"] == "host" else "between hosts"
        lines.append([f"link {link['axis']}", text, f"{link['op']} of {link['ranks']}, {place}"])
    if plain["loss"] is not None:
        lines.append(["loss", f"{plain['loss']:.4f}", f"of step {plain['loss_step']}"])
    return lines


def _format_rows(plain: dict[str, Any]) -> list[list[str]]:
    """Every format the run used, by what it held; and what fp16's loss scaling did."""
    said = plain["formats"]
    inside = said["products"]
    if said["activations"] != inside:
        inside = f"{inside} products, {said['activations']} around them"
    sent = " and ".join(dict.fromkeys(name for name in (said["reduce"], said["copies"]) if name))
    grads = f"added in {said['grads']}" + (f", sent in {sent}" if sent else "")
    lines = [
        [
            "weights, moments",
            f"{said['weights']}, {said['moments']}",
            f"kept by {plain['optimizer']}",
        ],
        ["computed in", inside, ""],
        ["gradients", grads, ""],
    ]
    if plain["loss_scale"] is not None:
        skipped, steps = plain["skipped_steps"], len(plain["raw_step_s"])
        lines.append(["loss scale", f"{plain['loss_scale']:g}", f"{skipped} of {steps} steps "
                      "skipped for overflow"])  # fmt: skip
    return lines


def _utilisation_rows(count: dict[str, float], convention: str) -> list[list[str]]:
    lines = [["TFLOPs/GPU", f"{count['tflops_gpu']:.4g}", f"by {convention}"]]
    if "mfu_pct" in count:
        lines.append(["MFU", f"{count['mfu_pct']:.2f} %", f"by {convention}"])
        lines.append(["HFU", f"{count['hfu_pct']:.2f} %", "with what the policy recomputes"])
    return lines


def _machine_rows(plain: dict[str, Any]) -> list[list[str]]:
    lines = []
    for name, unit, scale in (
        ("clock_hz", "MHz", 1e6), ("power_w", "W", 1.0), ("temperature_c", "C", 1.0),
    ):  # fmt: skip
        if name in plain:
            low, high = plain[name]["low"] / scale, plain[name]["high"] / scale
            lines.append(
                [name.rpartition("_")[0], f"{low:.0f} to {high:.0f} {unit}", "in the window"]
            )
    if "probe_before" in plain and "probe_after" in plain:
        before, after = plain["probe_before"], plain["probe_after"]
        for name, unit in (("flops_per_s", "GFLOP/s"), ("bytes_per_s", "GB/s")):
            text = f"{before[name] / 1e9:,.1f} / {after[name] / 1e9:,.1f} {unit}"
            lines.append([f"probe {name.split('_')[0]}", text, "before / after the steps"])
    if "straggler" in plain:
        said = plain["straggler"]
        lines.append(
            ["waits least", f"rank {said['rank']}", f"{100 * said['busy_share']:.0f}% busy"]
        )
    return lines
