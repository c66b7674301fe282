"""The calibrate job on this CPU: every kind of measurement is there and makes a usable cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.cost.fit.machine import coefficients_of
from fourfold.launch.local import run_job
from fourfold.result.job import Job, answer_file
from fourfold.result.profile import HardwareProfile, cluster_of
from fourfold.spec import codec
from fourfold.spec.cluster import Cluster


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> HardwareProfile:
    folder: Path = tmp_path_factory.mktemp("calibrate")
    options = (("device", "cpu"), ("quick", "true"), ("seconds", "1.5"))
    report = run_job(Job(job="calibrate", ranks=2, options=options), folder)
    assert report.outcome == "ok", report.failure
    return codec.from_json(HardwareProfile, answer_file(folder, 0).read_text())


def test_everything_was_measured(profile: HardwareProfile) -> None:
    assert {"fp32", "bf16"} <= {point.dtype for point in profile.gemms}
    assert {"flash", "unfused"} == {point.kernel for point in profile.attentions}
    assert {point.ranks for point in profile.shared} == {1, 2}
    assert all(point.layer_s > point.start_s > 0 for point in profile.shared)
    ops = {point.op for point in profile.collectives}
    assert ops == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p"}
    assert profile.launch_s < profile.layer_launch_s
    assert profile.sustained_flops_per_s > 0
    assert profile.memory_bytes > 2**28


def test_rates_are_of_this_world(profile: HardwareProfile) -> None:
    """No CPU is this fast: a wrong unit falls out. How slow it may be is up to its neighbours."""
    peak = profile.peak("fp32")
    assert peak is not None
    assert 0 < peak < 1e14
    assert 0 < profile.memory_bytes_per_s < 1e13


def test_the_cluster_can_be_planned_for(profile: HardwareProfile) -> None:
    cluster = cluster_of(profile, 2)
    assert codec.from_toml(Cluster, codec.to_toml(cluster)) == cluster
    assert cluster.device.id == "cpu-this"
    assert set(coefficients_of(profile)) == {
        "engine",
        "product",
        "align",
        "host_s",
        "attention",
        "nvlink",
        "latency_s",
    }
