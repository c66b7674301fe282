"""Formats are what the report says, and fp16 survives overflow: looked at on real ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fourfold.engine.training.gradients import LossScaler, ScalerSettings
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy, running
from tests.engine.forked import findings


def looked(*checks: str) -> list[dict]:
    """What each of four ranks saw, by check."""
    return findings("precision_ranks.py", *checks)


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def ranks(request):
    return looked(request.param, "scaler", "fp8", "ramp")


def test_an_overflow_skips_the_step_on_every_rank_and_the_scale_recovers(ranks):
    for name, steps in ranks[0]["scaler"].items():
        for other in ranks[1:]:
            decisions = [(step["scale"], step["finite"]) for step in other["scaler"][name]]
            assert decisions == [(step["scale"], step["finite"]) for step in steps], name
        for rank in ranks:
            for step in rank["scaler"][name]:
                assert step["changed"] == step["finite"], name
                assert step["weights_finite"], name
        finite = [step["finite"] for step in steps]
        assert not any(finite[:6]), name
        assert sum(finite) >= 3, name
        assert steps[-1]["updates"] == sum(finite), name
        scales = [step["scale"] for step in steps]
        # It doubled after two good steps, where the second was not the last.
        assert any(b == 2 * a for a, b in pairwise(scales)) or sum(finite) == 3, name
        # The loss does not know the scale.
        assert all(3.0 < step["loss"] < 4.0 for step in steps), name


def policy_of(name: str) -> tuple[Policy, Layout]:
    layout, zero, precision = name.split()
    own = {"compute_dtype": "bf16", "optimizer_dtype": "bf16", "reduce_dtype": "bf16"}
    fields = own if precision == "own" else {"precision": precision}
    return Policy(sharding=zero, **fields), Layout.parse(layout)


@pytest.mark.slow
def test_real_tensors_have_the_formats_the_report_names():
    for name, seen in looked("few", "formats")[0]["formats"].items():
        policy, layout = policy_of(name)
        said = running(policy, layout)
        assert seen["weights"] == [said.weights], name
        assert seen["activations"] == [said.activations] == [said.products], name
        assert seen["grads"] == [said.grads], name
        assert seen["moments"] == [said.moments], name
        sent = dict(seen["sent"])
        if layout.dp == 1:
            # Norm weights over tensor ranks, in the format they are kept in; no data parallelism.
            assert said.reduce is said.copies is None
            assert sent == {"allreduce_": [said.weights]}
        elif policy.zero == 0:
            assert sent == {"allreduce_": [said.reduce]}, name
        else:
            assert sent.pop("_reduce_scatter_base_") == [said.reduce], name
            assert sent == ({"allreduce_": [said.copies]} if said.copies else {}), name


def test_fp8_trains_as_bf16_does(ranks):
    for formats in ranks[0]["fp8"].values():
        wide, narrow = formats["bf16-mixed"], formats["fp8"]
        assert wide["eights"] == 0
        # Six operands of three products, in two or three linears a layer at least, every step.
        assert narrow["eights"] >= 5 * 2 * 2 * 6
        for bf16, eight in zip(wide["losses"], narrow["losses"], strict=True):
            assert eight == pytest.approx(bf16, rel=0.01)
        assert narrow["losses"] != wide["losses"]
        assert narrow["losses"][-1] < narrow["losses"][0] - 0.02


def test_a_ramp_up_trains_as_one_process_does(ranks):
    for rank in ranks:
        for layout, seen in rank["ramp"].items():
            assert seen["loss"] < 1e-12, layout
            assert seen["param"] < 1e-9, layout
    # 4 sequences for 3 steps (10, and what is left of a step), 6 for 2, then 8.
    assert ranks[0]["ramp"]["dp2x2"]["sizes"] == [[1]] * 3 + [[2]] * 2 + [[2]] * 3
    assert ranks[3]["ramp"]["dp2x2"]["sizes"] == [[1]] * 5 + [[2]] * 3
    assert ranks[0]["ramp"]["pp2 dp2"]["sizes"] == [[2]] * 3 + [[2, 1]] * 2 + [[2, 2]] * 3
    for layout in set(ranks[0]["ramp"]) - {"dp2x2", "pp2 dp2"}:
        assert ranks[0]["ramp"][layout]["sizes"] == [[2] * 2] * 3 + [[2] * 3] * 2 + [[2] * 4] * 3


def test_the_scale_halves_doubles_and_collapses():
    scaler = LossScaler(ScalerSettings(initial=4.0, interval=2, largest=8.0), torch.device("cpu"))

    def after(norm: float) -> float:
        scaler.update(scaler.overflow(torch.tensor(norm)))
        return float(scaler.scale)

    assert [after(1.0), after(1.0), after(1.0), after(1.0), after(1.0)] == [4.0, 8.0, 8.0, 8.0, 8.0]
    assert [after(float("inf")), after(1.0), after(float("nan"))] == [4.0, 4.0, 2.0]
    kept = scaler.scalars()
    assert [after(float("inf")), after(float("inf"))] == [1.0, 0.5]
    assert scaler.collapsed()
    scaler.restore(kept)
    assert not scaler.collapsed()
    assert [after(1.0), after(1.0)] == [2.0, 4.0]
