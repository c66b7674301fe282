"""Rows that an exam leaves out together: by layout, by source, by value of an axis.

Folds by layout: sha256 of the values as the CSV has them, joined by '|', modulo 5, of the columns
that were varied by hand in a table, so that no row is predicted by its twin. Still a held-out
layout has near relatives in the fit; a stranger's question has none. So folds also leave out every
row of a source, of a GPU type, of one value of an axis, or the largest worlds.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.table.reference import RowTable
from fourfold.cost.table.rows import Rows
from fourfold.spec.layout import MODEL_AXES

FOLDS = 5
BY_TABLE: dict[str, tuple[str, ...]] = {
    "mpt": ("model", "hardware"),
    "bloom": ("d_model", "n_heads"),
    "par4d": ("hardware", *MODEL_AXES, "seq_len"),
    "nanotron": ("model", "tp", "pp"),
    "aleph": ("tp", "pp", "seq_len", "n_gpus"),
    "newer": ("source", "model", "hardware", "precision", "n_gpus"),
}
OTHER = ("model", "n_layers", "d_model", "n_heads", "hardware", "seq_len", *MODEL_AXES)
# What each kind of fold leaves out. In the first two a whole key may go; in the others only rows
# whose stack and cluster keep some rows are scored: the others are the first two again.
WHOLE = ("source", "gpu")
AXES = (*MODEL_AXES, "dp", "nodes", "size", "seq", "world")
KINDS = ("layout", *WHOLE, *AXES)


def folds(table: RowTable) -> NDArray[np.int64]:
    """Fold of every row by layout, 0..4."""
    names = BY_TABLE.get(table.name, OTHER)
    values = zip(*(table.column(name) for name in names), strict=True)
    return np.array([_fold("|".join(row)) for row in values], dtype=np.int64)


def _fold(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % FOLDS


def labels(rows: Rows, kind: str) -> NDArray[np.str_]:
    """What each row is left out with; '' is never left out."""
    c = rows.columns
    if kind == "layout":
        return folds(rows.table).astype(str)
    if kind == "source":
        return np.array(rows.table.column("source"), dtype=str)
    if kind == "gpu":
        return rows.hardware
    if kind == "world":
        return np.where(_is_largest(rows), "largest", "")
    if kind in MODEL_AXES:
        return getattr(c, kind).astype(np.int64).astype(str)
    by_range = {
        "dp": np.log2(c.dp) // 2,
        "nodes": np.ceil(np.log2(np.maximum(1.0, c.gpus / c.node))),
        "size": np.floor(np.log2(c.layers * c.layer_weights)),
        "seq": np.floor(np.log2(c.seq)),
    }
    return by_range[kind].astype(np.int64).astype(str)


def _is_largest(rows: Rows) -> NDArray[np.bool_]:
    """Rows in the upper half (log) of the numbers of GPUs of their stack and cluster."""
    largest = np.zeros(rows.table.length, dtype=bool)
    for key in set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True)):
        mine = rows.usable & (rows.stack == key[0]) & (rows.cluster == key[1])
        if mine.any():
            gpus = np.log2(rows.columns.gpus)
            middle = (gpus[mine].min() + gpus[mine].max()) / 2.0
            largest |= mine & (gpus > middle + 1e-9)
    return largest
