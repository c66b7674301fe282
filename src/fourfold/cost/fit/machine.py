"""A hardware profile as a calibration: measured rates where the machine was measured, defaults
elsewhere, and an interval as wide as that deserves."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, log1p

import numpy as np

from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.fit.coefficients import BY_NAME, TIME, defaults
from fourfold.cost.fit.interval import SCATTER
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import layer_times
from fourfold.cost.step.kernels import NEWER_FLASH, misalignment
from fourfold.result.profile import (
    CollectivePoint,
    GemmPoint,
    HardwareProfile,
    all_reduces,
    link_of,
    measured_layer,
    shared_by,
)
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.spec.words import OURS


def coefficients_of(profile: HardwareProfile) -> dict[str, float]:
    """Where a calibration of this machine starts, by the planner's names: shares of measured peaks.

    Only what was measured is named; a fit on runs moves them from here.
    """
    peak = profile.peak(profile.sustained_dtype)
    assert peak is not None, "the burst itself is one"
    coef = {
        "engine": 1.0,
        "product": min(0.98, profile.sustained_flops_per_s / peak),  # of the fastest product seen
        "align": _alignment_loss(profile),
        "host_s": profile.layer_launch_s,
    }
    long = [point for point in profile.attentions if point.head_size >= 64]
    if long:
        best = max(long, key=lambda point: point.seq_len * point.flops_per_s)
        own_peak = profile.peak(best.dtype)
        assert own_peak is not None, "read_profile refuses attention without products"
        shape = NEWER_FLASH.share(best, profile.units)
        coef["attention"] = best.flops_per_s / own_peak / shape
    points = all_reduces(profile, 0)
    if points:
        coef |= {"nvlink": 0.98, "latency_s": link_of(profile, points[0].ranks)[1]}
    return coef


def _alignment_loss(profile: HardwareProfile) -> float:
    """Speed lost per power of two that the width misses 64, from products of nearly equal size."""
    losses = []
    for odd in profile.gemms:
        for even in profile.gemms:
            near = all(
                abs(a - b) <= 0.03 * b
                for a, b in ((odd.m, even.m), (odd.n, even.n), (odd.k, even.k))
            )
            missed = _missed(odd)
            if odd.dtype == even.dtype and near and missed and not _missed(even):
                losses.append((1.0 - odd.flops_per_s / even.flops_per_s) / missed)
    return max(0.0, sorted(losses)[len(losses) // 2]) if losses else 0.0


def _missed(point: GemmPoint) -> float:
    return float(misalignment(np.array([point.n, point.k])).sum())


# Copies run by the operating system, not by a device driver: no context, no communicator buffers.
_CPU = {"base_gib": 0.1, "fixed_s": 1e-3, "micro_s": 5e-5}
# As collectives are called in a step, by what they are called in formulas.
_CALLED = {"gather": "all-gather", "send": "p2p"}


def cpu_coefficients(profile: HardwareProfile, cluster: Cluster) -> dict[str, float]:
    """Of one rank of our engine on a CPU while all of the host do the same (step/rates.py): passes
    over memory take what a measured layer leaves them."""
    ranks = cluster.host_gpus
    own, peak = shared_by(profile, ranks), cluster.device.peak("fp32")
    coef = coefficients_of(profile) | {
        **_CPU,
        "product": own.flops_per_s / peak,
        "cpu_start_s": own.start_s,
        "cpu_byte_s": 0.0,
        "cpu_share": min(1.0, profile.cores / ranks),
        "cp_attention": 1.0,  # a CPU's kernel loses nothing where a ring cuts rows
    }
    for name, op in _CALLED.items():
        start_s, byte_s = _line(profile.collectives, op, ranks, profile.launch_s)
        coef |= {f"cpu_{name}_s": start_s, f"cpu_{name}_byte_s": byte_s}
    base = defaults() | coef
    c = columns_of([measured_layer()], cluster=cluster, engine=engine_of(OURS))
    rest_s, whole_s = (
        float(layer_times(c, base | {"cpu_byte_s": byte_s}, micro=c.micro).total[0])
        for byte_s in (0.0, 1.0)
    )
    left = (own.layer_s - rest_s) / (whole_s - rest_s)
    return coef | {"cpu_byte_s": max(1.0 / own.bytes_per_s, left)}


def _line(
    points: Sequence[CollectivePoint], op: str, ranks: int, launch_s: float
) -> tuple[float, float]:
    """(start of one hop, seconds per byte sent) over the measured number of ranks nearest to the
    asked one. One rank has no link: it never uses what it gets."""
    found = [p for p in points if p.op == op and p.hosts == 1]
    if not found:
        return launch_s, launch_s
    near = min({p.ranks for p in found}, key=lambda n: (abs(n - ranks), n))
    of_them = sorted((p for p in found if p.ranks == near), key=lambda p: p.payload_bytes)
    small, large = of_them[0], of_them[-1]
    hops = 1 if op == "p2p" else near - 1
    share = {"all-reduce": 2.0 * (near - 1) / near, "p2p": 1.0}.get(op, (near - 1) / near)
    moving_s = max(0.0, large.seconds - small.seconds)
    return small.seconds / hops, moving_s / (share * large.payload_bytes)


# Kernels alone were measured, no training step: twice the spread of a stack nobody measured. What
# readings of one work on a CPU differed by comes on top: runs will have such neighbours too.
HALF_WIDTH = 0.5


def calibration_of(profile: HardwareProfile, cluster: Cluster) -> Calibration:
    """Coefficients of our own engine on the profiled machine, clipped to what the model allows."""
    measured, half = coefficients_of(profile), HALF_WIDTH
    if profile.device == "cpu":
        measured = cpu_coefficients(profile, cluster)
        half = hypot(half, log1p(shared_by(profile, cluster.host_gpus).unsteady))
    coef = defaults() | measured
    for name, known in BY_NAME.items():
        coef[name] = min(max(coef[name], known.low), known.high)
    entry = FittedStack(
        measured_as=MeasuredAs(OURS),
        cluster=cluster.name,
        generation=generation_of(cluster.device),
        coefficients=coef,
        informed=dict.fromkeys((name for name in measured if name in TIME), 1.0),
        noise=half / SCATTER,
    )
    return Calibration(
        name=f"profile of {profile.host}", sources=("fourfold calibrate",), entries=(entry,)
    )
