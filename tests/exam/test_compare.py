"""The exam: tasks from measured rows, predictions that are right or wrong, one page of results."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from exam import compare
from exam.baselines import predictions_of
from fourfold.cli import main
from fourfold.cost.fit.calibration import shipped
from fourfold.errors import UserError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def test_published_tasks_are_the_golden_rows_without_results() -> None:
    tables = [str(GOLDEN / f"{name}.csv") for name in ("mpt", "bloom", "par4d")]
    texts = compare.make_tasks(tables, shipped())
    for name, text in texts.items():
        assert (compare.PUBLISHED / name).read_text() == text, "make them again with --new"
    rows = list(csv.DictReader(texts["tasks.csv"].splitlines()))
    assert not {*compare.RESULTS} & {*rows[0]}
    assert {row["note"] for row in rows} <= {"", "pure", "default"}
    tasks = compare.read_tasks(compare.PUBLISHED)
    assert tasks.seen_mask.all()
    assert len(tasks.row_ids) == 397


def test_page_scores_every_entrant_on_the_same_rows(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "mine"
    assert compare.main([str(folder), "--new", str(GOLDEN / "bloom.csv")]) == 0
    tasks = compare.read_tasks(folder)
    before = compare.scored(tasks, compare.read_entrants(folder, tasks))
    assert len(before) == 4
    step_s = np.full(len(tasks.row_ids), 100.0)
    step_s[:10] = np.nan
    text = compare.predictions_csv(tasks.row_ids, predictions_of(step_s))
    (folder / "entrants" / "late.csv").write_text(text)
    card = 'name = "a late one"\nby = "me"\nversion = "1"\nhow = "guessed"\nsaw = "nothing"\n'
    (folder / "entrants" / "late.toml").write_text(card)
    page = tmp_path / "results.html"
    assert compare.main([str(folder), "--page", str(page)]) == 0
    assert "a late one (me, 1): guessed. Saw: nothing." in capsys.readouterr().out
    after = compare.scored(tasks, compare.read_entrants(folder, tasks))
    (common_rows,) = {entrant.common.rows for entrant in after}
    assert common_rows < before[0].common.rows
    late = next(entrant for entrant in after if entrant.card.name == "a late one")
    assert late.declined == 10
    assert np.isnan(late.common.coverage_pct)
    html = page.read_text()
    assert all(entrant.card.name in html for entrant in after)
    assert "the only published blind exam that we know" in html
    assert compare.main([str(folder), "--new", str(GOLDEN / "mpt.csv")]) == 2
    assert "has tasks already" in capsys.readouterr().err


def test_predict_output_is_accepted_as_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "mine.csv"
    tasks_file = compare.PUBLISHED / "tasks.csv"
    assert main(["predict", str(tasks_file), "--out", str(out)]) == 0
    tasks = compare.read_tasks(compare.PUBLISHED)
    card = compare.Card(name="mine", by="", version="", how="", saw="")
    answer = card, compare.read_predictions(out, tasks.row_ids)
    checked = compare.scored(tasks, [answer])[0].own
    stored = compare.scored(tasks, compare.read_entrants(compare.PUBLISHED, tasks))
    mine = next(entrant for entrant in stored if entrant.card.name == "fourfold, as shipped").own
    assert checked.median_pct == pytest.approx(mine.median_pct, rel=0.05)
    assert checked.rank_correlation == pytest.approx(mine.rank_correlation, abs=0.02)
    assert len(stored) >= 4


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_wrong_predictions_are_refused_by_line(change, message: str, tmp_path: Path) -> None:
    lines = ["row_id,step_s,step_s_low,step_s_high,mem_gb,fit_chance", "a,1,0.5,2,,", "b,,,,,",
             "c,3,,,70,1"]  # fmt: skip
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines) + "\n")
    read = compare.read_predictions(file, ["a", "b", "c"])
    assert np.isnan(read.step_s[1])
    assert compare.predictions_csv(["a", "b", "c"], read).splitlines() == lines
    file.write_text("\n".join(change(lines)) + "\n")
    with pytest.raises(UserError) as error:
        compare.read_predictions(file, ["a", "b", "c"])
    assert re.search(message, str(error.value))
