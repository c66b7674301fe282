"""Why did a run go out of memory? Who held what, predicted against actual, and what would fit."""

from __future__ import annotations

from typing import Any

from fourfold.result.report import RunReport
from fourfold.show.table import render
from fourfold.spec import codec
from fourfold.units import show_bytes, show_seconds


def facts(report: RunReport) -> dict[str, Any]:
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


def text(said: dict[str, Any], style: str) -> str:
    """For a reader: the moment, its largest tensors, what would help. '' without anything."""
    if not said:
        return ""
    parts = [] if style == "csv" else [_moment(said)]
    if said["largest"]:
        rows = [
            [
                show_bytes(one["bytes"]), one["kind"], one["name"] or "-", one["shape"] or "-",
                one["dtype"] or "-", one["op"] or "-", one["phase"] or "-",
            ]
            for one in said["largest"]
        ]  # fmt: skip
        headings = ["largest tensors", "kind", "name", "shape", "format", "made by", "in"]
        parts.append(render(headings, rows, style))
    if said["fixes"]:
        rows = [
            [
                one["change"], "yes" if one["fits"] else "no", show_bytes(one["peak_bytes"]),
                show_seconds(one["step_s"]), f"{one['slower_pct']:+.0f}%",
            ]
            for one in said["fixes"]
        ]  # fmt: skip
        headings = ["what would help, by predicted cost", "fits", "memory", "sec/it", "slower"]
        parts.append(render(headings, rows, style))
    return "".join(f"\n{part}\n" for part in parts)


def _moment(said: dict[str, Any]) -> str:
    rank = said["rank"]
    who = f"rank {rank} (stage {said['stage']}) in {said['phase'] or 'start'}"
    lines = [f"out of memory: {who if rank is not None and rank >= 0 else 'no rank could tell'}"]
    if said["live_bytes"] is not None:
        held = f"held {show_bytes(said['live_bytes'])}"
        kinds = ", ".join(
            f"{name} {show_bytes(size)}" for name, size in said["kinds_bytes"].items()
        )
        held += f" ({kinds})" if kinds else ""
        if said["asked_bytes"]:
            held += f", asked for {show_bytes(said['asked_bytes'])}"
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
