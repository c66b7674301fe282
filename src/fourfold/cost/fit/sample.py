"""Measured rows of many tables as one sample, by stack and cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, joined
from fourfold.cost.table.open_fields import open_layouts
from fourfold.cost.table.rows import Rows

Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of several tables as one, usable ones only."""

    columns: Columns
    stack: NDArray[np.str_]
    cluster: NDArray[np.str_]
    hardware: NDArray[np.str_]
    step_s: Floats
    mem_gb: Floats
    fits: Floats  # 1 ran, 0 out of memory, NaN unknown

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, index: Places) -> Sample:
        return Sample(
            self.columns.take(index), self.stack[index], self.cluster[index],
            self.hardware[index], self.step_s[index], self.mem_gb[index], self.fits[index],
        )  # fmt: skip

    def all_keys(self) -> list[tuple[str, str]]:
        return sorted(set(zip(self.stack.tolist(), self.cluster.tolist(), strict=True)))

    def where(self, key: tuple[str, str]) -> Places:
        return np.flatnonzero((self.stack == key[0]) & (self.cluster == key[1]))


def joined_samples(parts: Sequence[Sample]) -> Sample:
    texts = [(p.stack, p.cluster, p.hardware, p.step_s, p.mem_gb, p.fits) for p in parts]
    return Sample(
        joined([part.columns for part in parts]),
        *(np.concatenate(list(column)) for column in zip(*texts, strict=True)),
    )


def sample(tables: Sequence[Rows]) -> Sample:
    """Measured rows of parsed tables: those with seconds, memory or an out-of-memory, and a layout
    of their own (nothing is learned from a guessed one)."""
    parts = []
    for rows in tables:
        ok = (rows.status == "ok") | ((rows.status == "") & np.isfinite(rows.step_s))
        oom = rows.status == "oom"
        index = np.flatnonzero(rows.usable & (ok | oom) & ~open_layouts(rows.table))
        fits = np.where(ok, 1.0, np.where(oom, 0.0, np.nan))
        step = np.where(ok & (rows.step_s > 0), rows.step_s, np.nan)
        mem = np.where(ok & (rows.mem_gb > 0), rows.mem_gb, np.nan)
        parts.append(
            Sample(rows.columns.take(index), rows.stack[index], rows.cluster[index],
                   rows.hardware[index], step[index], mem[index], fits[index])
        )  # fmt: skip
    return joined_samples(parts)
