"""A hardware profile as a calibration: measured rates where the machine was measured, defaults
elsewhere, and an interval as wide as that deserves.

What a profile of a CPU says of our engine there, as coefficients of cost/step/rates.py: of
one rank while as many as the host has do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, log1p

from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.fit.coefficients import BY_NAME, TIME, defaults
from fourfold.cost.fit.interval import SCATTER
from fourfold.result.points import (
    CPU_FLASH,
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    HostPoint,
)
from fourfold.result.profile import HardwareProfile, coefficients_of, peak_of
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import Cluster

# As collectives are called in a step, by what they are called in formulas.
_CALLED = {"gather": "all-gather", "send": "p2p"}


def host_coefficients(profile: HardwareProfile, ranks: int) -> dict[str, float]:
    """None where the profile is of a GPU or older than these measurements."""
    if not profile.hosts:
        return {}
    near = point_of(profile, ranks)
    slower = max(1.0, ranks / near.ranks)  # more ranks than measured: the cores are full already
    flop_s, operand_s = product_costs(near.products)
    peak = peak_of(profile, "fp32", ranks)
    assert peak is not None, "products of every profile are in fp32 too"
    attention = near.attention
    coef = {
        "flash": attention.flops_per_s / slower / peak / _flash_shape(attention),
        "cpu_product": 1.0 / (peak * slower * flop_s),
        "cpu_operand_s": slower * operand_s,
        "cpu_element_s": slower * near.element_s / near.element_bytes,
        "cpu_update_s": slower * near.update_s / near.update_params,
        "cpu_layer_s": slower * near.layer_s,
        "cpu_share": min(1.0, profile.cores / ranks),
        "cp_attention": 1.0,  # a CPU's kernel loses nothing where a ring cuts rows
    }
    for name, op in _CALLED.items():
        start_s, byte_s = _line(profile.collectives, op, ranks, profile.launch_s)
        coef |= {f"cpu_{name}_s": start_s, f"cpu_{name}_byte_s": byte_s}
    hops = near.ranks - 1
    gather_s = hops * coef["cpu_gather_s"]
    # A wrapped layer gathers before either pass and scatters once.
    sent = near.wrapped_s - near.layer_s - 3.0 * gather_s
    coef["cpu_wrap_s"] = slower * max(profile.launch_s, sent / 3.0)
    coef["cpu_call_s"] = slower * max(profile.launch_s, near.called_s - gather_s)
    return coef


def point_of(profile: HardwareProfile, ranks: int) -> HostPoint:
    """The measured number of ranks nearest to the asked one; a CPU's profile has some."""
    return min(profile.hosts, key=lambda point: (abs(point.ranks - ranks), point.ranks))


def _flash_shape(point: AttentionPoint) -> float:
    """What cost/step/kernels.py leaves of the rate for short rows and small heads."""
    rows = point.seq_len / (point.seq_len + CPU_FLASH.forward_keys)
    return rows * min(1.0, 1.25 * point.head_size / (point.head_size + 32.0)) ** 0.5


def product_costs(points: Sequence[GemmPoint]) -> tuple[float, float]:
    """(seconds per FLOP, seconds per byte of operands) of products that take the sum of both: least
    squares of relative errors, neither below 0."""
    rows = [
        (2.0 * p.m * p.n * p.k / p.seconds, 4.0 * (p.m * p.k + p.n * p.k + p.m * p.n) / p.seconds)
        for p in points
    ]
    ff, fb, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    f, b = (sum(r[i] for r in rows) for i in (0, 1))
    det = ff * bb - fb * fb
    flop_s, byte_s = (f * bb - b * fb) / det, (b * ff - f * fb) / det
    if byte_s <= 0.0 or flop_s <= 0.0:
        return f / ff, 0.0
    return flop_s, byte_s


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
    measured = coefficients_of(profile)
    coef |= measured
    for name, value in coef.items():
        coef[name] = min(max(value, BY_NAME[name].low), BY_NAME[name].high)
    host, half = host_coefficients(profile, cluster.host_gpus), HALF_WIDTH[profile.device]
    if profile.hosts:
        unsteady = point_of(profile, cluster.host_gpus).unsteady
        half = hypot(_HOST_HALF_WIDTH, log1p(unsteady))
    entry = FittedStack(
        stack="fourfold",
        cluster=cluster.name,
        generation=generation_of(cluster.device),
        coefficients=coef | host,
        informed=dict.fromkeys((name for name in measured | host if name in TIME), 1.0),
        noise=half / SCATTER,
    )
    return Calibration(
        name=f"profile of {profile.host}", sources=("fourfold calibrate",), entries=(entry,)
    )
