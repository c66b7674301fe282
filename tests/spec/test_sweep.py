"""Expansion of sweeps: any field is an axis, conditions drop, refusals carry their reason."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.errors import UserError
from fourfold.spec import codec, texts
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import expand, path_of, read_sweep

BASE: dict[str, Any] = {
    "model": "llama-tiny",
    "gpus": 4,
    "batch": {"seq_len": 64, "micro_batch": 1, "global_batch": 16},
    "policy": {"precision": "fp32"},
}


def sweep(text: str, **fields: Any):
    return expand(read_sweep({**BASE, **fields, "sweep": texts.parse_toml(text)}))


def test_the_product_in_order() -> None:
    found = sweep("tp = [1, 2]\nmicro_batch = [2, 3]")
    specs = [c.spec for c in found.combinations]
    axes = [(s.layout.tp, s.layout.dp, s.batch.micro_batch) for s in specs]
    assert axes == [(1, 4, 2), (1, 4, 3), (2, 2, 2), (2, 2, 3)]
    assert (found.total, found.dropped, found.same) == (4, 0, 0)
    assert found.combinations[0].label == "tp=1 micro_batch=2"


def test_any_field_is_an_axis() -> None:
    text = """
    model = ["llama-tiny", "mpt-tiny"]
    "env.CUDA_LAUNCH_BLOCKING" = ["0", "1"]
    policy.recompute = ["none", "full"]
    layout = ["pp2 tp2", "dp4"]
    seed = [1]
    """
    found = sweep(text)
    assert found.total == 16
    last = found.combinations[-1].spec
    assert (last.model.name, dict(last.policy.env)) == ("mpt-tiny", {"CUDA_LAUNCH_BLOCKING": "1"})
    assert (last.policy.recompute, str(last.layout), last.seed) == ("full", "pp1 dp4 cp1 tp1", 1)
    assert sweep("env.X = ['1', '2']").total == 2
    shapes = [c.spec.model for c in sweep('"model.layers" = [1, 3]').combinations]
    assert [(m.name, m.layers) for m in shapes] == [
        ("llama-tiny layers=1", 1), ("llama-tiny layers=3", 3),
    ]  # fmt: skip
    assert sweep("micro_batch = ['auto', 2]").combinations[0].spec.batch.micro_batch == 0


def test_conditions_and_nodes_drop() -> None:
    text = "tp = [1, 2, 4]\nwhere = ['dp % 2 == 0']"
    assert [c.spec.layout.tp for c in sweep(text).combinations] == [1, 2]
    assert sweep(text).dropped == 1
    nodes = sweep("gpus = [8, 16, 32]\nmax_nodes = 2")
    assert [c.spec.gpus for c in nodes.combinations] == [8, 16]
    assert sweep("gpus = [8, 16]\nmax_nodes = 2\ngpus_per_node = 4").dropped == 1


def test_axes_that_do_not_fit_are_refused_or_dropped() -> None:
    found = sweep("tp = [1, 3]")
    assert [bool(c.spec.refused) for c in found.combinations] == [False, True]
    refused = found.combinations[1].spec
    assert "gpus=4 is not divisible by pp x cp x tp = 3" in refused.refused
    assert (refused.gpus, str(refused.layout)) == (4, "pp1 dp1 cp1 tp3")
    assert codec.from_json(RunSpec, codec.to_json(refused)) == refused
    assert sweep("tp = [1, 3]\nwhere = ['dp == ceil(dp)']").dropped == 1


def test_a_layout_as_text_may_be_impossible_too() -> None:
    found = sweep("layout = ['tp3', 'dp2 tp2', 'dp4 tp2']")
    assert [bool(c.spec.refused) for c in found.combinations] == [True, False, True]
    assert sweep("layout = ['tp3', 'dp2 tp2']\nwhere = ['dp == ceil(dp)']").dropped == 1
    assert sweep("layout = ['dp2 tp2', 'dp4 tp2']\nwhere = ['dp == 4']").dropped == 1


def test_conditions_on_predictions_are_left_to_who_predicts() -> None:
    found = sweep("tp = [1, 2]\nwhere = ['tp == 1', 'mem_gb < 70 or step_s < 1']")
    assert (found.total, found.dropped) == (1, 1)
    assert [one.text for one in found.foreseen] == ["mem_gb < 70 or step_s < 1"]


def test_the_same_run_is_listed_once() -> None:
    found = sweep("tp = [1, 1, 2]\nnote = ['a', 'b']")
    assert (found.total, found.same) == (2, 4)


def test_a_fault_strikes_where_it_should() -> None:
    fault = {"kind": "hang", "where": "tp == 2 and micro_batch == 3", "step": 1}
    found = sweep("tp = [1, 2]\nmicro_batch = [2, 3]", fault=fault)
    struck = [c.spec.fault for c in found.combinations]
    assert struck[:3] == [None, None, None]
    assert (struck[3].kind, struck[3].where) == ("hang", "")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tpp = [1]", "did you mean"),
        ("tp = []", "is empty"),
        ("precision = ['fp33']", "policy.precision"),
        ("tp = ['two']", "tp"),
        ("where = ['colour == 1']", "unknown name"),
        ("max_nodes = 0", "max_nodes"),
        ("'layout.tpp' = [1]", "tpp"),
        (
            "".join(f"{axis} = {[*range(1, 99)]}\n" for axis in ("seed", "steps", "tp", "warmup")),
            "more than",
        ),
    ],
)
def test_mistakes_are_named(text: str, word: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep(text)
    assert word in str(caught.value)


def test_a_file_without_axes_is_no_sweep() -> None:
    with pytest.raises(UserError, match="is missing"):
        read_sweep(BASE)


def test_paths() -> None:
    assert path_of("tp") == "layout.tp"
    assert path_of("micro_batch") == "batch.micro_batch"
    assert path_of("precision") == "policy.precision"
    assert path_of("env.A.B") == "policy.env.A.B"
    assert path_of("gpus") == "gpus"
