"""How does shape advice read? One line a size, then the neighbourhood of those that lose."""

from __future__ import annotations

from typing import Any

from fourfold.show.table import Grid, Part

NEIGHBOURS = 9


def page(said: dict[str, Any]) -> list[Part]:
    """All advice, a blank line between its parts."""
    parts: list[Part] = [_head(said)]
    for name in ("hidden", "heads", "ffn", "vocab", "micro_batch"):
        if name in said:
            parts += ["", *_size(name, said[name])]
    if "shapes" in said:
        parts += ["", _shapes(said["shapes"])]
    return parts


def _head(said: dict[str, Any]) -> str:
    kernel = "flash attention" if said["attention"].startswith("flash") else said["attention"]
    return (
        f"one layer on one {said['gpu']} at tp {said['tp']}, micro batch "
        f"{said['micro_batches']} x {said['seq_len']} tokens, {said['precision']}, {kernel}; "
        f"{said['calibration']}"
    )


def _size(name: str, one: dict[str, Any]) -> list[Part]:
    label = name.replace("_", " ")
    where = " in the output layer" if name == "vocab" else ""
    better = one["better"]
    if better:
        change = better["value"] - one["asked"]
        ending = f"{better['value']} ({change:+d}) is {better['gain']:.2f}x as fast per FLOP"
    else:
        ending = "no nearby value is better"
    verdict = f", {one['verdict']}" if "verdict" in one else ""
    extra = (
        f" (head size {one['head_size']}, attention core {one['attention_loss']:.2f}x the best)"
        if "head_size" in one
        else ""
    )
    lines = [
        f"{label} {one['asked']}{extra}{verdict}: {one['tflops_gpu']:.0f} TFLOP/s{where}, loses "
        f"{one['loses_pct']:.0f}% to the best nearby; {ending}",
        *(f"  {note}" for note in one["notes"]),
    ]
    parts: list[Part] = ["\n".join(lines)]
    if better:
        parts.append(_table(label, one))
        parts += ["", _gemms(one["gemms"])] if "gemms" in one else []
    return parts


def _gemms(gemms: list[dict[str, Any]]) -> Grid:
    headings = ["product", "tokens", "in", "out", "alignment loses %", "tiles and waves lose %"]
    rows = [
        [one["name"], str(one["tokens"]), f"{one['into']:g}", f"{one['out']:g}",
         f"{one['alignment_loss_pct']:.0f}", f"{one['wave_loss_pct']:.0f}"]
        for one in gemms
    ]  # fmt: skip
    return Grid(headings, rows)


def _table(label: str, one: dict[str, Any]) -> Grid:
    rows = one["table"]
    wanted = {one["asked"], (one["better"] or {}).get("value")}
    by_distance = sorted(rows, key=lambda row: abs(row["value"] - one["asked"]))
    kept = [row for row in by_distance if row["value"] in wanted]
    kept += [row for row in by_distance if row not in kept][: NEIGHBOURS - len(kept)]
    extra = [name for name in ("heads", "head_size", "attention_loss") if name in rows[0]]
    headings = [label, *(name.replace("_", " ") for name in extra), "TFLOP/s", "against asked"]
    cells = []
    for row in sorted(kept, key=lambda row: row["value"]):
        marks = [
            f"{row[name]:.2f}" if name == "attention_loss" else str(row[name]) for name in extra
        ]
        cells.append(
            [str(row["value"]), *marks, f"{row['tflops_gpu']:.1f}", f"{row['against_asked']:.3f}"]
        )
    return Grid(headings, cells)


def _shapes(rows: list[dict[str, Any]]) -> Grid:
    headings = ["layers", "hidden", "heads", "ffn", "params B", "layout", "micro", "s/step", "days",
                "GPU-hours", "days per 1e21 FLOP"]  # fmt: skip
    cells = []
    for row in rows:
        sizes = [str(row[name]) for name in ("layers", "hidden", "heads", "ffn")]
        sizes.append(f"{row['params'] / 1e9:.1f}")
        if row["days"] is None:
            cells.append([*sizes, "does not fit", "-", "-", "-", "-", "-"])
            continue
        cells.append(
            [*sizes, row["layout"], str(row["micro_batch"]), f"{row['step_s']:.1f}",
             f"{row['days']:.1f}", f"{row['gpu_hours']:,.0f}",
             f"{row['days_per_1e21_flop']:.3f}"]
        )  # fmt: skip
    return Grid(headings, cells)
