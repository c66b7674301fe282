"""What the text above a table says: `NHIDDEN=14336 / NLAYERS=72 / GBS=512` in the notes,
`Llama-3.1-8B context length 8192` under a heading `H100 (94GB)` in the scaling tables.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import catalog

_SETTING = re.compile(
    r"\b(NHIDDEN|NLAYERS|NHEADS|NKVHEADS|NFFN|GBS|MBS|SEQ_?LEN|VOCAB(?:_SIZE)?)\s*=\s*([0-9]+)"
)
_FIELDS = {
    "NHIDDEN": "hidden", "NLAYERS": "layers", "NHEADS": "heads", "NKVHEADS": "kv_heads",
    "NFFN": "ffn", "GBS": "global_batch",
    "MBS": "micro_batch", "SEQLEN": "seq_len", "SEQ_LEN": "seq_len",
    "VOCAB": "vocab", "VOCAB_SIZE": "vocab",
}  # fmt: skip
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the text has stated; None where it is silent. `model` is a name of the catalogue."""

    model: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    family: str | None = None
    tied: bool | None = None
    vocab: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    hardware: str | None = None
    gpus_per_node: int | None = None
    convention: str = ""


def after(previous: Context, lines: tuple[str, ...]) -> Context:
    """The context of a table below `lines`. Hardware holds until other hardware is named; a model's
    shape and batch belong to the tables right below, and any written line ends them."""
    text = "\n".join(lines)
    if not text.strip():
        return previous
    stated: dict[str, Any] = {"model": _model(lines)}
    for name, digits in _SETTING.findall(text):
        if int(digits) > 0:
            stated[_FIELDS[name]] = int(digits)  # the last one stands
    for field, (pattern, read) in _WORDS.items():
        for word in pattern.findall(text):
            stated[field] = read(word)
    hardware, per_node = previous.hardware, previous.gpus_per_node
    return _hardware(Context(hardware=hardware, gpus_per_node=per_node, **stated), text)


def _model(lines: tuple[str, ...]) -> str | None:
    """The catalogue name said last; a shape in a line of its own after it takes its place."""
    model = None
    for line in lines:
        names = [name.lower() for name in _MODEL.findall(line)]
        known = [name for name in names if name in catalog.model_names()]
        if known:
            model = known[-1]
        elif "NLAYERS" in line or "NHIDDEN" in line:
            model = None
    return model


@functools.cache
def _devices() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Every GPU of the catalogue with the words that name it: 'A100 (80GB)', 'h100_80gb', 'H200'.
    A name that comes in several sizes needs its own."""
    patterns = []
    for device in catalog.device_names():
        name, _, size = device.partition("-")
        own = rf"[ _-]*\(?{size.removesuffix('gb')}\s*gb\b" if size.endswith("gb") else r"(?![\w-])"
        patterns.append((device, re.compile(rf"(?<![\w-]){re.escape(name)}{own}", re.IGNORECASE)))
    return tuple(patterns)


def _hardware(context: Context, text: str) -> Context:
    named = [
        (match.end(), device) for device, words in _devices() for match in words.finditer(text)
    ]
    for _, device in sorted(named):
        context = replace(context, hardware=device, gpus_per_node=None)
    for after_times, before_word in _PER_NODE.findall(text):
        context = replace(context, gpus_per_node=int(after_times or before_word))
    return context


def device_id(text: str) -> str | None:
    """'h100_80gb' -> 'h100-80gb' when the catalogue knows it."""
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    try:
        return catalog.device(name).id if name else None
    except UserError:
        return None
