"""How a traced run is priced: whose rates, on which GPU, and what it would hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.interval import half_width
from fourfold.cost.memory.peak import memory
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.result.profile import coefficients_of
from fourfold.search.query import entry_for
from fourfold.search.stack_names import match_stack
from fourfold.spec import catalog, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.run import RunSpec
from fourfold.traces.cause import TraceCase
from fourfold.traces.examined import Examined
from fourfold.traces.expect import Expected, Pricing, expect
from fourfold.verbs.machine import known_cluster, named_cluster, read_calibration, read_profile
from fourfold.verbs.trace_requests import DiagnoseRequest


def cluster_of(found: Examined, request: DiagnoseRequest) -> Cluster | None:
    ranks = found.spec.gpus if found.spec else 1
    if request.cluster:
        return known_cluster(request.cluster, ranks)
    name = found.settings["gpu"].value if "gpu" in found.settings else ""
    if request.gpu:
        name = catalog.device(request.gpu).name
    return named_cluster(name, ranks) if name else None


def _dense(spec: RunSpec) -> RunSpec:
    """Without experts, but as wide as those a token sees: the planner has no experts."""
    model = spec.model
    if model.moe is None:
        return spec
    wide = model.top_k * model.moe.ffn + model.moe.shared_ffn
    layout = replace(spec.layout, ep=1, etp=1) if hasattr(spec.layout, "ep") else spec.layout
    plain = replace(model, moe=None, experts=0, top_k=0, ffn=wide)
    return replace(spec, model=plain, layout=layout)


def pricing_of(found: Examined, request: DiagnoseRequest) -> Pricing | None:
    cluster = cluster_of(found, request)
    if cluster is None or found.linked.on_host or (found.is_graphed and found.spec is None):
        return None
    spec = found.spec or _any_run()
    entry, why = entry_for(read_calibration(request.calibration), "fourfold", cluster)
    known = coefficients_of(read_profile(request.profile)) if request.profile else {}
    columns = columns_of([_in_16_bits(_dense(spec))], cluster=cluster, stack="fourfold")
    basis = (
        f"{cluster.device.name}, {request.profile or 'the planner' + (': ' + why if why else '')}"
    )
    return Pricing(
        columns=columns,
        coefficients={**entry.coefficients, **known},
        width=half_width(entry),
        basis=basis,
        is_measured=bool(request.profile),
    )


def _in_16_bits(spec: RunSpec) -> RunSpec:
    """A GPU has no reason to multiply in fp32."""
    if spec.policy.precision != "fp32":
        return spec
    return replace(spec, policy=replace(spec.policy, precision="bf16-mixed"))


def _any_run() -> RunSpec:
    """For the columns of a machine alone."""
    batch = {"seq_len": 1024, "global_batch": 1}
    return codec.load(RunSpec, {"model": "llama-3.2-1b", "gpus": 1, "batch": batch})


def case_of(found: Examined, pricing: Pricing | None, request: DiagnoseRequest) -> TraceCase:
    step_s, run = found.steps.seconds, found.run
    expected = expect(run, pricing, step_s) if pricing else Expected({})
    return TraceCase(
        linked=found.linked,
        run=run,
        measured=found.parts,
        expected=expected,
        times=found.times,
        step_s=step_s,
        fits_without=_without_recompute(found, request),
        is_priced=pricing is not None,
    )


def _without_recompute(found: Examined, request: DiagnoseRequest) -> tuple[float, float] | None:
    """(bytes the run would hold if nothing were computed again, bytes of the GPU)."""
    cluster, spec = cluster_of(found, request), found.spec
    if spec is None or cluster is None or spec.model.moe is not None:
        return None
    asked = replace(spec, policy=replace(spec.policy, recompute="none"))
    calibration = calibrations.shipped()
    engine = found.settings["engine"].value if "engine" in found.settings else "fourfold"
    name = engine if engine in ("torchtitan", "megatron", "nanotron", "deepspeed") else "fourfold"
    stack = match_stack(name, cluster, calibration)
    entry, _ = entry_for(calibration, stack, cluster)
    room = memory(columns_of([asked], cluster=cluster, stack=stack), entry.coefficients)
    return float(room.worst_bytes[0]), float(cluster.device.memory_bytes)


def price_of(pricing: Pricing, request: DiagnoseRequest) -> Any:
    def price(spec: RunSpec) -> dict[str, float]:
        cluster = known_cluster(request.cluster, spec.gpus) if request.cluster else None
        if cluster is None:
            name = request.gpu and catalog.device(request.gpu).name
            cluster = named_cluster(name or pricing.basis.partition(",")[0], spec.gpus)
        assert cluster is not None
        entry, _ = entry_for(read_calibration(request.calibration), "fourfold", cluster)
        columns = columns_of([_dense(spec)], cluster=cluster, stack="fourfold")
        many = predictions(columns, replace(entry, coefficients=dict(pricing.coefficients)))
        return {name: float(part[0]) for name, part in many.times.parts.items()}

    return price
