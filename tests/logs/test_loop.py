"""The loop: logs are collected, the fit learns from 12 of them, and later runs are predicted
better than before."""

from __future__ import annotations

from pathlib import Path

import fourfold

SAMPLES = Path(__file__).parent.parent / "samples" / "logs"


def _collected(name: str, out: Path) -> str:
    request = fourfold.CollectRequest(
        logs=(str(SAMPLES / name),), cluster="jean-zay", stack="megatron-lm-mine", out=str(out)
    )
    answer = fourfold.collect(request)
    assert answer.ok
    assert all(row.is_usable for row in answer.rows_read)
    return answer.out


def _score(rows: str, calibration: str | None) -> dict[str, float]:
    request = fourfold.ScoreRequest(rows=(rows,), calibration=calibration)
    (score,) = fourfold.score(request).rows()
    return score


def test_twelve_collected_runs_improve_the_prediction_of_later_ones(tmp_path: Path) -> None:
    first = _collected("first", tmp_path / "mine.csv")
    later = _collected("later", tmp_path / "later.csv")
    before = _score(later, None)
    fitted = fourfold.fit(fourfold.FitRequest(rows=(first,)))
    assert [(e.stack, e.cluster, e.rows_time) for e in fitted.calibration.entries] == [
        ("megatron-lm-mine", "jean-zay", 12)
    ]
    (tmp_path / "mine.json").write_text(fitted.json())
    after = _score(later, str(tmp_path / "mine.json"))
    assert (before["rows"], after["rows"]) == (8, 8)
    assert after["median_pct"] < 0.8 * before["median_pct"]
