"""How does a sweep read? One line a combination; before it runs, what would run and how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.show.table import Grid, Part
from fourfold.spec.sweep import varied_text
from fourfold.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from fourfold.verbs.sweep import SweepPlan, Swept

_PLAN_HEADINGS = (
    "model", "layout", "seq", "micro", "global", "precision", "sharding", "recompute", "left",
    "step time", "80% interval", "memory", "run",
)  # fmt: skip


def page(answer: Swept, store: str) -> list[Part]:
    """A guess from the cores is kept with the runs, but is not worth three columns here."""
    headings = ["combination", "outcome", "step time", "tokens/s/GPU", "TFLOP/s/GPU", "memory"]
    headings += [] if answer.is_guess else ["predicted step time", "off by", "predicted memory"]
    cells = []
    for row in answer.runs:
        auto = row["combination"].get("micro_batch") == "auto"
        chosen = f" (micro_batch={row['micro_batch']})" if auto and row["micro_batch"] else ""
        line = [
            varied_text(row["combination"].items()) + chosen,
            row["outcome"],
            show_seconds(row["step_s"]) if row["step_s"] else "-",
            f"{row['tokens_s_gpu']:,.0f}" if row["tokens_s_gpu"] else "-",
            f"{row['tflops_gpu']:.4g}" if row["tflops_gpu"] else "-",
            show_bytes(row["peak_bytes"]) if row["peak_bytes"] else "-",
        ]
        line += [] if answer.is_guess else _predicted_cells(row)
        cells.append([*line, row["reason"][:70]])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in answer.counts.items() if count)
    ended = f"{sum(answer.counts.values())} of {answer.total} runs recorded: {counts}"
    return [Grid([*headings, "why"], cells), "", f"{ended}; store {store}"]


def _predicted_cells(row: dict[str, Any]) -> list[str]:
    said = row["predicted"]
    if said["step_s"] is None:
        return ["-", "-", "-"]
    off = f"{100 * (said['step_s'] / row['step_s'] - 1):+.0f}%" if row["step_s"] else "-"
    return [show_seconds(said["step_s"]), off, show_bytes(said["peak_bytes"])]


def plan_page(answer: SweepPlan, *, is_guess: bool, unstarted: bool) -> list[Part]:
    """What is illegal and why first, then what would run and how long it may take."""
    parts: list[Part] = []
    if answer.illegal:
        rows = [[varied_text(one["combination"].items()), one["reason"]] for one in answer.illegal]
        parts += [Grid(["illegal", "why"], rows), ""]
    if answer.planned:
        parts += [Grid(_PLAN_HEADINGS, [_plan_cells(row) for row in answer.planned]), ""]
    stored = sum(row["runs_left"] == 0 for row in answer.planned)
    better = "; 'fourfold calibrate' gives a better estimate" if is_guess else ""
    parts += [
        f"{answer.total} combinations: {len(answer.illegal)} illegal, {len(answer.planned)} legal, "
        f"{stored} of them already stored; {answer.dropped} excluded by conditions",
        f"to run: {answer.to_run}, about {show_seconds(answer.predicted_s)} "
        f"({answer.predicted_s / 3600:.2f} h) by {answer.basis}{better}",
    ]
    return [*parts, *(["nothing was run; add --run to start"] if unstarted else [])]


def _plan_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"], row["layout"], str(row["seq_len"]), str(row["micro_batch"]),
        str(row["global_batch"]), row["precision"], row["sharding"], row["recompute"],
        str(row["runs_left"]), show_seconds(row["step_s"]),
        f"{show_seconds(row['step_s_low'])} to {show_seconds(row['step_s_high'])}",
        show_bytes(row["peak_bytes"]) + ("" if row["fits"] is not False else ", does not fit"),
        show_seconds(row["run_s"]),
    ]  # fmt: skip
