"""The rules give the same answer about one run and about a column of runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourfold.search.legal import RULES, Target, case_of, why_not
from fourfold.spec import catalog
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.engine import ENGINES, engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.words import CP_KINDS, NUMBERED_RECOMPUTE, RECOMPUTE_KINDS, SCHEDULES

SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 96, 128])
ROW = st.fixed_dictionaries(
    {
        "pp": SIZES,
        "replicate": st.integers(1, 3),
        "shard": SIZES,
        "cp": SIZES,
        "tp": SIZES,
        "seq_len": st.sampled_from([127, 1024, 2048, 2052, 4096]),
        "micro_batch": st.integers(1, 12),
        "zero": st.integers(0, 3),
        "cp_kind": st.integers(0, 2),
        "schedule": st.integers(0, 3),
        "virtual_stages": st.integers(1, 4),
        "recompute": st.integers(0, 3),
        "sequence_parallel": st.integers(0, 1),
    }
)
BATCHES = st.sampled_from(
    [(48, None), (2048, None), (256, Ramp(start=16, increment=48, samples=900))]
)


def as_run(row: dict[str, int], batch: tuple[int, Ramp | None]) -> tuple[Layout, Batch, Policy]:
    layout = Layout(**{axis: row[axis] for axis in ("pp", "replicate", "shard", "cp", "tp")})
    recompute = RECOMPUTE_KINDS[row["recompute"]]
    policy = Policy(
        sharding=f"zero{row['zero']}",
        cp_kind=CP_KINDS[row["cp_kind"]],
        schedule=SCHEDULES[row["schedule"]],
        virtual_stages=row["virtual_stages"],
        recompute=f"{recompute}-2" if recompute in NUMBERED_RECOMPUTE else recompute,
        sequence_parallel=bool(row["sequence_parallel"]),
    )
    size, ramp = batch
    batch_of = {"seq_len": row["seq_len"], "micro_batch": row["micro_batch"]}
    return layout, Batch(**batch_of, global_batch=size, ramp=ramp), policy


@given(
    rows=st.lists(ROW, min_size=1, max_size=8),
    batch=BATCHES,
    model=st.sampled_from(["llama-3.1-8b", "gpt-3-175b", "mpt-125m", "nemotron-4-15b"]),
    stack=st.sampled_from(sorted(ENGINES)),
    gpus=st.sampled_from([None, 8, 96]),
)
def test_columns_agree_with_single_runs(rows, batch, model, stack, gpus) -> None:
    shape, target = catalog.model(model), Target(engine=engine_of(stack), gpus=gpus)
    single = [why_not(shape, *as_run(row, batch), target) for row in rows]
    case = case_of(shape, *as_run(rows[0], batch), target)
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for rule in RULES:
        broken = rule.broken(case.with_columns(columns))
        column = np.broadcast_to(np.asarray(broken, dtype=bool), len(rows))
        assert column.tolist() == [rule.reason in {r.reason for r in refused} for refused in single]
