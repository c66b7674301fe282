"""Rows that an exam leaves out together: by layout, neighbourhood, source, axis, engine, cluster,
family of engines, time.

Folds by layout: sha256 of the values as the CSV has them, joined by '|', modulo 5, of the columns
that were varied by hand in a table, so that no row is predicted by its twin. Still a held-out
layout has near relatives in the fit. Of a neighbourhood every run goes that shares all but one
setting with the run that is scored. A stranger's question has no relatives at all: `abroad` leaves
out every row of an engine and every row of a cluster at once.

Measured rows of many tables as one sample, by stack and cluster.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, joined
from fourfold.cost.kinds import DENSE
from fourfold.cost.table.cells import Engines
from fourfold.cost.table.open_fields import open_layouts
from fourfold.cost.table.reference import RowTable
from fourfold.cost.table.rows import Rows
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, family_of
from fourfold.spec.layout import MODEL_AXES

Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of several tables as one, usable ones only."""

    columns: Columns
    measured_as: Engines
    cluster: NDArray[np.str_]
    hardware: NDArray[np.str_]
    step_s: Floats
    mem_gb: Floats
    fits: Floats  # 1 ran, 0 out of memory, NaN unknown

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, index: Places) -> Sample:
        return Sample(
            self.columns.take(index),
            self.measured_as[index],
            self.cluster[index],
            self.hardware[index],
            self.step_s[index],
            self.mem_gb[index],
            self.fits[index],
        )

    def all_keys(self) -> list[tuple[MeasuredAs, str]]:
        """Return the keys of its rows (engine and cluster), by name."""
        keys = set(zip(self.measured_as.tolist(), self.cluster.tolist(), strict=True))
        return sorted(keys, key=lambda key: (key[0].text, key[1]))

    def where(self, key: tuple[MeasuredAs, str]) -> Places:
        return np.flatnonzero((self.measured_as == key[0]) & (self.cluster == key[1]))


def joined_samples(parts: Sequence[Sample]) -> Sample:
    texts = [(p.measured_as, p.cluster, p.hardware, p.step_s, p.mem_gb, p.fits) for p in parts]
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
            Sample(
                rows.columns.take(index),
                rows.measured_as[index],
                rows.cluster[index],
                rows.hardware[index],
                step[index],
                mem[index],
                fits[index],
            )
        )
    return joined_samples(parts)


Bools = NDArray[np.bool_]
# (rows of each table that are scored, rows of each that are left out)
Fold = tuple[list[Bools], list[Bools]]
FOLDS = 5
BY_TABLE: dict[str, list[str]] = catalog.data("folds.toml")
# In folds along an axis only rows whose stack and cluster keep some rows are scored: the others are
# a source left out.
AXES = (*MODEL_AXES, "dp", "nodes", "size", "seq", "model", "world")
KINDS = ("layout", "near", "source", "gpu", "abroad", "family", "time", *AXES)
# By time a fit knows what ran before the first day of such a year, and is asked for what ran from
# then on until the next one.
YEARS = (2024, 2025, 2026)
# Neighbourhoods of a stack and cluster that are left out, one by one, where it has so many rows.
NEIGHBOURHOODS, MANY_ROWS = 8, 30


def folds(table: RowTable) -> NDArray[np.int64]:
    """Fold of every row by layout, 0..4."""
    names = BY_TABLE.get(table.name, BY_TABLE["other"])
    values = zip(*(table.column(name) for name in names), strict=True)
    return np.array([_hash("|".join(row)) % FOLDS for row in values], dtype=np.int64)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def left_out(tables: Sequence[Rows], kind: str) -> Iterator[Fold]:
    if kind == "near":
        yield from _neighbourhoods(tables)
    elif kind == "abroad":
        yield from _abroad(tables)
    elif kind == "time":
        yield from _times(tables)
    else:
        named = [labels(rows, kind) for rows in tables]
        found = (label[rows.usable] for rows, label in zip(tables, named, strict=True))
        for value in sorted({str(one) for label in found for one in label} - {""}):
            out = [r.usable & (label == value) for r, label in zip(tables, named, strict=True)]
            yield out, out


def keys_of(rows: Rows) -> NDArray[np.str_]:
    """Return the key of each row's calibration, as an entry names its own."""
    pairs = zip(rows.measured_as.tolist(), rows.cluster.tolist(), strict=True)
    return np.array([f"{runs}|{cluster}" for runs, cluster in pairs], dtype=str)


def _abroad(tables: Sequence[Rows]) -> Iterator[Fold]:
    families = [
        np.array([runs.engine for runs in rows.measured_as.tolist()], str) for rows in tables
    ]
    pairs = {
        pair
        for rows, family in zip(tables, families, strict=True)
        for pair in zip(family[rows.usable], rows.cluster[rows.usable], strict=True)
    }
    for engine, cluster in sorted(pairs):
        both = [
            (rows.usable & (family == engine), rows.usable & (rows.cluster == cluster))
            for rows, family in zip(tables, families, strict=True)
        ]
        yield [a & b for a, b in both], [a | b for a, b in both]


def years(rows: Rows) -> Floats:
    """Return the year of each row, by its date or the day it was measured, else by its stack's
    name or its source; NaN where nothing says it."""
    columns = (rows.table.column(name) for name in ("date", "measured", "stack", "source"))
    return np.array(
        [
            _year(date) or _year(measured) or MeasuredAs.of(stack).year or _year(source) or np.nan
            for date, measured, stack, source in zip(*columns, strict=True)
        ]
    )


def _year(text: str) -> int | None:
    found = re.search(r"(?<!\d)20\d\d(?!\d)", text)
    return int(found[0]) if found else None


def undated(tables: Sequence[Rows]) -> int:
    """Return how many rows folds by time leave out, since nothing says when they ran."""
    return sum(int((rows.usable & np.isnan(years(rows))).sum()) for rows in tables)


def _times(tables: Sequence[Rows]) -> Iterator[Fold]:
    dates = [years(rows) for rows in tables]
    for first, end in zip(YEARS, (*YEARS[1:], np.inf), strict=True):
        asked = [
            rows.usable & (date >= first) & (date < end)
            for rows, date in zip(tables, dates, strict=True)
        ]
        gone = [rows.usable & ~(date < first) for rows, date in zip(tables, dates, strict=True)]
        if any(rows.any() for rows in asked):
            yield asked, gone


def _neighbourhoods(tables: Sequence[Rows]) -> Iterator[Fold]:
    nothing = [np.zeros(rows.table.length, dtype=bool) for rows in tables]
    for at, rows in enumerate(tables):
        settings, keys = _settings(rows), keys_of(rows)
        row_ids = rows.table.column("row_id")
        for key in sorted(set(keys[rows.usable].tolist())):
            mine = np.flatnonzero(rows.usable & (keys == key))
            if len(mine) < MANY_ROWS:
                continue
            for i in sorted(mine.tolist(), key=lambda i: _hash(row_ids[i]))[:NEIGHBOURHOODS]:
                unlike = (settings[mine] != settings[i]).sum(axis=1)
                scored, gone = ([one.copy() for one in nothing] for _ in range(2))
                scored[at][mine[unlike == 0]] = True
                gone[at][mine[unlike <= 1]] = True
                yield scored, gone


def _settings(rows: Rows) -> Floats:
    """[rows, settings]: what somebody who runs something else changes."""
    c = rows.columns
    shape = np.stack([c.layers, c.hidden, c.heads, c.ffn, c.vocab], axis=1)
    model = np.unique(shape, axis=0, return_inverse=True)[1].reshape(-1).astype(np.float64)
    split = np.where(c.shard < c.dp * c.cp, c.shard, 0.0)
    recompute = c.full_ckpt + 10.0 * c.attn_ckpt + 100.0 * c.norm_ckpt
    return np.stack(
        [
            model,
            c.seq,
            c.gpus,
            c.tp,
            c.cp,
            c.pp,
            c.vpp,
            c.micro,
            c.batch,
            c.zero + 10.0 * split,
            recompute,
            c.attention + 10.0 * c.fused_norm,
            c.precision,
            c.sp,
            c.peak,
        ],
        axis=1,
    )


def labels(rows: Rows, kind: str) -> NDArray[np.str_]:
    """What each row is left out with; '' is never left out."""
    c = rows.columns
    if kind == "layout":
        return folds(rows.table).astype(str)
    if kind == "source":
        return np.array(rows.table.column("source"), dtype=str)
    if kind == "gpu":
        return rows.hardware
    if kind == "family":
        return np.array([family_of(runs) for runs in rows.measured_as.tolist()], dtype=str)
    if kind == "world":
        return np.where(_is_largest(rows), "largest", "")
    if kind == "model":
        sizes = zip(c.layers, c.hidden, c.heads, c.seq, strict=True)
        return np.array([" ".join(f"{size:.0f}" for size in one) for one in sizes], dtype=str)
    if kind in MODEL_AXES:
        return getattr(c, kind).astype(np.int64).astype(str)
    by_range = {
        "dp": np.log2(c.dp) // 2,
        "nodes": np.ceil(np.log2(np.maximum(1.0, c.gpus / c.node))),
        "size": np.floor(np.log2(c.layers * DENSE.count(c))),
        "seq": np.floor(np.log2(c.seq)),
    }
    return by_range[kind].astype(np.int64).astype(str)


def _is_largest(rows: Rows) -> Bools:
    """Rows in the upper half (log) of the numbers of GPUs of their stack and cluster."""
    largest, keys = np.zeros(rows.table.length, dtype=bool), keys_of(rows)
    gpus = np.log2(rows.columns.gpus)
    for key in set(keys[rows.usable].tolist()):
        mine = rows.usable & (keys == key)
        middle = (gpus[mine].min() + gpus[mine].max()) / 2.0
        largest |= mine & (gpus > middle + 1e-9)
    return largest
