"""Is a benchmark on a GPU compiled where nobody says otherwise, under a name of its own?"""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.verbs.bench import described

TABLE: dict[str, Any] = {"model": "llama-tiny", "gpus": 2}


def decided(monkeypatch: pytest.MonkeyPatch, gpus: int, **more: Any) -> RunSpec:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    return described(TABLE | more)


def test_a_run_on_gpus_is_compiled_and_its_name_says_so(monkeypatch):
    found = decided(monkeypatch, 2)
    assert found.policy.compile
    assert found.run_id == codec.load(RunSpec, TABLE | {"policy": {"compile": True}}).run_id
    assert found.run_id != codec.load(RunSpec, TABLE).run_id


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (1, {}),
        (0, {}),
        (2, {"device": "cpu"}),
        (2, {"policy": {"compile": False}}),
        (2, {"policy": {"schedule": "zero-bubble"}, "layout": "pp2"}),
    ],
)
def test_elsewhere_it_stays_as_it_is(monkeypatch, gpus, more):
    assert not decided(monkeypatch, gpus, **more).policy.compile


def test_what_a_table_says_stands(monkeypatch):
    assert decided(monkeypatch, 0, policy={"compile": True}).policy.compile
