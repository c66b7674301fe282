"""One run as a page: its quantities, and the cause of an out-of-memory error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fourfold.result.quality import straggler
from fourfold.result.report import ExpertLoad
from fourfold.result.timing import LEAST_SAMPLES
from fourfold.spec.words import OURS
from fourfold.text_table import Grid, Part, named, or_dash, quantities, table
from fourfold.units import counted, show_bytes, show_seconds

if TYPE_CHECKING:
    from fourfold.verbs.run_shown import RunShown


def runs_page(runs: Sequence[RunShown], convention: str) -> list[Part]:
    pages = [part for run in runs for part in (*page(run, convention), "")]
    several = len({run.engine for run in runs}) > 1
    return [*pages, _side_by_side(runs, convention)] if several else pages


def _side_by_side(runs: Sequence[RunShown], convention: str) -> Grid:
    """Engines that ran the same run; speeds beside the last one's."""
    last = runs[-1].run.tokens_s_gpu

    def of_last(shown: RunShown) -> str:
        speed = shown.run.tokens_s_gpu
        return f"{speed / last:.3f}" if last and speed else "-"

    def rate(shown: RunShown) -> float | None:
        return shown.utilisation()[convention].tflops_gpu if shown.run.tokens_s_gpu else None

    def predicted(shown: RunShown) -> float | None:
        return shown.report.predicted.step_s if shown.report.predicted else None

    return table(
        runs,
        *named("engine", "outcome=run.outcome", "step time=run.step_s:seconds"),
        *named("tokens/s/GPU=run.tokens_s_gpu:,.0f"),
        (f"of {runs[-1].engine}", of_last),
        ("TFLOP/s/GPU", lambda shown: or_dash(rate(shown), ".1f")),
        *named("memory=run.peak_bytes:bytes"),
        ("predicted", lambda shown: or_dash(predicted(shown), show_seconds)),
    )


def page(shown: RunShown, convention: str) -> list[Part]:
    run, spec = shown.run, shown.report.spec
    batch, policy = spec.batch, spec.policy
    recompute = "" if policy.recompute == "none" else f"recompute {policy.recompute}"
    stages = f"{policy.virtual_stages} virtual stages" if policy.virtual_stages > 1 else ""
    how = (policy.precision_name, policy.sharding, stages, recompute, run.unlisted)
    head = (
        f"{spec.model.name}, {spec.layout}, micro batch {batch.micro_batch}, global batch "
        f"{batch.global_batch} x {batch.seq_len} tokens, {', '.join(filter(None, how))}"
    )
    # Of another engine it is that engine's name; illegal runs need none.
    kind = ", torch" if shown.engine == OURS else ","
    version = f"{kind} {run.torch}" if run.torch else ""
    stored = f"{run.device}{version}; stored in {shown.folder}"
    oom = oom_page(shown.post_mortem)
    return [head, "", quantities(_rows(shown, convention)), *oom, "", stored]


def _rows(shown: RunShown, convention: str) -> list[list[str]]:
    failure = shown.report.failure
    lines = [
        ["outcome", shown.run.outcome, ""],
        ["micro batches", shown.micro_words, "sequences per micro batch of a step"],
        *_speed_rows(shown, convention),
        *_format_rows(shown),
        *_predicted_rows(shown),
        *_memory_rows(shown),
        *_surrounding_rows(shown),
        *_machine_rows(shown),
        *(["flag", flag, ""] for flag in shown.flags),
    ]
    if failure is not None:
        # The largest tensors have a table of their own.
        words = failure.said.partition("; largest:")[0]
        lines.append(["failed at", failure.who, words[:240]])
    return lines


def _speed_rows(shown: RunShown, convention: str) -> list[list[str]]:
    step, batch, speed = shown.run.step, shown.report.spec.batch, shown.run.tokens_s_gpu
    if step is None or not speed:
        return []
    count = shown.utilisation()[convention]
    kind = "95%" if step.samples >= LEAST_SAMPLES else "range"
    spread = f"{show_seconds(step.low_s)} to {show_seconds(step.high_s)}"
    lines = [
        [
            "step time",
            show_seconds(step.step_s),
            f"median of {counted(step.samples, 'step')}; {kind}: {spread}",
        ],
        ["samples/s", f"{batch.global_batch / step.step_s:,.2f}", ""],
        ["tokens/s", f"{batch.tokens / step.step_s:,.0f}", ""],
        ["tokens/s/GPU", f"{speed:,.0f}", ""],
        ["TFLOP/s/GPU", f"{count.tflops_gpu:.4g}", f"by {convention}"],
    ]
    if count.mfu_pct is not None:
        lines.append(["MFU", f"{count.mfu_pct:.2f} %", f"by {convention}"])
        lines.append(["HFU", f"{count.hfu_pct:.2f} %", "including recomputation"])
    return lines


def _predicted_rows(shown: RunShown) -> list[list[str]]:
    predicted, step_s = shown.report.predicted, shown.run.step_s
    if predicted is None:
        return []
    note = f"{show_seconds(predicted.step_s_low)} to {show_seconds(predicted.step_s_high)}"
    if predicted.provenance:
        note += f" ({predicted.provenance})"
    if step_s:
        note += f"; off by {100 * (predicted.step_s / step_s - 1):+.0f}%"
    return [
        ["predicted step time", show_seconds(predicted.step_s), note],
        ["predicted memory", show_bytes(predicted.peak_bytes), predicted.basis],
    ]


def _memory_rows(shown: RunShown) -> list[list[str]]:
    """The fullest rank, and each stage's fullest where there are several."""
    memory, peak = shown.report.memory, shown.run.peak_bytes
    if not peak:
        return [["memory", "not measured", ""]] if shown.run.outcome == "ok" else []
    reserved, device = shown.most_reserved_bytes, shown.most_device_bytes
    note = f"reserved {show_bytes(reserved)}" if reserved else "live tensors"
    note += f", device {show_bytes(device)}" if device else ""
    lines = [["memory", show_bytes(peak), f"fullest rank; {note}"]]
    updating = max(rank.optimizer_bytes for rank in memory)
    if updating:
        note = "fullest rank, during the optimizer step"
        lines.append(["optimizer peak", show_bytes(updating), note])
    stages: dict[int, int] = {}
    for rank in memory:
        stages[rank.stage] = max(rank.peak_bytes, stages.get(rank.stage, 0))
    if len(stages) > 1:
        peaks = [f"{at}: {show_bytes(peak)}" for at, peak in sorted(stages.items())]
        lines.append(["memory by stage", "; ".join(peaks[:8]), "..." if len(peaks) > 8 else ""])
    return lines


def _surrounding_rows(shown: RunShown) -> list[list[str]]:
    report, run, lines = shown.report, shown.run, []
    if report.warmup is not None:
        lines.append(["warm-up", counted(report.warmup.steps, "step"), report.warmup.words])
    if shown.compile_s:
        first = report.steps[0].seconds if report.steps else 0.0
        note = f"the compiler's own clock; first step {show_seconds(first)}"
        lines.append(["compiling", show_seconds(shown.compile_s), note])
    if shown.data_wait_s is not None:
        share = "" if report.spec.data else "tokens are generated on the device"
        if report.spec.data and run.step_s:
            share = f"{100 * shown.data_wait_s / run.step_s:.1f}% of a step"
        lines.append(["data wait", show_seconds(shown.data_wait_s), share])
    lines += _expert_rows(report.experts, report.spec.policy.routing)
    for link in report.links:
        text = f"{link.bytes_per_s / 1e9:,.2f} GB/s"
        place = "within a host" if link.level == "host" else "between hosts"
        lines.append([f"link {link.axis}", text, f"{link.op} of {link.ranks}, {place}"])
    if run.loss is not None:
        lines.append(["loss", f"{run.loss:.4f}", f"of step {run.loss_step}"])
    return lines


def _expert_rows(loads: Sequence[ExpertLoad], routing: str) -> list[list[str]]:
    """The least even layer, and the mean over layers."""
    if not loads:
        return []
    worst = max(loads, key=lambda load: load.largest)
    largest = sum(load.largest for load in loads) / len(loads)
    dropped = sum(load.dropped for load in loads) / len(loads)
    lines = [
        [
            "tokens per expert",
            f"{largest:.2f} x mean",
            f"fullest expert, {routing} routing; {worst.largest:.2f}, CV "
            f"{worst.spread:.2f} in layer {worst.layer}",
        ]
    ]
    if dropped:
        lines.append(["tokens dropped", f"{100 * dropped:.1f} %", "of choices of experts"])
    return lines


def _format_rows(shown: RunShown) -> list[list[str]]:
    """Every format the run used, by what it held; and what fp16's loss scaling did."""
    formats = shown.formats
    inside = formats.products
    if formats.activations != formats.products:
        inside = f"{formats.products} products, {formats.activations} elsewhere"
    sent = " and ".join(dict.fromkeys(filter(None, (formats.reduce, formats.copies))))
    grads = f"accumulated in {formats.grads}" + (f", reduced in {sent}" if sent else "")
    lines = [
        [
            "weights, moments",
            f"{formats.weights}, {formats.moments}",
            f"optimizer {shown.report.spec.policy.optimizer_name}",
        ],
        ["compute dtype", inside, ""],
        ["gradients", grads, ""],
    ]
    if shown.loss_scale is not None:
        skipped = f"{shown.skipped_steps} of {len(shown.report.steps)} steps"
        lines.append(["loss scale", f"{shown.loss_scale:g}", f"{skipped} skipped for overflow"])
    return lines


def _machine_rows(shown: RunShown) -> list[list[str]]:
    units = {"clock_hz": ("MHz", 1e6), "power_w": ("W", 1.0), "temperature_c": ("C", 1.0)}
    lines = []
    for name, (low, high) in shown.samples.items():
        unit, scale = units[name]
        text = f"{low / scale:.0f} to {high / scale:.0f} {unit}"
        lines.append([name.rpartition("_")[0], text, "in the window"])
    probes = {probe.when: probe for probe in shown.report.probes}
    if "before" in probes and "after" in probes:
        before, after = probes["before"], probes["after"]
        note = "before / after the steps"
        flops = f"{before.flops_per_s / 1e9:,.1f} / {after.flops_per_s / 1e9:,.1f} GFLOP/s"
        copies = f"{before.bytes_per_s / 1e9:,.1f} / {after.bytes_per_s / 1e9:,.1f} GB/s"
        lines += [["probe flops", flops, note], ["probe bytes", copies, note]]
    slowest = straggler(shown.report)
    if slowest is not None:
        rank, busy = slowest
        lines.append(["straggler", f"rank {rank}", f"{100 * busy:.0f}% busy"])
    return lines


def oom_page(oom: dict[str, Any]) -> list[Part]:
    """The moment, its largest tensors, what would help; nothing where nothing is known."""
    if not oom:
        return []
    parts: list[Part] = ["", _moment(oom), ""]
    if oom["largest"]:
        columns = {
            "kind": "kind",
            "name": "name",
            "shape": "shape",
            "format": "dtype",
            "made by": "op",
            "in": "phase",
        }
        tensors = table(
            oom["largest"],
            *named("largest tensors=bytes:bytes"),
            *((name, lambda one, key=key: one[key] or "-") for name, key in columns.items()),
        )
        parts += [tensors, ""]
    if oom["fixes"]:
        fits = any(one["fits"] for one in oom["fixes"])
        title = "changes that would fit, by predicted cost" if fits else "changes that come nearest"
        fixes = table(
            oom["fixes"],
            *named(f"{title}=change"),
            ("fits", lambda one: "yes" if one["fits"] else "no"),
            *named("memory=peak_bytes:bytes", "step time=step_s:seconds"),
            ("slower", lambda one: f"{one['slower_pct']:+.0f}%"),
        )
        parts += [fixes, ""]
    return parts


def _moment(oom: dict[str, Any]) -> str:
    rank = oom["rank"]
    who = f"rank {rank} (stage {oom['stage']}) in {oom['phase'] or 'start'}"
    lines = [f"out of memory: {who if rank is not None and rank >= 0 else 'rank unknown'}"]
    if oom["live_bytes"] is not None:
        kinds = ", ".join(f"{n} {show_bytes(size)}" for n, size in oom["kinds_bytes"].items())
        live = f"held {show_bytes(oom['live_bytes'])}" + (f" ({kinds})" if kinds else "")
        for word, name in (("requested", "asked_bytes"), ("reserved", "reserved_bytes")):
            live += f", {word} {show_bytes(oom[name])}" if oom[name] else ""
        lines.append(live)
    compared = [f"limit {show_bytes(oom['limit_bytes'])}"] if oom["limit_bytes"] else []
    if oom["predicted_bytes"] is not None:
        verdicts = {True: ": should fit", False: ": should not fit", None: ""}
        predicted = f"predicted peak {show_bytes(oom['predicted_bytes'])}"
        compared.append(predicted + verdicts[oom["predicted_fits"]])
    return "\n".join([*lines, *(["; ".join(compared)] if compared else [])])
