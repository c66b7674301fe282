"""Which rows are held out together? Folds by layout, so that no row is predicted by its twin.

fold = sha256 of the values as the CSV has them, joined by '|', modulo 5. The columns depend on the
table: what was varied by hand there.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.table.reference import Table

FOLDS = 5
BY_TABLE: dict[str, tuple[str, ...]] = {
    "mpt": ("model", "hardware"),
    "bloom": ("d_model", "n_heads"),
    "par4d": ("hardware", "tp", "cp", "pp", "seq_len"),
    "nanotron": ("model", "tp", "pp"),
    "aleph": ("tp", "pp", "seq_len", "n_gpus"),
    "newer": ("source", "model", "hardware", "precision", "n_gpus"),
}
OTHER = ("model", "n_layers", "d_model", "n_heads", "hardware", "seq_len", "tp", "cp", "pp")


def folds(table: Table) -> NDArray[np.int64]:
    """Fold of every row, 0..4."""
    names = BY_TABLE.get(table.name, OTHER)
    values = zip(*(table.column(name) for name in names), strict=True)
    return np.array([_fold("|".join(row)) for row in values], dtype=np.int64)


def _fold(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % FOLDS
