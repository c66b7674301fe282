"""torchtitan's structured log, JSON lines of one rank each.

The span "step" ends with {"log_type_name": "step_end", "value": 321.9, "step": 7, "rank": 0}, the
milliseconds of the whole step; its `step_tags` say whether it saved a checkpoint or evaluated.
"""

from __future__ import annotations

import json
import re

from fourfold.logs.book import Book
from fourfold.logs.lines import Line
from fourfold.logs.nested import number, whole
from fourfold.logs.series import StepLine

MARK = '"log_type_name":'
# SOURCE.global_rank_RANK.TIME-LETTERS.jsonl
FILE = re.compile(r"(.+)\.global_rank_([0-9]{1,9})\.[\w-]{1,60}\.jsonl")
_STEP_END = re.compile(r'"log_type_name": ?"step_end"')
_PAUSES = {"checkpoint_save", "eval"}


def take(line: Line, book: Book) -> None:
    """A line that has the mark."""
    if not _STEP_END.search(line.text):
        return
    try:
        found = dict(json.loads(line.text))
    except (ValueError, TypeError, RecursionError):
        found = {}
    at, milliseconds = whole(str(found.get("step"))), number(str(found.get("value")))
    if at is None or not milliseconds or milliseconds < 0:
        book.unreadable(line)
        return
    tags = found.get("step_tags")
    if isinstance(tags, list) and _PAUSES.intersection(map(str, tags)):
        book.pause()
    label = f"rank {found.get('rank', 0)}"
    book.step(StepLine(step=at, seconds=milliseconds / 1e3, label=label))
