"""Are intervals of left-out rows those that predictions print, do sources have no say in their own
widths, and does `score --folds` tell all of it?"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.cli import main
from fourfold.cost.fit import spread
from fourfold.cost.fit.calibration import shipped
from fourfold.cost.fit.fold_scores import fold_scores
from fourfold.cost.fit.folds import KINDS
from fourfold.cost.fit.widths import (
    AIM,
    MANY_ROWS,
    LeftOut,
    Widths,
    left_out_rows,
    shipped_weights,
)
from fourfold.cost.table.predict import predict
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.rows import parse

GOLDEN = Path(__file__).parent.parent / "golden"


def left_out(source: str, error: float, *, noise: float = 0.05) -> LeftOut:
    far = (0.0,) * len(spread.PER_DOUBLING)
    return LeftOut("layout", source, error, True, 0.0, noise, far, 0.1, 0.9, 0.0)


@pytest.mark.parametrize("stack", ["megatron-lm-2024", "nobody-2024"])
def test_intervals_are_those_that_predictions_print(stack: str) -> None:
    """The sums of spread.py are written twice: for one prediction, and for any weights."""
    rows = parse(read_table(GOLDEN / "par4d.csv"))
    rows = replace(rows, stack=np.full(rows.table.length, stack))
    gone = rows.usable & np.isfinite(rows.step_s) & (rows.status != "oom")
    widths = Widths(left_out_rows("layout", rows, gone, shipped()))
    below, above = widths.ends(shipped_weights())
    said = predict(rows, shipped())
    # Rows come by stack and cluster.
    order = np.argsort(np.abs(widths.error))
    printed = np.flatnonzero(gone)
    wrong = np.abs(np.log(rows.step_s[printed] / said.step_s[printed]))
    printed = printed[np.argsort(wrong)]
    for got, ends in ((below, said.step_s / said.low_s), (above, said.high_s / said.step_s)):
        assert np.exp(got[order]) == pytest.approx(ends[printed], rel=2e-3)


def test_a_source_has_no_say_in_its_own_width() -> None:
    rng = np.random.default_rng(4)
    calm = [left_out("calm", error) for error in rng.normal(0.0, 0.01, 60)]
    wild = [left_out("wild", error) for error in rng.normal(0.0, 0.3, 60)]
    widths = Widths(calm + wild)
    together = widths.scores(widths.learned())[0]
    assert together.mean() == pytest.approx(AIM, abs=0.05)
    nested = widths.nested()
    assert nested[:60].mean() == 1.0
    assert nested[60:].mean() < 0.2 < together[60:].mean()


def test_nothing_is_nested_where_no_other_source_could_set_weights() -> None:
    whole, alone = fold_scores(Widths([left_out("alone", 0.01)] * MANY_ROWS))
    for one in (whole, alone):
        nested = (one.nested_pct, one.nested_least_pct, one.nested_most_pct)
        assert np.isnan(nested).all()
        assert one.inside_pct == 100.0


def test_kinds_weigh_sources_alike() -> None:
    many = [left_out("many", 0.01 * (-1) ** i) for i in range(MANY_ROWS)]
    few = [left_out("few", 0.2)]
    whole, *sources = fold_scores(Widths(many + few))
    assert (whole.source, whole.sources, whole.rows) == ("", 2, MANY_ROWS + 1)
    by_name = {one.source: one for one in sources}
    assert whole.median_pct == pytest.approx(
        (by_name["many"].median_pct + by_name["few"].median_pct) / 2
    )
    assert by_name["few"].nested_least_pct != by_name["few"].nested_least_pct  # too few rows
    assert whole.nested_least_pct == by_name["many"].nested_pct


def test_score_folds_tells_kinds_and_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (GOLDEN / "bloom.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))[::3]
    small = tmp_path / "bloom.csv"
    with small.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert main(["score", str(small), "--folds", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    kinds = [one for one in said["folds"] if not one["source"]]
    assert {one["left_out"] for one in kinds} <= set(KINDS)
    assert {"layout", "source", "gpu", "pp"} <= {one["left_out"] for one in kinds}
    assert all(one["rows"] <= len(rows) for one in kinds)
    assert main(["score", str(small), "--folds"]) == 0
    page = capsys.readouterr().out
    assert "left out  sources  rows" in page
    nested = [line.split()[6] for line in page.split("\n\n")[1].splitlines() if "layout" in line]
    assert nested == ["-"]  # one source: nothing else sets its widths
    assert max(map(len, page.split("\n\n")[1].splitlines())) <= 100
