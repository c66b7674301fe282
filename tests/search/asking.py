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
    own = {name: changed.pop(name) for name in ("entry", "no_rows") if name in changed}
    engine = replace(engine, calibration="shipped", **own)
    base = PlanQuery(
        model=shape,
        resolved=engine,
        gpus=gpus,
        batch=Batch(seq_len=4096, global_batch=48),
        policy=usual_policy(engine.engine, Policy(), set()),
        evidence=evidence_for(known, engine.entry),
        fixed={},
    )
    return replace(base, **changed)


def by_engine(query: PlanQuery, stack: str) -> PlanQuery:
    """The same question with another engine's rules and habits, at the same coefficients."""
    return replace(query, resolved=replace(query.resolved, measured_as=MeasuredAs.of(stack)))


def on_cluster(query: PlanQuery, **changed) -> PlanQuery:
    """The same question on a cluster that differs in these fields."""
    cluster = replace(query.resolved.cluster, **changed)
    return replace(query, resolved=replace(query.resolved, cluster=cluster))
