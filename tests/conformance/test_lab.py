"""Does the lab name faults, and nothing else? On a small engine of the tests' own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.conformance.cell import Cell
from fourfold.conformance.install import find
from fourfold.conformance.lab import Lab
from fourfold.conformance.verdicts import examine, repro_script

SMALL = str(Path(__file__).parent / "small_engine.py")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(find(SMALL, Path("none"))) as made:
        yield made


def test_right_cells_are_equal_and_conventions_are_no_faults(lab: Lab) -> None:
    plain = examine(lab, Cell.parse("dp2 experts accumulate"), seed=3)
    assert (plain.verdict, plain.signature, plain.convention) == ("equal", (), "")
    assert plain.difference is not None
    assert plain.difference < 1e-5
    other = examine(lab, Cell.parse("dp2 accumulate uneven per-micro"))
    assert (other.verdict, other.convention) == ("equal", "mean of every micro batch")
    assert examine(lab, Cell.parse("tp2")).verdict == "refused"


def test_a_missing_reduction_is_named_and_its_script_runs_alone(lab: Lab, tmp_path: Path) -> None:
    found = examine(lab, Cell.parse("dp2 overlap"))
    assert found.verdict == "fault"
    assert any(line.startswith("gradients of norm off by") for line in found.signature)
    assert any(line.startswith("copies of norm differ in gradient") for line in found.signature)
    text = repro_script(lab.release, found)
    path = tmp_path / "fault.py"
    path.write_text(text.replace("for seed in (0, 1, 2)", "for seed in (0,)"))
    assert "fourfold." not in text
    assert "import fourfold" not in text
    done = subprocess.run(
        [sys.executable, "-I", str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.signature[0].partition(" off by")[0] in done.stdout, done.stderr
    assert "--- one rank, seed 0: done" in done.stdout


def test_an_engine_that_misbehaves_is_a_cell(lab: Lab) -> None:
    died = lab.ask(Cell.parse("dp2 sinks"))
    assert (died["end"], "SIGSEGV" in died["why"]) == ("crash", True)
    raised = examine(lab, Cell.parse("recompute"))
    assert (raised.verdict, "its adapter breaks" in raised.why) == ("blocked", True)
    lab.limit_s = 4.0
    assert lab.ask(Cell.parse("dp2 tied"))["end"] == "hang"
    lab.limit_s = 180.0
    assert lab.ask(Cell.parse("dp2"))["equal"]


def test_a_copy_that_is_wrong_with_one_rank_too_is_cleared_by_the_release(tmp_path: Path) -> None:
    (tmp_path / "loss_scale.py").write_text("SCALE = 3.0\n")
    with Lab(find(SMALL, Path("none"), str(tmp_path))) as lab:
        found = examine(lab, Cell.parse("dp2"))
        line = "gradients of every weight x 3"
        assert found.signature == (line, f"one rank of this copy, too: {line}")
        assert found.verdict == "fault"
        # Without a release that is right, the adapter may be as wrong as the engine.
        lab.release = replace(lab.release, source="")
        assert examine(lab, Cell()).verdict == "blocked"


@pytest.mark.parametrize(
    ("fault", "words"),
    [("doubled-loss", "gradients of every weight x"), ("lost-sum", "copies of")],
)
def test_planted_faults_are_named(lab, monkeypatch, fault, words) -> None:
    monkeypatch.setattr(lab, "fault", fault)
    told = lab.ask(Cell.parse("dp2"))
    assert any(line.startswith(words) for line in told["signature"]), told
    assert lab.ask(Cell.parse("dp2"), plant=False)["equal"]


def test_a_host_that_answers_nonsense_or_does_not_load_is_a_cell(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('no such kernel')\n")
    with Lab(find(str(broken), tmp_path)) as lab:
        found = examine(lab, Cell())
    assert (found.verdict, "no such kernel" in found.why) == ("blocked", True)
    liar = tmp_path / "liar.py"
    liar.write_text("import os\nos.write(3, b'[1, 2]\\n')\nos.write(4, b'[1, 2]\\n')\n")
    with Lab(find(str(liar), tmp_path)) as lab:
        assert examine(lab, Cell()).verdict == "blocked"
