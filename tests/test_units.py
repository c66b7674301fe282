"""Are sizes, times and rates read as people mean them?"""

from __future__ import annotations

import pytest

from fourfold.errors import UserError
from fourfold.units import (
    budget_from,
    bytes_from,
    bytes_per_s_from,
    days_from,
    number_from,
    price_from,
    seconds_from,
    share_from,
    three_digits,
)


@pytest.mark.parametrize("text", ["400Gb/s", "100Mb/s", "9kb/s", "1Tb/s"])
def test_a_small_b_is_no_rate(text: str) -> None:
    with pytest.raises(UserError, match="bits or bytes"):
        bytes_per_s_from(text)


def test_a_small_b_is_no_size() -> None:
    with pytest.raises(UserError, match="bits or bytes"):
        bytes_from("80Gb")
    assert bytes_from("80gb") == bytes_from("80GB") == 80 * 10**9


def test_rates_of_networks() -> None:
    assert bytes_per_s_from("400Gbps") == bytes_per_s_from("400Gbit/s") == 50e9


def test_times_are_the_nearest_float() -> None:
    assert [seconds_from(text) for text in ("5us", "10us", "7ns", "1.5ms", "2min")] == [
        5e-06, 1e-05, 7e-09, 1.5e-3, 120.0,
    ]  # fmt: skip


def test_three_digits_are_never_a_power_of_ten() -> None:
    said = [three_digits(value) for value in (0.2781, 17.24, 999.4, 999.6, 4430.4)]
    assert said == ["0.278", "17.2", "999", "1,000", "4,430"]


@pytest.mark.parametrize(
    "text",
    ["2.5", "$2.5", "2.5$", "US$2.50", "EUR 2.5", "2.5 eur".upper(), "2.5/h", "$2.5/GPU-hour"],
)
def test_prices_are_read_with_their_currency(text: str) -> None:
    assert price_from(text) == 2.5


def test_budgets_and_times_in_words_are_read() -> None:
    assert budget_from("$5M") == budget_from("5M USD") == 5 * 10**6
    assert [days_from(text) for text in ("3 weeks", "1 week", "36 hours", "2w")] == [21, 7, 1.5, 14]
    for text in ("$", "dollars", "2,5"):
        with pytest.raises(UserError, match="is not a number"):
            price_from(text)


@pytest.mark.parametrize("read", [number_from, share_from, price_from])
def test_digits_of_other_scripts_are_no_numbers(read) -> None:
    with pytest.raises(UserError, match="is not a"):
        read("\u0661\u0662")
