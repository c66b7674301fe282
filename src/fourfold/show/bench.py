"""One run as a page: its quantities, and the cause of an out-of-memory error."""

from __future__ import annotations

from typing import Any

from fourfold.result.report import Failure
from fourfold.show.table import Grid, Part
from fourfold.units import show_bytes, show_seconds


def head(plain: dict[str, Any]) -> str:
    """Which run, on one line."""
    data = "" if plain["data"] == "synthetic" else f", data {plain['data']}"
    return (
        f"{plain['model']}, {plain['layout']}, micro batch {plain['micro_batch']}, global batch "
        f"{plain['global_batch']} x {plain['seq_len']} tokens, {plain['precision']}{data}"
    )


def page(plain: dict[str, Any], convention: str) -> list[Part]:
    """What was run, its quantities, why it ran out of memory, where it is kept."""
    kept = f"{plain['device']}, torch {plain['torch']}; stored in {plain['folder']}"
    table = Grid(["quantity", "value", "note"], rows(plain, convention))
    return [head(plain), "", table, *oom_page(plain.get("post_mortem", {})), "", kept]


def rows(plain: dict[str, Any], convention: str) -> list[list[str]]:
    """The same for a reader: one line for each quantity."""
    lines = [["outcome", plain["outcome"], ""]]
    lines.append(["micro batches", plain["micro_words"], "sequences per micro batch of a step"])
    if "step_s" in plain:
        spread = f"{show_seconds(plain['step_s_low'])} to {show_seconds(plain['step_s_high'])}"
        lines += [
            ["step time", show_seconds(plain["step_s"]), f"median of {plain['timed_steps']} steps; "
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
        lines.append(["predicted step time", show_seconds(predicted["step_s"]), note])
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
        lines.append(
            ["in the update", show_bytes(updating), "fullest rank, during the optimizer step"]
        )
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
        share = "tokens are generated on the device" if made else ""
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
        inside = f"{inside} products, {said['activations']} elsewhere"
    sent = " and ".join(dict.fromkeys(name for name in (said["reduce"], said["copies"]) if name))
    grads = f"accumulated in {said['grads']}" + (f", reduced in {sent}" if sent else "")
    lines = [
        [
            "weights, moments",
            f"{said['weights']}, {said['moments']}",
            f"optimizer {plain['optimizer']}",
        ],
        ["compute dtype", inside, ""],
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
        lines.append(["HFU", f"{count['hfu_pct']:.2f} %", "including recomputation"])
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
        lines.append(["straggler", f"rank {said['rank']}", f"{100 * said['busy_share']:.0f}% busy"])
    return lines


def oom_page(said: dict[str, Any]) -> list[Part]:
    """The moment, its largest tensors, what would help; nothing where nothing is known."""
    if not said:
        return []
    parts: list[Part] = ["", _moment(said), ""]
    if said["largest"]:
        rows = [
            [
                show_bytes(one["bytes"]), one["kind"], one["name"] or "-", one["shape"] or "-",
                one["dtype"] or "-", one["op"] or "-", one["phase"] or "-",
            ]
            for one in said["largest"]
        ]  # fmt: skip
        headings = ["largest tensors", "kind", "name", "shape", "format", "made by", "in"]
        parts += [Grid(headings, rows), ""]
    if said["fixes"]:
        rows = [
            [
                one["change"], "yes" if one["fits"] else "no", show_bytes(one["peak_bytes"]),
                show_seconds(one["step_s"]), f"{one['slower_pct']:+.0f}%",
            ]
            for one in said["fixes"]
        ]  # fmt: skip
        headings = [
            "changes that would fit, by predicted cost",
            "fits",
            "memory",
            "step time",
            "slower",
        ]
        parts += [Grid(headings, rows), ""]
    return parts


def _moment(said: dict[str, Any]) -> str:
    rank = said["rank"]
    who = f"rank {rank} (stage {said['stage']}) in {said['phase'] or 'start'}"
    lines = [f"out of memory: {who if rank is not None and rank >= 0 else 'rank unknown'}"]
    if said["live_bytes"] is not None:
        held = f"held {show_bytes(said['live_bytes'])}"
        kinds = ", ".join(
            f"{name} {show_bytes(size)}" for name, size in said["kinds_bytes"].items()
        )
        held += f" ({kinds})" if kinds else ""
        if said["asked_bytes"]:
            held += f", requested {show_bytes(said['asked_bytes'])}"
        if said["reserved_bytes"]:
            held += f", reserved {show_bytes(said['reserved_bytes'])}"
        lines.append(held)
    compared = []
    if said["limit_bytes"]:
        compared.append(f"limit {show_bytes(said['limit_bytes'])}")
    if said["predicted_bytes"] is not None:
        verdict = {True: ": should fit", False: ": should not fit", None: ""}[
            said["predicted_fits"]
        ]
        compared.append(f"predicted peak {show_bytes(said['predicted_bytes'])}{verdict}")
    return "\n".join([*lines, *(["; ".join(compared)] if compared else [])])
