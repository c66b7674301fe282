"""Damage to inputs, the same kinds for every reader: bytes that are cut, doubled, overwritten, in
another order or encoding; values that are of another kind. And a command that is called so."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from fourfold.cli import main

# What breaks readers of text: steering, encodings, numbers that are none, brackets and quotes.
NASTY = (
    b"", b"\x1b[31m", b"\x1b]0;title", b"\0\0\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xe2\x80\xa8",
    b"nan", b"null", b"true", b"1e999", b"-1", b"9" * 400, b"0x" + b"f" * 5000, b"|", b"{{{{",
    b"))))", b"[[", b"]]", b"[" * 2000, b'{"a":' * 50, b"}", b'"', b"'", b"=", b",", b": ", b"\\",
    b"\\ud800", b"\r", b"\n\n",
)  # fmt: skip
# Values of every kind, for a place that has another.
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, 10**30, "", "x", "\x1b[2J", "9" * 400, [], {}, [[]], {"a": [1]},
    [1, "x", None], "pp1 dp1", {"x": {"y": []}}, float("inf"), float("nan"), -0.5, "80GiB",
    "../../etc/passwd", "\ud800",
)  # fmt: skip


class Called(NamedTuple):
    code: int
    out: str
    err: str


def call(words: list[str]) -> Called:
    """One command in this process; a traceback is the test's failure."""
    out, err = io.StringIO(), io.StringIO()
    stdin, sys.stdin = sys.stdin, io.StringIO("")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    finally:
        sys.stdin = stdin
    assert "Traceback" not in err.getvalue(), words
    return Called(code, out.getvalue(), err.getvalue())


def damaged(content: bytes, dice: Random, nasty: Sequence[bytes] = NASTY) -> bytes:
    """One accident."""
    at, size = dice.randrange(len(content) + 1), dice.choice((1, 3, 40, 400))
    before, piece, after = content[:at], content[at : at + size], content[at + size :]
    kind = dice.randrange(10)
    if kind == 0:
        return before + dice.choice(nasty) * dice.choice((1, 1, 50)) + piece + after
    if kind == 1:
        return before + dice.choice(nasty) + after
    if kind == 2:
        return before + dice.randbytes(size) + after
    if kind == 3:
        return before
    if kind == 4:
        return before + piece * 30 + after
    if kind == 5:
        return b"\n".join(dice.sample(lines := content.split(b"\n"), len(lines)))
    if kind == 6:
        return content.replace(b"\n", dice.choice((b"\r", b"\r\n", b" ", b"\n[rank3]:")))
    if kind == 7:
        text = content.decode("utf-8", "replace")
        return text.encode(dice.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig")))
    flipped = bytearray(content or b"\0")
    for _ in range(dice.choice((1, 20))):
        flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
    return bytes(flipped)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


def revalue(data: Any, dice: Random) -> None:
    """Another value somewhere in plain data, of another kind or off by some; or an entry less."""
    holder, key = dice.choice(list(_places(data)))
    kind, value = dice.random(), holder[key]
    if kind < 0.15:
        del holder[key]
    elif kind < 0.35 and isinstance(value, int):
        holder[key] = value + dice.choice((-1, 1, 7, -value, 10**6))
    else:
        holder[key] = dice.choice(ODD)
