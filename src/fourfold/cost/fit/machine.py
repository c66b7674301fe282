"""A hardware profile as a calibration: measured rates where the machine was measured, defaults
elsewhere, and an interval as wide as that deserves."""

from __future__ import annotations

from math import hypot, log1p

from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.fit.coefficients import BY_NAME, defaults
from fourfold.result.cpu_profile import host_coefficients, point_of
from fourfold.result.profile import HardwareProfile, coefficients_of
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import Cluster

# Kernels alone were measured, no training step: twice the spread of a stack nobody measured. On
# CPUs by a GPU's formulas, which is all an older profile has, steps took 0.5 to 2.6 times the
# prediction.
HALF_WIDTH = {"cuda": 0.5, "cpu": 1.1}
# By formulas of their own on a quiet machine (docs/accuracy.md), as printed. What readings of one
# work differed by comes on top: runs will have such neighbours too.
_HOST_HALF_WIDTH = 0.2
# Copies run by the operating system, not by a device driver: no context, no communicator buffers.
_CPU_BASE_GIB = 0.1
_CPU_FIXED_S = 1e-3


def calibration_of(profile: HardwareProfile, cluster: Cluster) -> Calibration:
    """Coefficients of our own engine on the profiled machine, clipped to what the model allows."""
    coef = defaults()
    if profile.device == "cpu":
        coef |= {"base_gib": _CPU_BASE_GIB, "fixed_s": _CPU_FIXED_S, "micro_s": profile.launch_s}
    coef |= coefficients_of(profile)
    for name, value in coef.items():
        coef[name] = min(max(value, BY_NAME[name].low), BY_NAME[name].high)
    half = HALF_WIDTH[profile.device]
    if profile.hosts:
        unsteady = point_of(profile, cluster.host_gpus).unsteady
        half = hypot(_HOST_HALF_WIDTH, log1p(unsteady))
    entry = FittedStack(
        stack="fourfold",
        cluster=cluster.name,
        generation=generation_of(cluster.device),
        coefficients=coef | host_coefficients(profile, cluster.host_gpus),
        noise=half,
    )
    return Calibration(
        name=f"profile of {profile.host}", sources=("fourfold calibrate",), entries=(entry,)
    )
