"""Text that others wrote, made harmless: it reaches a screen, a page or a spreadsheet as text and
never as commands. Every output goes through here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

FORMATS = ("text", "md", "csv", "json")
# Control characters but tab and newline (C0, DEL, C1), marks that reorder or hide text, separators
# that other programs take for line ends, halves of surrogate pairs, tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_BREAKS = re.compile("[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
# What Markdown would take for HTML or a link. A lone '<' is a comparison.
_ENTITY = re.compile(r"&(?=#?[A-Za-z0-9]+;)")
_PIPED = re.compile(r"\\+(?=\|)")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_OTHER_TAG = re.compile(r"<(?!br>)(?=[A-Za-z/!?])")  # <br> is a line break in a cell of ours
# Spreadsheets run a cell that begins so (the wide forms too, where East Asian text is usual).
_FORMULA = re.compile(r"'*\s*[=+@\t\r\uff1d\uff0b\uff0d\uff20-]")
# A number with thousands commas, a sign and a short unit, alone in its cell.
NUMBER = re.compile(r"[+~-]?[0-9][0-9,]*(\.[0-9]+)?(e[+-]?[0-9]+)?( ?[A-Za-z%/]{1,8})?\Z")


def visible(text: str) -> str:
    """Characters that steer a terminal or hide, written out: ESC becomes '\\x1b'."""
    return _HIDDEN.sub(_written_out, text)


def one_line(text: str) -> str:
    """The same for a cell or a name in a sentence: line breaks and tabs become blanks."""
    return visible(_BREAKS.sub(" ", text))


def _written_out(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def markdown_line(text: str) -> str:
    """A line of text in Markdown: no HTML, no link to elsewhere."""
    text = _TAG.sub("&lt;", _ENTITY.sub("&amp;", visible(text)))
    return text.replace("](", "]&#40;")


def markdown_cell(text: str, line_break: str = " ") -> str:
    """A cell of a Markdown table; a backslash before a pipe would undo the pipe's own."""
    lines = [markdown_line(_BREAKS.sub(" ", line)) for line in text.split("\n")]
    lines = [_PIPED.sub(lambda found: "&#92;" * len(found.group()), line) for line in lines]
    return line_break.join(lines).replace("|", "\\|")


def from_markdown(text: str) -> str:
    """What `markdown_line` escaped, back; other entities stay as they stand."""
    for entity, mark in (("&#40;", "("), ("&#92;", "\\"), ("&lt;", "<"), ("&amp;", "&")):
        text = text.replace(entity, mark)
    return text


def csv_cell(text: str) -> str:
    """A cell that a spreadsheet shows and does not run: what could be a formula begins with an
    apostrophe, the spreadsheets' own mark of text. Numbers and rows of dashes stay."""
    text = visible(text)
    if _FORMULA.match(text) and not NUMBER.match(text) and set(text.strip()) != {"-"}:
        return f"'{text}"
    return text


def from_csv(text: str) -> str:
    """What `csv_cell` marked, without the mark."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text, 1) else text


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Lines of CSV, each with its newline."""
    import csv
    import io

    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(
        [csv_cell(cell) for cell in row] for row in rows
    )
    return buffer.getvalue()


def json_text(data: Any, *, indent: int | None = 2) -> str:
    """JSON that every reader takes: ASCII, whole characters, finite numbers only."""
    import json

    text = json.dumps(data, indent=indent, allow_nan=False)
    if "\\ud" in text:  # perhaps half of a surrogate pair, from a file name that is no UTF-8
        text = json.dumps(_whole(data), indent=indent, allow_nan=False)
    return text


def _whole(data: Any) -> Any:
    if isinstance(data, str):
        return _SURROGATE.sub(_written_out, data)
    if isinstance(data, dict):
        return {_whole(key): _whole(value) for key, value in data.items()}
    return [_whole(item) for item in data] if isinstance(data, list | tuple) else data


class Screen:
    """stdout or stderr of a command: whatever is printed there, nothing steers the terminal.
    `page`: what is printed is Markdown, where a name between tables must not be HTML either."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.page = False

    def write(self, text: str) -> int:
        shown = visible(text)
        if self.page:
            shown = _OTHER_TAG.sub("&lt;", shown).replace("](", "]&#40;")
        self.stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def steer(stream: Any, text: str) -> None:
    """Write a sequence of our own for the terminal, past the `Screen`."""
    stream = stream.stream if isinstance(stream, Screen) else stream
    stream.write(text)
    stream.flush()
