"""Calibrate, plan and measure a small model on this machine, in about two minutes.

Measures the machine briefly, plans a small model on it, runs the best layouts for a few steps, and
compares predicted with measured times. On a CPU four ranks share the cores (gloo); with GPUs each
GPU is one rank (NCCL).
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.runs import demo_page

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


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.demo(**options.given(args, "layouts", "steps"), on_event=show)
    for row in answer.runs:
        if row.failure:
            show(Event(f"{row.layout} {row.outcome}: {row.failure}"))
    all_ok = all(row.outcome == "ok" for row in answer.runs)
    return Output.of(answer, lambda: demo_page(answer), status=0 if all_ok else 1)
