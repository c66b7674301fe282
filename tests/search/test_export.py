"""Settings written for an engine have its own names, and a shell can use them as they are."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold import PlanRequest, plan
from fourfold.backends.megatron import export as megatron
from fourfold.backends.megatron_bridge import export as megatron_bridge
from fourfold.errors import UserError
from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.spec import catalog, codec, texts
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape, RopeScaling
from fourfold.spec.muon import Muon
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from tests.engines.sampled import EXPERTS, MODELS, sampled
from tests.specs import shape_of

TESTS = Path(__file__).parent.parent
FLAGS = tomllib.loads((TESTS / "golden" / "megatron_flags.toml").read_text())
LLAMA2 = catalog.model("llama-2-7b")
LLAMA31 = catalog.model("llama-3.1-8b")
NO_SEQUENCE_PARALLEL = ("accelerate", "deepspeed")
OTHERS = tuple(name for name in export.ENGINES if name != "torchrun")


def setup(layout: str = "pp2 dp4 tp8", model: str = "llama-3.1-70b", **policy: Any) -> Setup:
    return Setup(
        model=catalog.model(model),
        layout=Layout.parse(layout),
        batch=Batch(seq_len=4096, micro_batch=2, global_batch=256),
        policy=Policy(**policy),
        host_gpus=8,
        engine=engine_of("megatron-bridge-2026"),
        device="h100-80gb",
    )


def setup_of(said: dict[str, Any]) -> Setup:
    """Of the table."""
    rest = dict(said)
    model = shape_of(rest.pop("model", "llama-3.1-70b"))
    batch = {key: rest.pop(key) for key in ("seq_len", "micro_batch", "ramp") if key in rest}
    if "ramp" in batch:
        batch["ramp"] = Ramp(**batch["ramp"])
    fields: dict[str, Any] = {"device": rest.pop("device")} if "device" in rest else {}
    fields |= {"engine": engine_of(rest.pop("stack"))} if "stack" in rest else {}
    one = setup(rest.pop("layout", "pp2 dp4 tp8"), **rest)
    return replace(one, model=model, batch=replace(one.batch, **batch), **fields)


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


def written(engine: str, one: Setup) -> str:
    """All files of an engine that can express the model."""
    export.check(engine, one.model)
    return "\n".join(export.write_folder(engine, one).values())


TABLE = tomllib.loads(Path(__file__).with_name("exported.toml").read_text())


@pytest.mark.parametrize(("said", "there", "missing"), TABLE["flags"])
def test_a_setup_has_these_flags_of_megatron(said: dict, there: dict, missing: list[str]) -> None:
    found = flags_of(setup_of(said))
    assert {name: found.get(f"--{name}") for name in there} == there
    assert not {f"--{name}" for name in missing} & found.keys()


@pytest.mark.parametrize(("engine", "said", "begins"), TABLE["refused"])
def test_what_an_engine_cannot_do_is_refused(engine: str, said: dict, begins: str) -> None:
    one = setup_of(said)
    with pytest.raises(UserError) as caught:
        written(engine, replace(one, engine=engine_of(export.stack_of(engine))))
    assert str(caught.value).startswith(begins)


@pytest.mark.parametrize(("engine", "said", "there", "missing"), TABLE["written"])
def test_the_files_for_an_engine_have_these_texts(engine, said, there, missing) -> None:
    text = written(engine, setup_of(said))
    assert [one for one in there if one not in text] == []
    assert [one for one in missing if one in text] == []


def with_muon(drawn: Sequence[Setup]) -> list[Setup]:
    """Those of them that Megatron has with Muon, by every placement and scale in turn."""
    recipes = (Muon(), Muon(placement="blocks", nesterov=False), Muon(scale="original"))
    changed = [
        replace(one, policy=replace(one.policy, optimizer="muon", muon=recipes[number % 3]))
        for number, one in enumerate(drawn)
        if one.policy.zero < 2 and one.policy.precision != "fp16" and one.layout.replicate == 1
    ]
    assert len(changed) > 60
    return changed


@pytest.mark.parametrize(
    ("layout", "fields", "refused"),
    [
        ("dp32 tp2", {"precision": "fp16"}, "policy.precision=fp16"),
        ("dp2x16 tp2", {}, "layout.replicate=2"),
        ("dp32 tp2", {"sharding": "zero3"}, "policy.sharding=zero3"),
        ("dp32 tp2", {"muon": Muon(dtype="fp32")}, "policy.muon.dtype=fp32"),
        ("dp32 tp2", {"muon": Muon(matrices="no-router")}, "policy.muon.matrices=no-router"),
    ],
)
def test_megatron_refuses_of_muon_what_its_optimizer_lacks(layout, fields, refused) -> None:
    one = setup(layout, optimizer="muon", **fields)
    with pytest.raises(UserError, match=f"{refused} is not supported by megatron"):
        export.write_folder("megatron", one)


def test_every_exported_name_is_megatrons_own() -> None:
    """Over 300 sampled layouts: names, whether a value follows, and closed choices."""
    drawn = (*sampled("megatron", 240), *sampled("megatron", 60, EXPERTS["megatron"]))
    for one in (*drawn, *with_muon(drawn)):
        for name, values in flags_of(one).items():
            if name in FLAGS["switches"]:
                assert values == []
            else:
                assert name in FLAGS["values"]
                assert len(values) == 1 or (values and name in FLAGS["many"])
            assert set(values) <= set(FLAGS["choices"].get(name, values))


def test_bridge_refuses_a_flag_of_megatron_without_a_field_of_its_own() -> None:
    with pytest.raises(UserError, match=r"--no-such-flag 3 is not supported by megatron-bridge"):
        megatron_bridge.overrides(("--micro-batch-size", "2", "--no-such-flag", "3"))


def test_bridge_has_a_place_for_every_flag_that_megatron_is_given() -> None:
    """A field of its container, or its recipe; never both, never none."""
    tables = tomllib.loads(Path(megatron_bridge.__file__).with_name("recipes.toml").read_text())
    unsaid = [flag for flags in tables["unsaid"].values() for flag in flags]
    assert len(unsaid) == len({*unsaid})
    assert not {*unsaid} & {*tables["fields"]}
    found = set()
    for source in Path(megatron.__file__).parent.glob("export*.py"):
        found |= set(re.findall(r'"(--[a-z][\w-]*\w)"', source.read_text()))
    assert len(found) > 100
    assert found <= {*unsaid, *tables["fields"]}


def for_shell(engine: str, layout: str, value: str) -> Setup:
    """With a variable of this value."""
    policy = {"sharding": "zero0", "sequence_parallel": engine not in NO_SEQUENCE_PARALLEL}
    one = setup(layout, env=(("NCCL_DEBUG", value),), **policy)
    return replace(one, engine=engine_of(export.stack_of(engine)))


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


@pytest.mark.parametrize("engine", ["megatron-0.16", "torchtitan"])
def test_a_window_as_long_as_the_sequence_asks_for_nothing(engine: str) -> None:
    short = replace(setup("dp8"), model=replace(LLAMA2, window=4096), engine=engine_of(engine))
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


def test_an_engine_that_answers_has_the_axes_that_are_asked_for() -> None:
    """Of engines with a ring and gpipe only ours runs this family with experts on other ranks."""
    ask = PlanRequest(
        model="qwen3-30b-a3b", gpu="h100-80gb", gpus=16, seq_len=4096, global_batch=64,
        policy={"schedule": "gpipe", "cp_kind": "ring"},
    )  # fmt: skip
    assert plan(ask).stack == "accelerate"
    spread = plan(replace(ask, layout="ep4"))
    assert spread.stack == "fourfold"
    assert spread.best.layout.ep == 4


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
        export.check("megatron-0.16", replace(LLAMA2, positions=scaled().positions))


def test_yarn_beside_latent_attention_has_flags_since_megatron_0_19() -> None:
    yarn = RopeScaling(kind="yarn", factor=4.0, original_length=32768, beta_fast=16.0)
    model = replace(LLAMA2, positions=replace(LLAMA2.positions, scaling=yarn))
    found = flags_of(replace(setup("pp2 dp4"), model=model))
    assert found.items() >= {
        "--position-embedding-type": ["yarn"], "--rotary-scaling-factor": ["4.0"],
        "--yarn-original-max-position-embeddings": ["32768"], "--yarn-beta-fast": ["16.0"],
        "--yarn-correction-range-round-to-int": [],
    }.items()  # fmt: skip
    assert "--rope-type" not in found


def test_six_models_of_every_engine_are_drawn() -> None:
    for engine, models in MODELS.items():
        assert len(models) >= 6
        drawn = sampled(engine, 2 * len(models))
        assert {one.model.name for one in drawn} == {model.name for model in models}


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
    assert "micro_batch = 3" in export.write("torchrun", setup_of({"micro_batch": 3}))
    changed = replace(setup().model, layers=8)
    for model, written in ((setup().model, "llama-3.1-70b"), (changed, codec.encode(changed))):
        one = replace(setup(), model=model, model_name="llama-3.1-70b")
        table = texts.parse_toml(export.write("torchrun", one))
        spec = codec.load(RunSpec, table)
        assert (spec.model, table["model"]) == (model, written)
    assert spec.layout == setup().layout
    assert spec.batch == setup().batch


def test_what_cannot_be_exported_is_said_of_the_layout_that_was_asked() -> None:
    ask = PlanRequest(
        model="llama-3.1-70b", gpu="h100-80gb", gpus=64, seq_len=8192, global_batch=128,
        layout="tp2", export="deepspeed",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"--tp 2: layout.tp=2 is not supported by .*; use --tp 1"):
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


def test_names_of_stacks_are_read_as_exports() -> None:
    names = {"Megatron-LM": "megatron", "nemo": "megatron", "torchtitan-2025": "torchtitan"}
    assert {name: export.engine_named(name) for name in names} == names
    ask = PlanRequest(
        model="llama-3.1-8b", gpu="h100-80gb", gpus=8, seq_len=4096, global_batch=64,
        layout="tp2", export="megatron-lm",
    )  # fmt: skip
    exported = fourfold.export(ask)
    assert (exported.engine, exported.release) == ("megatron", export.EXPORTS["megatron"].release)
    assert "predicted as megatron-lm-2025" in exported.notes[0]


def test_an_own_stack_keeps_the_rules_of_the_engine_it_names() -> None:
    assert engine_of("my-megatron").rules.name == "megatron"
    assert engine_of("acme-torchtitan-2025").rules.name == "torchtitan"
    assert engine_of("gigatron-2023").rules.name == "generic"
    assert engine_of("our-nemo-compile").habits.compiled
    assert export.has_rules_of("megatron", "my-megatron")


def test_accelerate_export_ignores_the_kind_of_cp_without_cp() -> None:
    ask = {"model": "llama-2-7b", "gpu": "h100-80gb", "gpus": 16, "seq_len": 4096,
           "global_batch": 64, "layout": "cp1", "policy": {"cp_kind": "ulysses"}}  # fmt: skip
    written = fourfold.export(PlanRequest(**ask, export="accelerate"))
    assert written.engine == "accelerate"
    assert "distributed_type: FSDP" in written.script
