"""Rows of a table of measured runs as the cost model's columns, with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns
from fourfold.cost.table.cells import Bools, Engines, Floats
from fourfold.cost.table.reference import RowTable


@dataclass(frozen=True, slots=True)
class Rows:
    """Parsed rows of one table. Measured values are NaN where blank; never used to predict."""

    table: RowTable
    columns: Columns
    usable: Bools
    reasons: list[str]
    measured_as: Engines
    cluster: NDArray[np.str_]
    hardware: NDArray[np.str_]
    step_s: Floats
    mem_gb: Floats
    status: NDArray[np.str_]
