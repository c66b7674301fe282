"""Whether a row's steps are those of a training, or lack what only a training has: tokens that come
in their own proportions, experts that choose them, an optimizer."""

from __future__ import annotations

import re

from fourfold.result.record import OWN_STACK, Record

TRAINING, BENCHMARK = "training-equivalent", "benchmark-only"
# What a note or a setting says -> what is not as in a training. `collect` writes these names.
_LACKS = {
    "forced routing": re.compile(
        r"forced (?:routing|balance)|routing=forced|load[- _]balancing on"
    ),
    "random tokens": re.compile(r"(?:random|mock|synthetic|dummy)[- _](?:tokens|data)"),
    "no optimizer": re.compile(r"(?:no|without) optimi[sz]er|(?:forward|fwd)[- _]?only"),
}
_HAS_DATA = re.compile(r"\breal tokens\b|\bdata=\S")


def equivalence(record: Record) -> str:
    """'training-equivalent', 'benchmark-only (WHY)', or '' where nothing says."""
    said = " ".join((record.note, record.settings, record.variant)).lower()
    lacks = [name for name, words in _LACKS.items() if words.search(said)]
    if record.text("routing") == "forced":
        lacks.append("forced routing")
    elif record.model_json and not record.experts:  # nothing is routed, whatever the setting
        lacks = [name for name in lacks if name != "forced routing"]
    is_own = bool(record.torch) and record.stack in ("", OWN_STACK)
    if is_own and not _HAS_DATA.search(said):
        lacks.append("random tokens")
    if lacks:
        return f"{BENCHMARK} ({', '.join(dict.fromkeys(lacks))})"
    return TRAINING if _HAS_DATA.search(said) else ""
