"""Builds the report of a job from the files its ranks left: facts of every rank, merged by run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.launch.outcomes import own_words, read_if_whole
from fourfold.result import report
from fourfold.result.job import Job, JobReport, RankFacts, facts_file

# How a task ended, and the failure it ended with.
End = tuple[report.Outcome, report.Failure | None]


def job_report(
    job: Job, folder: Path, ends: Mapping[int, End], seconds: float, started_at: str
) -> JobReport:
    """A task without an end (our own bug stopped the launcher) counts as cancelled."""
    lost = ("cancelled", report.Failure(rank=-1, stage=0, phase="", message="the launcher stopped"))
    whole = {task: ends.get(task, lost) for task in range(job.tasks)}
    worst = min(whole.values(), key=lambda end: report.WORST_FIRST.index(end[0]))
    runs = tuple(
        run_report(job, task, folder, end, started_at)
        for task, end in whole.items()
        if job.specs and job.job in ("run", "train", "ping", "verify", "one-rank")
    )
    return JobReport(
        job=job.job,
        outcome=worst[0],
        seconds=seconds,
        runs=runs,
        answers=tuple(sorted(path.name for path in folder.glob("answer-*.json"))),
        failure=worst[1],
    )


def run_report(job: Job, task: int, folder: Path, end: End, started_at: str) -> report.RunReport:
    """Steps, start and environment as rank 0 saw them, loss from whoever has it."""
    paths = (facts_file(folder, task, rank) for rank in range(job.processes(task)))
    facts = [fact for path in paths if (fact := read_if_whole(RankFacts, path)) is not None]
    own = ("environment", "samples", "probes", "warmup")
    of_first: dict[str, Any] = {name: getattr(facts[0], name) for name in own} if facts else {}
    return report.RunReport(
        spec=job.specs[task],
        outcome=end[0],
        steps=_steps(facts),
        memory=tuple(fact.memory for fact in facts),
        ranks=tuple(fact.times for fact in facts),
        links=_slowest([link for fact in facts for link in fact.links]),
        experts=_loads(facts),
        start_s=max((fact.start_s for fact in facts), default=0.0),
        window_s=max((fact.window_s for fact in facts), default=0.0),
        failure=end[1],
        started_at=started_at,
        shortage=_shortage(folder, task, end[1]) if end[0] == "oom" else None,
        **of_first,
    )


def _loads(facts: list[RankFacts]) -> tuple[report.ExpertLoad, ...]:
    """Ranks of a stage have counted together: any of them says it for its layers."""
    by_layer = {load.layer: load for fact in facts for load in fact.experts}
    return tuple(by_layer[layer] for layer in sorted(by_layer))


def _slowest(links: list[report.LinkRate]) -> tuple[report.LinkRate, ...]:
    """One for each axis, level and kind: a step waits for its slowest group."""
    slowest: dict[tuple[str, str, str], report.LinkRate] = {}
    for link in links:
        key = (link.axis, link.level, link.op)
        if key not in slowest or link.seconds > slowest[key].seconds:
            slowest[key] = link
    return tuple(slowest.values())


def _shortage(folder: Path, task: int, failure: report.Failure | None) -> report.OomReport | None:
    """From the words of the rank that failed; another task's start sets them aside."""
    for place in (folder / f"failed-{task}", folder):
        own_failure = own_words(place, failure.rank) if failure else None
        if own_failure is not None:
            return own_failure.shortage
    return None


def _steps(facts: list[RankFacts]) -> tuple[report.StepReport, ...]:
    """A step lasts as long as on its slowest rank; loss and norm from the first that has it."""
    merged = []
    for same in zip(*(fact.steps for fact in facts), strict=False):
        losses = (step.loss for step in same if step.loss is not None)
        norms = (step.grad_norm for step in same if step.grad_norm is not None)
        seconds, skipped = max(s.seconds for s in same), any(s.skipped for s in same)
        loss, norm = next(losses, None), next(norms, None)
        merged.append(replace(same[0], seconds=seconds, loss=loss, grad_norm=norm, skipped=skipped))
    return tuple(merged)
