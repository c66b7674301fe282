"""Learning-rate schedules and what settings are refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.train import TrainSettings, lr_at


def rates(**fields: object) -> list[float]:
    settings = TrainSettings(**fields)  # type: ignore[arg-type]
    return [lr_at(settings, step) for step in range(settings.steps)]


def test_cosine_by_hand() -> None:
    found = rates(steps=6, lr=1.0, min_lr=0.1, warmup_steps=2)
    # Up in two steps; then three intervals: cos of 0, 60, 120 and 180 degrees.
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.775, 0.325, 0.1])


def test_linear_and_constant_by_hand() -> None:
    assert rates(steps=5, lr=1.0, lr_schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates(steps=4, lr=2.0, lr_schedule="constant", warmup_steps=2) == [1.0, 2.0, 2.0, 2.0]


def test_wsd_by_hand() -> None:
    found = rates(steps=8, lr=1.0, lr_schedule="wsd", warmup_steps=1, decay_steps=4)
    assert found == pytest.approx([1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates(steps=20, lr=1.0, lr_schedule="wsd")[-3:] == pytest.approx([1, 0.5, 0])


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    steps=st.integers(1, 200),
    warmup=st.integers(0, 200),
    low=st.floats(0, 1),
)
def test_rates_rise_then_fall_within_bounds(schedule, steps, warmup, low) -> None:
    warmup, low = min(warmup, steps), low if schedule != "constant" else 0.0
    found = rates(steps=steps, lr=1.0, min_lr=low, warmup_steps=warmup, lr_schedule=schedule)
    assert found[:warmup] == sorted(found[:warmup])
    rest = found[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))
    assert all(low - 1e-12 <= rate <= 1.0 for rate in rest)
    if schedule != "constant" and len(rest) > 1:
        assert rest[-1] == pytest.approx(low)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"beta2": 1.0}, "beta2"),
        ({"warmup_steps": 11}, "warmup_steps"),
        ({"decay_steps": 11, "lr_schedule": "wsd"}, "decay_steps"),
        ({"decay_steps": 2}, "decay_steps"),
        ({"min_lr": 1e-5, "lr_schedule": "constant"}, "min_lr"),
        ({"log_every": 0}, "log_every"),
        ({"max_norm": -1.0}, "max_norm"),
        ({"lr": float("nan")}, "lr"),
    ],
)
def test_bad_settings_name_their_field(fields, field) -> None:
    with pytest.raises(UserError) as caught:
        TrainSettings(steps=10, **fields)
    assert caught.value.field == field


def test_settings_survive_both_texts() -> None:
    settings = TrainSettings(steps=7, lr=1e-3, lr_schedule="wsd", wandb="x", async_save=False)
    assert codec.from_json(TrainSettings, codec.to_json(settings)) == settings
    assert codec.from_toml(TrainSettings, codec.to_toml(settings)) == settings
