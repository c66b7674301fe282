"""Lines of a log, whatever wrote it: streamed, bounded in length, without colours.

Text is UTF-8 unless a byte order mark or the pattern of zero bytes says UTF-16 or UTF-32; bytes
that are no text become U+FFFD. A carriage return ends a line too, as progress bars draw with it.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fourfold import files
from fourfold.spec.nccl_tests import unlabelled

# A configuration printed on one line has some 100 KB; more is not a line that anybody reads.
MOST_CHARS = 2**20
_HEAD_BYTES = 4096
# Escape sequences, and colours whose escape character was lost on the way ("[31mstep:").
_COLOUR = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|\x1b[@-Z\\^_]"
    r"|\[[0-9]{1,3}(?:;[0-9]{1,3}){0,4}m"
)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Line(NamedTuple):
    """`text` without label, colours and line end; `label` as printed, '' where there is none.
    `is_whole`: it ended with a line end and was not cut. `head`: labels and times before it."""

    number: int
    text: str
    label: str = ""
    is_whole: bool = True
    head: str = ""


def encoding_of(head: bytes) -> str:
    """Of a file that begins so."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    pairs = len(head) // 2
    if pairs >= 8:
        even, odd = head[0 : 2 * pairs : 2].count(0), head[1 : 2 * pairs : 2].count(0)
        if odd > 0.8 * pairs and even < 0.2 * pairs:
            return "utf-16-le"
        if even > 0.8 * pairs and odd < 0.2 * pairs:
            return "utf-16-be"
    return "utf-8"


def open_text(path: str | Path) -> io.TextIOWrapper:
    """A log as text; folders and devices are refused, a pipe without a writer reads as empty."""
    stream = files.open_stream(path, field="LOG")
    try:
        encoding = encoding_of(stream.peek(_HEAD_BYTES)[:_HEAD_BYTES])
    except OSError as error:
        stream.close()
        raise files.refused(error, path, field="LOG", verb="read") from None
    return io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline="")


def read_lines(path: str | Path) -> Iterator[Line]:
    """Every line, in bounded memory: a longer one than MOST_CHARS is cut."""
    with open_text(path) as stream:
        number = 0
        while True:
            try:
                text = stream.readline(MOST_CHARS)
                is_whole = text.endswith(("\n", "\r"))
                rest = text
                while rest and not rest.endswith(("\n", "\r")) and len(rest) == MOST_CHARS:
                    rest = stream.readline(MOST_CHARS)  # the tail of a cut line
            except OSError as error:
                raise files.refused(error, path, field="LOG", verb="read") from None
            if not text:
                return
            number += 1
            yield clean(text, number, is_whole=is_whole)


def clean(text: str, number: int = 0, *, is_whole: bool = True) -> Line:
    text = text.rstrip("\r\n")
    if "\0" in text:
        text = text.replace("\0", "")
    if ("m" in text and "[" in text) or "\x1b" in text:
        text = _COLOUR.sub("", text)
    label, rest = unlabelled(text)
    return Line(number, rest, label, is_whole, text[: len(text) - len(rest)])
