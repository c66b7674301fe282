"""How does shape advice read? One line a size, then the neighbourhood of those that lose."""

from __future__ import annotations

from typing import Any

from fourfold.show.table import render

NEIGHBOURS = 9


def advice_text(said: dict[str, Any], style: str) -> str:
    """All advice; CSV gives the neighbourhood tables only."""
    blocks = [] if style == "csv" else [_head(said)]
    for name in ("hidden", "heads", "ffn", "vocab", "micro_batch"):
        if name in said:
            blocks += _size(name, said[name], style)
    if "shapes" in said:
        blocks.append(_shapes(said["shapes"], style))
    return "\n\n".join(blocks)


def _head(said: dict[str, Any]) -> str:
    kernel = "flash attention" if said["attention"].startswith("flash") else said["attention"]
    return (
        f"one layer on one {said['gpu']} at tp {said['tp']}, micro batch "
        f"{said['micro_batches']} x {said['seq_len']} tokens, {said['precision']}, {kernel}; "
        f"{said['calibration']}"
    )


def _size(name: str, one: dict[str, Any], style: str) -> list[str]:
    label = name.replace("_", " ")
    where = " in the output layer" if name == "vocab" else ""
    better = one["better"]
    if better:
        change = better["value"] - one["asked"]
        ending = f"{better['value']} ({change:+d}) is {better['gain']:.2f}x as fast per FLOP"
    else:
        ending = "nothing near it is better"
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
    if not better and style != "csv":
        return ["\n".join(lines)]
    table = render(*_table(label, one), style)
    if style == "csv":
        return [table]
    blocks = ["\n".join([*lines, table])]
    return [*blocks, _gemms(one["gemms"], style)] if "gemms" in one else blocks


def _gemms(gemms: list[dict[str, Any]], style: str) -> str:
    headings = ["product", "tokens", "in", "out", "alignment loses %", "tiles and waves lose %"]
    rows = [
        [one["name"], str(one["tokens"]), f"{one['into']:g}", f"{one['out']:g}",
         f"{one['alignment_loss_pct']:.0f}", f"{one['wave_loss_pct']:.0f}"]
        for one in gemms
    ]  # fmt: skip
    return render(headings, rows, style)


def _table(label: str, one: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
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
    return headings, cells


def _shapes(rows: list[dict[str, Any]], style: str) -> str:
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
    return render(headings, cells, style)
