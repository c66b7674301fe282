"""Does `support` say of every engine and GPU what is known?"""

from __future__ import annotations

import pytest

import fourfold
from fourfold import SupportRequest
from fourfold.cost.fit.calibration import PROVENANCES
from fourfold.cost.stacks import EXPORTS
from fourfold.errors import UserError


def test_one_table_of_all_engines() -> None:
    found = fourfold.support(SupportRequest(model="llama-3.1-70b"))
    assert found.runs_here == "yes"
    assert {line.engine for line in found.lines} == {*EXPORTS}
    assert {line.priced for line in found.lines} <= {*PROVENANCES}
    by = {(line.engine, line.gpu): line for line in found.lines}
    assert by["megatron", "h100-80gb"].priced == "near"
    assert by["megatron", "h100-80gb"].rows > 0
    assert by["torchrun", "mi300x"].priced == "physics"
    assert by["megatron", "b200"].settings == "yes"
    assert "theta" in by["nanotron", "b200"].settings


def test_one_line_of_one_question() -> None:
    (line,) = fourfold.support(SupportRequest(model="mpt-7b", engine="deepspeed", gpu="h200")).lines
    assert (line.engine, line.gpu) == ("deepspeed", "h200")


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'megatron'"):
        fourfold.support(SupportRequest(model="mpt-7b", engine="megatrn"))
