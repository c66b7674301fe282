"""Answers that need no fitted coefficient: a constant MFU, and the rules of thumb of guides."""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.count.flops import FlopsQuery
from fourfold.cost.table.predict import RowPredictions
from fourfold.cost.table.rows import Rows

# Of the peak: what training of dense models is usually said to reach on A100 and H100.
USUAL_MFU = 0.40
# Guides give directions; these sizes are ours. More for each doubling of tensor parallelism in a
# host, times as much across hosts, less for each doubling of the micro-batch up to 8.
PER_TP_DOUBLING, ACROSS_HOSTS, PER_MICRO_BATCH_DOUBLING = 0.05, 2.0, 0.05
STATE_BYTES = 18.0  # bf16 weights, fp32 gradients, fp32 weights and two moments
LAYER_BYTES = 34.0  # a layer's activations, times sequence, micro-batch and hidden size
USED_OF_MEMORY = 0.9


def predictions_of(
    step_s: Floats,
    step_s_low: Floats | None = None,
    step_s_high: Floats | None = None,
    mem_gb: Floats | None = None,
    fit_chance: Floats | None = None,
) -> RowPredictions:
    """Return predictions of rows in which everything that was not answered is NaN."""
    blank = np.full(len(step_s), np.nan)
    low, high, memory, chance = (
        blank if column is None else column
        for column in (step_s_low, step_s_high, mem_gb, fit_chance)
    )
    no_text = [""] * len(step_s)
    return RowPredictions(
        step_s, low, high, blank, blank, blank, memory, blank, np.nan_to_num(chance) >= 0.5, chance,
        no_text, no_text,
    )  # fmt: skip


def constant_mfu(rows: Rows) -> RowPredictions:
    """Return 6 FLOPs per parameter and token at 40% of the peak, whatever the layout."""
    return predictions_of(_six_n_s(rows) / USUAL_MFU)


def rule_of_thumb(rows: Rows) -> RowPredictions:
    """Return what guides say in words, as numbers.

    Recompute costs a third, a pipeline its bubble (stages - 1) / (virtual stages x micro-batches),
    tensor parallelism some percent within a host and twice the time across hosts, a larger
    micro-batch runs faster. Memory is states, sharded as ZeRO does, and activations.
    """
    c = rows.columns
    stretch = 1.0 + c.full_ckpt / 3.0
    stretch = stretch * (1.0 + (c.pp - 1.0) / (c.vpp * c.micros))
    stretch = stretch * (1.0 + PER_TP_DOUBLING * np.log2(c.tp))
    stretch = np.where(c.tp > c.node, ACROSS_HOSTS, 1.0) * stretch
    stretch = stretch / (1.0 + PER_MICRO_BATCH_DOUBLING * np.log2(np.minimum(c.micro, 8.0)))
    params_per_rank = _params(rows) / (c.tp * c.pp)
    shards = c.gpus / (c.tp * c.pp * c.cp)
    weight_shards, moment_shards = (np.where(c.zero >= stage, shards, 1.0) for stage in (3, 1))
    state = params_per_rank * ((STATE_BYTES - 12.0) / weight_shards + 12.0 / moment_shards)
    layer_bytes = np.where(c.full_ckpt > 0, 2.0, LAYER_BYTES)
    layers = c.layers * np.minimum(c.micros, c.pp) / c.pp
    tokens = c.seq * c.micro / c.cp
    need_bytes = state + layer_bytes * tokens * c.hidden * layers / c.tp
    fits = need_bytes < USED_OF_MEMORY * c.capacity
    return predictions_of(
        _six_n_s(rows) / USUAL_MFU * stretch,
        mem_gb=need_bytes / 2**30,
        fit_chance=np.where(fits, 0.95, 0.05),
    )


def _params(rows: Rows) -> Floats:
    return np.asarray(FlopsQuery.of_columns(rows.columns, learned_positions=0.0).params)


def _six_n_s(rows: Rows) -> Floats:
    """Return seconds of 6 FLOPs per parameter and token at the peak."""
    c = rows.columns
    return 6.0 * _params(rows) * c.batch * c.seq / (c.gpus * c.peak_low)
