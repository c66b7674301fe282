"""One run as a page: its quantities, and the cause of an out-of-memory error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.result.report import Failure
from fourfold.result.timing import LEAST_SAMPLES
from fourfold.spec.words import OURS
from fourfold.text_table import Grid, Part, named, or_dash, quantities, table
from fourfold.units import counted, show_bytes, show_seconds


def runs_page(runs: Sequence[dict[str, Any]], convention: str) -> list[Part]:
    pages = [part for run in runs for part in (*page(run, convention), "")]
    several = len({run["engine"] for run in runs}) > 1
    return [*pages, _side_by_side(runs, convention)] if several else pages


def _side_by_side(runs: Sequence[dict[str, Any]], convention: str) -> Grid:
    """Engines that ran the same run; speeds beside the last one's."""
    last = runs[-1].get("tokens_s_gpu")

    def of_last(run: dict[str, Any]) -> str:
        return f"{run['tokens_s_gpu'] / last:.3f}" if last and "step_s" in run else "-"

    def rate(run: dict[str, Any]) -> float | None:
        return run["conventions"][convention]["tflops_gpu"] if "step_s" in run else None

    return table(
        runs,
        *named("engine", "outcome", "step time=step_s:seconds", "tokens/s/GPU=tokens_s_gpu:,.0f"),
        (f"of {runs[-1]['engine']}", of_last),
        ("TFLOP/s/GPU", lambda run: or_dash(rate(run), ".1f")),
        *named("memory=peak_bytes:bytes"),
        ("predicted", lambda run: or_dash(run.get("predicted", {}).get("step_s"), show_seconds)),
    )


def page(plain: dict[str, Any], convention: str) -> list[Part]:
    recompute = "" if plain["recompute"] == "none" else f"recompute {plain['recompute']}"
    virtual = plain["virtual_stages"]
    stages = f"{virtual} virtual stages" if virtual > 1 else ""
    how = (plain["precision"], plain["sharding"], stages, recompute, plain["settings"])
    head = (
        f"{plain['model']}, {plain['layout']}, micro batch {plain['micro_batch']}, global batch "
        f"{plain['global_batch']} x {plain['seq_len']} tokens, {', '.join(filter(None, how))}"
    )
    # Of another engine it is that engine's name; illegal runs need none.
    kind = ", torch" if plain["engine"] == OURS else ","
    version = f"{kind} {plain['torch']}" if plain["torch"] else ""
    stored = f"{plain['device']}{version}; stored in {plain['folder']}"
    oom = oom_page(plain.get("post_mortem", {}))
    return [head, "", quantities(_rows(plain, convention)), *oom, "", stored]


def _rows(plain: dict[str, Any], convention: str) -> list[list[str]]:
    lines = [
        ["outcome", plain["outcome"], ""],
        ["micro batches", plain["micro_words"], "sequences per micro batch of a step"],
        *(_speed_rows(plain, convention) if "step_s" in plain else ()),
        *_format_rows(plain),
        *(_predicted_rows(plain) if plain.get("predicted") else ()),
        *_memory_rows(plain),
        *_surrounding_rows(plain),
        *_machine_rows(plain),
        *(["flag", flag, ""] for flag in plain["flags"]),
    ]
    if "failure" in plain:
        failure = Failure(**plain["failure"])
        # The largest tensors have a table of their own.
        words = failure.said.partition("; largest:")[0]
        lines.append(["failed at", failure.who, words[:240]])
    return lines


def _speed_rows(plain: dict[str, Any], convention: str) -> list[list[str]]:
    spread = f"{show_seconds(plain['step_s_low'])} to {show_seconds(plain['step_s_high'])}"
    count = plain["conventions"][convention]
    kind = "95%" if plain["timed_steps"] >= LEAST_SAMPLES else "range"
    median = f"median of {counted(plain['timed_steps'], 'step')}; {kind}: {spread}"
    lines = [
        ["step time", show_seconds(plain["step_s"]), median],
        ["samples/s", f"{plain['samples_s']:,.2f}", ""],
        ["tokens/s", f"{plain['tokens_s']:,.0f}", ""],
        ["tokens/s/GPU", f"{plain['tokens_s_gpu']:,.0f}", ""],
        ["TFLOP/s/GPU", f"{count['tflops_gpu']:.4g}", f"by {convention}"],
    ]
    if "mfu_pct" in count:
        lines.append(["MFU", f"{count['mfu_pct']:.2f} %", f"by {convention}"])
        lines.append(["HFU", f"{count['hfu_pct']:.2f} %", "including recomputation"])
    return lines


def _predicted_rows(plain: dict[str, Any]) -> list[list[str]]:
    predicted = plain["predicted"]
    note = f"{show_seconds(predicted['step_s_low'])} to {show_seconds(predicted['step_s_high'])}"
    if predicted.get("provenance"):
        note += f" ({predicted['provenance']})"
    if "step_s" in plain:
        note += f"; off by {100 * (predicted['step_s'] / plain['step_s'] - 1):+.0f}%"
    return [
        ["predicted step time", show_seconds(predicted["step_s"]), note],
        ["predicted memory", show_bytes(predicted["peak_bytes"]), predicted["basis"]],
    ]


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
        note = "fullest rank, during the optimizer step"
        lines.append(["optimizer peak", show_bytes(updating), note])
    stages: dict[int, int] = {}
    for rank in plain["memory"]:
        stages[rank["stage"]] = max(rank["peak_bytes"], stages.get(rank["stage"], 0))
    if len(stages) > 1:
        peaks = [f"{at}: {show_bytes(peak)}" for at, peak in sorted(stages.items())]
        lines.append(["memory by stage", "; ".join(peaks[:8]), "..." if len(peaks) > 8 else ""])
    return lines


def _surrounding_rows(plain: dict[str, Any]) -> list[list[str]]:
    lines = []
    if "warmup_words" in plain:
        lines.append(["warm-up", counted(plain["warmup_steps"], "step"), plain["warmup_words"]])
    if "compile_s" in plain:
        first = plain["raw_step_s"][0] if plain["raw_step_s"] else 0.0
        note = f"the compiler's own clock; first step {show_seconds(first)}"
        lines.append(["compiling", show_seconds(plain["compile_s"]), note])
    if "data_wait_s" in plain:
        made = plain["data"] == "synthetic"
        share = "tokens are generated on the device" if made else ""
        if not made and "step_s" in plain:
            share = f"{100 * plain['data_wait_s'] / plain['step_s']:.1f}% of a step"
        lines.append(["data wait", show_seconds(plain["data_wait_s"]), share])
    lines += _expert_rows(plain.get("experts", []), plain.get("routing", ""))
    for link in plain["links"]:
        text = f"{link['bytes_per_s'] / 1e9:,.2f} GB/s"
        place = "within a host" if link["level"] == "host" else "between hosts"
        lines.append([f"link {link['axis']}", text, f"{link['op']} of {link['ranks']}, {place}"])
    if plain["loss"] is not None:
        lines.append(["loss", f"{plain['loss']:.4f}", f"of step {plain['loss_step']}"])
    return lines


def _expert_rows(loads: list[dict[str, Any]], routing: str) -> list[list[str]]:
    """The least even layer, and the mean over layers."""
    if not loads:
        return []
    worst = max(loads, key=lambda load: load["largest"])
    mean, dropped = (
        sum(load[name] for load in loads) / len(loads) for name in ("largest", "dropped")
    )
    lines = [
        [
            "tokens per expert",
            f"{mean:.2f} x mean",
            f"fullest expert, {routing} routing; {worst['largest']:.2f}, CV "
            f"{worst['spread']:.2f} in layer {worst['layer']}",
        ]
    ]
    if dropped:
        lines.append(["tokens dropped", f"{100 * dropped:.1f} %", "of choices of experts"])
    return lines


def _format_rows(plain: dict[str, Any]) -> list[list[str]]:
    """Every format the run used, by what it held; and what fp16's loss scaling did."""
    formats = plain["formats"]
    state = f"{formats['weights']}, {formats['moments']}"
    inside = formats["products"]
    if formats["activations"] != inside:
        inside = f"{inside} products, {formats['activations']} elsewhere"
    sent = " and ".join(dict.fromkeys(filter(None, (formats["reduce"], formats["copies"]))))
    grads = f"accumulated in {formats['grads']}" + (f", reduced in {sent}" if sent else "")
    lines = [
        ["weights, moments", state, f"optimizer {plain['optimizer']}"],
        ["compute dtype", inside, ""],
        ["gradients", grads, ""],
    ]
    if plain["loss_scale"] is not None:
        skipped = f"{plain['skipped_steps']} of {len(plain['raw_step_s'])} steps"
        lines.append(["loss scale", f"{plain['loss_scale']:g}", f"{skipped} skipped for overflow"])
    return lines


def _machine_rows(plain: dict[str, Any]) -> list[list[str]]:
    lines = []
    for name, unit, scale in (
        ("clock_hz", "MHz", 1e6),
        ("power_w", "W", 1.0),
        ("temperature_c", "C", 1.0),
    ):
        if name in plain:
            low, high = plain[name]["low"] / scale, plain[name]["high"] / scale
            text = f"{low:.0f} to {high:.0f} {unit}"
            lines.append([name.rpartition("_")[0], text, "in the window"])
    if "probe_before" in plain and "probe_after" in plain:
        before, after = plain["probe_before"], plain["probe_after"]
        for name, unit in (("flops_per_s", "GFLOP/s"), ("bytes_per_s", "GB/s")):
            text = f"{before[name] / 1e9:,.1f} / {after[name] / 1e9:,.1f} {unit}"
            lines.append([f"probe {name.split('_')[0]}", text, "before / after the steps"])
    if "straggler" in plain:
        slow = plain["straggler"]
        lines.append(["straggler", f"rank {slow['rank']}", f"{100 * slow['busy_share']:.0f}% busy"])
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
