"""What the page knows of a stored run beyond its row: how to run it again, where it ran, every
step, memory by rank and by kind, and its pipeline.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fourfold.cost.schedule import Timeline
from fourfold.page.command import bench_command
from fourfold.result.quality import flags
from fourfold.result.report import RankMemory, RunReport
from fourfold.verbs.drawing import Drawing, draw_runs
from fourfold.verbs.facts import post_mortem
from fourfold.verbs.report import Report

# A page of thousands of runs stays small enough to be mailed.
_MOST_EVENTS = 100_000


def run_details(answer: Report, environments: list[dict[str, str]]) -> list[dict[str, Any] | None]:
    """One for each record, None for a row of a table. `environments` gets those that differ."""
    reports = {
        place: stored.report() for place, stored in enumerate(answer.stored) if stored is not None
    }
    drawings = _drawings(answer, reports)
    known: dict[tuple[tuple[str, str], ...], int] = {}
    found: list[dict[str, Any] | None] = []
    for place, stored in enumerate(answer.stored):
        if stored is None:
            found.append(None)
            continue
        environment = known.setdefault(reports[place].environment, len(known))
        one = {"folder": str(stored.folder), "environment": environment}
        found.append(_detail(reports[place]) | one | _model(drawings[place]))
    environments += [dict(one) for one in known]
    return found


def _drawings(answer: Report, reports: dict[int, RunReport]) -> dict[int, Drawing | None]:
    """The fastest runs first: a page has room for so many timelines."""
    order = sorted(reports, key=lambda place: -(answer.records[place].tokens_s_gpu or 0.0))
    specs = [reports[place].spec for place in order]
    devices = [dict(reports[place].environment).get("device", "") for place in order]
    return dict(zip(order, draw_runs(specs, devices, most_events=_MOST_EVENTS), strict=True))


def _detail(report: RunReport) -> dict[str, Any]:
    failure, limit = report.failure, report.predicted.limit_bytes if report.predicted else 0.0
    why = post_mortem(report)
    return {
        "command": bench_command(report.spec),
        "steps": [_rounded(step.seconds) for step in report.steps],
        "warmup_steps": [i for i, step in enumerate(report.steps) if step.warmup],
        "losses": [_rounded(step.loss) for step in report.steps],
        "memory": _fullest(report),
        "limit_bytes": why.get("limit_bytes") or report.spec.memory_limit or limit or None,
        "flags": flags(report) if report.outcome == "ok" else [],
        "failure": f"{failure.who}: {failure.message}" if failure else "",
        "held_bytes": why.get("kinds_bytes", {}),
        "fixes": [dataclasses.asdict(one) for one in report.remedies],
    }


def _rounded(value: float | None) -> float | None:
    """Seven digits: more than any clock has, half the bytes."""
    return None if value is None else float(f"{value:.7g}")


def _fullest(report: RunReport) -> list[list[int]]:
    """[stage, peak bytes, reserved bytes] of the fullest rank of each stage."""
    found: dict[int, RankMemory] = {}
    for one in report.memory:
        if one.stage not in found or one.peak_bytes > found[one.stage].peak_bytes:
            found[one.stage] = one
    return [[at, found[at].peak_bytes, found[at].reserved_bytes] for at in sorted(found)]


def _model(drawing: Drawing | None) -> dict[str, Any]:
    if drawing is None:
        return {"stages": [], "timeline": None, "no_timeline": "this device is not described"}
    line = drawing.timeline
    return {
        "stages": [[one.stage, one.kinds_bytes] for one in drawing.stages],
        "timeline": timeline_data(line) if line else None,
        "no_timeline": drawing.no_timeline,
    }


def timeline_data(line: Timeline) -> dict[str, Any]:
    """Boxes as [rank, kind, chunk, micro batch, start, end]: times in units of a millionth of the
    step, which no screen can tell apart."""
    unit = line.step_s / 1e6
    return {
        "schedule": line.schedule,
        "stages": line.stages,
        "virtual_stages": line.virtual_stages,
        "micros": line.micros,
        "step_s": line.step_s,
        "bubble": line.bubble,
        "events": [
            [e.rank, e.action.kind, e.action.chunk, e.action.micro,
             round(e.start_s / unit), round(e.end_s / unit)]
            for e in line.events
        ],
    }  # fmt: skip
