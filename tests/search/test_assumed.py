"""What the seconds of a plan with experts assume, and what a cluster says of its dispatchers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fourfold
from fourfold import events
from fourfold.errors import UserError
from fourfold.search.plan_answer import PlanAnswer
from fourfold.show.plan import page
from fourfold.spec import Cluster, RunSpec, catalog
from fourfold.verbs.export import export
from fourfold.verbs.requests import PlanRequest

EXPERTS = PlanRequest(
    model="qwen3-30b-a3b", cluster="nvidia-h100", gpus=16, seq_len=4096, global_batch=256,
    stack="megatron", top=3,
)  # fmt: skip


def cluster_with(*dispatchers: str) -> Cluster:
    return replace(catalog.cluster("nvidia-h100"), dispatchers=dispatchers)


@pytest.fixture(scope="module")
def plan() -> PlanAnswer:
    return fourfold.plan(EXPERTS)


def test_second_line_names_dispatcher_and_graphs(plan: PlanAnswer) -> None:
    assert plan.assumes is not None
    assert (plan.assumes.dispatcher, plan.assumes.graphs) == ("hybridep", "attention and router")
    second = page(plan)[1]
    assert isinstance(second, str)
    assert second.startswith("Assumes HybridEP and CUDA graphs of attention and router; without")
    assert "with all-to-all" in second
    assert "best then: " in second
    assert plan.plain()["assumes"]["text"] + "." == second


def test_search_with_all_to_all_shows_no_second_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PATIENCE_S", 0.0)
    monkeypatch.setattr(events, "EVERY_S", 0.0)
    seen: list[events.Event] = []
    fourfold.plan(EXPERTS, on_event=seen.append)
    shares = [event.share for event in seen if event.text.startswith("searching")]
    assert len(shares) > 1
    assert shares == sorted(shares)


def test_seconds_without_a_dispatcher_are_those_of_a_plan_without_it(plan: PlanAnswer) -> None:
    assert plan.assumes is not None
    assert plan.best is not None
    less = {one.what: one for one in plan.assumes.without}["alltoall"]
    plain = replace(EXPERTS, policy={"dispatcher": "alltoall"})
    assert less.best_s == fourfold.plan(plain).ranked[0].step_s
    decided = {name: getattr(plan.best.policy, name) for name in ("sharding", "recompute")}
    decided |= {"virtual_stages": plan.best.policy.virtual_stages}
    same = replace(
        plain, policy=plain.policy | decided, micro_batch=plan.best.micro_batch, explore=True
    )
    alone = fourfold.plan(replace(same, policy=decided, layout=plan.best.layout.to_plain()))
    assert alone.assumes is not None
    assert "with all-to-all" in alone.assumes.text
    assert "best then" not in alone.assumes.text  # which is the same
    row = fourfold.explain(same, plan.best.layout).explanation.row
    assert row is not None
    assert row.step_s == less.step_s > plan.best.step_s


def test_all_to_all_goes_without_a_graph_of_the_whole_step() -> None:
    policy = {"precision": "fp8", "scaling": "mx", "cuda_graph": True, "dispatcher": "hybridep"}
    request = replace(EXPERTS, cluster="nvidia-gb200", policy=policy, layout="ep4 pp1")
    answer = fourfold.plan(request)
    assert answer.assumes is not None
    assert answer.best is not None
    assert answer.assumes.graphs == "the whole step"
    assert "with all-to-all and without the graphs" in answer.assumes.text
    less = {one.what: one for one in answer.assumes.without}
    plain = policy | {"dispatcher": "alltoall"}
    with pytest.raises(UserError, match="needs dispatcher = hybridep"):
        fourfold.plan(replace(request, policy=plain))
    free = replace(request, policy=plain | {"cuda_graph": False})
    assert less["alltoall"].best_s == fourfold.plan(free).ranked[0].step_s
    assert answer.best.step_s < less["graphs"].step_s < less["alltoall"].step_s


def test_dense_plan_assumes_no_dispatcher() -> None:
    dense = fourfold.plan(replace(EXPERTS, model="llama-3.2-1b"))
    assert dense.assumes is None
    assert "assumes" not in dense.plain()


@pytest.mark.parametrize(
    ("built", "dispatcher"),
    [(("alltoall",), "alltoall"), (("deepep",), "deepep"), (("deepep", "hybridep"), "hybridep")],
)
def test_plan_assumes_only_dispatchers_of_the_cluster(
    built: tuple[str, ...], dispatcher: str
) -> None:
    request = replace(EXPERTS, cluster=cluster_with(*built), layout="ep4 pp2")
    answer = fourfold.plan(request)
    assert answer.assumes is not None
    assert answer.assumes.dispatcher == dispatcher
    asked = fourfold.plan(replace(EXPERTS, layout="ep4 pp2", policy={"dispatcher": dispatcher}))
    assert [row.step_s for row in answer.ranked] == [row.step_s for row in asked.ranked]


def test_predict_and_plan_agree_on_a_cluster_with_all_to_all_alone() -> None:
    request = replace(EXPERTS, cluster=cluster_with("alltoall"), layout="ep4 pp2")
    best = fourfold.plan(request).best
    assert best is not None
    spec = RunSpec(
        model=catalog.model("qwen3-30b-a3b"),
        gpus=16,
        layout=best.layout,
        batch=replace(fourfold.Batch(seq_len=4096, global_batch=256), micro_batch=best.micro_batch),
        policy=replace(best.policy, dispatcher="auto"),
    )
    predicted = fourfold.predict(spec, "megatron", cluster=cluster_with("alltoall"))
    assert predicted.step_s == best.step_s


def test_dispatcher_that_the_cluster_lacks_is_refused() -> None:
    request = replace(EXPERTS, cluster=cluster_with("deepep"), policy={"dispatcher": "hybridep"})
    with pytest.raises(UserError, match="is not among the dispatchers of nvidia-h100"):
        fourfold.plan(request)


def test_export_header_names_what_the_seconds_assume() -> None:
    written = export(replace(EXPERTS, export="megatron"))
    assert "# assumes HybridEP and CUDA graphs of attention and router" in written.files["run.sh"]


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama-3.1-8b"])
def test_unnamed_engine_is_priced_as_its_short_name_for_models_with_experts(model: str) -> None:
    """Where runs with experts were measured, the engine with most of them is the default, not the
    one with most dense runs, which may lack their dispatchers."""
    request = PlanRequest(
        model=model, cluster="nvidia-h100", gpus=16, seq_len=4096, global_batch=256, top=1
    )
    unnamed, megatron = (
        fourfold.plan(replace(request, stack=stack)).best for stack in (None, "megatron")
    )
    assert (unnamed == megatron) is (model == "qwen3-30b-a3b")
