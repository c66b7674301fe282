"""One real release, which `.ci/run` installs: right layouts are equal, its known fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.conformance.cell import Cell
from fourfold.conformance.install import find, installed
from fourfold.conformance.lab import Lab
from fourfold.conformance.verdicts import examine

FOLDER = Path(__file__).parent.parent.parent / ".engines" / "lab"


@pytest.mark.slow
def test_a_release_is_right_and_wrong_where_it_is_known_to_be() -> None:
    if not installed(FOLDER):
        pytest.skip("fourfold engines install torchtitan==0.2.2 --engines .engines/lab")
    with Lab(find("torchtitan==0.2.2", FOLDER), limit_s=600.0) as lab:
        right = [examine(lab, Cell.parse(text)) for text in ("tp2", "dp2 fsdp")]
        wrong = examine(lab, Cell.parse("dp2"))
    assert [one.verdict for one in right] == ["equal", "equal"]
    assert max(one.difference or 1.0 for one in right) < 1e-5
    assert (wrong.verdict, wrong.resembles) == ("fault", "pytorch/torchtitan#2323")
    assert wrong.signature == ("gradients of every weight / DP (2)",)
