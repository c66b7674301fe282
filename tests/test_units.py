"""Are sizes, times and rates read as people mean them?"""

from __future__ import annotations

import pytest

from fourfold.errors import UserError
from fourfold.units import bytes_from, bytes_per_s_from, seconds_from, three_digits


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
