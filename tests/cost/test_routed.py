"""Layers with experts: what is sent, who waits for whom, what the fullest rank keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.cost.columns import Columns
from fourfold.cost.count.params import model_params, mtp_params
from fourfold.cost.dispatch import DISPATCHERS, parts_met
from fourfold.cost.fit.accuracy import Result, score
from fourfold.cost.fit.calibration import blend, shipped
from fourfold.cost.fit.coefficients import defaults
from fourfold.cost.fit.pairs import pair_scores
from fourfold.cost.kinds import KINDS, active_weights
from fourfold.cost.memory.peak import memory
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.run import columns_of
from fourfold.cost.step.estimate import estimate
from fourfold.cost.step.pipeline import fill_share, in_flight
from fourfold.cost.step.traffic import copies, host_layer_s
from fourfold.cost.table.predict import predict
from fourfold.cost.table.reference import SCHEMA, read_table
from fourfold.cost.table.rows import Rows
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import match_engine
from fourfold.search.routed import beyond
from fourfold.search.rows.read import parse
from fourfold.show.plan import page
from fourfold.spec import catalog
from fourfold.spec.engine import MeasuredAs, engine_of
from fourfold.verbs.plan import plan
from fourfold.verbs.predict import predict_table
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest
from tests.specs import run_spec

MODELS = ("mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2", "llama4-maverick")


def run(model: str, layout: str, gpus: int, gpu: str = "h100-80gb", **policy: object) -> Columns:
    spec = run_spec(model, layout, seq_len=4096, global_batch=4 * gpus, **policy)
    cluster = usual_cluster(catalog.device(gpu), gpus)
    return columns_of([spec], cluster=cluster, engine=engine_of("megatron-bridge"))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_are_counted(name: str) -> None:
    c, model = run(name, "dp8", 8), catalog.model(name)
    layers = float((c.layers * sum(kind.count(c) for kind in KINDS.values()))[0])
    ends = 2 * model.vocab * model.hidden
    counted = model_params(model, 4096) + mtp_params(model)
    assert layers + ends == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_a_token_meets(name: str) -> None:
    c = run(name, "dp8 ep8", 8, routing="forced")
    products = [op for op in decoder_layer(c, c.micro) if op.kind.endswith("product")]
    flops = sum(
        2.0 * float(np.sum(op.m * op.n * op.k * op.groups * op.share))
        for op in products
        if op.phase == "forward"
    )
    assert flops == pytest.approx(2.0 * 4096 * float(active_weights(c)[0]), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "layout", "gpus", "each", "once"),
    [
        ("deepseek-v3", "dp64 ep64", 64, 7.00, 4.63),
        ("qwen3-235b-a22b", "dp32 ep32", 32, 6.00, 2.72),
        ("qwen3-30b-a3b", "dp16 ep16", 16, 4.00, 1.00),
    ],
)
def test_copies_of_a_token_that_cross_the_network(name, layout, gpus, each, once) -> None:
    """Eight GPUs a node: one for each choice on another node, or one for each other node."""
    for dispatcher, wanted in (("alltoall", each), ("deepep", once)):
        _, far = copies(run(name, layout, gpus, dispatcher=dispatcher))
        assert float(far[0]) == pytest.approx(wanted, abs=0.006)


def test_a_rack_is_one_domain() -> None:
    near, far = copies(run("deepseek-v3", "dp64 ep64", 64, gpu="gb200", dispatcher="hybridep"))
    assert float(far[0]) == 0.0 < float(near[0])
    assert float(parts_met(1, 256, 8)) == 1.0


def test_natural_routing_takes_longer_and_more_memory_than_forced() -> None:
    even = run("qwen3-235b-a22b", "pp4 dp8 ep8", 32, routing="forced")
    spread = [run("qwen3-235b-a22b", "pp4 dp8 ep8", 32, imbalance=x) for x in (0.5, 1.0, 2.0)]
    seconds = [float(estimate(c, defaults()).step_s[0]) for c in (even, *spread)]
    room = [float(memory(c, defaults()).worst_bytes[0]) for c in (even, *spread)]
    assert seconds == sorted(set(seconds))
    assert room == sorted(set(room))
    assert float(np.max(even.fullest)) == 1.0
    # 8 ranks with 16 of 128 experts each: 1 + sqrt(2 ln 8 / 16).
    assert float(spread[1].fullest[0]) == pytest.approx(1.51, abs=0.01)
    cut = replace(spread[2], dropped_above=np.array([1.25]))
    assert float(cut.fullest[0]) == 1.25


def test_the_host_launches_many_kernels_but_not_of_a_whole_graph() -> None:
    c = run("qwen3-30b-a3b", "dp16 ep8", 16)
    coef = defaults() | {"moe_host_s": 0.05}
    slow = estimate(c, coef).parts["host"][0]
    graph = replace(c, fused_host=np.array([2.0]))
    assert slow > 10.0 * estimate(graph, coef).parts["host"][0]
    moved = "elementwise"  # a graph's kernels are fused
    assert estimate(graph, coef).parts[moved][0] < 0.9 * estimate(c, coef).parts[moved][0]


def test_a_host_launches_what_a_layer_has() -> None:
    """Latent attention, shared experts and tensor groups are launches more."""
    plain = host_layer_s(run("qwen3-30b-a3b", "dp16 ep8", 16), defaults())[0]
    assert host_layer_s(run("qwen3-30b-a3b", "dp8 tp2 ep8", 16), defaults())[0] > 1.1 * plain
    rich = run("deepseek-v3", "dp16 ep8", 16)
    bare = replace(rich, latent=np.zeros(1), shared_ffn=np.zeros(1))
    assert host_layer_s(rich, defaults())[0] > 1.5 * host_layer_s(bare, defaults())[0]


def test_every_dispatcher_is_priced_and_local_ranks_send_nothing() -> None:
    alone = estimate(run("mixtral-8x7b", "dp16", 16), defaults())
    assert alone.parts["ep_comm"][0] == 0.0
    for name in DISPATCHERS[1:]:
        found = estimate(run("mixtral-8x7b", "dp16 ep8", 16, dispatcher=name), defaults())
        assert found.parts["ep_comm"][0] > 0.0


ROW = {
    "stack": "megatron-bridge-26.02", "hardware": "gb200",
    "cluster": "nvidia-gb200", "n_layers": "61",
    "d_model": "7168", "n_heads": "128", "n_kv_heads": "128", "d_ff": "18432", "vocab": "129280",
    "seq_len": "4096", "n_gpus": "256", "tp": "1", "pp": "4", "mbs": "1", "gbs": "4096",
    "head_dim": "192", "q_lora_rank": "1536", "kv_lora_rank": "512", "qk_rope_dim": "64",
    "v_head_dim": "128", "experts": "256", "experts_per_token": "8", "expert_ffn": "2048",
    "shared_ffn": "2048", "dense_layers": "3", "ep": "64", "dispatcher": "hybridep",
    "routing": "forced", "precision": "fp8", "recompute_modules": "mla_up_proj",
}  # fmt: skip


def parsed(folder: Path, *rows: dict[str, str]) -> Rows:
    lines = [",".join(SCHEMA)]
    named = [row | {"row_id": str(i)} for i, row in enumerate(rows)]
    lines += [",".join(row.get(name, "") for name in SCHEMA) for row in named]
    (folder / "rows.csv").write_text("\n".join(lines))
    return parse(read_table(folder / "rows.csv"))


def test_a_row_says_where_its_experts_lie(tmp_path: Path) -> None:
    rows = parsed(tmp_path, ROW, ROW | {"ep": "48"})
    assert rows.usable.tolist() == [True, False]
    assert "ep 48 must divide experts=256" in rows.reasons[1]
    assert (str(rows.measured_as[0]), rows.cluster[0]) == ("megatron-bridge with experts", "nvidia")
    c = rows.columns
    assert (c.ep[0], c.latent_ckpt[0], c.imbalance[0]) == (64, 1, 0)
    total = float((c.layers * sum(kind.count(c) for kind in KINDS.values()))[0]) + 2 * 129280 * 7168
    assert total == pytest.approx(671.0e9, rel=2e-3)


def test_experts_on_an_undescribed_cluster_are_priced_as_on_those_like_it(tmp_path: Path) -> None:
    own = {"cluster": "aws-p5", "hardware": "h100-80gb", "gpus_per_node": "8"}
    parsed(tmp_path, ROW | own | {"recompute_modules": ""})
    machine = replace(usual_cluster(catalog.device("h100-80gb"), 256), name="aws-p5")
    table = str(tmp_path / "rows.csv")
    (by_name,), (by_machine,) = (predict_table(table, cluster=c).rows() for c in (None, machine))
    assert by_name["provenance"] == by_machine["provenance"] == "near"
    prices = ("step_s", "mem_gb", "fit_chance")
    assert [by_name[n] for n in prices] == [by_machine[n] for n in prices]


def test_a_row_that_recomputes_something_or_did_not_fit_otherwise(tmp_path: Path) -> None:
    """A kind that is not said is full; where nothing is said, as many layers as it takes."""
    said = ROW | {"recompute_modules": "", "note": "recompute on (kind not said)"}
    unsaid = ROW | {"recompute_modules": ""}
    share = parsed(tmp_path, said, unsaid, unsaid | {"mbs": "2"}).columns.full_ckpt
    assert (share[0], share[1]) == (1.0, 0.0)
    assert 0.0 < share[2] < 1.0


def test_pairs_differ_in_one_setting_and_over_2_percent(tmp_path: Path) -> None:
    ran = ROW | {"status": "ok"}
    rows = parsed(
        tmp_path,
        ran | {"step_s": "10"},
        ran | {"step_s": "20", "dispatcher": "alltoall"},
        ran | {"step_s": "10.1", "precision": "bf16"},  # less than 2% apart
        ran | {"step_s": "30", "mbs": "2", "dispatcher": "alltoall"},
        ran | {"step_s": "40", "pp": "8"},  # another layout
    )
    answers = predict(rows, shipped())
    guess = replace(answers, step_s=np.array([10.0, 30.0, 9.0, 20.0, 1.0]))
    every = np.ones(5, dtype=bool)
    one = Result("cv", score(rows, guess), "", rows, guess, every)
    found = {pair.knob: pair for pair in pair_scores((one,))}
    assert {knob: pair.pairs for knob, pair in found.items()} == {
        "dispatcher": 1, "micro batch": 1, "all": 2
    }  # fmt: skip
    assert (found["dispatcher"].signs_pct, found["micro batch"].signs_pct) == (100.0, 0.0)
    assert found["dispatcher"].ratio_pct == pytest.approx(100.0 / 3.0)
    assert found["all"].signs_pct == 50.0


def test_runs_with_experts_teach_no_others() -> None:
    known = shipped()
    dense, routed = known.dense, known.routed
    assert dense
    assert routed
    assert len(dense) + len(routed) == len(known.entries)
    where = {"cluster": "elsewhere", "generation": "h"}
    by_all, by_dense = (
        blend(entries, MeasuredAs("nemo", "2031"), **where) for entries in (known.entries, dense)
    )
    assert by_all.coefficients == by_dense.coefficients


def test_tokens_beyond_a_capacity() -> None:
    """Of log-normal shares; sampled, the same."""
    draws = np.random.default_rng(0).lognormal(-np.log(2) / 2, np.sqrt(np.log(2)), 400_000)
    for factor in (1.0, 1.5, 2.0):
        sampled = np.maximum(0, draws - factor).mean(), np.minimum(draws, factor).std()
        assert beyond(factor, 1.0) == pytest.approx(sampled, abs=0.004)
    assert beyond(1.25, 0.0) == (0.0, 0.0)


def test_a_plan_places_experts_and_says_what_routing_does() -> None:
    asked = {"model": "mixtral-8x7b", "gpu": "h100-80gb", "gpus": 16, "seq_len": 4096,
             "global_batch": 64, "stack": "megatron"}  # fmt: skip
    found = plan(PlanRequest(**asked, layout="pp1 tp1 ep4", capacity=True))
    first, routing = found.ranked[0], found.routed
    assert routing.forced_s < routing.natural_s == pytest.approx(first.step_s, rel=1e-9)
    assert routing.natural_range_s[1] > first.step_s_high > first.step_s
    seconds = [one.step_s for one in routing.capacities]
    assert seconds == sorted(seconds)
    assert (routing.forced_s, routing.natural_s) == pytest.approx((seconds[0], seconds[-1]))
    assert routing.forced_bytes < routing.natural_bytes == pytest.approx(first.peak_bytes)
    assert routing.capacities[0].again_s > routing.capacities[-1].again_s == seconds[-1]
    assert routing.capacities[-1].dropped == 0.0 < routing.capacities[0].dropped
    assert "routing: forced even" in "\n".join(map(str, page(found, details=True)))
    assert {(row.layout.ep, row.layout.tp) for row in found.ranked} == {(4, 1)}
    assert plan(PlanRequest(**asked)).ranked[0].step_s <= first.step_s
    two = plan(PlanRequest(**asked, layout="pp1 tp1", where=("ep == 2 and etp == 1",)))
    assert {(row.layout.ep, row.layout.etp) for row in two.ranked} == {(2, 1)}


def test_layers_that_predict_further_tokens_are_priced_where_they_run() -> None:
    asked = {"model": "deepseek-v3", "gpu": "h800-80gb", "gpus": 512, "seq_len": 4096,
             "global_batch": 2048, "layout": "pp8 dp64 ep32", "micro_batch": 1,
             "policy": {"recompute": "full", "virtual_stages": 1}}  # fmt: skip
    alone = replace(catalog.model("deepseek-v3"), mtp=None)
    for stack, more in (("megatron", (1.005, 1.06)), ("fourfold", (1.0, 1.0))):
        both, without = (
            plan(PlanRequest(**(asked | changes), stack=stack, explore=True))
            for changes in ({}, {"model": alone})
        )
        ratio = both.ranked[0].step_s / without.ranked[0].step_s
        assert more[0] <= ratio <= more[1]
        said = "not timed" if stack == "fourfold" else "not in TFLOP/s and MFU"
        assert said in " ".join(both.remarks)


def test_a_short_name_stands_for_an_engine_measured_with_experts() -> None:
    known, cluster = shipped(), usual_cluster(catalog.device("h800-80gb"), 64)
    dense = match_engine("megatron", cluster, known).stack
    routed = match_engine("megatron", cluster, known, experts=True).stack
    measured = {entry.stack for entry in known.routed if entry.rows_time}
    assert (
        str(MeasuredAs.of(dense).with_experts()) not in measured
    )  # the nearest dense one says nothing of experts
    assert str(MeasuredAs.of(routed).with_experts()) in measured


def test_graphs_save_no_launches_where_the_host_waits_for_counts() -> None:
    seconds = [
        host_layer_s(replace(one, graphed=np.full(1, graphed)), defaults())[0]
        for one in (
            run("mixtral-8x7b", "dp16 ep8", 16, dispatcher=d) for d in ("alltoall", "ncclep")
        )
        for graphed in (0.0, 1.0)
    ]
    assert seconds[1] == seconds[0] > seconds[2] > 1.5 * seconds[3]


def test_how_an_exchange_hides_is_its_engines_habit(tmp_path: Path) -> None:
    """DualPipe pays 4% of it, Megatron what was fitted; halves of a micro batch hold no more."""
    row = ROW | {"a2a_overlap": "1", "vpp": "1", "act_ckpt": "none", "dispatcher": "deepep"}
    engines = ("hai-llm-2024", "megatron-lm-2026", "olmo-core-2026")
    c = parsed(tmp_path, *(row | {"stack": name} for name in engines)).columns
    seconds = estimate(c, defaults()).parts["ep_comm"]
    assert seconds[0] / seconds[1] == pytest.approx(0.04 / defaults()["exchange_hidden"])
    assert in_flight(c, c.micros).first.tolist() == [5.0, 5.0, 4.0]


def test_shared_experts_hide_as_much_of_an_exchange_as_they_take() -> None:
    kind = {"dispatcher": "alltoall", "overlap_kind": "shared-expert"}
    alone = run("deepseek-v3", "dp64 ep64", 64, **kind)
    beside = replace(alone, hides_exchange=np.ones(1))
    shared = (beside, *(replace(beside, shared_ffn=np.full(1, ffn)) for ffn in (0.0, 2e5)))
    sent, half, none, wide = (
        float(estimate(c, defaults()).parts["ep_comm"][0]) for c in (alone, *shared)
    )
    assert 0.5 * sent < half < sent == none
    assert wide == 0.0


def test_a_recipe_that_names_no_dispatcher_has_its_engines(tmp_path: Path) -> None:
    """HybridEP in racks; and where experts drop tokens the host waits for no counts."""
    unsaid = ROW | {"dispatcher": "", "cuda_graph": "", "act_ckpt": ""}
    host = unsaid | {"hardware": "b200", "cluster": "nvidia-b200"}
    c = parsed(tmp_path, unsaid, host, host | {"routing": "drop"}).columns
    kinds = [DISPATCHERS[int(one)] for one in c.dispatcher]
    assert kinds == ["hybridep", "alltoall", "alltoall"]
    seconds = host_layer_s(c, defaults())
    assert seconds[0] < seconds[2] < 0.6 * seconds[1]


def test_scales_of_few_bits_are_read_from_notes_and_priced(tmp_path: Path) -> None:
    """By block, products are slower on Hopper and faster on Blackwell; casts move more."""
    notes = ("", "recipe mxfp8", "recipe blockwise", "recipe delayed")
    machines = ({"hardware": "h100-80gb", "cluster": "nvidia-h100"}, {})
    rows = [ROW | machine | {"note": note} for machine in machines for note in notes]
    c = parsed(tmp_path, *rows).columns
    assert c.cast_bytes.tolist() == [4.0, 6.0, 6.0, 2.0] * 2
    assert c.scaled_rate.tolist() == [1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.1, 1.0]
    products = estimate(c, defaults()).parts["gemm"]
    assert products[2] > products[0]
    assert products[6] < products[4]
    policy = run("deepseek-v3", "dp64 ep64", 64, gpu="b200", precision="fp8", scaling="block")
    assert (policy.cast_bytes[0], policy.scaled_rate[0]) == (6.0, 1.1)


def test_what_an_engine_keeps_is_its_habit(tmp_path: Path) -> None:
    """Scores in Transformer Engine's unfused attention, moments of some recipes, micro batches
    under which an exchange hides, and a compiled loss."""
    plain = ROW | {"precision": "bf16", "attention": "unfused", "stack": "mcore-2026",
                   "act_ckpt": "none", "vpp": "1"}  # fmt: skip
    kept = [
        float(memory(parsed(tmp_path, plain | change).columns, defaults()).worst_bytes[0])
        for change in ({}, {"stack": "aleph-2023"}, {"a2a_overlap": "1"}, {"attention": "flash"})
    ]
    assert kept[3] < kept[0] < kept[1]
    assert kept[0] < kept[2] < 1.3 * kept[0]
    moments = parsed(tmp_path, ROW, ROW | {"family": "deepseek"}).columns.opt_bytes
    assert moments.tolist() == [12.0, 8.0]
    titan = ROW | {"stack": "torchtitan-2025", "note": "2 layers; compiled; GiB"}
    rows = parsed(tmp_path, titan, titan | {"note": "", "stack": "torchtitan-2026-compile"},
                  titan | {"note": "loss compiled only"})  # fmt: skip
    assert rows.columns.compiled_loss.tolist() == [1.0, 1.0, 0.0]


def test_dualpipe_fills_a_third_as_long_and_holds_two_stages() -> None:
    """DeepSeek-V3's report, table 2: (p/2-1)(F&B+B-3W) of (p-1)(F+B), weights of two stages, and
    p+1 micro batches in flight on every rank."""
    alone = run("deepseek-v3", "pp8 dp16 ep16", 128, overlap_kind="dualpipe")
    both = replace(alone, hides_exchange=np.ones(1))
    plain = replace(both, overlap=np.zeros(1))
    assert fill_share(both)[0] == pytest.approx(1 / 3, abs=1e-3)
    assert fill_share(plain)[0] == fill_share(alone)[0] == 1.0
    flights = in_flight(both, np.array([64.0]))
    assert flights.first[0] == flights.last[0] == 9.0
    assert in_flight(replace(both, vpp=np.full(1, 2.0)), np.array([64.0])).first[0] == 9.0
    state = [memory(c, defaults()).parts["state"][0] for c in (plain, both)]
    assert 1.2 < state[1] / state[0] < 2.0


def test_engine_of_dualpipe_overlaps_without_being_asked() -> None:
    ask = {"model": "deepseek-v3", "gpu": "h800", "gpus": 128, "seq_len": 4096,
           "global_batch": 1920, "stack": "hai-llm", "layout": "pp8 ep16"}  # fmt: skip
    query, _ = resolved(PlanRequest(**ask))
    assert query.policy.overlap_exchange
    off, _ = resolved(PlanRequest(**ask, policy={"overlap_exchange": False}))
    assert not off.policy.overlap_exchange
    assert not resolved(PlanRequest(**ask | {"stack": "megatron"}))[0].policy.overlap_exchange
