"""`exam`: a season of measured rows, submissions that are right or wrong, one page of results."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

import fourfold
from fourfold import ExamRequest
from fourfold.cli import main
from fourfold.cost import exam
from fourfold.cost.fit.calibration import shipped
from fourfold.errors import UserError
from tests.cli import Cli

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SEASON = ROOT / "exam" / "season1"


def test_season_1_is_made_of_the_published_tables() -> None:
    """Without a word of the results, and with every row that the shipped calibration saw marked."""
    tables = [str(GOLDEN / f"{name}.csv") for name in ("mpt", "bloom", "par4d")]
    made = exam.make_season(tables, shipped())
    for name, text in made.items():
        assert (SEASON / name).read_text() == text, "fourfold exam --new makes the season again"
    asked = list(csv.DictReader(made["tasks.csv"].splitlines()))
    assert not {*exam.RESULTS} & {*asked[0]}
    assert {row["note"] for row in asked} <= {"", "pure", "default"}
    season = exam.read_season(str(SEASON))
    assert season.seen.all()
    assert len(season.ids) == 397


def test_the_page_has_every_entrant_on_the_same_rows(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "season1"
    alone = cli.json("exam", folder, "--new", GOLDEN / "bloom.csv")
    assert len(alone["entrants"]) == 4
    (folder / "entrants" / "late.csv").write_text(
        "row_id,step_s\n"
        + "".join(
            f"{name},{'' if i < 10 else 100}\n"
            for i, name in enumerate(exam.read_season(str(folder)).ids)
        )
    )
    card = 'name = "a late one"\nby = "me"\nversion = "1"\nhow = "guessed"\nsaw = "nothing"\n'
    (folder / "entrants" / "late.toml").write_text(card)
    page = tmp_path / "results.html"
    answer = cli.json("exam", folder, "--page", page)
    rows = {one["common"]["rows"] for one in answer["entrants"]}
    assert rows == {answer["common"]}
    assert answer["common"] < alone["common"]
    late = next(one for one in answer["entrants"] if one["card"]["name"] == "a late one")
    assert late["declined"] == 10
    assert late["common"].get("coverage_pct") is None
    text = page.read_text()
    assert all(one["card"]["name"] in text for one in answer["entrants"])
    assert "the only published blind exam that we know" in text
    with pytest.raises(UserError, match="is a season already"):
        fourfold.exam(ExamRequest(folder=str(folder), new=(str(GOLDEN / "mpt.csv"),)))


def test_what_predict_writes_is_a_submission(tmp_path: Path) -> None:
    out = tmp_path / "mine.csv"
    assert main(["predict", str(SEASON / "tasks.csv"), "--out", str(out)]) == 0
    told = fourfold.exam(
        ExamRequest(folder=str(SEASON), check=str(SEASON / "entrants/fourfold.csv"))
    )
    assert told.entrants[0].card.how, "the card beside a submission is read"
    checked = fourfold.exam(ExamRequest(folder=str(SEASON), check=str(out))).entrants[0].own
    stored = fourfold.exam(ExamRequest(folder=str(SEASON)))
    mine = next(one for one in stored.entrants if one.card.name == "fourfold, as shipped").own
    assert checked.median_pct == pytest.approx(mine.median_pct, rel=0.05)
    assert checked.rank_correlation == pytest.approx(mine.rank_correlation, abs=0.02)
    assert len(stored.entrants) >= 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[:-2], "has no line for 2 of 3 tasks: b, c"),
        (lambda lines: [*lines, "a,1,,,,"], "row_id = a in .*, line 5 is answered twice"),
        (lambda lines: [*lines, "x,1,,,,"], "row_id = x in .*, line 5 is no task"),
        (lambda lines: [*lines[:-1], "c,nan,,,,"], "step_s = nan in .*, line 4 must be a finite"),
        (lambda lines: [*lines[:-1], "c,-3,,,,"], "step_s = -3 in .*, line 4 must be a finite"),
        (lambda lines: [*lines[:-1], "c,inf,,,,"], "step_s = inf in .* must be a finite"),
        (lambda lines: [*lines[:-1], "c,1_0,,,,"], "step_s = 1_0 in .* must be a finite"),
        (lambda lines: [*lines[:-1], "c,٣,,,,"], "step_s = ٣ in .* must be a finite"),
        (lambda lines: [*lines[:-1], "c,1,,,,٣"], "fit_chance = ٣ in .* must be from 0 to 1"),
        (lambda lines: [lines[0], "a,,,,,", "b,,,,,", "c,,,,70,1"], "answers no task"),
        (lambda lines: [*lines[:-1], "c,soon,,,,"], "step_s = soon in .* must be a finite"),
        (lambda lines: [*lines[:-1], "c,1,2,3,,"], "must lie from step_s_low=2.0 to step_s_high=3"),
        (lambda lines: [*lines[:-1], "c,1,0.5,,,"], "needs both ends of the interval"),
        (lambda lines: [*lines[:-1], "c,1,,,,1.5"], "fit_chance = 1.5 in .* must be from 0 to 1"),
        (lambda lines: ["row_id,seconds", "a,1"], "lacks the column step_s"),
    ],
)
def test_a_wrong_submission_is_an_error(change, said: str, tmp_path: Path) -> None:
    lines = ["row_id,step_s,step_s_low,step_s_high,mem_gb,fit_chance", "a,1,0.5,2,,", "b,,,,,",
             "c,3,,,70,1"]  # fmt: skip
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines) + "\n")
    read = exam.read_submission(file, ["a", "b", "c"])
    assert np.isnan(read.step_s[1])
    assert exam.written(["a", "b", "c"], read).splitlines() == lines
    file.write_text("\n".join(change(lines)) + "\n")
    with pytest.raises(UserError) as error:
        exam.read_submission(file, ["a", "b", "c"])
    assert re.search(said, str(error.value))
