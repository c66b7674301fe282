"""Sizes, times, rates and counts as people write them ("80GiB", "1.5ms", "8k"), base units inside.

GB = 1e9 bytes, GiB = 2^30 bytes; the two are never mixed up silently. A sequence of 8k tokens has
8,192 of them, as everybody in the field means it; 20B tokens of a training are 20e9.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fourfold.errors import UserError

_BYTES: dict[str, float] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_DAYS = {
    **dict.fromkeys(("", "d", "day", "days"), 1.0),
    **dict.fromkeys(("w", "week", "weeks"), 7.0),
    **dict.fromkeys(("h", "hour", "hours"), 1.0 / 24.0),
}
# Before a price '$', 'EUR '; after it the same, and what it is of.
_CURRENCY = r"(?:[$€£¥]|(?:US)?\$|[A-Z]{3}(?![A-Za-z]))"
_PRICE = rf"\s*(?:{_CURRENCY}\s*)?(.*?)\s*{_CURRENCY}?\s*(?:/\s*(?:GPU-?)?(?:h|hr|hour))?\s*\Z"
# 'Gb' is a gigabit on a network card's box and a gigabyte in a hurry: a factor of 8.
_BIT_OR_BYTE = r"[kKMGT]b(/s)?\Z"
_RATES = {
    "b/s": 1.0,
    "kb/s": 1e3,
    "mb/s": 1e6,
    "gb/s": 1e9,
    "tb/s": 1e12,
    "kbit/s": 1e3 / 8,
    "mbit/s": 1e6 / 8,
    "gbit/s": 1e9 / 8,
    "tbit/s": 1e12 / 8,
    "mbps": 1e6 / 8,
    "gbps": 1e9 / 8,
    "tbps": 1e12 / 8,
}
_POWERS = {"": 1, "k": 2**10, "m": 2**20}
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT = r"\s*([+-]?[0-9][0-9_]{0,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]?)\Z"
_MAX_COUNT = 2**63 - 1
_NUMBER_AND_UNIT = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*\Z"


def _parse(text: str, units: dict[str, float], kind: str, example: str) -> float:
    match = re.match(_NUMBER_AND_UNIT, text, re.ASCII)
    scale = units.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        names = ", ".join(unit for unit in units if unit)
        raise UserError(
            f"is not a {kind}",
            value=text,
            hint=f"write a number and one of {names}, such as {example}",
        )
    if re.match(_BIT_OR_BYTE, match.group(2)):
        raise UserError(
            "could mean bits or bytes", value=text, hint=f"write B for bytes, such as {example}"
        )
    # Dividing keeps 5us at 5e-06; 5 * 1e-6 is 4.9999999999999996e-06.
    number = float(match.group(1))
    value = number * scale if scale >= 1 else number / round(1 / scale)
    if not math.isfinite(value):
        raise UserError(f"is too large for a {kind}", value=text, hint=f"write it as {example}")
    return value


def bytes_from(text: str) -> int:
    """'80GiB' -> 85899345920."""
    return round(_parse(text, _BYTES, "size", "80GiB or 40GB"))


def seconds_from(text: str) -> float:
    """'10us' -> 1e-5."""
    return _parse(text, _SECONDS, "time", "30s or 15us")


def days_from(text: str) -> float:
    """'30d' -> 30, '6w' and '6 weeks' -> 42, '36h' -> 1.5."""
    return _parse(text, _DAYS, "number of days", "30d, 36h or 6 weeks")


def bytes_per_s_from(text: str) -> float:
    """'100Gbit/s' -> 1.25e10, '300GB/s' -> 3e11. A bare number could mean either."""
    match = re.match(_NUMBER_AND_UNIT, text, re.ASCII)
    if match and not match.group(2):
        number = match.group(1)
        raise UserError("has no unit", value=text, hint=f"write {number}Gbit/s or {number}GB/s")
    return _parse(text, _RATES, "rate", "300GB/s or 400Gbit/s")


def size_from(text: str) -> int:
    """'8k' -> 8192, '1M' -> 1048576: tokens of a sequence, sequences, ranks, widths."""
    return _count(text, _POWERS, "8192 or 8k (k = 1024, M = 1024k)")


def count_from(text: str) -> int:
    """'20B' -> 20e9, '1.5e12', '10k' -> 10,000: tokens of a training, parameters, steps."""
    return _count(text, _THOUSANDS, "20B or 20e9 (k = 1e3, M = 1e6, B = 1e9, T = 1e12)")


def share_from(text: str) -> float:
    """'10%' or '0.1' -> 0.1."""
    number = plain_float(text.strip().removesuffix("%"))
    share = number / (100.0 if text.strip().endswith("%") else 1.0)
    if not 0.0 <= share <= 1.0:
        raise UserError("is not a share", value=text, hint="write it as 10% or 0.1")
    return share


def plain_float(text: str) -> float:
    """Return the number that `text` writes with ASCII digits, NaN where it writes none. Python
    takes '1_0' and digits of other scripts for numbers; no table or log prints them."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def number_from(text: str) -> float:
    """85144.5, or 3.2M with the letters of a count."""
    number = plain_float(text)
    if not math.isnan(number):
        return number
    return float(_count(text, _THOUSANDS, "2.5, or 3.2M for 3.2e6"))


def price_from(text: str) -> float:
    """Return an amount of money: '$2.5', '2.50 EUR/h' and '2.5' alike."""
    match = re.match(_PRICE, text)
    return number_from(match[1] if match and match[1] else text)


def budget_from(text: str) -> int:
    """Return a whole amount of money: '$5M' and '5M' alike."""
    match = re.match(_PRICE, text)
    return count_from(match[1] if match and match[1] else text)


def _count(text: str, units: dict[str, int], example: str) -> int:
    import decimal  # 2 ms, only paid for a word

    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    match = re.match(_COUNT, text, re.ASCII)
    scale = units.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UserError("is not a number", value=text, hint=f"write it as {example}")
    with decimal.localcontext(prec=200):  # exact: 1.1B is 1,100,000,000
        number = decimal.Decimal(match.group(1).replace("_", "")) * scale
        if abs(number) > _MAX_COUNT:
            raise UserError("is too large", value=text, hint="at most 2^63 - 1")
        if number != number.to_integral_value():
            raise UserError("is not a whole number", value=text, hint=f"write it as {example}")
    return int(number)


def show_bytes(count: float) -> str:
    """Bytes for people, in binary units: 1536 -> '1.50 KiB'."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """Seconds for people: 0.0012 -> '1.20 ms', 1.0768 -> '1.077 s', 600 -> '600.00 s'."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s" if abs(seconds) < 100 else f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.2f} us"


def three_digits(value: float) -> str:
    """'0.278', '17.2', and '4,430' where %g would write 4.43e+03."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def show_mwh(energy: float) -> str:
    """'2,513 MWh', '0.254 MWh'."""
    return f"{three_digits(energy)} MWh"


def short_s(seconds: float) -> str:
    """Three digits are more than any prediction is worth; '-' for nothing."""
    if abs(seconds) < 5e-4:
        return "-"
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 0.1 else 3
    return f"{seconds:.{digits}f}"


def millis(seconds: float) -> str:
    """Return milliseconds without a unit, with a digit after the point below a second."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if abs(ms) >= 1000 else f"{ms:.1f}"


def show_count(count: float) -> str:
    """Parameters and FLOPs for people: 6738415616 -> '6.74B'."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def counted(number: int, what: str) -> str:
    """A number of things: '1 rank', '2 ranks', '1,024 processes'."""
    ending = "" if number == 1 else "es" if what.endswith(("s", "ch")) else "s"
    return f"{number:,} {what}{ending}"


def whole_units(values: Sequence[float], unit: float) -> list[int]:
    """In whole units that add up to the rounded sum: the largest remainders are rounded up."""
    exact = [value / unit for value in values]
    units = [math.floor(value) for value in exact]
    missing = round(sum(exact)) - sum(units)
    by_rest = sorted(range(len(exact)), key=lambda i: units[i] - exact[i])
    for i in by_rest[:missing]:
        units[i] += 1
    return units
