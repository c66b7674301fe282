"""Does every type survive JSON and TOML, and does a mistake in a file name its field?"""

from __future__ import annotations

import dataclasses
import string
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.result.report import RunReport, StepReport
from fourfold.search.plan_answer import Choice
from fourfold.spec import catalog, codec, words
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.cluster import Cluster, Device
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import Fault, RunSpec
from fourfold.spec.sweep import expand, read_sweep
from fourfold.spec.words import BUNDLES, CP_KINDS, SCHEDULES, Dtype
from tests.sampling import examples

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
models = st.sampled_from(sorted(catalog.model_names())).map(catalog.model)
axes = st.permutations(("pp", "dp", "cp", "tp")).map(tuple)
sizes = st.integers(1, 64)
layouts = st.builds(Layout, pp=sizes, replicate=sizes, shard=sizes, cp=sizes, tp=sizes, order=axes)
ramps = st.builds(Ramp, start=st.just(8), increment=st.just(8), samples=st.integers(1, 10**6))
batches = st.builds(
    Batch,
    seq_len=st.integers(1, 10**6),
    micro_batch=st.integers(0, 64),
    global_batch=st.integers(2, 100).map(lambda n: 8 * n),
    ramp=st.none() | ramps,
)
dtypes = st.none() | st.sampled_from(typing.get_args(Dtype))
policies = st.builds(
    Policy,
    precision=st.sampled_from(sorted(BUNDLES)),
    grad_dtype=dtypes,
    sharding=st.sampled_from(("zero0", "zero1", "zero2", "zero3")),
    recompute=st.sampled_from(("none", "full", "selective", "every-3")),
    virtual_stages=st.integers(1, 8),
    compile=st.booleans(),
    env=st.dictionaries(
        st.text(string.ascii_uppercase, min_size=1, max_size=9), names.filter(str.isprintable)
    ).map(lambda table: tuple(sorted(table.items()))),
)


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    layout = draw(layouts.filter(lambda layout: layout.world <= 2**24))
    return RunSpec(
        model=draw(models),
        gpus=layout.world,
        layout=layout,
        batch=draw(batches),
        policy=draw(policies),
        seed=draw(st.integers(0, 2**63 - 1)),
        memory_limit=draw(st.none() | st.integers(1, 2**40)),
        step_limit_s=draw(st.floats(0.1, 1e6)),
        note=draw(names),
        fault=draw(st.none() | st.just(Fault(kind="hang", rank=1, step=2))),
    )


reports = st.builds(
    RunReport,
    spec=runs(),
    outcome=st.sampled_from(("ok", "oom", "hung")),
    environment=st.just((("torch", "2.13.0"),)),
    steps=st.lists(
        st.builds(StepReport, step=st.integers(0, 99), seconds=st.floats(0, 1e3), loss=st.none())
    ).map(tuple),
)


@pytest.mark.parametrize("values", [models, layouts, batches, policies, runs(), reports], ids=str)
def test_json_and_toml_both_ways(values: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=examples(60))
    @given(values)
    def check(value: Any) -> None:
        for write, read in ((codec.to_json, codec.from_json), (codec.to_toml, codec.from_toml)):
            again = read(type(value), write(value))
            assert again == value
            assert hash(again) == hash(value)

    check()


@pytest.mark.parametrize("name", catalog.cluster_names())
def test_every_cluster_and_device_round_trips(name: str) -> None:
    cluster = catalog.cluster(name)
    assert codec.from_toml(Cluster, codec.to_toml(cluster)) == cluster
    assert codec.from_json(Device, codec.to_json(cluster.device)) == cluster.device


@given(layouts)
def test_layout_prints_and_parses(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    ranks = {tuple(layout.coordinates(rank).items()) for rank in range(min(layout.world, 512))}
    assert len(ranks) == min(layout.world, 512)


@given(
    layouts,
    st.sampled_from(CP_KINDS),
    st.sampled_from(SCHEDULES),
    st.integers(1, 16),
    st.integers(1, 64),
)
def test_printed_layout_reads_back_to_itself(layout, cp_kind, schedule, virtual, micro) -> None:
    policy = Policy(cp_kind=cp_kind, schedule=schedule, virtual_stages=virtual)
    choice = Choice(layout=layout, policy=policy, micro_batch=micro)
    text = f"{choice}, micro batch {micro}, zero1, recompute norm+act"
    table = words.with_layout_words({"layout": text})
    assert Layout.parse(table["layout"]) == layout
    policy = codec.decode(Policy, table["policy"])
    read = Choice(layout=layout, policy=policy, micro_batch=table["batch"]["micro_batch"])
    assert str(read) == str(choice)
    assert (read.micro_batch, policy.sharding, policy.recompute) == (micro, "zero1", "norm+act")


def test_layout_text_must_agree_with_the_fields_it_decides() -> None:
    base = {"model": "llama-tiny", "gpus": 4, "batch": {"seq_len": 64, "global_batch": 8}}
    layout = "pp2 dp2 cp1 tp1 v2"
    assert codec.load(RunSpec, {**base, "layout": layout}).policy.virtual_stages == 2
    with pytest.raises(UserError, match=r"contradicts policy\.virtual_stages = 4"):
        codec.load(RunSpec, {**base, "layout": layout, "policy": {"virtual_stages": 4}})
    with pytest.raises(UserError, match="says virtual_stages 2 and 3"):
        codec.load(RunSpec, {**base, "layout": f"{layout} v3"})


def test_sweep_reads_printed_layouts_as_base_and_axis() -> None:
    base = {"model": "llama-tiny", "gpus": 4, "batch": {"seq_len": 64, "global_batch": 8}}
    texts = ["pp2 dp2 cp1 tp1 v2", "pp1 dp2 cp2 tp1 ulysses"]
    varied = expand(read_sweep({**base, "sweep": {"layout": texts}})).combinations
    policies = [combination.spec.policy for combination in varied]
    assert [(policy.virtual_stages, policy.cp_kind) for policy in policies] == [
        (2, "ring"),
        (1, "ulysses"),
    ]
    fixed = expand(read_sweep({**base, "layout": "pp2 tp1 v2", "sweep": {"tp": [1, 2]}}))
    assert [one.spec.policy.virtual_stages for one in fixed.combinations] == [2, 2]


def test_layout_text_of_the_documentation() -> None:
    layout = Layout.parse("pp2 dp2x4 cp1 tp8")
    assert (layout.pp, layout.replicate, layout.shard, layout.tp, layout.world) == (2, 2, 4, 8, 128)
    assert Layout.parse("dp8").shard == 8
    assert str(Layout(shard=8)) == "pp1 dp8 cp1 tp1"


@pytest.mark.parametrize("cls", [ModelShape, Layout, Batch, Policy, RunSpec, Device, Cluster])
def test_unknown_fields_are_refused_with_the_nearest(cls: type) -> None:
    field = next(field.name for field in dataclasses.fields(cls) if field.name != "type")
    with pytest.raises(UserError, match=r"unknown field.*did you mean"):
        codec.load(cls, {"gpus": 1, f"{field}x": 1} if cls is RunSpec else {f"{field}x": 1})


def test_a_newer_file_is_refused_and_says_so() -> None:
    with pytest.raises(UserError, match="newer fourfold"):
        codec.load(Batch, {"schema": 99, "seq_len": 1})


@given(runs(), names)
def test_run_id_ignores_notes_and_defaults_only(run: RunSpec, note: str) -> None:
    assert dataclasses.replace(run, note=note, tag="a tag").run_id == run.run_id
    assert dataclasses.replace(run, seed=(run.seed + 1) % 2**63).run_id != run.run_id
    assert codec.from_json(RunSpec, codec.to_json(run)).run_id == run.run_id


# Fields added to shapes and policies since must not make old runs strangers.
_KNOWN_IDS = {
    "mpt-7b": "b08219b023e84e78", "gpt-3-175b": "b7b4b966f1a3f34b",
    "bloom-176b": "7e46e4c4317b1096", "llama-2-7b": "87bb892842cc1170",
    "llama-3.1-8b": "954659d8f9eb1927", "llama-3.2-1b": "296f0442956fe81d",
    "nemotron-4-15b": "246e80f87531b896", "llama-tiny": "43f637d620a6467d",
    "bloom-tiny": "89595d97b5364d3e",
}  # fmt: skip


@pytest.mark.parametrize("name", _KNOWN_IDS)
def test_a_run_of_a_known_model_keeps_its_id(name: str) -> None:
    assert RunSpec(model=catalog.model(name), gpus=1).run_id == _KNOWN_IDS[name]


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 64))
def test_no_sequence_is_lost(global_batch: int, micro_batch: int, dp: int) -> None:
    batch = Batch(seq_len=8, micro_batch=micro_batch, global_batch=global_batch)
    shares = batch.shares(dp)
    assert sum(shares) == global_batch
    assert sum(sum(batch.micro_sizes(share)) for share in shares) == global_batch
    assert batch.micro_count(dp) == len(batch.micro_sizes(shares[0]))
