"""A plan as one page: the answer, every ranked layout with its interval, and what to run.

request = PlanRequest(model="llama-3.1-8b", gpu="h100-80gb", gpus=64, seq_len=8192, ...)
text = plan_page(fourfold.plan(request), request)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import fourfold
from fourfold.events import OnEvent
from fourfold.page import document
from fourfold.page.command import plan_command
from fourfold.page.plan_words import facts, words_of
from fourfold.page.run_details import MOST_EVENTS, timeline_data
from fourfold.search.plan_answer import plain
from fourfold.show import plan as shown
from fourfold.show.table import Grid, Part
from fourfold.verbs.export import Exported, NotExported, export_all
from fourfold.verbs.front import FrontPoint, front
from fourfold.verbs.plan import best_timeline
from fourfold.verbs.requests import PlanRequest

if TYPE_CHECKING:
    from fourfold.cost.schedule import Timeline
    from fourfold.search.plan_answer import PlanAnswer, PlanRow

PLAN_SCRIPTS = ("timeline.js", "plan_charts.js", "plan.js")


def plan_page(
    answer: PlanAnswer,
    request: PlanRequest,
    *,
    exports: Sequence[Exported | NotExported] = (),
    timeline: Timeline | None = None,
    sizes: Sequence[FrontPoint] = (),
) -> str:
    """`exports`: of every engine (verbs.export.export_all); `timeline`: of the best layout;
    `sizes`: the best on fewer GPUs (verbs.front.front)."""
    if timeline and len(timeline.events) > MOST_EVENTS:
        timeline = None
    data = plan_data(answer, request) | {
        "exports": [_exported(one) for one in exports],
        "engines": _engines(answer) or [_beside(one) for one in exports],
        "timeline": timeline_data(timeline) if timeline else None,
        "sizes": [{"gpus": one.gpus} | _compared(one.row) for one in sizes],
        "facts": facts(answer, request),
        "words": words_of(answer.best) if answer.best else [],
    }
    return document.document(
        title=data["title"], body=document.asset("plan.html"), data=data, scripts=PLAN_SCRIPTS
    )


def write_plan(
    request: PlanRequest, path: str, name: str, *, browser: bool, force: bool, on_event: OnEvent
) -> PlanAnswer:
    """The plan, also written as a page with settings for every engine, where the model is called
    `name`, and the best layout's pipeline."""
    document.check_page(path, force=force)
    answer = fourfold.plan(request, on_event=on_event)
    exports = export_all(request, name=name, on_event=on_event)
    timeline = best_timeline(request, answer)
    sizes = front(request, "gpus", on_event=on_event).points if answer.best else ()
    text = plan_page(answer, request, exports=exports, timeline=timeline, sizes=sizes)
    document.write_page(path, text, on_event=on_event, browser=browser)
    return answer


def plan_data(answer: PlanAnswer, request: PlanRequest) -> dict[str, Any]:
    """What a page or a view of a plan holds, as plain data."""
    sentence, table, remarks = _parts(shown.page(answer, details=True))
    return {
        "kind": "plan",
        "title": f"{answer.model} on {answer.gpus} x {answer.gpu}",
        "version": fourfold.__version__,
        "sentence": sentence,
        "remarks": remarks,
        "command": plan_command(request),
        "headings": list(table.headings) if table else [],
        "cells": [list(row) for row in table.rows] if table else [],
        "rows": [plain(row) | {"name": str(row)} for row in answer.ranked],
        "memory_bytes": answer.memory_bytes,
        "gpus": answer.gpus,
        "host_gpus": answer.host_gpus,
        "flips": plain(answer.flips),
        "engines": _engines(answer),
    }


def _parts(parts: Iterable[Part]) -> tuple[str, Grid | None, list[str]]:
    """(the answer, the table, all else that is said) of the page for a terminal."""
    shown_parts = list(parts)
    texts = [part for part in shown_parts if isinstance(part, str) and part]
    grid = next((part for part in shown_parts if isinstance(part, Grid)), None)
    # What would change the order has a place of its own.
    return texts[0], grid, [text for text in texts[1:] if not text.startswith("sensitivity: ")]


def _exported(one: Exported | NotExported) -> dict[str, Any]:
    if isinstance(one, NotExported):
        return {"engine": one.engine, "script": "", "said": [one.reason]}
    return {"engine": one.engine, "script": one.script, "said": list(one.notes)}


def _engines(answer: PlanAnswer) -> list[dict[str, Any]]:
    return [
        {"engine": one.engine, "choice": _compared(one.row) if one.row else None}
        for one in answer.engines
    ]


def _beside(one: Exported | NotExported) -> dict[str, Any]:
    choice = None if isinstance(one, NotExported) else _compared(one.choice)
    return {"engine": one.engine, "choice": choice}


def _compared(row: PlanRow) -> dict[str, Any]:
    """What engines and numbers of GPUs are compared by."""
    names = ("micro_batch", "step_s", "step_s_low", "step_s_high", "peak_bytes", "fit_chance",
             "tflops_gpu", "mfu_pct", "gpu_hours", "training_s", "cost")  # fmt: skip
    policy = {"sharding": row.policy.sharding, "recompute": row.policy.recompute}
    return {"name": str(row)} | policy | {name: getattr(row, name) for name in names}
