"""The best measured run of a plan's model and sequence, to compare its first choice with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fourfold.cost.table.reference import read_table
from fourfold.cost.table.reports import report_rows
from fourfold.cost.table.rows import Rows, parse
from fourfold.search.plan_answer import MeasuredBest
from fourfold.search.query import PlanQuery
from fourfold.spec.layout import Layout
from fourfold.spec.words import SHARDINGS


def best_measured(path: str, query: PlanQuery) -> MeasuredBest:
    """Of a table's rows or a store's runs, the one with most tokens per second and GPU: other
    numbers of GPUs and batches compare too. Vocabularies are padded, so their size is not asked."""
    rows = report_rows(path, query.cluster) if Path(path).is_dir() else parse(read_table(path))
    c, model = rows.columns, query.model
    same = rows.usable & (rows.step_s > 0)
    asked = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads,
             "kv_heads": model.kv_heads, "ffn": model.ffn, "seq": query.batch.seq_len}  # fmt: skip
    for name, value in asked.items():
        same &= getattr(c, name) == value
    if not same.any():
        return MeasuredBest(source=path)
    speed = np.where(same, c.seq * c.batch / (rows.step_s * c.gpus), 0.0)
    return _named(rows, int(np.argmax(speed)), path, float(speed.max()))


def _named(rows: Rows, i: int, path: str, tokens_s_gpu: float) -> MeasuredBest:
    c = rows.columns
    pp, dp, cp, tp, looped = (int(sizes[i]) for sizes in (c.pp, c.dp, c.cp, c.tp, c.vpp))
    layout = Layout(pp=pp, shard=dp, cp=cp, tp=tp)
    return MeasuredBest(
        source=path,
        row=rows.table.column("row_id")[i],
        name=f"{layout} v{looped}" if looped > 1 else str(layout),
        micro_batch=int(c.micro[i]),
        sharding=SHARDINGS[int(c.zero[i])],
        gpus=int(c.gpus[i]),
        step_s=float(rows.step_s[i]),
        tokens_s_gpu=tokens_s_gpu,
    )
