"""Settings written for an engine are read back to the same layout, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.search import export
from fourfold.search.export.setup import SIZES, Setup
from fourfold.search.legal import Target, why_not
from fourfold.spec import catalog
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

MODEL = catalog.model("llama-3.1-8b")
SHAPE = tuple((name, getattr(MODEL, name)) for name in SIZES)


def setup(layout: str = "pp2 dp4 tp8", **policy) -> Setup:
    return Setup(
        layout=Layout.parse(layout),
        batch=Batch(seq_len=4096, micro_batch=2, global_batch=256),
        policy=Policy(**policy),
        host_gpus=8,
        shape=SHAPE,
    )


def told(engine: str, one: Setup) -> Setup:
    """The setup without what changes nothing: unused kinds, and sizes the file does not hold."""
    policy = one.policy
    if one.layout.cp == 1:
        policy = replace(policy, cp_kind="ring")
    if one.layout.tp == 1:
        policy = replace(policy, sequence_parallel=True)
    if one.layout.pp == 1:
        policy = replace(policy, schedule="1f1b", virtual_stages=1)
    if one.layout.dp == 1:
        policy = replace(policy, sharding="zero0")
    if engine == "megatron" and policy.zero == 0:
        policy = replace(policy, overlap_grad_reduce=False, overlap_param_gather=False)
    shape = () if engine in ("torchtitan", "torchrun") else SHAPE
    return replace(one, policy=policy, shape=shape)


@given(
    engine=st.sampled_from(export.ENGINES),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([(1, 1), (1, 2), (1, 8), (2, 4)]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 8]),
    micro=st.sampled_from([1, 2, 4]),
    policy=st.fixed_dictionaries(
        {
            "precision": st.sampled_from(["bf16-mixed", "fp16", "fp32", "fp8"]),
            "sharding": st.sampled_from(["zero0", "zero1", "zero2", "zero3"]),
            "sequence_parallel": st.booleans(),
            "cp_kind": st.sampled_from(["ring", "allgather", "ulysses"]),
            "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]),
            "virtual_stages": st.sampled_from([1, 2, 4]),
            "recompute": st.sampled_from(["none", "full", "selective", "every-2"]),
        }
    ),
)
def test_every_legal_setup_round_trips_or_is_refused(engine, pp, dp, cp, tp, micro, policy) -> None:
    layout = Layout(pp=pp, replicate=dp[0], shard=dp[1], cp=cp, tp=tp)
    batch = Batch(seq_len=4096, micro_batch=micro, global_batch=64)
    stack = "fourfold" if engine == "torchrun" else engine
    if why_not(MODEL, layout, batch, Policy(**policy), Target(stack=stack)):
        return
    one = Setup(layout=layout, batch=batch, policy=Policy(**policy), host_gpus=8, shape=SHAPE)
    try:
        text = export.write(engine, one)
    except UserError as refused:
        saying = str(refused)
        if "has no setting for it; " in saying:
            return
        raise
    back = export.read(engine, text, layers=MODEL.layers)
    assert told(engine, back) == told(engine, replace(one, host_gpus=min(8, layout.world)))
    if (dp, cp) != ((1, 1), 1) or policy["sharding"] == "zero0":
        assert back.layout == layout


def test_megatron_speaks_its_own_words() -> None:
    one = replace(
        setup("pp8 dp2 cp2 tp8", schedule="interleaved", virtual_stages=4, recompute="full"),
        batch=Batch(
            seq_len=4096,
            micro_batch=1,
            global_batch=256,
            ramp=Ramp(start=16, increment=16, samples=9000),
        ),
    )
    text = export.write("megatron", one)
    for line in (
        "--nnodes 32",
        "--tensor-model-parallel-size 8",
        "--pipeline-model-parallel-size 8",
        "--context-parallel-size 2",
        "--cp-comm-type p2p",
        "--num-virtual-stages-per-pipeline-rank 4",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--recompute-granularity full",
        "--rampup-batch-size 16 16 9000",
        "--num-query-groups 8",
        "--bf16",
    ):
        assert line in text.splitlines()
    assert export.read("megatron", text, layers=32) == one


@pytest.mark.parametrize(
    ("engine", "policy", "field"),
    [
        ("megatron", {"schedule": "zero-bubble"}, "policy.schedule"),
        ("megatron", {"recompute": "every-2"}, "policy.recompute"),
        ("torchtitan", {"sharding": "zero1"}, "policy.sharding"),
        ("torchtitan", {"sharding": "zero3", "precision": "fp8"}, "policy.precision"),
        ("nanotron", {"sharding": "zero3"}, "policy.sharding"),
        ("nanotron", {"recompute": "selective"}, "policy.recompute"),
    ],
)
def test_what_an_engine_cannot_say_is_refused(engine: str, policy: dict, field: str) -> None:
    with pytest.raises(UserError, match="has no setting for it") as caught:
        export.write(engine, setup(**policy))
    assert caught.value.field == field


def test_other_engines_need_whole_micro_batches() -> None:
    odd = replace(setup(), batch=Batch(seq_len=4096, micro_batch=3, global_batch=256))
    with pytest.raises(UserError, match="must divide it for megatron"):
        export.write("megatron", odd)
    assert export.read("torchrun", export.write("torchrun", odd), layers=32).batch == odd.batch


def test_broken_files_are_user_errors() -> None:
    for engine in export.ENGINES:
        for text in (
            "",
            "--seq-length x --micro-batch-size 1",
            "parallelism:\n  dp: x\n",
            "a = 'b",
        ):
            with pytest.raises(UserError):
                export.read(engine, text, layers=32)
    with pytest.raises(UserError, match="one of megatron, torchtitan, nanotron, torchrun"):
        export.write("jax", setup())


def test_our_own_run_file_is_a_run_file() -> None:
    from fourfold.spec import codec
    from fourfold.spec.run import RunSpec

    text = export.write("torchrun", replace(setup(), model="llama-3.1-8b"))
    spec = codec.load(RunSpec, codec.parse_toml(text))
    assert spec.model == MODEL
    assert spec.layout == setup().layout
    assert export.read("torchrun", text, layers=32).model == "llama-3.1-8b"
