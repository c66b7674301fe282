"""Conditions mean what they say, refuse what they must, and agree on values and on columns."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec.expression import NAMES, parse

TEXTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
VALUES = {"dp": 4, "tp": 8, "pp": 12, "cp": 1, "vp": 1, "global_batch": 2048, "gpus": 384}


@pytest.mark.parametrize(("text", "answer"), TEXTS["conditions"])
def test_conditions_on_values_and_columns(text: str, answer: bool) -> None:
    assert parse(text).holds(VALUES) is answer
    columns = {name: np.array([value, value]) for name, value in VALUES.items()}
    assert parse(text).holds(columns).tolist() == [answer, answer]


def test_columns_answer_row_by_row_beside_scalars() -> None:
    got = parse("dp > 1 and 12 % (dp - 1) == 0 or tp == 1").holds({"dp": np.arange(1, 7), "tp": 2})
    assert got.tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *TEXTS["mistakes"],
        ("dp == 9" + "9" * 400, "too large"),
        ("(" * 60 + "dp" + ")" * 60 + " == ", "where"),
        ("+".join(["dp"] * 100) + " == 1", "nested deeper"),
        ("-" * 500 + "dp == 1", "nested deeper"),
        ("dp == 1" * 200, "longer than"),
        ("dp == 1\x00", "where"),
    ],
)
def test_mistakes_are_refused_with_a_way_out(text: str, says: str) -> None:
    with pytest.raises(UserError, match="where") as caught:
        parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["dp / (cp - 1) > 1", "dp % (cp - 1) == 0", "10 ** 10 ** 10 > 1", "(0 - dp) ** 0.5 > 1",
     "log2(cp - 1) > 0", "dp // (cp - 1) > 1"],
)  # fmt: skip
def test_no_finite_answer_is_an_error(text: str) -> None:
    condition = parse(text)
    for values in (VALUES, {name: np.array([value] * 3) for name, value in VALUES.items()}):
        with pytest.raises(UserError, match="where"):
            condition.holds(values)


def test_a_word_without_a_value_is_named() -> None:
    with pytest.raises(UserError, match=r"'step_s', which has no value here; known: dp, tp"):
        parse("step_s < 3").holds({"dp": 1, "tp": 2, "step_s": None})


NUMBER = st.deferred(
    lambda: (
        st.sampled_from(NAMES)
        | st.integers(0, 99).map(str)
        | st.tuples(NUMBER, st.sampled_from(["+", "-", "*", "/", "//", "%"]), NUMBER).map(
            lambda part: f"({' '.join(part)})"
        )
        | NUMBER.map(lambda part: f"ceil({part})")
    )
)
TRUTH = st.deferred(
    lambda: (
        st.tuples(NUMBER, st.sampled_from(["==", "<", ">=", "!="]), NUMBER).map(" ".join)
        | st.tuples(TRUTH, st.sampled_from(["and", "or"]), TRUTH).map(lambda p: f"({' '.join(p)})")
        | TRUTH.map(lambda part: f"not ({part})")
    )
)


@given(
    text=TRUTH,
    rows=st.lists(st.tuples(*[st.integers(0, 9)] * len(NAMES)).map(list), min_size=1, max_size=4),
)
def test_columns_agree_with_values(text: str, rows: list[list[int]]) -> None:
    try:
        condition = parse(text)
    except UserError:
        return  # deeper or longer than allowed
    answers: list[bool] | None = []
    for row in rows:
        try:
            answers.append(condition.holds(dict(zip(NAMES, row, strict=True))))
        except UserError:
            answers = None
            break
    columns = {name: np.array([row[i] for row in rows]) for i, name in enumerate(NAMES)}
    if answers is None:
        with pytest.raises(UserError):
            condition.holds(columns)
    else:
        got = condition.holds(columns)
        assert np.broadcast_to(got, len(rows)).tolist() == answers
