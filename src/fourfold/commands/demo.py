"""Calibrate, plan and measure a small model on this machine, in about two minutes.

Measures the machine briefly, plans a small model on it, runs the best layouts for a few steps, and
compares predicted with measured times. On a CPU four ranks share the cores (gloo); with GPUs each
GPU is one rank (NCCL).
"""

from __future__ import annotations

from statistics import median
from typing import Any

import fourfold
from fourfold import options
from fourfold.events import Event
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show.table import Grid, Part

EXAMPLES = """\
examples:
  fourfold demo
  fourfold demo --layouts 2 --steps 4
"""
OPTIONS = (
    option("--layouts", "layouts to run (default 3)", "N", read=int),
    option("--steps", "timed steps per layout (default 6)", "N", read=int),
    options.FORMAT,
)
GIB = 2**30


def run(args: Any) -> Output:
    show = Stderr()
    answer = fourfold.demo(**options.given(args, "layouts", "steps"), on_event=show)
    show.close()
    for row in answer.runs:
        if "failure" in row:
            show(Event(f"{row['layout']} {row['outcome']}: {row['failure']}"))
    good = all(row["outcome"] == "ok" for row in answer.runs)
    return Output.of(answer, lambda: _page(answer), status=0 if good else 1)


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """How the prediction did, and what to doubt about the measurement, as `bench` says it."""
    timed = [row for row in rows if "measured_s" in row]
    inside = [
        row
        for row in timed
        if row["predicted_s_low"] <= row["measured_s"] <= row["predicted_s_high"]
    ]
    if not timed:
        return []
    lines = [f"{len(inside)} of {len(timed)} measured inside their 80% interval"]
    if len(inside) < len(timed):
        ratio = median(row["measured_s"] / row["predicted_s"] for row in timed)
        lines[0] += (
            f"; they took {ratio:.2g} times the prediction, which is for a machine that does "
            "nothing else"
        )
    best = min(timed, key=lambda row: row["measured_s"])
    place = timed.index(best) + 1
    lines.append(f"fastest measured: {best['layout']}, predicted as number {place} of these")
    lines += [f"doubt {row['layout']}: {flag}" for row in timed for flag in row["flags"]]
    return lines


def _page(answer: Any) -> list[Part]:
    chosen, rows = answer.scene, answer.runs
    cells = []
    for row in rows:
        measured = row.get("measured_s")
        cells.append(
            [
                row["layout"],
                row["sharding"],
                str(row["micro_batch"]),
                f"{row['predicted_s']:.3f}",
                f"{row['predicted_s_low']:.2f}-{row['predicted_s_high']:.2f}",
                f"{measured:.3f}" if measured else row["outcome"],
                f"{100 * (row['predicted_s'] / measured - 1):+.0f}" if measured else "-",
                f"{chosen.batch.tokens / measured:,.0f}" if measured else "-",
                f"{row['predicted_peak_bytes'] / GIB:.2f}",
                f"{row['measured_peak_bytes'] / GIB:.2f}" if measured else "-",
                f"{row['loss']:.3f}" if row.get("loss") is not None else "-",
            ]
        )
    headings = [
        "layout", "sharding", "micro", "predicted s", "80% interval", "measured s", "error %",
        "tokens/s", "predicted GiB", "measured GiB", "loss",
    ]  # fmt: skip
    batch = chosen.batch
    return [
        Grid(headings, cells),
        "",
        f"{chosen.model}, {batch.global_batch} sequences of {batch.seq_len} tokens, "
        f"{chosen.policy.precision}; {chosen.ranks} ranks on {answer.cluster.device.name}",
        "predicted from kernels and links measured a minute ago, before any step was run; "
        "'fourfold fit' learns from runs",
        *_verdict(rows),
    ]
