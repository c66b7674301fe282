"""The ranked layouts of a plan as rows: short for people, one value a column for programs."""

from __future__ import annotations

from typing import Any

from fourfold.spec.layout import Layout

GIB = 2**30
PARTS = ("compute", "recompute", "tp", "cp", "pp", "dp", "host", "other")


def plan_table(
    rows: list[dict[str, Any]], *, details: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells to read; `details` adds the exposed seconds of each part."""
    parts = [
        name
        for name in (PARTS if details else ())
        if any(row["exposed_s"][name] > 0.0005 * row["step_s"] for row in rows)
    ]
    long = any(row["training_s"] for row in rows)
    ramp = any(row["ramp_s"] for row in rows)
    priced = any(row["cost"] is not None for row in rows) and long
    headings = ["#", "layout", "micro", "sharding", "recompute", "s/step", "s 80%", "GiB",
                "GiB 80%", "TFLOP/s/GPU", *(f"{name} s" for name in parts)]  # fmt: skip
    headings += ["ramp h"] * ramp + ["days", "days 80%", "GPU-hours"] * long + ["cost"] * priced
    return headings, [_cells(row, parts, ramp, long, priced) for row in rows]


def _cells(
    row: dict[str, Any], parts: list[str], ramp: bool, long: bool, priced: bool
) -> list[str]:
    cells = [
        str(row["rank"]),
        layout_text(row),
        str(row["micro_batch"]),
        row["policy"]["sharding"],
        row["policy"]["recompute"],
        short_s(row["step_s"]),
        f"{short_s(row['step_s_low'])}-{short_s(row['step_s_high'])}",
        f"{row['peak_bytes'] / GIB:.1f}",
        f"{row['peak_bytes_low'] / GIB:.0f}-{row['peak_bytes_high'] / GIB:.0f}"
        + (" tight" if row["tight"] else ""),
        f"{row['tflops_gpu']:.0f}",
        *(short_s(row["exposed_s"][name]) for name in parts),
    ]
    if ramp:
        cells.append(f"{(row['ramp_s'] or 0.0) / 3600:.1f}")
    if long:
        days = row["training_s"] / 86400
        low, high = (days * row[name] / row["step_s"] for name in ("step_s_low", "step_s_high"))
        cells += [f"{days:.1f}", f"{low:.1f}-{high:.1f}", f"{row['gpu_hours']:,.0f}"]
    return [*cells, f"{row['cost']:,.0f}"] if priced else cells


def plan_records(answer: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The same as a rectangle for other programs: base units, a column for every axis and field,
    the same columns whatever was asked."""
    found = [_record(answer, row) for row in answer["ranked"]]
    headings = list(found[0]) if found else []
    return headings, [[_text(cell) for cell in one.values()] for one in found]


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return str(cell).lower() if isinstance(cell, bool) else str(cell)


def _record(answer: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    layout, policy = Layout.parse(row["layout"]), row["policy"]
    return {
        "rank": row["rank"],
        **{name: answer[name] for name in ("model", "cluster", "gpu", "stack", "gpus", "seq_len")},
        "global_batch": answer["global_batch"],
        "micro_batch": row["micro_batch"],
        **layout.sizes,
        "dp_replicate": layout.replicate,
        "dp_shard": layout.shard,
        **policy,
        **{name: row[name] for name in ("step_s", "step_s_low", "step_s_high")},
        **{name: row[name] for name in ("peak_bytes", "peak_bytes_low", "peak_bytes_high")},
        "tight": row["tight"],
        **{name: row[name] for name in ("tokens_s_gpu", "tflops_gpu", "mfu_pct")},
        **{f"{name}_s": row["exposed_s"][name] for name in PARTS},
        **{name: row[name] for name in ("training_s", "gpu_hours", "cost")},
    }


def layout_text(row: dict[str, Any]) -> str:
    """`pp8 dp4 cp2 tp8 ulysses v4`: the layout and the kinds that go with it."""
    words = [row["layout"]]
    if " cp1 " not in f" {row['layout']} ":
        words.append(row["policy"]["cp_kind"])
    if row["policy"]["virtual_stages"] > 1:
        words.append(f"v{row['policy']['virtual_stages']}")
    if row["policy"]["schedule"] in ("gpipe", "zero-bubble") and not row["layout"].startswith(
        "pp1 "
    ):
        words.append(row["policy"]["schedule"])
    return " ".join(words)


def short_s(seconds: float) -> str:
    """Three digits are more than any prediction is worth; '-' for nothing."""
    if abs(seconds) < 5e-4:
        return "-"
    if seconds >= 100:
        return f"{seconds:.0f}"
    return (
        f"{seconds:.1f}"
        if seconds >= 10
        else f"{seconds:.2f}"
        if seconds >= 0.1
        else f"{seconds:.3f}"
    )
