"""Tables and the text between them, cell by cell as they stood in a file, and what the text says.

Cells are not interpreted here, so that what is read can be written again unchanged. The text above
a table is read for `NHIDDEN=14336 / NLAYERS=72 / GBS=512`, as the notes write it, and for
`Llama-3.1-8B context length 8192` under a heading `H100 (94GB)`, as the scaling tables do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.tables.row import PublishedRow


@dataclass(frozen=True, slots=True)
class TableRow:
    """`rule` marks a line of dashes inside the body; `line` is where it stood (0: new)."""

    cells: tuple[str, ...]
    rule: bool = False
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Table:
    """`marks` are the cells of the Markdown line under the headings (alignment); may be empty.

    A row may have more or fewer cells than there are headings: published tables do.
    """

    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]
    marks: tuple[str, ...] = field(default=(), compare=False)
    line: int = field(default=0, compare=False)

    @property
    def data(self) -> tuple[TableRow, ...]:
        return tuple(row for row in self.rows if not row.rule)


@dataclass(frozen=True, slots=True)
class Text:
    lines: tuple[str, ...]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Document:
    blocks: tuple[Table | Text, ...]

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Table))


_SETTING = re.compile(
    r"\b(NHIDDEN|NLAYERS|NHEADS|NKVHEADS|NFFN|GBS|MBS|SEQ_?LEN|VOCAB(?:_SIZE)?)\s*=\s*([0-9]+)"
)
_FIELDS = {
    "NHIDDEN": "hidden",
    "NLAYERS": "layers",
    "NHEADS": "heads",
    "NKVHEADS": "kv_heads",
    "NFFN": "ffn",
    "GBS": "global_batch",
    "MBS": "micro_batch",
    "SEQLEN": "seq_len",
    "SEQ_LEN": "seq_len",
    "VOCAB": "vocab",
    "VOCAB_SIZE": "vocab",
}
_MODEL = re.compile(
    r"\b((?:mpt|llama|gpt|bloom|nemotron)-[A-Za-z0-9.-]*[A-Za-z0-9])", re.IGNORECASE
)
_LENGTH = re.compile(r"\b(?:context|sequence) length\s*:?\s*([0-9]+)", re.IGNORECASE)
_WORDS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "seq_len": (_LENGTH, int),
    "family": (re.compile(r"\bFAMILY\s*=\s*([a-z0-9]+)"), str),
    "tied": (re.compile(r"\bTIED\s*=\s*([01])\b"), lambda digit: digit == "1"),
    "convention": (re.compile(r"\bTFLOPs by ([a-z0-9-]+)"), str),
}
_PER_NODE = re.compile(r"\)\s*x\s*([0-9]+)\s*GPUs?\b|\b([0-9]+) GPUs per node", re.IGNORECASE)


def after(previous: PublishedRow, lines: tuple[str, ...]) -> PublishedRow:
    """What the text says of every row of a table below `lines`. Hardware holds until other hardware
    is named; a model's shape and batch belong to the tables right below, and any written line ends
    them."""
    text = "\n".join(lines)
    if not text.strip():
        return previous
    stated: dict[str, Any] = {"model": _model(lines)}
    for name, digits in _SETTING.findall(text):
        if int(digits) > 0:
            stated[_FIELDS[name]] = int(digits)  # the last one stands
    for name, (pattern, read) in _WORDS.items():
        for word in pattern.findall(text):
            stated[name] = read(word)
    hardware, per_node = previous.hardware, previous.gpus_per_node
    return _hardware(PublishedRow(hardware=hardware, gpus_per_node=per_node, **stated), text)


def _model(lines: tuple[str, ...]) -> str:
    """The catalogue name said last; a shape in a line of its own after it takes its place."""
    model = ""
    for line in lines:
        names = [name.lower() for name in _MODEL.findall(line)]
        known = [name for name in names if name in catalog.model_names()]
        if known:
            model = known[-1]
        elif "NLAYERS" in line or "NHIDDEN" in line:
            model = ""
    return model


@functools.cache
def _devices() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Every GPU of the catalogue with the words that name it: 'A100 (80GB)', 'h100_80gb', 'H200'.
    A name that comes in several sizes needs its own."""
    patterns = []
    for device in catalog.device_names():
        name, *rest = device.split("-")
        words = (re.sub(r"gb\Z", r"\\s*gb", re.escape(word)) for word in rest)
        own = "".join(rf"[ _-]*\(?{word}" for word in words) + (r"\b" if rest else r"(?![\w-])")
        patterns.append((device, re.compile(rf"(?<![\w-]){re.escape(name)}{own}", re.IGNORECASE)))
    return tuple(patterns)


def _hardware(stated: PublishedRow, text: str) -> PublishedRow:
    named = [
        (match.end(), device) for device, words in _devices() for match in words.finditer(text)
    ]
    for _, device in sorted(named):
        stated = replace(stated, hardware=device, gpus_per_node=None)
    for after_times, before_word in _PER_NODE.findall(text):
        stated = replace(stated, gpus_per_node=int(after_times or before_word))
    return stated


def device_id(text: str) -> str | None:
    """'h100_80gb' -> 'h100-80gb' when the catalogue knows it."""
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    try:
        return catalog.device(name).id if name else None
    except UserError:
        return None
