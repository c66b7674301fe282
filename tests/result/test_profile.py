"""A profile's raw seconds -> rates, a device shared by ranks, a link and starting numbers."""

from __future__ import annotations

import pytest

from fourfold.cost.fit.machine import coefficients_of
from fourfold.errors import UserError
from fourfold.result.profile import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    HardwareProfile,
    SharedPoint,
    cluster_of,
    device_of,
    link_of,
)
from fourfold.spec import codec


def make(**fields: object) -> HardwareProfile:
    plain: dict = {
        "device": "cpu", "device_name": "a cpu", "host": "here", "torch": "2.13", "made_at": "2026",
        "measured_s": 1.0, "cores": 8, "units": 8, "memory_bytes": 16 * 2**30, "power_w": 0.0,
        "gemms": (
            GemmPoint(dtype="fp32", m=1000, n=1024, k=1000, seconds=0.02),
            GemmPoint(dtype="fp32", m=1024, n=1024, k=1024, seconds=2 * 1024**3 / 2e11),
        ),
        "attentions": (
            AttentionPoint(
                kernel="flash", dtype="fp32", batch=1, heads=2, head_size=64, seq_len=512,
                forward_s=0.01, backward_s=0.02,
            ),
        ),
        "copies": (
            CopyPoint(moved_bytes=2**20, seconds=1e-6),
            CopyPoint(moved_bytes=2**28, seconds=2**28 / 1e10),
        ),
        "launch_s": 5e-6, "layer_launch_s": 1e-3, "burst_flops_per_s": 2e11,
        "sustained_flops_per_s": 1.6e11, "sustained_over_s": 10.0,
        "shared": (
            SharedPoint(ranks=1, dtype="fp32", flops_per_s=1.9e11, bytes_per_s=2e10,
                        layer_s=0.02, start_s=1e-3),
            SharedPoint(ranks=4, dtype="fp32", flops_per_s=4.75e10, bytes_per_s=6e9,
                        layer_s=0.08, start_s=4e-3),
        ),
        "collectives": tuple(
            CollectivePoint(op="all-reduce", ranks=4, payload_bytes=size, seconds=seconds)
            for size, seconds in ((1024, 6e-4), (2**24, 6e-4 + 0.02))
        ),
    }  # fmt: skip
    return HardwareProfile(**(plain | fields))


def test_rates() -> None:
    profile = make()
    assert profile.peak("fp32") == pytest.approx(2e11)
    assert profile.peak("bf16") is None
    assert profile.memory_bytes_per_s == pytest.approx(2e10)  # read and written, large copy only
    pairs = 2 * 512 * 512 / 2
    assert profile.attentions[0].flops_per_s == pytest.approx(14 * pairs * 64 / 0.03)


def test_a_cpu_is_shared_by_its_ranks() -> None:
    alone, one_of_four = device_of(make()), device_of(make(), 4)
    assert one_of_four.peak("fp32") == pytest.approx(alone.peak("fp32") / 4)
    assert one_of_four.memory_bytes * 4 == alone.memory_bytes
    assert one_of_four.memory_bytes_per_s == 6e9
    assert one_of_four.sms == 2
    with pytest.raises(UserError, match="has no known peak"):
        alone.peak("fp8")


def test_a_gpu_is_not_shared() -> None:
    profile = make(device="cuda", power_w=700.0)
    assert device_of(profile, 4).peak("fp32") == device_of(profile).peak("fp32")
    assert device_of(profile, 4).memory_bytes == profile.memory_bytes


def test_the_link_comes_from_all_reduces() -> None:
    rate, latency_s = link_of(make(), 4)
    assert rate == pytest.approx(2 * 3 / 4 * 2**24 / 0.02)
    assert latency_s == pytest.approx(1e-4)
    cluster = cluster_of(make(), 4)
    assert cluster.links[0].bytes_per_s == rate
    assert cluster_of(make(), 1).links[0].ranks == 1


def test_knobs_are_shares_of_what_was_measured() -> None:
    coef = coefficients_of(make())
    assert coef["product"] == pytest.approx(0.8)
    assert coef["host_s"] == 1e-3
    assert coef["latency_s"] == pytest.approx(1e-4)
    # 1000 misses 64 by 3 powers of two (8 divides it) and runs at 1.0e11 of 2e11.
    assert coef["align"] == pytest.approx((1 - (2 * 1000 * 1024 * 1000 / 0.02) / 2e11) / 3)


def test_profiles_round_trip() -> None:
    assert codec.from_json(HardwareProfile, codec.to_json(make())) == make()


@pytest.mark.parametrize(
    ("hosts", "ranks", "levels"),
    [
        ((), 2, [("host", 2, 1e9)]),
        ((2,), 4, [("host", 2, 1e9), ("network", 4, 0.5e9)]),
        # Measured on two hosts, described with eight of them.
        ((2,), 16, [("host", 2, 1e9), ("network", 16, 0.5e9)]),
        ((2, 4), 8, [("host", 2, 1e9), ("2 hosts", 4, 0.5e9), ("network", 8, 0.25e9)]),
        # Fewer ranks than a host has.
        ((2,), 1, [("host", 1, 1e10), ("network", 2, 0.5e9)]),
    ],
)
def test_links_between_hosts_are_levels(hosts, ranks: int, levels: list) -> None:
    """A ring of n moves 2 (n-1)/n of the payload; the smallest all-reduce is all latency."""

    def points(n: int, of_hosts: int, rate: float) -> list[CollectivePoint]:
        large_s = 2 * (n - 1) / n * 2**30 / rate
        times = {2**10: 1e-4, 2**30: large_s + 1e-4}
        facts = {"op": "all-reduce", "ranks": n, "hosts": of_hosts}
        return [
            CollectivePoint(payload_bytes=size, seconds=s, **facts) for size, s in times.items()
        ]

    measured = points(2, 1, 1e9)
    for count in hosts:
        measured += points(count, count, 1e9 / count)
    shared = tuple(
        SharedPoint(ranks=n, dtype="fp32", flops_per_s=1e11, bytes_per_s=1e10) for n in (1, 2)
    )
    copies = (CopyPoint(moved_bytes=10**9, seconds=0.2),)
    cluster = cluster_of(make(collectives=tuple(measured), shared=shared, copies=copies), ranks)
    found = [(link.name, link.ranks, link.bytes_per_s) for link in cluster.links]
    assert found == [(name, size, pytest.approx(rate)) for name, size, rate in levels]
    assert cluster.gpus == ranks
