"""runs, show_run, diff: what a store holds, one run in full, and what differs between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, progress, warnings
from fourfold.result.files.run_file import RUN_FILE
from fourfold.result.files.store import Store, Stored
from fourfold.result.quality import Comparison, compare, differences, stored_spread
from fourfold.result.stored_run import Cell, StoredRun, named_apart, short_name
from fourfold.spec import check, codec
from fourfold.spec.expression import Expression, parse
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.requests import RunFilter, RunsRequest
from fourfold.verbs.run_shown import RunShown, post_mortem

# Trials of micro batches are stored like runs, but measure nothing.
TRIAL_TAG = "auto-trial"


@dataclass(frozen=True, slots=True)
class StoredRuns(Answer):
    runs: tuple[Stored, ...]

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(Counter(str(stored.summary.outcome) for stored in self.runs))

    def plain(self) -> dict[str, Any]:
        return {"runs": self.rows(), "outcomes": self.outcomes, "total": len(self.runs)}

    def rows(self) -> list[dict[str, Any]]:
        return [_plain(stored) for stored in self.runs]


def runs(request: RunsRequest, *, on_event: OnEvent = ignore) -> StoredRuns:
    found = chosen_runs(request, on_event)
    return StoredRuns(tuple(sorted(found, key=lambda item: _order(item.summary, request.sort))))


def chosen_runs(request: RunFilter, on_event: OnEvent) -> list[Stored]:
    conditions = [parse(text) for text in request.where]
    found = Store(request.runs, warn=warnings(on_event)).runs(progress=progress(on_event))
    named = named_apart([stored.summary for stored in found])
    return [
        replace(one, summary=listed)
        for one, listed in zip(found, named, strict=True)
        if _is_of(request.model, one.summary, listed) and _wanted(listed, request, conditions)
    ]


def _is_of(model: str | None, *runs: StoredRun) -> bool:
    """A model by its own name, or by the one that tells it from others of that name."""
    return not model or model.lower() in (run.model.lower() for run in runs)


def _wanted(summary: StoredRun, request: RunFilter, conditions: list[Expression]) -> bool:
    if request.outcome and summary.outcome not in request.outcome:
        return False
    if request.tag is not None and summary.spec.tag != request.tag:
        return False
    values = summary.values()
    return all(
        all(values.get(name) is not None for name in condition.names) and condition.holds(values)
        for condition in conditions
    )


def _order(summary: StoredRun, name: str) -> tuple[Any, ...]:
    value = summary.row()[name]
    return (value is None, value, summary.run_id, summary.repeat)


def _plain(stored: Stored) -> dict[str, Cell]:
    return {"folder": str(stored.folder), **stored.summary.row()}


def show_run(run: str, *, store: str = "runs", on_event: OnEvent = ignore) -> RunShown:
    """The newest repeat of a run: a folder, or the beginning of its id."""
    *_, stored = repeats_of(run, Store(store, warn=warnings(on_event)).runs())
    return RunShown.of(stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences(Answer):
    """(name, a, b) of what differs, and whether the times do; `names` are the runs."""

    names: tuple[str, str]
    settings: list[tuple[str, Any, Any]]
    environment: list[tuple[str, Any, Any]]
    result: list[tuple[str, Any, Any]]
    repeats: dict[str, int]
    verdict: Comparison
    post_mortem: dict[str, dict[str, Any]]

    def plain(self) -> dict[str, Any]:
        lists = {name: getattr(self, name) for name in ("settings", "environment", "result")}
        verdict = {n: getattr(self.verdict, n) for n in ("ratio", "spread", "verdict", "why")}
        return {
            **{kind: [_named(*row) for row in rows] for kind, rows in lists.items()},
            "repeats": self.repeats,
            **verdict,
            "post_mortem": self.post_mortem,
        }

    def rows(self) -> list[dict[str, Any]]:
        lists = {"setting": self.settings, "environment": self.environment, "result": self.result}
        return [{"what": kind} | _named(*row) for kind, rows in lists.items() for row in rows]


def _named(name: str, a: Any, b: Any) -> dict[str, Any]:
    return {"name": name, "a": a, "b": b}


def diff(a: str, b: str, *, store: str = "runs", on_event: OnEvent = ignore) -> Differences:
    known = Store(store, warn=warnings(on_event)).runs()
    one, other = repeats_of(a, known), repeats_of(b, known)
    listed = [stored.summary for stored in known]
    shown = RunShown.of(one[-1]), RunShown.of(other[-1])
    first, second = (run.report for run in shown)
    spread = None
    if one[-1].summary.device == other[-1].summary.device:
        spread = stored_spread(listed, one[-1].summary.device)
    repeated = {run.run_id for run in listed if run.repeat}
    reports = {"a": first, "b": second}
    return Differences(
        names=(_name(one[-1], repeated), _name(other[-1], repeated)),
        settings=differences(codec.encode(first.spec), codec.encode(second.spec)),
        environment=differences(dict(first.environment), dict(second.environment)),
        result=_results(*(run.plain() for run in shown)),
        repeats={"a": len(one), "b": len(other)},
        verdict=compare(_times(one), _times(other), spread),
        post_mortem={n: post_mortem(r) for n, r in reports.items() if r.outcome == "oom"},
    )


def _name(stored: Stored, repeated: Container[str]) -> str:
    return short_name(stored.summary.run_id, stored.summary.repeat, repeated)


def repeats_of(text: str, known: list[Stored]) -> list[Stored]:
    """The repeats that a folder or the beginning of an id names."""
    path = Path(text)
    if (path / RUN_FILE).is_file():
        name = path.absolute().name
        found = [stored for stored in Store(path.absolute().parent).runs() if stored.name == name]
        if found:
            return found
    head, _, repeat = text.partition("#")
    found = [stored for stored in known if head and stored.name.startswith(head)]
    if repeat:
        found = [stored for stored in found if str(stored.summary.repeat) == repeat]
    check.that(found, "run", text, "does not match any stored run", "'fourfold runs' lists them")
    if len({stored.summary.run_id for stored in found}) > 1:
        runs = len({stored.summary.run_id for stored in found})
        hint = "use more characters of the id"
        raise UserError(f"matches {counted(runs, 'run')}", field="run", value=text, hint=hint)
    return found


def _times(repeats: list[Stored]) -> list[float]:
    return [stored.summary.step_s for stored in repeats if stored.summary.step_s]


# Of a run's facts, in the order of reading.
_COMPARED = (
    "outcome",
    "step_s",
    "step_s_low",
    "step_s_high",
    "tokens_s_gpu",
    "peak_bytes",
    "reserved_bytes",
    "device_bytes",
    "loss",
    "loss_step",
    "warmup_steps",
    "warmup_ended",
    "data_wait_s",
    "compile_s",
    "recompiles",
    "retries",
)


def _results(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Everything either run has; what is 0 or unknown in both says nothing."""
    rows = [(name, one.get(name), other.get(name)) for name in _COMPARED]
    first, second = (facts.get("predicted", {}) for facts in (one, other))
    rows += [(f"predicted_{n}", first.get(n), second.get(n)) for n in ("step_s", "peak_bytes")]
    a, b = ({x["axis"]: x["bytes_per_s"] for x in facts["links"]} for facts in (one, other))
    for axis in a | b:
        rows.append((f"link_{axis.replace(' ', '_')}_bytes_per_s", a.get(axis), b.get(axis)))
    rows.append(("flags", "; ".join(one["flags"]), "; ".join(other["flags"])))
    return [row for row in rows if row[0] in _COMPARED[:2] or row[1] or row[2]]
