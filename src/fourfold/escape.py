"""Text that others wrote, made harmless: it reaches a screen, a page or a spreadsheet as text and
never as commands. Every output goes through here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

FORMATS = ("text", "md", "csv", "json")
# Patterns are texts: re compiles them when they are first used, which most commands never do.
# Control characters but tab and newline (C0, DEL, C1), marks that reorder or hide text, separators
# that other programs take for line ends, halves of surrogate pairs, tags.
_HIDDEN = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_BREAKS = "[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+"
_SURROGATE = "[\ud800-\udfff]"
# What Markdown would take for HTML or a link. A lone '<' is a comparison.
_ENTITY = r"&(?=#?[A-Za-z0-9]+;)"
_PIPED = r"\\+(?=\|)"
_TAG = r"<(?=[A-Za-z/!?])"
_OTHER_TAG = r"<(?!br>)(?=[A-Za-z/!?])"  # <br> is a line break in a cell of ours
# Spreadsheets run a cell that begins so (the wide forms too, where East Asian text is usual).
_FORMULA = r"'*\s*[=+@\t\r\uff1d\uff0b\uff0d\uff20-]"
_BARE_KEY = r"[A-Za-z0-9_-]+\Z"  # of TOML
_NUMBER = r"[+~-]?[0-9][0-9,]*(\.[0-9]+)?(e[+-]?[0-9]+)?( ?[A-Za-z%/]{1,8})?\Z"


def is_number(text: str) -> bool:
    """A number with thousands commas, a sign and a short unit, alone in its cell."""
    return re.match(_NUMBER, text) is not None


def visible(text: str) -> str:
    """Characters that steer a terminal or hide, written out: ESC becomes '\\x1b'."""
    return text if text.isprintable() else re.sub(_HIDDEN, _written_out, text)


def one_line(text: str) -> str:
    """The same for a cell or a name in a sentence: line breaks and tabs become blanks."""
    return text if text.isprintable() else visible(re.sub(_BREAKS, " ", text))


def shell_line(words: Iterable[str]) -> str:
    """A command for a shell, as its words are: one line of printable text, since a terminal may run
    what is pasted into it at a control character, whatever quotes are around."""
    return " ".join(map(_shell_word, words))


def _shell_word(word: str) -> str:
    import shlex

    if word.isprintable():
        return shlex.quote(word)
    written = (
        f"\\{one}" if one in "\\'" else one if one.isprintable() else _byte_escapes(one)
        for one in word
    )
    return f"$'{''.join(written)}'"


def _byte_escapes(one: str) -> str:
    try:
        data = one.encode("utf-8", "surrogateescape")  # of a file name that is no UTF-8
    except UnicodeEncodeError:
        data = one.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def markdown_line(text: str) -> str:
    """A line of text in Markdown: no HTML, no link to elsewhere."""
    text = re.sub(_TAG, "&lt;", re.sub(_ENTITY, "&amp;", visible(text)))
    return text.replace("](", "]&#40;")


def markdown_cell(text: str, line_break: str = " ") -> str:
    """A cell of a Markdown table; a backslash before a pipe would undo the pipe's own."""
    lines = [markdown_line(re.sub(_BREAKS, " ", line)) for line in text.split("\n")]
    lines = [re.sub(_PIPED, lambda match: "&#92;" * len(match.group()), line) for line in lines]
    return line_break.join(lines).replace("|", "\\|")


def from_markdown(text: str) -> str:
    """What `markdown_line` escaped, back; other entities stay as they stand."""
    for entity, mark in (("&#40;", "("), ("&#92;", "\\"), ("&lt;", "<"), ("&amp;", "&")):
        text = text.replace(entity, mark)
    return text


def csv_cell(text: str) -> str:
    """A cell that a spreadsheet shows and does not run: what could be a formula begins with an
    apostrophe, the spreadsheets' own mark of text. Numbers and rows of dashes stay."""
    if not text or (text[0].isalnum() and text.isprintable()):  # most of a million cells
        return text
    text = visible(text)
    if text[0].isalnum() or not re.match(_FORMULA, text):
        return text
    return text if is_number(text) or set(text.strip()) == {"-"} else f"'{text}"


def from_csv(text: str) -> str:
    """What `csv_cell` marked, without the mark."""
    return text[1:] if text.startswith("'") and re.match(_FORMULA, text[1:]) else text


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    import csv
    import io

    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")  # noqa: TID251 -- here alone
    writer.writerows([csv_cell(cell) for cell in row] for row in rows)
    return buffer.getvalue()


def flattened(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}; a list is one cell."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat


def html_table(rows: Sequence[dict[str, Any]], most: int = 50) -> str:
    """Rows as a notebook shows them: numbers with four digits, columns that say something."""
    from html import escape

    def cell(value: Any) -> str:
        return escape(one_line(f"{value:.4g}" if isinstance(value, float) else str(value)))

    empty = (None, "", [], {}, ())
    named = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in named if any(row.get(name) not in empty for row in rows)]
    head = "".join(f"<th>{cell(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell(row.get(name, ''))}</td>" for name in names) + "</tr>"
        for row in rows[:most]
    )
    more = f"<p>{len(rows) - most:,} more rows</p>" if len(rows) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def json_text(data: Any, *, indent: int | None = 2) -> str:
    """JSON that every reader takes: ASCII, whole characters, finite numbers only."""
    import json

    text = json.dumps(data, indent=indent, allow_nan=False)
    if "\\ud" in text:  # perhaps half of a surrogate pair, from a file name that is no UTF-8
        text = json.dumps(_whole(data), indent=indent, allow_nan=False)
    return text


def _whole(data: Any) -> Any:
    if isinstance(data, str):
        return re.sub(_SURROGATE, _written_out, data)
    if isinstance(data, dict):
        return {_whole(key): _whole(value) for key, value in data.items()}
    return [_whole(item) for item in data] if isinstance(data, list | tuple) else data


def toml_text(data: dict[str, Any]) -> str:
    """Plain data as TOML, which the standard library only reads."""
    return "\n".join(_toml_lines(data, ())).lstrip("\n") + "\n"


def _toml_lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """Plain values first: in TOML whatever follows a [header] belongs to it."""
    lines = [
        f"{_toml_key(key)} = {_toml_value(item)}"
        for key, item in table.items()
        if item is not None and not _is_section(item)
    ]
    for key, item in table.items():
        header = ".".join(_toml_key(part) for part in (*path, key))
        if isinstance(item, dict):
            lines += ["", f"[{header}]", *_toml_lines(item, (*path, key))]
        elif _is_section(item):
            for entry in item:
                lines += ["", f"[[{header}]]", *_toml_lines(entry, (*path, key))]
    return lines


def _is_section(item: object) -> bool:
    if isinstance(item, dict):
        return True
    return isinstance(item, list) and bool(item) and all(isinstance(entry, dict) for entry in item)


def _toml_key(key: str) -> str:
    return key if re.match(_BARE_KEY, key) else _toml_quoted(key)


def _toml_quoted(text: str) -> str:
    """JSON's escapes are TOML's too; what steers a terminal or hides is written out as well."""
    import json

    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isprintable() else "".join(map(_toml_letter, quoted))


def _toml_letter(one: str) -> str:
    if one.isprintable():
        return one
    return f"\\u{ord(one):04X}" if ord(one) < 0x10000 else f"\\U{ord(one):08X}"


def _toml_value(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        return str(item)
    if isinstance(item, float):
        assert abs(item) < float("inf"), "validated types hold finite numbers only"
        text = repr(item)
        return text if any(mark in text for mark in ".e") else f"{text}.0"
    if isinstance(item, str):
        return _toml_quoted(item)
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_toml_value(entry) for entry in item)}]"
    raise TypeError(f"no TOML form for {type(item).__name__}")


class Screen:
    """stdout or stderr of a command: whatever is printed there, nothing steers the terminal.
    `page`: what is printed is Markdown, where a name between tables must not be HTML either."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.page = False

    def write(self, text: str) -> int:
        shown = visible(text)
        if self.page:
            shown = re.sub(_OTHER_TAG, "&lt;", shown).replace("](", "]&#40;")
        self.stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def write_control(stream: Any, text: str) -> None:
    """Write a sequence of our own for the terminal, past the `Screen`."""
    stream = stream.stream if isinstance(stream, Screen) else stream
    stream.write(text)
    stream.flush()
