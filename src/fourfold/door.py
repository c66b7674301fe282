"""What may come in with a table: bounded columns, headings and rows, numbers that can have been
measured, text that can be written again. Every reader of tables asks here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.errors import UserError, shorten

# Short lines are filled up to the header's width: a long one would cost its length for every line.
MAX_COLUMNS = 1000
MAX_HEADING_LETTERS = 500
# Seconds, GB, tokens/s, TFLOP/s and counts of anything that runs on computers.
LEAST, MOST = 1e-9, 1e15
POSSIBLE = f"a number from {LEAST:g} to {MOST:g}"


def check_headings(headings: Sequence[str], *, field: str, path: str | None = None) -> None:
    if len(headings) > MAX_COLUMNS:
        raise UserError(
            f"has more than {MAX_COLUMNS} columns",
            field=field,
            value=path,
            hint="keep those that describe runs",
        )
    longest = max(headings, key=len, default="")
    if len(longest) > MAX_HEADING_LETTERS:
        raise UserError(
            f"has a heading of more than {MAX_HEADING_LETTERS} letters ({shorten(longest)})",
            field=field,
            value=path,
            hint="is this a table with a heading line?",
        )


def is_possible(value: float) -> bool:
    """Whether anybody can have measured it, or counted it where that is not none; NaN is not."""
    return LEAST <= value <= MOST


def check_text(text: str) -> None:
    """Refuse halves of UTF-16 pairs, which JSON can spell and no file or terminal can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        rule = f"contains {half}, half of a character"
        raise UserError(rule, hint="write the whole character, or leave it out") from None
