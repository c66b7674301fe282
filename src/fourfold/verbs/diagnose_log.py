"""What a run's log says of it, in the words of a trace's settings: as one rank sees them."""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.logs.nested import whole
from fourfold.logs.row import Row, complete
from fourfold.spec.layout import AXES
from fourfold.verbs.collect import read_files

# Setting: column of the row, and the axis that divides it on a rank.
_NUMBERS = {
    "layers": ("n_layers", "pp"), "hidden": ("d_model", ""), "ffn": ("d_ff", "tp"),
    "heads": ("n_heads", "tp"), "kv_heads": ("n_kv_heads", "tp"), "vocab": ("vocab", "tp"),
    "seq_len": ("seq_len", "cp"), "micro_batch": ("mbs", ""), "gpus": ("n_gpus", ""),
}  # fmt: skip
_WORDS = {"recompute": "act_ckpt", "sharding": "sharding", "gpu": "hardware"}


def log_settings(path: str) -> dict[str, Any]:
    """Of the run in a log; of several in one file the last."""
    rows = read_files([path]).rows
    if not rows:
        raise UserError(
            "has no run in it that can be read", field="log", value=path,
            hint="an engine's log as 'fourfold collect' reads it",
        )  # fmt: skip
    return settings_of(complete(rows[-1], {}))


def settings_of(row: Row) -> dict[str, Any]:
    axes = {axis: whole(row[axis]) or 1 for axis in AXES}
    found: dict[str, Any] = {axis: size for axis, size in axes.items() if row[axis]}
    for name, (column, axis) in _NUMBERS.items():
        number = whole(row[column])
        if number:
            found[name] = number // axes.get(axis, 1) or 1
    found |= {name: row[column] for name, column in _WORDS.items() if row[column]}
    batch = whole(row["gbs"])
    if batch and "micro_batch" in found:
        found["micro_batches"] = max(1, batch // (axes["dp"] * found["micro_batch"]))
    if row["tied"]:
        found["tied"] = row["tied"] not in ("0", "False")
    return found
