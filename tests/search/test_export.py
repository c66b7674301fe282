"""Settings written for an engine have its own names, and a shell can use them as they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold import PlanRequest, plan
from fourfold.errors import UserError
from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.spec import catalog, codec, texts
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape, Positions, RopeScaling
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "engines"))
from sampled import EXPERTS, MODELS, sampled  # noqa: E402

FLAGS = tomllib.loads((TESTS / "golden" / "megatron_flags.toml").read_text())
LLAMA2 = catalog.model("llama-2-7b")
LLAMA31 = catalog.model("llama-3.1-8b")
NO_SEQUENCE_PARALLEL = ("accelerate", "deepspeed")
OTHERS = tuple(name for name in export.ENGINES if name != "torchrun")


def setup(layout: str = "pp2 dp4 tp8", model: str = "llama-3.1-70b", **policy) -> Setup:
    return Setup(
        model=catalog.model(model),
        layout=Layout.parse(layout),
        batch=Batch(seq_len=4096, micro_batch=2, global_batch=256),
        policy=Policy(**policy),
        host_gpus=8,
        stack="megatron-bridge-2026",
        device="h100-80gb",
    )


def flags_of(one: Setup) -> dict[str, list[str]]:
    """Megatron's flags with their values; no flag comes twice."""
    found: dict[str, list[str]] = {}
    for word in export.write_folder("megatron", one)["engine.args"].splitlines():
        if word.startswith("--"):
            assert word not in found
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_blocks_of_recomputed_layers_are_megatrons() -> None:
    flags = flags_of(setup(recompute="block-3"))
    assert flags["--recompute-granularity"] == ["full"]
    assert flags["--recompute-method"] == ["block"]
    assert flags["--recompute-num-layers"] == ["3"]


def test_every_exported_name_is_megatrons_own() -> None:
    """Over 300 sampled layouts: names, whether a value follows, and closed choices."""
    for one in (*sampled("megatron", 240), *sampled("megatron", 60, EXPERTS["megatron"])):
        for name, values in flags_of(one).items():
            if name in FLAGS["switches"]:
                assert values == []
            else:
                assert name in FLAGS["values"]
                assert len(values) == 1 or (values and name in FLAGS["many"])
            assert set(values) <= set(FLAGS["choices"].get(name, values))


def test_the_whole_model_is_exported() -> None:
    found = flags_of(setup())
    assert found.items() >= {
        "--swiglu": [], "--normalization": ["RMSNorm"], "--norm-epsilon": ["1e-05"],
        "--disable-bias-linear": [], "--position-embedding-type": ["rope"],
        "--rotary-base": ["500000"], "--use-rope-scaling": [], "--rope-scaling-factor": ["8.0"],
        "--untie-embeddings-and-output-weights": [], "--attention-dropout": ["0.0"],
        "--hidden-dropout": ["0.0"], "--padded-vocab-size": ["128256"], "--kv-channels": ["128"],
        "--num-query-groups": ["8"], "--group-query-attention": [],
    }.items()  # fmt: skip
    short = replace(setup().batch, seq_len=2048)
    gpt = flags_of(replace(setup(model="gpt-3-175b"), batch=short))
    assert gpt["--padded-vocab-size"] == ["50264"]  # 50257 rows, 8 ranks
    assert gpt["--position-embedding-type"] == ["learned_absolute"]
    assert not {"--swiglu", "--untie-embeddings-and-output-weights"} & gpt.keys()
    qwen = replace(catalog.model("llama-3.1-8b"), qkv_bias=True, qk_norm="head", head_dim=160)
    found = flags_of(replace(setup("dp4"), model=qwen))
    assert found.keys() >= {"--add-qkv-bias", "--qk-layernorm"}


def test_what_the_seconds_assume_is_switched_on() -> None:
    """Overlap and gradient formats are those of the stack that was priced."""
    found = flags_of(setup())
    assert found.keys() >= {
        "--tp-comm-overlap", "--grad-reduce-in-bf16", "--overlap-grad-reduce",
        "--overlap-param-gather", "--use-distributed-optimizer", "--sequence-parallel",
    }  # fmt: skip
    plain = flags_of(replace(setup(), stack="megatron-lm-2024"))
    assert "--accumulate-allreduce-grads-in-fp32" in plain
    priced = {"--tp-comm-overlap", "--grad-reduce-in-bf16", "--overlap-grad-reduce"}
    assert not priced & plain.keys()
    sharded = setup("dp8", sharding="zero3")
    assert flags_of(sharded)["--ckpt-format"] == ["fsdp_dtensor"]
    connections = {
        one.device + str(one.policy.zero): export.write_folder("megatron", one)["env.sh"]
        for one in (setup(), sharded, replace(setup(), device="gb200-192gb"))
    }
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1\n" in connections["h100-80gb1"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8\n" in connections["h100-80gb3"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in connections["gb200-192gb1"]
    assert "overlap_tp" not in found
    yaml = export.write_folder("nanotron", replace(setup(), model=LLAMA2, stack="nanotron-2025"))
    assert "tp_linear_async_communication: true" in yaml["config.yaml"]


def test_uneven_stages_are_a_layout_of_megatrons() -> None:
    """126 layers are two short of 64 chunks, 61 of DeepSeek-V3 three of 32, whose last one has the
    head and the layer that predicts further tokens alone (so in NVIDIA's recipes)."""

    def layout(words: str, model: str, virtual: int = 1) -> list[str]:
        looped = {"schedule": "interleaved", "virtual_stages": virtual} if virtual > 1 else {}
        return flags_of(setup(words, model, **looped))["--pipeline-model-parallel-layout"]

    assert layout("pp16 dp2 tp8", "llama-3.1-405b", 4) == ["Et|(tt|)*62tL"]
    assert layout("pp12 dp2 tp8", "llama-3.1-70b") == ["Et*5|(t*7|)*10t*5L"]
    assert layout("pp2 dp2 tp8", "deepseek-v3") == ["Et*31|t*30mL"]
    assert layout("pp16 dp8 ep8", "deepseek-v3", 2) == ["Et|(tt|)*30mL"]
    looped = setup("pp2 dp2 tp8", schedule="interleaved", virtual_stages=2)
    assert "pp2 dp2 cp1 tp8 v2 on 4 hosts" in export.write("megatron", looped)


def test_experts_are_megatrons() -> None:
    found = flags_of(setup("pp16 dp16 tp2 ep32", "deepseek-v3", recompute="moe-act"))
    assert found.items() >= {
        "--num-experts": ["256"], "--moe-router-topk": ["8"], "--moe-ffn-hidden-size": ["2048"],
        "--expert-model-parallel-size": ["32"], "--expert-tensor-parallel-size": ["1"],
        "--moe-token-dispatcher-type": ["flex"], "--moe-flex-dispatcher-backend": ["hybridep"],
        "--moe-grouped-gemm": [], "--moe-router-score-function": ["sigmoid"],
        "--moe-router-enable-expert-bias": [], "--moe-router-num-groups": ["8"],
        "--moe-router-group-topk": ["4"], "--moe-router-topk-scaling-factor": ["2.5"],
        "--moe-router-load-balancing-type": ["seq_aux_loss"],
        "--moe-shared-expert-intermediate-size": ["2048"], "--multi-latent-attention": [],
        "--kv-lora-rank": ["512"], "--moe-layer-freq": ["([0]*3+[1]*58)"],
        "--mtp-num-layers": ["1"], "--recompute-modules": ["moe_act"],
        "--cuda-graph-scope": ["attn", "moe_router", "moe_preprocess"],
    }.items()  # fmt: skip
    plain = flags_of(replace(setup("dp16 ep8", "mixtral-8x7b"), stack="megatron-lm-2024"))
    assert plain["--moe-token-dispatcher-type"] == ["alltoall"]
    assert not {"--moe-router-pre-softmax", "--cuda-graph-impl"} & plain.keys()
    forced = flags_of(setup("dp16 ep8", "deepseek-v2-lite", routing="forced"))
    assert forced.keys() >= {"--moe-router-pre-softmax", "--moe-router-force-load-balancing"}
    hides = {"overlap_exchange": True, "overlap_kind": "shared-expert", "dispatcher": "alltoall"}
    beside = setup("dp16 ep8", "deepseek-v3", **hides)
    assert "--moe-shared-expert-overlap" in flags_of(beside)
    written = export.write("megatron-bridge", beside)
    assert "model.moe_shared_expert_overlap=true" in written


REFUSED = [
    ("megatron", "deepseek-v2", "dp8", {}, "model.moe.group_score=best"),
    ("megatron", "qwen3-30b-a3b", "dp8 ep8", {"precision": "fp16"}, "policy.precision=fp16"),
    ("megatron", "qwen3-30b-a3b", "dp8", {"recompute": "norm+mlp"}, "policy.recompute=norm+mlp"),
    ("megatron", "qwen3-30b-a3b", "dp8 ep8", {"dispatcher": "ncclep"}, "policy.dispatcher"),
    ("megatron", "qwen3-30b-a3b", "pp2 dp8 ep8", {"overlap_exchange": True}, "overlap_exchange"),
    ("megatron", "qwen3-30b-a3b", "dp8 ep8",
     {"overlap_exchange": True, "overlap_kind": "shared-expert"}, "overlap_kind=shared-expert"),
    ("megatron", "olmoe-1b-7b", "dp8", {}, "model.qk_norm=width"),
    ("megatron", "gpt-oss-20b", "dp8", {}, "model.window"),
    ("torchtitan", "mixtral-8x7b", "dp8", {}, "model.family=mixtral"),
    ("torchtitan", "qwen3-30b-a3b", "dp8 tp2 ep1", {}, "layout.etp=1"),
    ("torchtitan", "qwen3-30b-a3b", "dp8 ep8", {"dispatcher": "allgather"}, "policy.dispatcher"),
    ("torchtitan", "qwen3-30b-a3b", "dp8 ep8", {"recompute": "moe"}, "policy.recompute=moe"),
    ("torchtitan-0.2", "qwen3-30b-a3b", "pp2 dp8", {}, "layout.pp=2"),
    ("torchtitan-0.2", "qwen3-30b-a3b", "dp8 ep8", {"dispatcher": "hybridep"}, "dispatcher"),
    ("nanotron", "qwen3-30b-a3b", "dp8", {"sharding": "zero1"}, "model.experts=128"),
    ("accelerate", "qwen3-30b-a3b", "dp8 ep8", {"sequence_parallel": False}, "layout.ep=8"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "model", "layout", "policy", "field"), REFUSED)
def test_what_an_engine_lacks_of_experts_is_refused_by_name(
    engine: str, model: str, layout: str, policy: dict, field: str
) -> None:
    policy = {"sharding": "zero3" if "pp" not in layout else "zero1", **policy}
    one = replace(setup(layout, model, **policy), stack=export.stack_of(engine))
    with pytest.raises(UserError) as error:
        export.write_folder(engine, one)
    assert field in str(error.value)


def for_shell(engine: str, layout: str, value: str) -> Setup:
    """With a variable of this value."""
    policy = {"sharding": "zero0", "sequence_parallel": engine not in NO_SEQUENCE_PARALLEL}
    one = setup(layout, env=(("NCCL_DEBUG", value),), **policy)
    return replace(one, stack=export.stack_of(engine))


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_shell_runs_the_files_as_they_are(engine: str, hosts: int, tmp_path) -> None:
    """A launcher in place of torchrun prints what reaches it: words, environment, paths."""
    one = replace(for_shell(engine, f"dp{8 * hosts}", "a 'b' $c"), model=LLAMA2)
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    for name, text in export.write_folder(engine, one).items():
        (folder / name).write_text(text)
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$NCCL_DEBUG" "$PYTHONPATH" "$@"\n')
    fake.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "TORCHRUN": str(fake), "NODE_RANK": "1"}
    env |= {"MASTER_ADDR": "n0", "TRAIN": "train.py"}
    stand_alone = tmp_path / "all.sh"
    stand_alone.write_text(export.write(engine, one))
    for script in (folder / "run.sh", stand_alone):
        subprocess.run(["bash", "-n", script], check=True)
        done = subprocess.run(
            ["bash", script, "--own", "x y"], env=env, capture_output=True, text=True, check=True
        )
        value, path, *words = done.stdout.splitlines()
        assert value == "a 'b' $c"
        assert words[:4] == ["--nnodes", str(hosts), "--nproc-per-node", "8"]
        assert ("--standalone" in words) == (hosts == 1)
        assert words[-2:] == ["--own", "x y"]
        engine_words = (folder / "engine.args").read_text().split()
        assert words[-2 - len(engine_words) : -2] == engine_words
        if engine.startswith("torchtitan"):
            assert list(Path(path).glob("fourfold_*.py"))
        if engine == "nanotron":
            assert Path(words[words.index("--config-file") + 1]).is_file()
    shell = f'set -- $(cat "{folder}/engine.args"); printf "%s\\n" "$@"'
    read = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert read.stdout.split() == (folder / "engine.args").read_text().split()
    assert read.stdout.strip() == (folder / "engine.args").read_text().strip()


@pytest.mark.parametrize("engine", OTHERS)
def test_bash_runs_nothing_that_stands_in_a_name(engine: str, tmp_path) -> None:
    hostile = 'it\'s "$(touch pwned)" `touch pwned`; touch pwned'
    lines = f"{hostile}\ntouch pwned\nEOF\ntouch pwned\n"  # of a path
    one = replace(for_shell(engine, "dp8", hostile), model_name=lines)
    one = replace(one, model=replace(LLAMA2, name=hostile))
    if engine == "megatron-bridge":  # which has recipes of known models only
        with pytest.raises(UserError, match="not supported by megatron-bridge"):
            export.write_folder(engine, one)
        one = replace(one, model=LLAMA31)
    files = export.write_folder(engine, one) | {"all.sh": export.write(engine, one)}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for script in ("run.sh", "all.sh"):
        env = {"PATH": os.environ["PATH"], "TORCHRUN": "env"}
        subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True)
        assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("engine", "policy", "field"),
    [
        ("megatron", {"schedule": "zero-bubble"}, "policy.schedule"),
        ("megatron", {"recompute": "every-2"}, "policy.recompute"),
        ("megatron", {"precision": "bf16-pure"}, "policy.precision"),
        ("megatron", {"compile": True}, "policy.compile"),
        ("megatron", {"loss_chunks": 4}, "policy.loss_chunks"),
        ("megatron", {"schedule": "interleaved", "virtual_stages": 30}, "policy.virtual_stages"),
        ("torchtitan", {"sharding": "zero1"}, "policy.sharding"),
        ("torchtitan", {"sharding": "zero3", "precision": "fp4"}, "policy.precision"),
        ("torchtitan", {"sharding": "zero3", "recompute": "every-2"}, "policy.recompute"),
        ("torchtitan-0.2", {"sharding": "zero3", "recompute": "norm+mlp"}, "policy.recompute"),
        ("torchtitan-0.2", {"sharding": "zero3", "recompute": "block-2"}, "policy.recompute"),
        ("torchtitan-0.2", {"sharding": "zero3", "sequence_parallel": False},
         "policy.sequence_parallel"),
        ("nanotron", {"sharding": "zero3"}, "policy.sharding"),
        ("nanotron", {"recompute": "full"}, "policy.recompute"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(engine: str, policy: dict, field: str) -> None:
    one = setup(**policy)
    if engine == "nanotron":
        one = replace(one, model=LLAMA2)
    with pytest.raises(UserError, match=r"is not supported by|cannot split") as caught:
        export.write(engine, one)
    assert caught.value.field == field


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_a_sharding_that_nanotron_lacks_is_refused_on_one_data_rank_too(sharding: str) -> None:
    """It is legal there, since nothing is divided, but no config says it."""
    one = replace(setup("pp2 tp8", sharding=sharding), model=LLAMA2, stack="nanotron-2025")
    with pytest.raises(UserError, match=r"is not supported by nanotron.*use zero0 or zero1"):
        export.write("nanotron", one)
    plain = export.write_folder("nanotron", replace(one, policy=Policy(sharding="zero1")))
    assert "zero_stage: 1" in plain["config.yaml"]


@pytest.mark.parametrize(
    ("engine", "model", "field"),
    [
        ("megatron", catalog.model("bloom-176b"), "model.embedding_norm"),
        ("megatron", replace(LLAMA2, activation="geglu"), "model.activation"),
        ("megatron", replace(LLAMA2, window=4096), "model.window"),
        ("megatron", replace(LLAMA2, mlp_bias=True), "model.mlp_bias"),
        ("megatron", replace(LLAMA2, norm="layernorm-nobias"), "model.norm"),
        ("torchtitan", catalog.model("gpt-3-175b"), "model.family"),
        ("torchtitan", replace(LLAMA2, qkv_bias=True), "model.qkv_bias"),
        ("torchtitan-0.2", catalog.model("llama-3.2-1b"), "model.tied"),
        ("torchtitan-0.2", replace(LLAMA2, head_dim=64), "model.head_dim"),
        ("nanotron", catalog.model("llama-3.1-8b"), "model.positions"),
    ],
)
def test_a_model_it_cannot_express_is_refused_by_name(engine: str, model, field: str) -> None:
    with pytest.raises(UserError, match="is not supported by") as caught:
        export.check(engine, model)
    assert caught.value.field == field


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "nanotron"])
def test_a_window_as_long_as_the_sequence_asks_for_nothing(engine: str) -> None:
    short = replace(setup("dp8"), model=replace(LLAMA2, window=4096), stack=engine)
    short = replace(short, policy=Policy(sharding="zero3" if engine == "torchtitan" else "zero1"))
    assert export.write(engine, short)
    with pytest.raises(UserError, match="window=4096 is not supported"):
        export.write(engine, replace(short, batch=replace(short.batch, seq_len=8192)))


def test_an_engine_that_answers_is_named_among_those_that_run_it() -> None:
    """Gemma 2 has settings in no other engine; accelerate is the first that can run it."""
    ask = PlanRequest(model="gemma-2-2b", gpu="h100-80gb", gpus=8, seq_len=4096, global_batch=64)
    answer = plan(ask)
    assert answer.stack == "accelerate"
    assert answer.best.runs_in == ("accelerate",)


def test_rope_that_megatron_cannot_scale_is_refused() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, high_freq_factor=2.0)
    for place in (
        Positions(kind="rope", theta=1e4, scaling=scaling),
        Positions(kind="rope", theta=10000.5),
        Positions(kind="alibi"),
    ):
        with pytest.raises(UserError, match="is not supported by"):
            export.check("megatron", replace(LLAMA2, positions=place))
    linear = Positions(kind="rope", scaling=RopeScaling(kind="linear", factor=4.0))
    found = flags_of(replace(setup(), model=replace(LLAMA2, positions=linear)))
    assert found["--rotary-seq-len-interpolation-factor"] == ["4"]


def test_yarn_of_latent_attention_is_megatrons() -> None:
    """DeepSeek's published file has it; Megatron has no flag of its betas and first length, nor of
    any other scaling there."""
    model = catalog.model("deepseek-v3")
    yarn = RopeScaling(kind="yarn", factor=40.0, original_length=4096, mscale_all_dim=1.0)

    def scaled(**changes: Any) -> ModelShape:
        return replace(model, positions=replace(model.positions, scaling=replace(yarn, **changes)))

    found = flags_of(replace(setup("pp8 dp8 ep8", "deepseek-v3"), model=scaled()))
    assert found.items() >= {
        "--rope-type": ["yarn"], "--rotary-scaling-factor": ["40.0"], "--mscale": ["1.0"],
        "--mscale-all-dim": ["1.0"],
    }.items()  # fmt: skip
    assert "--no-rope-fusion" not in found
    for changes in ({"beta_fast": 1.0}, {"original_length": 8192}, {"kind": "linear"}):
        with pytest.raises(UserError, match=rf"model.positions.scaling.{next(iter(changes))}="):
            export.check("megatron", scaled(**changes))
    with pytest.raises(UserError, match="none, linear or llama3"):
        export.check("megatron", replace(LLAMA2, positions=scaled().positions))


def test_a_ramp_and_whole_micro_batches() -> None:
    ramp = Ramp(start=64, increment=64, samples=9000)
    one = replace(setup(), batch=replace(setup().batch, ramp=ramp))
    assert flags_of(one)["--rampup-batch-size"] == ["64", "64", "9000"]
    odd = replace(setup(), batch=Batch(seq_len=4096, micro_batch=3, global_batch=256))
    with pytest.raises(UserError, match="must divide global_batch 256 for megatron"):
        export.write("megatron", odd)
    assert "micro_batch = 3" in export.write("torchrun", odd)


def test_six_models_of_every_engine_are_drawn() -> None:
    for engine, models in MODELS.items():
        assert len(models) >= 6
        drawn = sampled(engine, 2 * len(models))
        assert {one.model.name for one in drawn} == {model.name for model in models}


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UserError, match="one of megatron, torchtitan, "):
        export.write("jax", setup())


@pytest.mark.parametrize("stack", ["megatron", "torchtitan"])
def test_a_schedule_may_be_asked_of_a_release(stack: str) -> None:
    """What has no pipeline on one rank has one in the layouts that are ranked."""
    policy = {"schedule": "interleaved"}
    sizes = {"gpus": 16, "seq_len": 2048, "global_batch": 64}
    request = PlanRequest(
        model="llama-3.1-8b", gpu="h100-80gb", stack=stack, layout="pp2", policy=policy, **sizes
    )
    best = plan(request).best
    assert best.policy.schedule == "interleaved"
    assert best.policy.virtual_stages > 1


def test_our_own_run_file_is_a_run_file() -> None:
    changed = replace(setup().model, layers=8)
    for model, written in ((setup().model, "llama-3.1-70b"), (changed, codec.encode(changed))):
        one = replace(setup(), model=model, model_name="llama-3.1-70b")
        table = texts.parse_toml(export.write("torchrun", one))
        spec = codec.load(RunSpec, table)
        assert (spec.model, table["model"]) == (model, written)
    assert spec.layout == setup().layout
    assert spec.batch == setup().batch


def test_torchtitans_selective_recompute_is_written_as_its_own() -> None:
    one = setup(sharding="zero3", recompute="selective", compile=True)
    config = export.write("torchtitan", one)
    assert "activation_checkpoint=SelectiveAC.Config()," in config
    assert "enable=True," in config
    words = export.write("torchtitan-0.2", one)
    assert "--activation_checkpoint.mode\nselective\n" in words
    assert "--activation_checkpoint.selective_ac_option\nop\n" in words


def test_scales_of_fp8_are_each_engines_own() -> None:
    recipes = {"auto": "tensorwise", "delayed": "delayed", "block": "blockwise", "mx": "mxfp8"}
    for scaling, recipe in recipes.items():
        one = replace(setup(precision="fp8", scaling=scaling), device="b200")
        assert flags_of(one)["--fp8-recipe"] == [recipe]
    bridge = export.write_folder("megatron-bridge", one)["pretrain.py"]
    assert "bf16_with_mxfp8_mixed" in bridge
    rows = setup(sharding="zero3", precision="fp8", scaling="row")
    words = export.write("torchtitan-0.2", rows)
    assert "float8.recipe_name\nrowwise\n" in words
    assert "enable_fsdp_float8_all_gather" not in words
    with pytest.raises(UserError, match=r"policy.scaling=block is not supported by torchtitan"):
        export.write("torchtitan", setup(sharding="zero3", precision="fp8", scaling="block"))


@pytest.mark.parametrize(("held", "narrow"), [("fp32", False), ("bf16", True), (None, True)])
def test_megatron_sums_gradients_as_stated_or_as_the_recipe(held: str | None, narrow: bool) -> None:
    words = export.write("megatron", setup(grad_dtype=held, reduce_dtype=held)).splitlines()
    assert ("--grad-reduce-in-bf16" in words) == narrow
    assert ("--accumulate-allreduce-grads-in-fp32" in words) != narrow
    assert "--cross-entropy-loss-fusion" in words
    with pytest.raises(UserError, match="one buffer for both"):
        export.write("megatron", setup(grad_dtype="bf16", reduce_dtype="fp32"))


def test_megatron_bridge_names_precisions_that_plan_has() -> None:
    with pytest.raises(UserError, match=r"use bf16-mixed, fp16, fp8$"):
        export.write("megatron-bridge", setup(model="llama-3.1-8b", precision="fp32"))


def test_what_cannot_be_exported_is_said_of_the_layout_that_was_asked() -> None:
    ask = PlanRequest(
        model="llama-3.1-70b", gpu="h100-80gb", gpus=64, seq_len=8192, global_batch=128,
        layout="tp2", export="deepspeed",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"rejected by: axis .*layout.tp=2 is not .*dp32 cp1 tp2"):
        fourfold.export(ask)


def test_a_job_asks_for_the_gpus_of_their_maker() -> None:
    for device, resource, name in (
        ("mi300x", "amd.com/gpu", "MI300X"),
        ("gh200-96gb", "nvidia.com/gpu", "GH200"),
    ):
        one = replace(setup("dp8", "llama-3.1-8b"), device=device)
        script = export.write("megatron", one)
        job = export.around("kubeflow", "megatron", one, script)["kubeflow.yaml"]
        assert f'{resource}: "8"' in job
        job = export.around("skypilot", "megatron", one, script)["skypilot.yaml"]
        assert f"accelerators: {name}:8" in job
