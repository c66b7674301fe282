"""Do folds leave out what they say, do intervals of left-out rows hold, and is all of it told?"""

from __future__ import annotations

import csv
import itertools
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

import fourfold
from fourfold.commands.fit import fold_tables
from fourfold.cost.columns import Floats
from fourfold.cost.fit.accuracy import FoldScore, Score, group_labels, timed_rows
from fourfold.cost.fit.calibration import (
    ELSEWHERE,
    NOWHERE,
    ROUTED_STRANGER,
    STRANGER,
    Calibration,
    blend,
    shipped,
)
from fourfold.cost.fit.coefficients import defaults
from fourfold.cost.fit.fit import fit_entries
from fourfold.cost.fit.folds import KINDS, _settings, keys_of, left_out, sample, undated
from fourfold.cost.fit.interval import StepInterval
from fourfold.cost.fit.validate import held_out, left_out_of
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.predict import predict
from fourfold.events import OnEvent
from fourfold.search.alternatives import tie_width
from fourfold.spec.engine import MeasuredAs, family_of
from fourfold.verbs.fit import Scores, score
from fourfold.verbs.requests import ScoreRequest
from tests.cost.test_fit import table

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fold_leaves_out_what_it_scores(kind: str) -> None:
    rows = table("par4d")
    found = list(left_out([rows], kind))
    assert found
    for (scored,), (gone,) in found:
        assert scored.any()
        assert not np.any(scored & ~gone)
        if kind in ("tp", "cp", "pp"):
            (value,) = set(getattr(rows.columns, kind)[scored].tolist())
            assert value not in getattr(rows.columns, kind)[rows.usable & ~gone]


def test_a_neighbourhood_shares_all_but_one_setting() -> None:
    rows = table("par4d")
    settings, keys = _settings(rows), keys_of(rows)
    for (scored,), (gone,) in left_out([rows], "near"):
        centre = np.flatnonzero(scored)[0]
        unlike = (settings != settings[centre]).sum(axis=1)
        near = rows.usable & (keys == keys[centre]) & (unlike <= 1)
        assert np.array_equal(near, gone)
        assert gone.sum() > scored.sum()


def test_abroad_neither_engine_nor_cluster_was_seen() -> None:
    tables = [table("mpt"), table("par4d")]
    entries = fit_entries(sample(tables), rounds=1)
    for scored, gone in left_out(tables, "abroad"):
        engines = {
            runs.engine for r, at in zip(tables, scored, strict=True) for runs in r.measured_as[at]
        }
        clusters = {c for r, at in zip(tables, scored, strict=True) for c in r.cluster[at]}
        for rows, out in zip(tables, gone, strict=True):
            kept = rows.usable & ~out
            assert not clusters & set(rows.cluster[kept])
            assert not engines & {runs.engine for runs in rows.measured_as[kept]}
    for rows, (answers, asked) in zip(tables, left_out_of(tables, entries, "abroad"), strict=True):
        half = np.log(answers.high_s / answers.low_s)[asked] / 2.0
        assert np.array_equal(asked, rows.usable)
        timed = np.isfinite(half)
        assert half[timed].min() >= NOWHERE - 1e-9


def test_left_out_rows_teach_nothing() -> None:
    """Predictions of a left-out value of pp stay the same whatever was measured there."""
    rows = table("bloom")
    entries = fit_entries(sample([rows]), rounds=1)
    before, asked = left_out_of([rows], entries, "pp")[0]
    value = rows.columns.pp[asked][0]
    here = asked & (rows.columns.pp == value)
    wrong = replace(rows, step_s=np.where(here, 7.0 * rows.step_s, rows.step_s))
    after, _ = left_out_of([wrong], entries, "pp")[0]
    assert np.allclose(after.step_s[here], before.step_s[here], rtol=1e-9)
    assert not np.allclose(after.step_s[asked & ~here], before.step_s[asked & ~here], rtol=1e-9)


def test_an_engine_measured_elsewhere_is_known_better_than_none() -> None:
    known = shipped()
    assert known.entry(MeasuredAs.of("megatron-lm-2024"), "nowhere", "h")[0].noise == ELSEWHERE
    assert known.entry(MeasuredAs.of("nobody-2024"), "nowhere", "h")[0].noise == NOWHERE > ELSEWHERE


def test_score_folds_tells_kinds_and_sources(tmp_path, cli, monkeypatch) -> None:
    answers: list[Scores] = []

    def once(request: ScoreRequest, *, on_event: OnEvent) -> Scores:
        """Both forms are of one answer."""
        if not answers:
            answers.append(score(request, on_event=on_event))
        return answers[0]

    monkeypatch.setattr(fourfold, "score", once)
    with (GOLDEN / "bloom.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))[::3]
    small = tmp_path / "bloom.csv"
    with small.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    said = cli.json("score", small, "--folds")
    assert {"layout", "source", "gpu", "abroad", "pp"} <= {one["left_out"] for one in said["folds"]}
    assert all(one["rows"] <= len(rows) for one in said["folds"])
    assert {one["how"] for one in said["scores"]} > {"as fitted", "layout", "abroad"}
    page = cli("score", small, "--folds")
    assert "left out  sources  rows" in page
    assert max(map(len, page.split("\n\n")[1].splitlines())) <= 100


def test_two_tables_with_rows_of_one_source_keep_their_own_numbers() -> None:
    def scored(how: str, rows: int, median_pct: float) -> SimpleNamespace:
        numbers = {field.name: float("nan") for field in fields(Score)}
        one = Score(**numbers | {"source": "mpt", "rows": rows, "median_pct": median_pct})
        return SimpleNamespace(how=how, score=one)

    results = [scored("layout", 139, 2.5), scored("layout", 3, 30.0), scored("source", 139, 4.0)]
    numbers = {field.name: 3 for field in fields(FoldScore)} | {"left_out": "layout"}
    answer = SimpleNamespace(scores=results, folds=[FoldScore(**numbers)])
    _, sources = fold_tables(cast(Scores, answer))
    assert [tuple(row[:5]) for row in sources.rows] == [
        ("mpt", "139", "2.5", "-", "4.0"), ("mpt", "3", "30.0", "-", "-")
    ]  # fmt: skip


def test_intervals_of_an_engine_are_as_wide_as_its_rows_ask_for() -> None:
    """Rows as predicted; all somewhat off; every fourth far off. Few rows say little."""
    rows = table("par4d")
    (entry,) = (e for e in fit_entries(sample([rows]), rounds=1) if e.cluster == "tsubame4")
    mine = rows.usable & (keys_of(rows) == entry.key)
    step_s = predict(rows, Calibration(name="one", sources=(), entries=(entry,))).step_s
    random = np.random.default_rng(0)
    even = random.normal(size=len(step_s))
    tails = np.where(random.integers(4, size=len(step_s)) == 0, np.sign(even), 0.0)

    def width(off: Floats, every: int = 1) -> float:
        kept = mine & (np.cumsum(mine) % every == 0)
        made = replace(rows, step_s=step_s * np.exp(off), usable=kept)
        (found,) = fit_entries(sample([made]), rounds=1)
        return found.width

    exact = width(0.001 * even)
    assert 0.4 < exact < width(0.03 * even) < 1.0 < width(0.3 * tails)
    assert exact < width(0.001 * even, every=8) - 0.2 < 0.8


def test_layouts_a_tie_apart_are_in_order_four_times_in_five() -> None:
    """Layouts left out; nearer ones are nearer to a coin flip, further ones are sure."""
    rows = table("par4d")
    width = {e.key: tie_width(e) for e in fit_entries(sample([rows]))}
    answers, keys, labels = held_out(rows, ()), keys_of(rows), group_labels(rows)
    ties, is_right = [], []
    for i, j in itertools.combinations(np.flatnonzero(timed_rows(rows, answers)), 2):
        measured = np.log(rows.step_s[i] / rows.step_s[j])
        if labels[i] != labels[j] or abs(measured) < 0.005:
            continue
        predicted = np.log(answers.step_s[i] / answers.step_s[j])
        ties.append(abs(predicted) / width[keys[i]])
        is_right.append(predicted * measured > 0)
    apart, right = np.array(ties), np.array(is_right)
    near, tied, far = (
        right[(apart > low) & (apart < high)] for low, high in ((0.0, 0.5), (0.7, 1.3), (2.0, 99.0))
    )
    assert min(len(near), len(tied), len(far)) > 30
    assert 0.5 < near.mean() < 0.8
    assert 0.7 < tied.mean() < 0.95 < far.mean()


def test_by_time_only_what_ran_before_teaches() -> None:
    """The year of a row is that of its stack's name where no column has it; one without any is
    neither taught nor asked."""
    tables = [table("mpt"), table("par4d"), table("bloom")]
    unsaid = replace(tables[2].table, texts={**tables[2].table.texts, "stack": ["megatron"] * 70})
    tables[2] = replace(tables[2], table=unsaid)
    found = list(left_out(tables, "time"))
    assert len(found) == 1  # none ran after 2024
    (scored, gone) = found[0]
    assert np.array_equal(scored[1], tables[1].usable)
    assert not scored[0].any()
    assert not gone[0].any()
    assert gone[2].sum() == tables[2].usable.sum() == undated(tables)


def test_families_are_left_out_whole() -> None:
    tables = [table("mpt"), table("par4d"), table("bloom")]
    gone = [[bool(one.any()) for one in out] for _, out in left_out(tables, "family")]
    assert sorted(gone) == [[False, False, True], [False, True, False], [True, False, False]]


@pytest.mark.parametrize(
    ("stack", "family"),
    [
        ("nemo-2025", "NVIDIA"),
        ("megatron-deepspeed-2022", "academic Megatron"),
        ("torchtitan", "compiled torch"),
        ("torchtitan-2025-eager", "eager torch"),
        ("fms-fsdp-2024-compile", "compiled torch"),
        ("nanotron", "eager torch"),
        ("maxtext", "JAX"),
        ("nobody-2024", ""),
    ],
)
def test_an_engine_is_of_the_family_that_its_folder_names(stack: str, family: str) -> None:
    assert family_of(MeasuredAs.of(stack)) == family


def test_kernels_and_places_are_not_handed_on() -> None:
    """Rates of kernels are the device's, whatever other stacks made of them."""
    mine = MeasuredAs.of("nemo-2025")
    known = replace(shipped().entries[0], measured_as=mine, cluster="here", coefficients=defaults())
    learned = {"product": 0.8, "attention": 0.5, "jitter": 0.02, "engine": 1.3}
    known = replace(
        known,
        coefficients=known.coefficients | learned,
        informed=dict.fromkeys(learned, 1.0),
    )
    usual = defaults()
    for where, handed in (("here", {"jitter", "engine"}), ("elsewhere", {"engine"})):
        prior = blend((known,), MeasuredAs.of("nemo-2024"), cluster=where, generation="h")
        now = prior.coefficients
        moved = {name for name in learned if now[name] != pytest.approx(usual[name])}
        assert moved == handed


def test_nobodys_interval_is_never_narrow() -> None:
    known = shipped()
    for name, least in (("nobody-2024", STRANGER), ("nobody with experts", ROUTED_STRANGER)):
        entry, _ = known.entry(MeasuredAs.of(name), "nowhere", "h")
        assert entry.least_half == least
        c = table("par4d").columns.take(np.arange(3))
        assert (StepInterval(c, entry, estimate(c, entry.coefficients)).half >= least).all()
    assert known.entry(MeasuredAs.of("nemo-2030"), "nowhere", "h")[0].least_half == 0.0
