"""Whole trainings: GPU-hours that were published against what a calendar says.

    python scripts/calendars.py FOLDER    the list and the table at the end of docs/calendar.md

FOLDER holds the reference tables, famous.csv among them; they stay outside. Seconds of a step are
predicted by a calibration without any row of the run's source; where the layout is not published,
those of the planner's first choice. Published figures: tests/golden/trainings.toml.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from famous import Famous, answers

from fourfold.cost.calendar.assumptions import defaults
from fourfold.cost.calendar.training import DAY_S, Phase, training
from fourfold.spec import catalog
from fourfold.verbs.plan import plan
from fourfold.verbs.requests import PlanRequest

HEAD = (
    "| run | GPUs | counts | printed GPU-hours | predicted | 80% | off | inside | with its step "
    "| source |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
FACTS = Path(__file__).parent.parent / "tests" / "golden" / "trainings.toml"


@dataclass(frozen=True)
class Scored:
    """GPU-hours in all; `logged`: with the published seconds of a step in place of predicted ones
    (0: not published, or taken from the hours themselves)."""

    run: str
    gpus: int
    counts: str
    printed: float
    hours: float
    low: float
    high: float
    logged: float
    source: str
    is_planned: bool

    @property
    def off(self) -> float:
        return self.hours / self.printed - 1.0

    @property
    def inside(self) -> bool:
        return self.low <= self.printed <= self.high


def scored(one: Famous, fact: dict[str, object]) -> Scored:
    row, i = one.row, one.at
    gpus = int(row["n_gpus"] or fact["gpus"])
    steps = float(fact["tokens"]) / float(row["seq_len"]) / float(row["gbs"])
    known = one.rows.usable[i]
    if known:
        seconds = tuple(float(s[i]) for s in (one.said.step_s, one.said.low_s, one.said.high_s))
    else:
        seconds = planned(row, gpus)
    table = one.rows.step_s[i] if known else np.nan
    phase = Phase(
        gpus=gpus,
        host_gpus=int(row["gpus_per_node"]),
        work_s=steps * seconds[0],
        params=params(row),
        low=seconds[1] / seconds[0],
        high=seconds[2] / seconds[0],
    )
    found = training([phase], defaults())
    lost = found.total_s / phase.work_s if fact["counts"] == "all" else 1.0
    hour = gpus / 3600.0
    ends = (
        (found.within_s(0.1), found.within_s(0.9))
        if fact["counts"] == "all"
        else (phase.work_s * phase.low, phase.work_s * phase.high)
    )
    is_logged = np.isfinite(table) and row["speed_kind"] != "gpu_hours"
    return Scored(
        run=row["run"],
        gpus=gpus,
        counts=str(fact["counts"]),
        printed=float(fact["gpu_hours"]),
        hours=phase.work_s * lost * hour,
        low=ends[0] * hour,
        high=ends[1] * hour,
        logged=steps * float(table) * lost * hour if is_logged else 0.0,
        source=str(fact["source"]),
        is_planned=not known,
    )


def params(row: dict[str, str]) -> int:
    """About: of a checkpoint's size only its order matters."""
    hidden, ffn, layers = (int(row[name]) for name in ("d_model", "d_ff", "n_layers"))
    wide = 3 if row["family"] == "llama" else 2
    kv = int(row["n_kv_heads"]) / int(row["n_heads"])
    return layers * hidden * (wide * ffn + int(2 * hidden * (1 + kv))) + int(row["vocab"]) * hidden


def planned(row: dict[str, str], gpus: int) -> tuple[float, float, float]:
    sizes = {"layers": "n_layers", "hidden": "d_model", "ffn": "d_ff", "heads": "n_heads",
             "kv_heads": "n_kv_heads", "vocab": "vocab"}  # fmt: skip
    numbers = {name: int(row[column]) for name, column in sizes.items()}
    shape = replace(catalog.model("llama-2-70b"), **numbers)
    request = PlanRequest(
        model=shape, seq_len=int(row["seq_len"]), global_batch=int(row["gbs"]), gpus=gpus,
        gpu=row["hardware"], top=1,
    )  # fmt: skip
    best = plan(request).ranked[0]
    return best.step_s, best.step_s_low, best.step_s_high


def line(one: Scored) -> str:
    logged = f"{100 * (one.logged / one.printed - 1):+.0f}%" if one.logged else "-"
    cells = (
        one.run + "*" * one.is_planned, f"{one.gpus:,}", one.counts, f"{one.printed:,.0f}",
        f"{one.hours:,.0f}", f"{one.low:,.0f} to {one.high:,.0f}", f"{100 * one.off:+.0f}%",
        "yes" if one.inside else "no", logged, one.source,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def summary(found: list[Scored]) -> str:
    off = np.array([abs(one.off) for one in found])
    inside = np.mean([one.inside for one in found])
    known = [abs(one.logged / one.printed - 1.0) for one in found if one.logged]
    with_steps = f"; with published steps ({len(known)} runs) {100 * np.median(known):.1f}%"
    return (
        f"{len(found)} runs: median error {100 * np.median(off):.1f}%, {100 * inside:.0f}% in the "
        f"80% interval{with_steps if known else ''}"
    )


def main() -> None:
    facts = tomllib.loads(FACTS.read_text())
    famous = {one.row["run"]: one for one in answers(Path(sys.argv[1]), choose=False)}
    found = [scored(famous[run], fact) for run, fact in facts.items()]
    ran = [one for one in found if "computed from the speed" not in one.source]
    print(f"- Trainings that ran: {summary(ran)}.")
    print(f"- With times that a paper computed from a measured speed: {summary(found)}.")
    print(f"- Llama 3 405B's 54 days with 466 interruptions: {snapshot()}.\n")
    print(*HEAD, *map(line, found), sep="\n")


def snapshot() -> str:
    """Effective share of Llama 3 405B's 54 days: at its rate of interruptions, at the usual one."""
    phase = Phase(gpus=16384, host_gpus=8, work_s=48 * DAY_S, params=405 * 10**9, low=1.0, high=1.0)
    seen = defaults().changed({"failures_per_gpu_day": 466 / 54 / 16384})
    first, second = (training([phase], assumed).effective for assumed in (seen, defaults()))
    return (
        f"{100 * first:.1f}% of the time effective at that rate, {100 * second:.1f}% at the "
        "default one; published: more than 90%"
    )


if __name__ == "__main__":
    main()
