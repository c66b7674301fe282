"""Layouts of the lab as words: read, written, sampled."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold.conformance.cell import Cell, candidates
from fourfold.conformance.install import Release
from fourfold.conformance.verdicts import COLUMNS, Verdict, known_reports, resembling
from fourfold.errors import UserError
from fourfold.output import table_csv
from fourfold.spec.engine import ADAPTERS
from fourfold.verbs import conformance
from fourfold.verbs.conformance import Conformance, joined, read_matrix
from fourfold.verbs.run_requests import VerifyRequest


def test_words_are_read_back() -> None:
    for cell in itertools.islice(candidates(4), 0, None, 7):
        assert Cell.parse(str(cell)) == cell
        assert cell.world == 4
    assert str(Cell.parse("tp2, dp2x2 fsdp")) == "dp2x2 tp2 fsdp"
    assert Cell.parse("dp4 zero1").shards == 4
    assert Cell.parse("pp2 dp2 tp2 sp experts").alone() == Cell.parse("experts")


@pytest.mark.parametrize("text", ["tp", "tp2 tp2", "pp2x2", "tp0", "zero9", "sp sp", "tp2.5"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"word|twice"):
        Cell.parse(text)


def test_every_cell_of_the_matrix_is_one() -> None:
    for texts in COLUMNS.values():
        assert all(not Cell.parse(text).illegal() for text in texts)
    assert Cell.parse("ep2").illegal()
    assert Cell.parse("dp2 experts ep4").illegal()


def test_flags_of_our_own_proof_do_not_go_with_another_engine() -> None:
    with pytest.raises(UserError, match="does not go with --engine"):
        fourfold.conform(VerifyRequest(engine="fourfold", layout="dp2", precision="bf16"))
    with pytest.raises(UserError, match="has the word 'tpp'"):
        fourfold.conform(VerifyRequest(engine="fourfold", layout="tpp"))


def test_releases_find_their_adapter_and_faults_their_report() -> None:
    releases = [Release("torchtitan", version, "") for version in ("0.2.2", "0.3.0", "1.0")]
    files = [release.adapter_path.name for release in releases]
    assert files == ["adapter_02.py", "adapter_03.py", "adapter_03.py"]
    for folder, adapter in ADAPTERS.values():
        files = (adapter.file, *adapter.below.values())
        assert all(Path(folder, f"{file}.py").is_file() for file in files)
    said = ("gradients of every weight / DP (2)",)
    assert resembling("torchtitan", Cell.parse("dp2"), said) == "pytorch/torchtitan#2323"
    assert not resembling("megatron-core", Cell.parse("dp2"), said)
    assert all({"name", "engine", "layout", "says"} == {*one} for one in known_reports())


def test_a_matrix_keeps_releases_that_only_its_sheet_has() -> None:
    def matrix(version: str, **kw: Any) -> Conformance:
        one = Verdict(engine="x", version=version, cell="dp2", world=2, seed=1, **kw)
        return Conformance(verdicts=(one,), columns=("dp",))

    fault = {"verdict": "fault", "difference": 0.5, "copies": math.inf, "hidden": True}
    first = matrix("1.0", signature=("norm 1, 2: q left out", "copies differ"), **fault)
    assert read_matrix(table_csv(first.rows())) == first
    both = joined(first, matrix("2.0", verdict="refused", why="no"))
    assert [one.version for one in both.verdicts] == ["1.0", "2.0"]
    again = joined(both, matrix("1.0", verdict="equal"))
    assert [one.verdict for one in again.verdicts] == ["refused", "equal"]
    assert read_matrix("") == Conformance(verdicts=())
    with pytest.raises(UserError, match="no matrix"):
        read_matrix("a,b\n1,2\n")


def test_torch_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def require_torch() -> None:
        raise UserError("needs torch")

    monkeypatch.setattr(conformance, "require_torch", require_torch)
    with pytest.raises(UserError, match="needs torch"):
        fourfold.conform(VerifyRequest(engine="fourfold", layout="dp2"))
    with pytest.raises(UserError, match="needs torch"):
        fourfold.matrix(conformance.EnginesRequest(names=("fourfold",)))
    with pytest.raises(UserError, match="needs torch"):
        fourfold.install_engines(conformance.EnginesRequest(names=("deepspeed",)))
    with pytest.raises(UserError, match="unknown engine"):
        fourfold.install_engines(conformance.EnginesRequest(names=("deepsped",)))
