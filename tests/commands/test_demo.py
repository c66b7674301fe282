"""Does the demo plan sensibly from a profile, and does the whole of it run?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.cost.fit import calibration
from fourfold.cost.fit.coefficients import BY_NAME
from fourfold.cost.fit.machine import calibration_of
from fourfold.events import ignore
from fourfold.result.profile import HardwareProfile, cluster_of
from fourfold.search.legal import Target, why_not
from fourfold.spec import codec
from fourfold.verbs.calibrate import _plan, scene
from tests.result.test_profile import make


@pytest.fixture
def profile() -> HardwareProfile:
    return make(cores=4, units=4)


def test_a_profile_becomes_a_calibration_within_the_knobs_limits(profile: HardwareProfile) -> None:
    (entry,) = calibration_of(profile, cluster_of(profile, 4)).entries
    assert entry.stack == "fourfold"
    assert entry.coefficients["host_s"] == pytest.approx(1e-3)
    for name, known in BY_NAME.items():
        assert known.low <= entry.coefficients[name] <= known.high


def test_the_plan_is_legal_diverse_and_sorted(profile: HardwareProfile) -> None:
    small = scene(0)
    planned = _plan(small, cluster_of(profile, small.ranks), profile, 3, ignore)
    assert len(planned) == 3
    assert len({str(spec.layout) for spec, _ in planned}) == 3
    first, *others = (said.step_s for _, said in planned)  # the first is what loses least
    assert others == sorted(others)
    assert first < 1.1 * min(others)
    for spec, said in planned:
        target = Target(gpus=spec.gpus)
        assert not why_not(spec.model, spec.layout, spec.batch, spec.policy, target)
        assert said.step_s_low < said.step_s < said.step_s_high


@pytest.mark.slow
def test_the_whole_demo_runs(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "demo")]
    assert main(["demo", "--layouts", "2", "--steps", "2", *out, "--format", "json"]) == 0
    page = (tmp_path / "demo" / "demo.html").read_text()
    assert "2 runs: llama-mini" in page
    runs = json.loads(capfd.readouterr().out)["runs"]
    assert [run["outcome"] for run in runs] == ["ok", "ok"]
    # The layout changes the speed, never the mathematics.
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=1e-5)


def test_plan_takes_the_files_calibrate_writes(profile, tmp_path, cli) -> None:
    cluster = cluster_of(profile, 4)
    (tmp_path / "this.toml").write_text(codec.to_toml(cluster))
    (tmp_path / "this.json").write_text(calibration.to_json(calibration_of(profile, cluster)))
    words = ["plan", "--model", "llama-mini", "--seq-len", "128", "--global-batch", "16"]
    words += ["--precision", "fp32", "--cluster", str(tmp_path / "this.toml")]
    assert "has kernels and links but no runs" in cli(
        *words, "--calibration", tmp_path / "this.json"
    )
