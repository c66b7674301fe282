"""What of an answer is its JSON, which of it are rows, and how a table names its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from fourfold.output import Output, text_of
from fourfold.spec import Device, catalog, codec
from fourfold.text_table import named, table
from fourfold.verbs import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    step_s: float
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Answer):
    TABLE, SHARED = "runs", ("of=model", "note")
    model: str = "m"
    note: str | None = None
    kept: Annotated[int, codec.HIDDEN] = 7
    best: Annotated[Speed | None, codec.INLINE] = None
    fault: Annotated[str | None, codec.JsonForm(key="break", null=True)] = None
    runs: tuple[Speed, ...] | dict[str, Speed] = ()


RUNS = (Speed(step_s=1.5), Speed(step_s=float("nan"), loss=2.0))


def test_answer_fields_are_its_json_in_their_order() -> None:
    plain = Measured(best=Speed(step_s=3.0), runs=RUNS).plain()
    runs = [{"step_s": 1.5}, {"step_s": None, "loss": 2.0}]
    assert plain == {"model": "m", "step_s": 3.0, "break": None, "runs": runs}
    assert [*plain] == ["model", "step_s", "break", "runs"]


def test_answer_rows_are_its_table_after_shared_columns() -> None:
    assert Measured(runs=RUNS).rows() == [
        {"of": "m", "step_s": 1.5},
        {"of": "m", "step_s": None, "loss": 2.0},
    ]
    output = Output.of(Measured(runs=RUNS, note="n"), list)
    assert text_of(output, "csv") == "of,note,step_s,loss\nm,n,1.5,\nm,n,,2.0"


def test_answer_rows_of_a_dict_name_each() -> None:
    @dataclass(frozen=True, slots=True)
    class ByName(Answer):
        TABLE, NAMES = "runs", "run"
        runs: dict[str, Speed]

    assert ByName({"a": RUNS[0]}).rows() == [{"run": "a", "step_s": 1.5}]


def test_answer_json_of_a_list_is_the_list() -> None:
    @dataclass(frozen=True, slots=True)
    class Runs(Answer):
        TABLE, LIST = "runs", True
        runs: tuple[Speed, ...]

    assert Runs(RUNS[:1]).plain() == Runs(RUNS[:1]).rows() == [{"step_s": 1.5}]


def test_answer_without_a_table_is_one_row_with_its_own_json() -> None:
    @dataclass(frozen=True, slots=True)
    class Own(Answer):
        value: int

        def plain(self) -> dict[str, Any]:
            return {"twice": 2 * self.value}

    assert Own(4).rows() == [{"twice": 8}]


def test_field_as_a_file_has_schema_and_type() -> None:
    @dataclass(frozen=True, slots=True)
    class Gpu(Answer):
        device: Annotated[Device, codec.AS_FILE]

    device = catalog.device("h100-80gb")
    assert Gpu(device).plain() == codec.dump(device)
    assert codec.from_json(Device, codec.json_of(Gpu(device).plain())) == device


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("step_s:ms.2f", "1500.00"),
        ("bytes:GiB.1f", "2.0"),
        ("rate:GB,.6g", "1,234.5"),
        ("rate:T.3f", "1.234"),
        ("share:pct.1f", "12.5"),
        ("rate:g", "1.2345e+12"),
        ("links.-1.name", "outer"),
        ("links.0.ranks:,", "8"),
        ("words", "a, b"),
        ("nothing:ms.1f", "-"),
        ("nothing.deeper:.1f", "-"),
    ],
)
def test_column_writes_its_number_in_a_unit(column: str, cell: str) -> None:
    row = {"step_s": 1.5, "bytes": 2**31, "rate": 1.2345e12, "share": 0.125, "nothing": None}
    row |= {"links": [{"ranks": 8, "name": "inner"}, {"name": "outer"}], "words": ("a", "b")}
    assert table([row], *named(column)).rows == [[cell]]
