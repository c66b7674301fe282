"""exam: what planners say of the same runs, against what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fourfold import files
from fourfold.cost import exam as exams
from fourfold.cost.exam import ENTRANTS, Card, Season, card_of
from fourfold.cost.fit.accuracy import Score, score, timed_rows
from fourfold.cost.fit.folds import Bools
from fourfold.cost.table.predict import RowPredictions
from fourfold.escape import toml_text
from fourfold.events import Event, OnEvent, ignore
from fourfold.flag import flag
from fourfold.spec import check, codec
from fourfold.verbs import Answer, Request, measured
from fourfold.verbs.machine import read_calibration

_FIT = ("fit_pct", "refused_pct", "missed_pct", "unsure_pct")
_INTERVAL = ("coverage_pct", "width_pct", "interval_score")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamRequest(Request):
    """`folder` is a season. `check`: one submission, scored alone."""

    folder: str = flag(
        "season (default exam/season1)", "SEASON", names=("folder",), nargs="?",
        default="exam/season1",
    )  # fmt: skip
    new: tuple[str, ...] = flag(
        "make a season of these measured tables", "ROWS.csv", nargs="+", default=()
    )
    sit: bool = flag("let fourfold and the baselines answer again", default=False)
    check: str | None = flag("check and score one submission alone", "FILE.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """`common`: on the rows that every entrant answered; `own`: on all that this one did, also by
    source."""

    card: Card
    declined: int
    common: Score
    own: Score
    by_source: dict[str, Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam(Answer):
    season: str
    tasks: int
    timed: int
    common: int
    seen: int
    entrants: tuple[Entrant, ...]

    def plain(self) -> dict[str, Any]:
        entrants = [
            {
                "card": codec.encode(one.card),
                "declined": one.declined,
                "common": measured(one.common),
                "own": measured(one.own),
                "by_source": {name: measured(part) for name, part in one.by_source.items()},
            }
            for one in self.entrants
        ]
        names = ("season", "tasks", "timed", "common", "seen")
        return {name: getattr(self, name) for name in names} | {"entrants": entrants}

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"entrant": one.card.name, "saw": one.card.saw, "declined": one.declined}
            | measured(one.common)
            for one in self.entrants
        ]


def exam(request: ExamRequest, *, on_event: OnEvent = ignore) -> Exam:
    base = Path(request.folder)
    if request.new:
        _make(base, request.new, on_event)
    season = exams.read_season(request.folder)
    if request.sit or request.new:
        _sit(base, season, on_event)
    if request.check is not None:
        told, name = Path(request.check).with_suffix(".toml"), Path(request.check).stem
        card = Card(name=name, by="", version="", how="", saw="not said")
        card = exams.read_card(told) if told.is_file() else card
        return _scored(season, [(card, exams.read_submission(request.check, season.ids))])
    found = []
    for path in sorted((base / "entrants").glob("*.csv")):
        on_event(Event(f"reading {path.name}", "progress"))
        card = exams.read_card(path.with_suffix(".toml"))
        found.append((card, exams.read_submission(path, season.ids)))
    hint = "'--sit' makes those of fourfold and the baselines"
    check.that(found, "folder", request.folder, "has no entrants", hint)
    return _scored(season, found)


def _make(base: Path, tables: tuple[str, ...], on_event: OnEvent) -> None:
    hint = "name a new folder: entrants answered these tasks"
    check.that(not (base / "tasks.csv").exists(), "folder", str(base), "is a season already", hint)
    for name, text in exams.make_season(tables, read_calibration(None)).items():
        base.mkdir(parents=True, exist_ok=True)
        files.write_text(base / name, text)
        on_event(Event(f"written: {base / name}"))


def _sit(base: Path, season: Season, on_event: OnEvent) -> None:
    import fourfold

    (base / "entrants").mkdir(exist_ok=True)
    shipped = read_calibration(None)
    for name, (_, answered) in ENTRANTS.items():
        on_event(Event(f"{name} answers {len(season.ids)} tasks", "progress"))
        text = exams.written(season.ids, answered(season.rows, shipped))
        files.write_text(base / "entrants" / f"{name}.csv", text)
        card = toml_text(codec.encode(card_of(name, fourfold.__version__)))
        files.write_text(base / "entrants" / f"{name}.toml", card)


def _scored(season: Season, found: list[tuple[Card, RowPredictions]]) -> Exam:
    rows = season.rows
    answered = [np.isfinite(said.step_s) for _, said in found]
    common = np.logical_and.reduce(answered)
    best_first = sorted(
        (
            Entrant(
                card=card,
                declined=int((~mine).sum()),
                common=_score(season, said, common),
                own=_score(season, said, mine),
                by_source={
                    name: _score(season, said, mine & season.of_source(name))
                    for name in season.sources
                },
            )
            for (card, said), mine in zip(found, answered, strict=True)
        ),
        key=lambda one: one.common.median_pct,
    )
    timed = timed_rows(rows, found[0][1]) if found else common
    return Exam(
        season=season.name,
        tasks=len(season.ids),
        timed=int((np.isfinite(rows.step_s) & (rows.status != "oom")).sum()),
        common=int((common & timed).sum()),
        seen=int(season.seen.sum()),
        entrants=tuple(best_first),
    )


def _score(season: Season, said: RowPredictions, within: Bools) -> Score:
    """What an entrant does not say is not scored."""
    found = score(season.rows, said, within=within)
    silent = () if np.isfinite(said.fit_chance).any() else _FIT
    silent += () if np.isfinite(said.low_s).any() else _INTERVAL
    silent += () if np.isfinite(said.mem_gb).any() else ("memory_pct",)
    nothing: dict[str, Any] = dict.fromkeys(silent, float("nan"))
    return replace(found, **nothing)
