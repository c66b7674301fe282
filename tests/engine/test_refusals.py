"""Does the engine refuse what it would otherwise silently do in another way?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fourfold.engine.jobs.build import require_runnable
from fourfold.errors import UserError
from fourfold.search.legal import require_legal
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from tests.specs import run_spec

SPEC = run_spec(
    "llama-tiny", "dp2 tp2", seq_len=16, global_batch=4, precision="fp32", sharding="zero2"
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "fp4"),
        ("async_tp", True),
        ("attention", "fused-softmax"),
        ("grad_dtype", "bf16"),
        ("overlap_grad_reduce", False),
        ("overlap_param_gather", False),
    ],
)
def test_choices_the_engine_does_not_run_are_refused_by_name(field: str, value: Any) -> None:
    require_legal(SPEC)
    with pytest.raises(UserError, match=rf"policy\.{field}=.*is not supported"):
        require_legal(replace(SPEC, policy=replace(SPEC.policy, **{field: value})))


def test_a_format_is_refused_only_where_another_would_run() -> None:
    """zero2 adds gradients up in the weights' format; copies are summed in that of gradients."""
    zero1 = replace(SPEC, policy=Policy(grad_dtype="bf16", reduce_dtype="bf16"))
    require_legal(zero1)
    for sharding, field in (("zero2", "grad_dtype"), ("zero3", "grad_dtype")):
        with pytest.raises(UserError, match=rf"policy\.{field}"):
            require_legal(replace(zero1, policy=replace(zero1.policy, sharding=sharding)))
    copies = Policy(sharding="zero0", reduce_dtype="bf16")
    with pytest.raises(UserError, match=r"policy\.reduce_dtype"):
        require_legal(replace(SPEC, policy=copies))
    require_legal(replace(SPEC, gpus=2, layout=Layout(tp=2), policy=copies))


def test_a_graph_needs_a_gpu_and_everything_on_it() -> None:
    graphed = replace(SPEC, policy=replace(SPEC.policy, cuda_graph=True))
    with pytest.raises(UserError, match=r"policy\.cuda_graph=.*needs a GPU"):
        require_runnable(graphed, torch.device("cpu"))
    require_runnable(graphed, torch.device("cuda"))
    offloaded = replace(graphed, policy=replace(graphed.policy, offload="activations"))
    with pytest.raises(UserError, match=r"policy\.cuda_graph=.*offload"):
        require_runnable(offloaded, torch.device("cuda"))


def test_what_a_rank_refuses_is_shown_as_a_bad_request(cli, tmp_path) -> None:
    asked = ("--model", "llama-tiny", "--gpus", "1", "--seq-len", "16", "--global-batch", "2")
    asked += ("--precision", "fp32", "--set", "policy.cuda_graph=true", "--set", "device=cpu")
    shown = cli("bench", *asked, "--runs", tmp_path, status=1)
    assert "build  policy.cuda_graph=True needs a GPU; use cuda_graph = false" in shown
