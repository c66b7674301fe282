"""A run has one price: every row that the planner lists, and the same run predicted by itself, have
the same seconds and bytes to the last bit, whatever stack, machine and choices."""

from __future__ import annotations

import csv
import html
import json
import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import fourfold
from fourfold.agents.tools import TOOLS
from fourfold.errors import UserError
from fourfold.escape import csv_text
from fourfold.logs.models import model_columns
from fourfold.page.plan import plan_data
from fourfold.result.report import Prediction
from fourfold.search import export as exports
from fourfold.search.legal import Target, why_not
from fourfold.search.predict import predict
from fourfold.search.query import PlanQuery, usual_cluster, with_gradient_dtypes
from fourfold.search.ranking import rank_layouts
from fourfold.search.resolve import match_engine
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import ENGINES, MeasuredAs, engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec, running_schedule
from fourfold.spec.words import CP_KINDS, SCHEDULES, SHARDINGS, scaled_name
from fourfold.verbs.calendar_request import CalendarRequest
from fourfold.verbs.machine import Predictor
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest
from tests.logs import written
from tests.page.serving import serving
from tests.search.asking import SHIPPED, ask
from tests.specs import run_spec

MEASURED = sorted({entry.stack for entry in SHIPPED.dense})
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "mpt-7b", "mpt-30b", "qwen3-8b", "gemma-2-9b",
          "llama-3.1-70b")  # fmt: skip
ROUTED = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b")
AXES = ("pp", "cp", "tp", "dp", "replicate")
OPEN = (*AXES, "micro_batch", "sharding", "cp_kind", "schedule",
        "virtual_stages", "recompute")  # fmt: skip


def sampled(rng: random.Random, *, experts: bool = False) -> tuple[RunSpec, str, Cluster]:
    """A random legal run under a random stack, on a random machine."""
    while True:
        ep, etp = (rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2))) if experts else (1, 1)
        layout = Layout(
            pp=rng.choice((1, 1, 2, 3, 4, 8)),
            replicate=rng.choice((1, 1, 2)),
            shard=rng.choice((1, 2, 4, 8)),
            cp=rng.choice((1, 1, 2, 4)),
            tp=rng.choice((1, 2, 4, 8)),
            ep=ep,
            etp=etp,
        )
        spec = run_spec(
            rng.choice(ROUTED if experts else MODELS),
            layout,
            seq_len=rng.choice((1024, 2048, 8192)),
            micro_batch=rng.choice((1, 2, 3, 4)),
            global_batch=rng.choice((16, 48, 96, 256)),
            policy=_policy(rng, experts=experts),
        )
        stack = rng.choice((*ENGINES, *MEASURED))
        device = catalog.device(rng.choice(("a100-80gb", "h100-80gb", "b200")))
        target = Target(engine=engine_of(stack), gpus=spec.gpus, device=device, runs=False)
        if not why_not(spec.model, spec.layout, spec.batch, spec.policy, target):
            # With room for everything, so that the planner lists it.
            return spec, stack, usual_cluster(replace(device, memory_bytes=2**46), spec.gpus)


def _policy(rng: random.Random, *, experts: bool) -> Policy:
    schedule = rng.choice(SCHEDULES)
    routed = {
        "dispatcher": rng.choice(("auto", "alltoall", "deepep", "allgather")),
        "routing": rng.choice(("natural", "forced")),
        "overlap_exchange": rng.random() < 0.3,
    }
    return Policy(
        **(routed if experts else {}),
        precision=rng.choice(("bf16-mixed", "bf16-mixed", "bf16-pure", "fp16", "fp8")),
        sharding=rng.choice(SHARDINGS),
        sequence_parallel=rng.random() < 0.7,
        cp_kind=rng.choice(CP_KINDS),
        schedule=schedule,
        virtual_stages=rng.choice((1, 2, 3)) if schedule in ("interleaved", "zero-bubble") else 1,
        recompute=rng.choice(("none", "selective", "full", "every-2", "every-3", "block-1")),
        attention=rng.choice(("auto", "fused", "unfused", "fused-softmax")),
        compile=rng.random() < 0.3,
        async_tp=rng.random() < 0.3,
        prefetch=rng.choice((0, 1)),
        overlap_grad_reduce=rng.random() < 0.8,
        loss_chunks=rng.choice((1, 4)),
        fused_projections=rng.random() < 0.8,
    )


def query(spec: RunSpec, stack: str, cluster: Cluster, left_open: set[str]) -> PlanQuery:
    """What the planner is asked: the run, with some of its fields left to the search."""
    named = (*AXES, "ep", "etp") if spec.model.moe is not None else AXES
    axes = {name: getattr(spec.layout, name) for name in named}
    chosen = axes | {name: getattr(spec.policy, name) for name in OPEN[6:]}
    chosen["micro_batch"] = spec.batch.micro_batch
    fixed = {name: value for name, value in chosen.items() if name not in left_open}
    policy = with_gradient_dtypes(engine_of(stack), spec.policy)  # as a plan states them
    asked = {"batch": replace(spec.batch, micro_batch=0), "policy": policy, "fixed": fixed}
    return replace(ask(spec.model.name, spec.gpus, stack, cluster=cluster, explore=True), **asked)


def require_one_price(seed: int, folder: Path, *, experts: bool = False) -> int:
    """How many rows were compared: seconds and bytes are equal on every path."""
    rng = random.Random(seed)
    spec, stack, cluster = sampled(rng, experts=experts)
    left_open = set(rng.sample(OPEN, rng.choice((0, 1, 2))))
    ranking = rank_layouts(query(spec, stack, cluster, left_open))
    for i in range(len(ranking)):
        (alone,) = predict([ranking.spec(i)], cluster=cluster, stack=stack)
        if MeasuredAs.of(stack).year is not None or stack == "fourfold":
            assert bare(alone) == ranking.predicted.one(i), (seed, stack, ranking.spec(i))
    require_equal_doors(spec, stack, cluster)
    if MeasuredAs.of(stack).year is not None:
        require_equal_row(spec, stack, cluster, folder)
    return len(ranking)


def bare(one: Prediction) -> Prediction:
    """Seconds and bytes, without what is said of them once they are priced."""
    return replace(one, provenance="", fit_chance=None)


def require_equal_doors(spec: RunSpec, stack: str, cluster: Cluster) -> None:
    """One run through plan, explain, a plan's page, the library and bench's prediction."""
    encoded = codec.encode(spec.policy)
    request = PlanRequest(
        model=spec.model,
        seq_len=spec.batch.seq_len,
        global_batch=spec.batch.global_batch,
        gpus=spec.gpus,
        layout=spec.layout.to_plain(),
        policy={name: value for name, value in encoded.items() if value is not None},
        micro_batch=spec.batch.micro_batch,
        cluster=cluster,
        stack=stack,
        explore=True,
    )
    require_equal_export(request, spec, stack, cluster)
    try:
        answer = fourfold.plan(request)
    except UserError:  # the release of that name has no settings for it
        return
    if answer.best is None:
        return
    best = answer.best
    run = replace(spec, layout=best.layout, policy=best.policy)
    price = (best.step_s, best.peak_bytes)
    row = fourfold.explain(request, best.layout).explanation.row
    assert (row.step_s, row.peak_bytes) == price
    shown = plan_data(answer, request)["rows"][0]
    assert (shown["step_s"], shown["peak_bytes"]) == price
    assert fourfold.predict(run, stack, cluster=cluster).fit_chance == best.fit_chance
    for one in (
        fourfold.predict(run, stack, cluster=cluster),
        Predictor(cluster=cluster, stack=stack).predictions([run])[0],
    ):
        assert (one.step_s, one.peak_bytes) == price, (stack, run)


def require_equal_export(request: PlanRequest, run: RunSpec, stack: str, cluster: Cluster) -> None:
    """The row that settings are written for has its own price, and their text says it; the policy
    is left open, since releases have no settings for most sampled ones."""
    request = replace(request, policy={}, explore=False)
    engines = [one for one in exports.ENGINES if same_rules(exports.stack_of(one), stack)]
    for engine in engines:
        try:
            exported = fourfold.export(replace(request, export=engine))
        except UserError:  # an engine that was measured is not the release that we write for
            continue
        row = exported.choice
        batch = replace(run.batch, micro_batch=row.micro_batch)
        asked = replace(run, layout=row.layout, policy=row.policy, batch=batch)
        alone = fourfold.predict(asked, stack, cluster=cluster)
        assert (alone.step_s, alone.peak_bytes) == (row.step_s, row.peak_bytes), (engine, asked)
        if exported.files:
            seconds = f"{row.step_s_low:.3g} to {row.step_s_high:.3g} s per step"
            gib = f"{row.peak_bytes_low / 2**30:.0f} to {row.peak_bytes_high / 2**30:.0f} GiB"
            fits = f"{100 * row.fit_chance:.0f}% chance to fit"
            assert f": {seconds}; {fits}: {gib}" in exported.script


def same_rules(one: str, other: str) -> bool:
    return engine_of(one).rules.name == engine_of(other).rules.name


def require_equal_row(spec: RunSpec, stack: str, cluster: Cluster, folder: Path) -> None:
    """A run of which a table's columns say all, predicted from a table and from itself: a row
    without dtypes of gradients has the habits of its stack."""
    recompute, virtual = spec.policy.recompute, spec.policy.virtual_stages
    wire, held = engine_of(stack).habits.gradient_bytes("bf16")
    policy = Policy(
        reduce_dtype="bf16" if wire < 4.0 else "fp32",
        grad_dtype="bf16" if held < 4.0 else "fp32",
        sharding=spec.policy.sharding,
        recompute=recompute if recompute in ("none", "full") else "none",
        sequence_parallel=spec.policy.sequence_parallel,
        virtual_stages=virtual,
        schedule=running_schedule("1f1b", virtual),
        routing=spec.policy.routing,
        dispatcher=spec.policy.dispatcher,
    )
    layout = replace(spec.layout, replicate=1, cp=1)
    if layout.shard * layout.tp % (layout.ep * layout.etp):
        layout = replace(layout, ep=1, etp=1)
    has_experts = spec.model.moe is not None
    model = catalog.model("qwen3-30b-a3b" if has_experts else "llama-3.1-8b")
    batch = replace(spec.batch, micro_batch=1)
    run = replace(spec, policy=policy, layout=layout, model=model, batch=batch, gpus=layout.world)
    one = fourfold.predict(run, stack, cluster=cluster)
    price = (one.step_s, one.peak_bytes)
    cells = {
        "row_id": "1", "stack": stack, "family": model.family, "n_layers": model.layers,
        "d_model": model.hidden, "n_heads": model.heads, "n_kv_heads": model.kv_heads,
        "d_ff": model.ffn, "vocab": model.vocab, "tied": int(model.tied),
        "seq_len": run.batch.seq_len, "n_gpus": run.gpus, **run.layout.sizes,
        "vpp": policy.virtual_stages, "mbs": run.batch.micro_batch, "gbs": run.batch.global_batch,
        "precision": "bf16", "act_ckpt": policy.recompute, "sharding": policy.sharding,
        "sequence_parallel": int(policy.sequence_parallel), "hardware": cluster.device.id,
    }  # fmt: skip
    if model.moe:
        sent = "" if policy.dispatcher == "auto" else policy.dispatcher
        cells |= {
            "head_dim": model.head_dim, "experts": model.experts, "experts_per_token": model.top_k,
            "expert_ffn": model.moe.ffn, "routing": policy.routing, "dispatcher": sent,
        }  # fmt: skip
    path = folder / "row.csv"
    path.write_text(f"{','.join(cells)}\n{','.join(map(str, cells.values()))}\n")
    found = fourfold.predict_table(str(path), cluster=cluster).answers
    assert (found.step_s[0], found.worst_gb[0] * 2**30) == price, (stack, run)


@pytest.mark.parametrize("experts", [False, True])
def test_every_door_says_the_same_to_the_last_bit(tmp_path: Path, experts: bool) -> None:
    assert sum(require_one_price(seed, tmp_path, experts=experts) for seed in range(4)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_every_door_says_the_same_about_500_runs(tmp_path: Path, first: int, experts: bool) -> None:
    seeds = range(first, first + 50)
    rows = [require_one_price(seed, tmp_path, experts=experts) for seed in seeds]
    # The grid holds one of several names of a run (zero1 over one rank is zero0): some have none.
    assert sum(count > 0 for count in rows) >= 40
    assert sum(rows) >= 100


def test_a_question_that_leaves_all_open_lists_rows_that_predict_repeats() -> None:
    spec, _, cluster = sampled(random.Random(7))
    stacks = (
        ("megatron-lm-2024", ""),
        ("torchtitan-2025", "torchtitan-0.2"),
        ("nanotron-2025", ""),
    )
    for stack, release in stacks:
        plain = replace(spec, policy=Policy(), model=catalog.model("llama-3.1-8b"))
        open_query = query(plain, stack, cluster, set(OPEN))
        machine = usual_cluster(cluster.device, 64)
        resolved = replace(open_query.resolved, cluster=machine)
        ranking = rank_layouts(replace(open_query, gpus=64, resolved=resolved, release=release))
        assert len(ranking) >= 8
        specs = [ranking.spec(i) for i in range(len(ranking))]
        alone = predict(specs, cluster=machine, stack=stack)
        assert [*map(bare, alone)] == [ranking.predicted.one(i) for i in range(len(ranking))]


@pytest.fixture(scope="module")
def planner() -> Iterator[str]:
    """The address of a served one."""
    with serving() as address:
        yield address


def _asked(address: str) -> tuple[str, bool]:
    try:
        with urllib.request.urlopen(address) as answered:
            return answered.read().decode(), False
    except urllib.error.HTTPError as refusal:
        return refusal.read().decode(), True


# Spellings of engines on this cluster, and the measured stack that each stands for there.
SPELLINGS = {
    "megatron": "megatron-bridge-2026",
    "Megatron": "megatron-bridge-2026",
    "megatron-bridge": "megatron-bridge-2026",
    "megatron-bridge-2026": "megatron-bridge-2026",
    "Megatron-Bridge-2026": "megatron-bridge-2026",
    "megatron-bridge-2025": "megatron-bridge-2025",
    "Megatron-LM": "megatron-lm-2025",
    "megatron_lm": "megatron-lm-2025",
    "mcore": "megatron-bridge-2026",
    "Megatron Core": "megatron-bridge-2026",
    "megatron-lm-2025": "megatron-lm-2025",
    "nemo": "nemo-2025",
    "nemo-2025": "nemo-2025",
}


def _spelled(stack: str) -> tuple[PlanRequest, RunSpec]:
    """A question that leaves nothing open, and its run."""
    request = PlanRequest(
        model="llama-3.1-8b", cluster="nvidia-h100", gpus=16, layout="dp8 tp2", seq_len=4096,
        global_batch=128, micro_batch=1, policy={"sharding": "zero1"}, stack=stack,
    )  # fmt: skip
    sizes = {"seq_len": 4096, "micro_batch": 1, "global_batch": 128}
    return request, run_spec("llama-3.1-8b", Layout(shard=8, tp=2), **sizes)


@pytest.mark.parametrize(
    "spellings",
    [
        ("megatron", "Megatron Core", "Megatron-LM"),
        pytest.param(tuple(SPELLINGS), marks=pytest.mark.slow),
    ],
)
def test_plan_and_predict_agree_bit_for_bit_however_an_engine_is_spelt(
    tmp_path: Path, planner: str, spellings: tuple[str, ...]
) -> None:
    prices: dict[str, set[tuple[float, float]]] = {}
    for number, stack in enumerate(spellings):
        stands_for = SPELLINGS[stack]
        request, run = _spelled(stack)
        best = fourfold.plan(request).best
        row = fourfold.explain(request, best.layout).explanation.row
        stated = replace(run, policy=best.policy)
        predicted = (
            fourfold.predict(run, stack, cluster="nvidia-h100"),
            fourfold.predict(stated, stands_for, cluster="nvidia-h100"),
        )
        found = prices.setdefault(stands_for, set())
        found |= {(one.step_s, one.peak_bytes) for one in (best, row, *predicted)}
        found |= {*_of_agents(request)}
        found |= {_of_page(planner, request), _of_log(stack, tmp_path / str(number))}
        calendar = fourfold.calendar(CalendarRequest(plan=replace(request, tokens=10**12)))
        assert {step_s for point in calendar.points for step_s in point.step_s} == {best.step_s}
    assert {stack: len(found) for stack, found in prices.items()} == dict.fromkeys(prices, 1)


def _of_agents(request: PlanRequest) -> Iterator[tuple[float, float]]:
    """The price in answers of the tools of agents."""
    names = (
        "model",
        "cluster",
        "gpus",
        "layout",
        "seq_len",
        "global_batch",
        "micro_batch",
        "policy",
        "stack",
    )
    asked = {name: getattr(request, name) for name in names}
    batch = {name: asked.pop(name) for name in ("seq_len", "global_batch", "micro_batch")}
    run = {name: asked.pop(name) for name in ("model", "gpus", "layout", "policy")}
    machine = asked | {"runs": [run | {"batch": batch}]}
    yield _price_of(TOOLS["predict"].call(machine).plain()["runs"][0])
    yield _price_of(TOOLS["plan"].call(asked | run | batch).plain()["ranked"][0])
    explained = TOOLS["explain"].call(
        asked | run | batch | {"layout": "", "explain": run["layout"]}
    )
    yield _price_of(explained.plain()["row"])


def _price_of(answer: dict[str, Any]) -> tuple[float, float]:
    return answer["step_s"], answer["peak_bytes"]


def _of_page(address: str, request: PlanRequest) -> tuple[float, float]:
    names = (
        "model",
        "cluster",
        "gpus",
        "layout",
        "seq_len",
        "global_batch",
        "micro_batch",
        "stack",
    )
    asked = {name: getattr(request, name) for name in names} | {"full": "1", "sharding": "zero1"}
    text, is_refused = _asked(f"{address}plan?{urlencode(asked)}")
    assert not is_refused, text
    block = re.search(r'id="plan-data">(.*?)</script>', text)
    assert block is not None, text
    return _price_of(json.loads(block[1])["rows"][0])


def _of_log(stack: str, folder: Path) -> tuple[float, float]:
    """The price of the run by its Megatron log: read into a row, which is predicted."""
    folder.mkdir()
    model = catalog.model("llama-3.1-8b")
    cells = {name: str(value) for name, value in model_columns(model).items()} | {
        "n_gpus": "16",
        "dp": "8",
        "tp": "2",
        "pp": "1",
        "cp": "1",
        "sharding": "zero1",
        "seq_len": "4096",
        "mbs": "1",
        "gbs": "128",
        "precision": "bf16",
        "act_ckpt": "none",
        "attention": "flash",
        "sequence_parallel": "1",
        "status": "ok",
        "step_s": "3.4",
        "mem_gb": "60",
    }
    said = {"accumulate_allreduce_grads_in_fp32": "True", "cuda_graph_impl": "none"}
    log = folder / "train.log"
    log.write_text(written.told(said, written.megatron(cells, deepspeed=False)))
    rows = folder / "rows.csv"
    own = {"stack": stack, "cluster": "nvidia-h100", "out": str(rows)}
    (row,) = fourfold.collect(fourfold.CollectRequest(logs=(str(log),), **own)).rows_read
    assert (row["grad_dtype"], row["cuda_graph"]) == ("fp32", "none")
    answers = fourfold.predict_table(str(rows)).answers
    return answers.step_s[0], answers.worst_gb[0] * 2**30


def test_table_row_without_gradient_dtype_has_the_habit_and_names_it(tmp_path: Path) -> None:
    run = _spelled("megatron")[1]
    narrow = replace(run, policy=replace(run.policy, grad_dtype="bf16", reduce_dtype="bf16"))
    wanted = fourfold.predict(narrow, "megatron", cluster="nvidia-h100")
    model = model_columns(catalog.model("llama-3.1-8b"))
    cells = (
        model
        | run.layout.sizes
        | {
            "row_id": "a",
            "stack": "megatron",
            "cluster": "nvidia-h100",
            "hardware": "h100-80gb",
            "n_gpus": 16,
            "seq_len": 4096,
            "mbs": 1,
            "gbs": 128,
            "precision": "bf16",
            "vpp": 1,
            "sharding": "zero1",
            "sequence_parallel": 1,
            "act_ckpt": "none",
        }
    )
    path = tmp_path / "rows.csv"
    lines = [[*cells], [*map(str, cells.values())]]
    path.write_text(csv_text(lines))
    answers = fourfold.predict_table(str(path)).answers
    assert (answers.step_s[0], answers.worst_gb[0] * 2**30) == (wanted.step_s, wanted.peak_bytes)
    said = "stack megatron read as megatron-bridge-2026; gradients bf16"
    assert answers.reasons[0].startswith(said)
    path.write_text(csv_text([*lines, lines[1]]))
    with pytest.raises(UserError, match=r"row_id a names lines 2 and 3 of .*rows.csv; give each"):
        fourfold.predict_table(str(path))
    released = [[*cells, "engine_release"], [*lines[1], "25.09"]]
    path.write_text(csv_text(released))
    older = fourfold.predict(narrow, "megatron-bridge-2025", cluster="nvidia-h100")
    released[1][released[0].index("stack")] = "megatron-bridge"
    path.write_text(csv_text(released))
    assert fourfold.predict_table(str(path)).answers.step_s[0] == older.step_s


def test_printed_predictions_of_a_table_have_every_digit(cli, tmp_path: Path) -> None:
    request, run = _spelled("megatron")
    best = fourfold.plan(request).best
    cells = model_columns(run.model) | run.layout.sizes
    cells |= {"row_id": "a", "stack": "megatron", "cluster": "nvidia-h100", "n_gpus": 16}
    cells |= {"seq_len": 4096, "mbs": 1, "gbs": 128, "precision": "bf16", "sharding": "zero1"}
    cells |= {"sequence_parallel": 1, "act_ckpt": "none", "grad_dtype": "fp32"}
    cells |= {"hardware": "h100-80gb", "vpp": 1}
    path, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    path.write_text(csv_text([[*cells], [*map(str, cells.values())]]))
    printed = cli("predict", path, "--format", "csv")
    assert not cli("predict", path, "--out", out)
    (shown,) = csv.DictReader(printed.splitlines())
    (file_row,) = csv.DictReader(out.read_text().splitlines())
    (plain,) = cli.json("predict", path)
    for row in (shown, file_row, plain):
        price = (float(row["step_s"]), float(row["mem_gb"]) * 2**30, float(row["fit_chance"]))
        assert price == (best.step_s, best.peak_bytes, best.fit_chance)


def test_cells_of_a_table_are_spelt_as_flags_are(tmp_path: Path) -> None:
    usual = {"precision": "fp8", "sharding": "zero3", "grad_dtype": "fp32"}
    spelt = {
        "precision": ("FP8", "fp8-cs", "float8"),
        "sharding": ("fsdp", "FULL_SHARD", "ZeRO-3"),
        "grad_dtype": ("float32", "FP32"),
    }
    rows = [usual] + [usual | {name: word} for name, words in spelt.items() for word in words]
    sizes = {"n_gpus": 8, "dp": 8, "seq_len": 4096, "mbs": 1, "gbs": 8}
    shared = model_columns(catalog.model("llama-3.2-1b")) | sizes | {"hardware": "h100-80gb"}
    cells = [shared | row | {"row_id": i} for i, row in enumerate(rows)]
    lines = [[*cells[0]], *([str(cell) for cell in row.values()] for row in cells)]
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(lines))
    found = fourfold.predict_table(str(path)).answers
    assert len({*zip(found.step_s, found.worst_gb, strict=True)}) == 1
    assert all("not expressible" not in reason for reason in found.reasons)


def test_predict_takes_a_gpu_as_plan_does_and_asks_for_a_machine() -> None:
    request, run = _spelled("megatron")
    best = fourfold.plan(replace(request, cluster=None, gpu="h100-80gb")).best
    small = replace(run, gpus=8, layout=Layout(shard=4, tp=2))
    typical = fourfold.predict([small, run], "megatron", gpu="h100-80gb")
    assert typical.predictions[1].basis == "16 x h100-80gb"
    found = {(one.step_s, one.peak_bytes) for one in (best, typical.predictions[1])}
    assert found == {(best.step_s, best.peak_bytes)}
    alone = fourfold.predict(small, "megatron", gpu="h100-80gb")
    assert typical.predictions[0] == alone
    networked = replace(request, cluster=None, gpu="h100-80gb", network="400Gbit/s")
    slow = fourfold.plan(networked).best
    assert slow.step_s > best.step_s
    for rate in ("400Gbit/s", 50e9):
        one = fourfold.predict(run, "megatron", gpu="h100-80gb", network=rate)
        assert (one.step_s, one.peak_bytes) == (slow.step_s, slow.peak_bytes)
    large = replace(run, gpus=1024, layout=Layout(shard=1024))
    for spec, stack in ((run, "megatron"), (large, "fourfold")):
        with pytest.raises(UserError, match=r"has no machine: .*pass cluster, gpu"):
            fourfold.predict(spec, stack)
    with pytest.raises(UserError, match="cannot be combined"):
        fourfold.predict(run, "megatron", cluster="nvidia-h100", gpu="h100-80gb")


def test_plan_takes_fp32_gradients_of_every_stack_unless_told() -> None:
    for stack in MEASURED:
        request = replace(_spelled(stack)[0], micro_batch=0, policy={}, layout="")
        policy = resolved(request)[0].policy
        for name in ("grad_dtype", "reduce_dtype"):
            usual = engine_of(stack).habits.gradient_bytes("bf16")
            assert getattr(policy, name) == "fp32" or (getattr(policy, name), usual) == (
                None,
                (4.0, 4.0),
            )
    request = replace(_spelled("megatron-bridge-2026")[0], policy={"grad_dtype": "bf16"})
    assert resolved(request)[0].policy.reduce_dtype == "bf16"


# Engines as rows and questions spell them; the first three are one on NVIDIA's clusters.
_ENGINES = (
    "megatron", "megatron-bridge", "megatron-bridge-2026", "Megatron-LM", "megatron-lm-2025",
    "nemo", "nemo-2025", "torchtitan", "torchtitan-2025", "mlperf-nvidia",
)  # fmt: skip
_STEP_GRAPH, _SOME_GRAPHS = "full_iteration", "transformer_engine:attn+moe_router"


@dataclass(frozen=True, slots=True)
class FilledRow:
    """A question that leaves nothing open, and its run as a row whose cells are all filled."""

    request: PlanRequest
    layout: Layout
    cells: dict[str, object]


def filled_row(rng: random.Random) -> FilledRow | None:
    """None where the engine cannot run what was drawn."""
    stack = rng.choice(_ENGINES)
    cluster = rng.choice(("nvidia-h100", "nvidia-gb200", "nvidia-b200"))
    name = rng.choice(("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b",
                       "deepseek-v3"))  # fmt: skip
    model, has_experts = catalog.model(name), name not in ("llama-3.1-8b", "llama-3.1-70b")
    layout = Layout(
        pp=rng.choice((1, 2, 4, 8)), shard=rng.choice((4, 8, 16)), cp=rng.choice((1, 1, 2)),
        tp=rng.choice((1, 2, 4)), ep=rng.choice((1, 4, 8)) if has_experts else 1,
    )  # fmt: skip
    rules = engine_of(stack).rules
    is_titan = rules.name == "torchtitan"
    virtual = rng.choice((1, 1, 2, 4)) if layout.pp > 1 else 1
    kinds = ("none", "selective", "full", *(("moe", "moe-act") if has_experts else ()))
    grad, moments = rng.choice(("fp32", "bf16")), rng.choice(("fp32", "bf16"))
    precision = rng.choice(("bf16-mixed", "bf16-mixed", "fp8", "bf16-pure"))
    scaling = rng.choice(("auto", "block", "mx")) if precision == "fp8" else "auto"
    policy = Policy(
        precision=precision,
        scaling=scaling,
        sharding=rng.choice(("zero2", "zero3")) if is_titan else "zero1",
        sequence_parallel=layout.tp > 1 and rng.random() < 0.8,
        virtual_stages=virtual,
        schedule=running_schedule("1f1b", virtual),
        recompute=rng.choice(kinds),
        compile=is_titan,
        cp_kind="allgather" if is_titan else "ring",
        grad_dtype=None if is_titan else grad,
        reduce_dtype=None if is_titan else grad,
        optimizer_dtype=None if is_titan else moments,
        cuda_graph=not is_titan and rng.random() < 0.3,
        overlap_grad_reduce=rng.random() < 0.7,
        routing=rng.choice(("natural", "forced")),
        dispatcher=rng.choice(("alltoall", "hybridep", "deepep")) if has_experts else "auto",
    )
    batch = Batch(seq_len=4096, micro_batch=rng.choice((1, 2)), global_batch=512)
    run = run_spec(
        name, layout, policy=policy, seq_len=4096, micro_batch=batch.micro_batch, global_batch=512
    )
    device = catalog.cluster(cluster).device
    target = Target(engine=engine_of(stack), gpus=run.gpus, device=device, runs=False)
    if why_not(model, layout, batch, policy, target):
        return None
    place = catalog.cluster(cluster, run.gpus)
    habits = engine_of(match_engine(stack, place, SHIPPED, experts=has_experts)).habits
    hides_tp = habits.overlap_tp and policy.sequence_parallel
    overlap = ["grad-reduce param-gather"] * policy.overlap_grad_reduce + ["tp"] * hides_tp
    graphs = _SOME_GRAPHS if has_experts and habits.graphs_experts else "none"
    domain = max(place.links[0].ranks, place.host_gpus)
    cells: dict[str, object] = {
        "stack": stack, "cluster": cluster, "hardware": device.id, "model": name,
        **model_columns(model), "seq_len": 4096, "n_gpus": run.gpus, **layout.sizes,
        "vpp": virtual, "mbs": batch.micro_batch, "gbs": 512, "sharding": policy.sharding,
        "sequence_parallel": int(policy.sequence_parallel), "routing": policy.routing,
        "precision": scaled_name(precision, scaling), "act_ckpt": policy.recompute,
        "attention": "flash",
        "dispatcher": policy.dispatcher if has_experts else "",
        "grad_dtype": policy.grad_dtype or ("bf16" if policy.precision == "bf16-pure" else "fp32"),
        "reduce_dtype": policy.reduce_dtype or "fp32",
        "optimizer_dtype": policy.dtypes.optimizer, "gpus_per_node": place.host_gpus,
        "cuda_graph": _STEP_GRAPH if policy.cuda_graph else graphs, "nvlink_domain": domain,
        "overlap": " ".join(overlap) or "none",
        "mtp_layers": model.mtp if model.mtp and rules.predicts_further else "",
        "note": "torch.compile; all-gather CP" if is_titan else "",
    }  # fmt: skip
    encoded = codec.encode(policy).items()
    decided = {field: value for field, value in encoded if value not in (None, ())}
    request = PlanRequest(
        model=name, cluster=cluster, gpus=run.gpus, layout=layout.to_plain(), seq_len=4096,
        global_batch=512, micro_batch=batch.micro_batch, policy=decided, stack=stack, explore=True,
    )  # fmt: skip
    return FilledRow(request, layout, cells)


def require_equal_table(seed: int, count: int, folder: Path) -> set[str]:
    """Rows drawn until `count` of them are runs of their engines: the table and `explain` agree.
    Return the engines."""
    rng = random.Random(seed)
    rows: list[FilledRow] = []
    explained: list[tuple[float, float]] = []
    while len(rows) < count:
        row = filled_row(rng)
        if row is None:
            continue
        try:
            found = fourfold.explain(row.request, row.layout).explanation.row
        except UserError:  # a release that settings are written for lacks what was drawn
            continue
        if found is not None:
            explained.append((found.step_s, found.peak_bytes))
            rows.append(row)
    columns = sorted({name for row in rows for name in row.cells})
    table = [["row_id", *columns]]
    table += [
        [str(i), *(str(row.cells.get(name, "")) for name in columns)] for i, row in enumerate(rows)
    ]
    path = folder / "rows.csv"
    path.write_text(csv_text(table))
    answers = fourfold.predict_table(str(path)).answers
    for i, row in enumerate(rows):
        price = (answers.step_s[i], answers.worst_gb[i] * 2**30)
        assert price == explained[i], (seed, i, row.cells, answers.reasons[i])
        assert "habit" not in answers.reasons[i]
    return {str(row.cells["stack"]) for row in rows}


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_filled_rows_of_a_table_and_explain_agree_bit_for_bit(tmp_path: Path, count: int) -> None:
    engines = require_equal_table(count, count, tmp_path)
    assert count < 200 or engines == {*_ENGINES}


def require_equal_served(address: str, seed: int) -> None:
    """A question asked over HTTP, of the library, and its first row exported and predicted."""
    rng = random.Random(seed)
    engine = ("megatron", "torchtitan", "accelerate", "fourfold")[seed % 4]
    model = rng.choice((*MODELS, *ROUTED))
    gpus, batch = rng.choice((8, 16, 64)), rng.choice((64, 128, 192))
    asked = {"model": model, "gpu": rng.choice(("h100-80gb", "h200", "b200")), "gpus": gpus,
             "seq_len": 2048, "global_batch": batch, "stack": engine, "full": "1"}  # fmt: skip
    text, is_refused = _asked(f"{address}plan?{urlencode(asked)}")
    if is_refused:  # what one door refuses, the other does
        with pytest.raises(UserError) as raised:
            fourfold.plan(PlanRequest(**{k: v for k, v in asked.items() if k != "full"}))
        assert html.escape(str(raised.value)) in text
        return
    block = re.search(r'id="plan-data">(.*?)</script>', text)
    assert block is not None, text
    shown = json.loads(block[1])["rows"]
    del asked["full"]
    request = PlanRequest(**asked)
    answer = fourfold.plan(request)
    assert [(row["step_s"], row["peak_bytes"], row["fit_chance"]) for row in shown] == [
        (row.step_s, row.peak_bytes, row.fit_chance) for row in answer.ranked
    ]
    if answer.best is None:  # nothing fits, on either side
        return
    sizes = {"seq_len": 2048, "micro_batch": answer.best.micro_batch, "global_batch": batch}
    run = run_spec(model, answer.best.layout, policy=answer.best.policy, **sizes)
    machine = usual_cluster(catalog.device(asked["gpu"]), gpus)
    alone = fourfold.predict(run, answer.stack, cluster=machine)
    assert (alone.step_s, alone.peak_bytes) == (answer.best.step_s, answer.best.peak_bytes)
    decided = replace(request, layout=answer.best.layout.to_plain())
    require_equal_export(decided, run, answer.stack, machine)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)])
def test_served_plans_and_exports_agree_bit_for_bit(planner: str, seeds: range) -> None:
    for seed in seeds:
        require_equal_served(planner, seed)
