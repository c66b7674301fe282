"""Does every prediction say what it rests on?"""

from __future__ import annotations

from pathlib import Path

import pytest

import fourfold
from fourfold import PlanRequest
from fourfold.cost.fit.calibration import PROVENANCES

GOLDEN = Path(__file__).parent.parent / "golden"


def _first(**machine: object) -> str:
    request = PlanRequest(
        model="llama-3.1-8b", gpus=64, seq_len=8192, global_batch=128, layout="tp2 pp1 cp1", top=1,
        **machine,  # type: ignore[arg-type]
    )  # fmt: skip
    best = fourfold.plan(request).best
    assert best is not None
    return best.provenance


@pytest.mark.parametrize(
    ("word", "machine"),
    [
        ("near", {"gpu": "h100-80gb", "stack": "megatron"}),  # a twin of a measured cluster
        ("blended", {"gpu": "mi300x", "stack": "megatron"}),  # its engine elsewhere
        ("blended", {"gpu": "a100-80gb", "stack": "fourfold"}),  # other engines on such GPUs
        ("physics", {"gpu": "mi300x", "stack": "fourfold"}),
    ],
)
def test_a_plan_says_what_it_rests_on(word: str, machine: dict[str, object]) -> None:
    assert _first(**machine) == word


def test_rows_that_were_fitted_are_measured_and_larger_ones_near(tmp_path: Path) -> None:
    lines = (GOLDEN / "mpt.csv").read_text().splitlines()
    head = lines[0].split(",")
    other = lines[1].split(",")
    other[head.index("seq_len")] = str(64 * int(other[head.index("seq_len")]))
    broken = lines[1].split(",")
    broken[head.index("n_gpus")] = ""
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join([*lines[:2], ",".join(other), ",".join(broken)]))
    told = [row["provenance"] for row in fourfold.predict_table(str(rows)).rows()]
    assert told == ["measured", "near", ""]


def test_a_guess_of_this_machine_is_physics() -> None:
    spec = fourfold.RunSpec.from_plain({"model": "llama-tiny", "gpus": 1})
    told = fourfold.predict(spec).provenance
    assert told == "physics"
    assert told in PROVENANCES
