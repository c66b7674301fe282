"""Does the engine refuse what it would otherwise silently do in another way?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.engine.parallel.order import refuse_unbuilt
from fourfold.errors import UserError
from fourfold.spec import Batch, Layout, Policy, RunSpec, catalog

SPEC = RunSpec(
    model=catalog.model("llama-tiny"),
    gpus=4,
    layout=Layout(shard=2, tp=2),
    batch=Batch(seq_len=16, micro_batch=1, global_batch=4),
    policy=Policy(precision="fp32"),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "interleaved"),
        ("schedule", "zero-bubble"),
        ("virtual_stages", 2),
        ("precision", "fp8"),
        ("async_tp", True),
        ("offload", "activations"),
        ("overlap_grad_reduce", False),
        ("overlap_param_gather", False),
    ],
)
def test_choices_the_engine_does_not_run_are_refused_by_name(field: str, value: Any) -> None:
    refuse_unbuilt(SPEC)
    with pytest.raises(UserError, match=rf"policy\.{field}=.*does not run it yet"):
        refuse_unbuilt(replace(SPEC, policy=replace(SPEC.policy, **{field: value})))
