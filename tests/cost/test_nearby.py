"""What the formulas miss near measured runs: learned where neighbours tell, nothing elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold.cost.columns import Columns, columns
from fourfold.cost.fit import nearby
from fourfold.cost.fit.calibration import Calibration, from_json, shipped, to_json
from fourfold.cost.fit.coefficients import defaults
from fourfold.cost.fit.nearby import NOT_LEARNED, Nearby, learned, missed
from fourfold.cost.step.estimate import estimate
from fourfold.errors import UserError
from fourfold.spec.words import DTYPES, PRICED_ATTENTION


def runs(count: int, seed: int = 0) -> Columns:
    """Layouts of one model, drawn."""
    rng = np.random.default_rng(seed)
    tp, pp, dp = (2 ** rng.integers(0, 4, count) for _ in range(3))
    micro = 2 ** rng.integers(0, 3, count)
    return columns(
        count,
        layers=32, hidden=4096, heads=32, ffn=14336, vocab=50304, seq=4096, micro=micro,
        batch=dp * micro * 8, gpus=tp * pp * dp, tp=tp, pp=pp, vpp=1, dp=dp, zero=1,
        attention=PRICED_ATTENTION.index("flash"), precision=DTYPES.index("bf16"),
        peak=989.5e12, peak_low=989.5e12, clock=0.83, hbm=3.35e12, sms=132, link=450e9, node=8,
        net=400e9, capacity=80e9,
    )  # fmt: skip


def test_a_miss_that_neighbours_share_is_learned_and_the_rest_is_left() -> None:
    c = runs(200)
    shared = 0.03 * np.log2(c.tp) - 0.05
    noise = np.random.default_rng(1).normal(0.0, 0.01, len(c))
    found, left = learned(c, shared + noise)
    other = runs(50, seed=9)
    guess = missed(other, found)
    truth = 0.03 * np.log2(other.tp) - 0.05
    assert np.abs(guess - truth).mean() < 0.3 * np.abs(truth).mean()
    # What is left of layouts that the surface was not shown is near the noise, not below it.
    assert 0.008 < left.std() < 0.02


def test_where_neighbours_tell_nothing_nothing_is_learned() -> None:
    c = runs(200)
    lots = [learned(c, np.random.default_rng(s).normal(0.0, 0.05, len(c))) for s in range(8)]
    moved = [float(np.abs(missed(c, found)).max()) for found, _ in lots]
    assert float(np.median(moved)) < 0.02


def test_it_falls_to_nothing_far_from_measured_runs() -> None:
    c = runs(60)
    found, _ = learned(c, np.full(len(c), 0.1))
    near = missed(c, found)
    assert near.mean() > 0.05
    far = missed(replace(c, hidden=c.hidden * 2.0**40), found)
    assert np.all(np.abs(far) < 0.2 * near.mean())


def test_one_run_is_answered_as_among_many() -> None:
    c = runs(400)
    found, _ = learned(c, 0.02 * np.log2(c.pp))
    every = missed(c, found)
    alone = [missed(c.take(np.array([i])), found)[0] for i in range(len(c))]
    assert every.tolist() == alone


def test_parts_add_up_to_the_step() -> None:
    c = runs(100)
    found, _ = learned(c, 0.02 * np.log2(c.pp) + 0.01)
    plain = estimate(c, defaults())
    moved = nearby.times(c, defaults(), found)
    np.testing.assert_allclose(moved.step_s / plain.step_s, np.exp(missed(c, found)), rtol=1e-12)
    np.testing.assert_allclose(sum(moved.parts.values()), moved.step_s, rtol=1e-9)
    assert np.all(moved.step_s >= plain.step_s * found.least_factor * (1.0 - 1e-12))


def test_few_layouts_teach_nothing() -> None:
    c = runs(3)
    left = np.array([0.1, 0.2, 0.3])
    surface, rest = learned(c, left)
    assert surface is NOT_LEARNED
    assert rest is left


def test_a_file_keeps_it() -> None:
    c = runs(60)
    found, _ = learned(c, 0.02 * np.log2(c.tp))
    entry = replace(shipped().entries[0], nearby=found)
    kept = from_json(to_json(Calibration(name="x", sources=(), entries=(entry,))), "x")
    np.testing.assert_allclose(missed(c, kept.entries[0].nearby), missed(c, found), rtol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"axes": ("tp",), "points": ((1.0,),), "weights": ()},
        {"axes": ("tp",), "points": ((1.0, 2.0),), "weights": (0.1,)},
        {"axes": ("nothing",), "points": ((1.0,),), "weights": (0.1,)},
        {"axes": ("tp",), "points": ((float("nan"),),), "weights": (0.1,)},
        {"low": 0.5, "high": 0.6},
        {"low": -3.0},
    ],
)
def test_a_broken_surface_is_refused(fields: dict) -> None:
    with pytest.raises(UserError, match="nearby"):
        Nearby(**fields)
