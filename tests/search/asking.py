"""A question to the planner, as the command asks it, from what matters to a test."""

from __future__ import annotations

from dataclasses import replace

from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.calibration import Calibration
from fourfold.search.query import PlanQuery, usual_cluster, usual_policy
from fourfold.search.resolve import evidence_for, resolve
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.engine import MeasuredAs
from fourfold.spec.policy import Policy

SHIPPED = calibrations.shipped()


def ask(
    model: str = "llama-3.1-8b",
    gpus: int = 8,
    stack: str = "generic",
    *,
    known: Calibration = SHIPPED,
    **changed,
) -> PlanQuery:
    cluster = changed.pop("cluster", None) or usual_cluster(catalog.device("h100-80gb"), gpus)
    shape = catalog.model(model)
    engine = resolve(MeasuredAs.of(stack), cluster, known, experts=shape.moe is not None)
    base = PlanQuery(
        model=shape,
        cluster=cluster,
        gpus=gpus,
        batch=Batch(seq_len=4096, global_batch=48),
        policy=usual_policy(stack, Policy(), set()),
        stack=stack,
        entry=engine.entry,
        calibration="shipped",
        no_rows=engine.no_rows,
        evidence=evidence_for(known, engine.entry),
        fixed={},
    )
    return replace(base, **changed)
