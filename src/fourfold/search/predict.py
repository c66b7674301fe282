"""What runs will take before any of them runs: on a cluster by a calibration, on this machine by
its profile ('fourfold calibrate'), else by a rough guess of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fourfold.cost.columns import Columns
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit import coefficients
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.fit.interval import provenance
from fourfold.cost.fit.machine import calibration_of
from fourfold.cost.memory.peak import memory
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.result.profile import HardwareProfile, cluster_of
from fourfold.result.report import Prediction
from fourfold.result.timing import LEAD, WINDOW
from fourfold.search.query import with_gradient_dtypes
from fourfold.search.resolve import resolve
from fourfold.spec.cluster import Cluster, Device, Link, Peaks
from fourfold.spec.engine import Engine, engine_of
from fourfold.spec.run import RunSpec
from fourfold.spec.words import OURS

# Imports, process groups, building the model: what one start of torch takes before its first step.
START_S = 8.0
# One core of a recent server in fp32, and its share of the memory's rate; within a factor of three.
_CORE_FLOPS_PER_S, _CORE_BYTES_PER_S, _GUESS_FACTOR = 30e9, 5e9, 3.0


def run_s(spec: RunSpec, step_s: float) -> float:
    """The whole run: start, warm-up and steps."""
    least = LEAD + 2 * WINDOW
    warmup = max(spec.warmup, least) if spec.settle else spec.warmup
    return START_S + step_s * (spec.steps + warmup)


def predict(
    specs: Sequence[RunSpec],
    *,
    cluster: Cluster | Callable[[RunSpec], Cluster | None] | None = None,
    profile: HardwareProfile | None = None,
    calibration: Calibration | None = None,
    stack: str = OURS,
    cores: int = 1,
) -> list[Prediction]:
    """One answer for each spec, in their order, as the stack's engine would run it. `cluster` may
    depend on a run's ranks; `cores` is this host's. Whether it fits is the caller's to add."""
    answers: dict[int, Prediction] = {}
    by_ranks: dict[tuple[int, bool], list[int]] = {}
    for at, spec in enumerate(specs):
        by_ranks.setdefault((spec.gpus, spec.model.moe is not None), []).append(at)
    for (ranks, has_experts), places in by_ranks.items():
        named = cluster(specs[places[0]]) if callable(cluster) else cluster
        machine = named or (cluster_of(profile, ranks) if profile else rough_cpu(ranks, cores))
        known = calibration or (calibration_of(profile, machine) if profile else None)
        known = known or calibrations.shipped()
        engine = resolve(stack, machine, known, experts=has_experts)
        asked = [with_planned_gradients(specs[at], engine.engine) for at in places]
        c = columns_of(asked, cluster=machine, engine=engine.engine)
        many, words = predictions(c, engine.entry), provenance(c, engine.entry)
        for i, at in enumerate(places):
            chance = float(many.fits[i]) if named is not None else None
            one = replace(many.one(i), provenance=words[i], fit_chance=chance)
            if named is None and profile is None:
                low_s, high_s = one.step_s / _GUESS_FACTOR, one.step_s * _GUESS_FACTOR
                one = replace(one, step_s_low=low_s, step_s_high=high_s)
            answers[at] = one
    return [answers[at] for at in range(len(specs))]


def with_planned_gradients(spec: RunSpec, engine: Engine) -> RunSpec:
    """Return the run with the gradients' dtypes that 'plan' has for this engine."""
    return replace(spec, policy=with_gradient_dtypes(engine, spec.policy))


def state_bytes(spec: RunSpec) -> float:
    """Weights, gradients and moments of the fullest rank, which no step can do without: the same on
    every machine."""
    return float(memory(anywhere(spec), coefficients.defaults()).parts["state"][0])


def anywhere(spec: RunSpec) -> Columns:
    """The run by our engine, for what is the same on every machine."""
    return columns_of([spec], cluster=rough_cpu(spec.gpus, 1), engine=engine_of(OURS))


def rough_cpu(ranks: int, cores: int) -> Cluster:
    """This host as a cluster, guessed from its cores alone."""
    share = max(0.25, cores / ranks)
    peak = _CORE_FLOPS_PER_S * share
    device = Device(
        id="cpu-guess",
        name="CPU, guessed",
        peak_flops_per_s=Peaks(
            fp64=peak / 2, fp32=peak, tf32=peak, fp16=peak, bf16=peak, fp8=peak, fp4=peak
        ),
        memory_bytes=2**34,
        memory_bytes_per_s=_CORE_BYTES_PER_S * share,
        sms=max(1, round(share)),
        power_w=1e4,
        kernels="measured",
        source="a guess from the number of cores",
    )
    link = Link(name="host", ranks=ranks, bytes_per_s=1e9, latency_s=1e-4)
    return Cluster(name="cpu-guess", device=device, gpus=ranks, host_gpus=ranks, links=(link,))
