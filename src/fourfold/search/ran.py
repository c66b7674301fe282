"""Runs of the user's own that were measured: a plan knows that they fit, and what they take."""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.predict import Predictions
from fourfold.search.query import OwnRuns
from fourfold.search.table import PointTable, Pool
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES

# What a point must share with a run to be that run, as columns of the cost model.
_SAME = (
    *MODEL_AXES,
    *EXPERT_AXES,
    "vpp",
    "zero",
    "micro",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "experts",
    "top_k",
    "expert_ffn",
    "seq",
    "batch",
    "gpus",
    "full_ckpt",
    "block_ckpt",
    "attn_ckpt",
    "norm_ckpt",
    "mlp_ckpt",
    "moe_ckpt",
    "moe_act_ckpt",
    "precision",
    "peak",
    "capacity",
)
# Columns of a table's rows that name a layout, and those of the cost model.
_OF_ROWS = {axis: axis for axis in (*MODEL_AXES, *EXPERT_AXES) if axis != "dp"}
_OF_ROWS |= {"virtual_stages": "vpp", "zero": "zero"}


def measured_s(runs: OwnRuns | None, c: Columns) -> Floats:
    """Return the seconds that were measured of each point, the fewest of several runs; NaN where
    none was. Gradients that are held in fewer bytes prove nothing about wider ones."""
    seconds = np.full(len(c), np.nan)
    for i in range(len(runs.step_s) if runs else 0):
        assert runs is not None
        is_same = runs.columns.acc_bytes[i] >= c.acc_bytes
        for name in _SAME:
            is_same = is_same & np.isclose(getattr(c, name), getattr(runs.columns, name)[i])
        is_same = is_same & ((c.cp == 1) | (c.cp_kind == runs.columns.cp_kind[i]))
        seconds = np.where(is_same, np.fmin(seconds, runs.step_s[i]), seconds)
    return seconds


def with_own_runs(runs: OwnRuns | None, points: Pool, predicted: Predictions) -> Pool:
    """Return points with their seconds and their chance to fit: those of a run that was measured,
    else what is predicted; and what was measured of each (NaN: nothing)."""
    ran_s = measured_s(runs, predicted.columns)
    was_run = np.isfinite(ran_s)
    return points | {
        "step_s": np.where(was_run, ran_s, predicted.step_s),
        "measured_s": ran_s,
        "fit_chance": np.where(was_run, 1.0, predicted.fits),
    }


def measured_points(runs: OwnRuns | None, table: PointTable) -> Pool:
    """Return the legal points of a table that were measured, as columns by CHOSEN."""
    none = np.zeros(0, dtype=np.intp)
    index, query = [none], table.query
    for i in range(len(runs.step_s) if runs else 0):
        assert runs is not None
        is_layout = table.rows["replicate"] == 1
        is_layout = is_layout & (table.rows["shard"] == runs.columns.dp[i])
        for name, column in _OF_ROWS.items():
            is_layout = is_layout & (table.rows[name] == getattr(runs.columns, column)[i])
        is_way = table.ways["micro_batch"] == runs.columns.micro[i]
        index.append(np.flatnonzero(table.legal & is_layout[:, None] & is_way))
    places = np.unique(np.concatenate(index))
    points = table.points(places)
    was_measured = np.isfinite(measured_s(runs, query.columns(points)))
    places = places[was_measured]
    return {name: column[was_measured] for name, column in points.items()} | {
        "peak_bytes": table.peak_bytes(places)
    }
