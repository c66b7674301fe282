"""Do Hugging Face, DeepSpeed, Megatron-Bridge, SkyPilot and Kubeflow take what is written for them?

Each is asked by its own code, in an environment of scripts/engines; without that, what it would be
asked is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import fourfold
from fourfold import PlanRequest
from fourfold.backends.megatron_bridge import export as megatron_bridge
from fourfold.errors import UserError
from fourfold.verbs.export import Exported
from tests.engines.sampled import environment


def _exported(engine: str, layout: str, job: str = "", **policy: Any) -> Exported:
    request = PlanRequest(
        model="llama-3.1-8b", gpu="h100-80gb", gpus=64, seq_len=8192, global_batch=128, top=1,
        layout=layout, policy=policy, export=engine,
    )  # fmt: skip
    return fourfold.export(request, job=job)


def _asked(code: str, text: str, folder: Path, **env: str) -> Any:
    """What the tool's own code says of an exported file, its last line as JSON."""
    file = folder / "exported"
    file.write_text(text)
    done = subprocess.run(
        [environment("ecosystem"), "-c", code, str(file)],
        env=os.environ | {"HOME": str(folder)} | env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


LAYOUTS = [
    ("tp1 cp1 dp64", {"sharding": "zero3"}),
    ("tp2 cp2 dp16", {"sharding": "zero2"}),
    ("tp2 cp1 dp4x8", {"sharding": "zero3", "recompute": "full"}),
]


@pytest.mark.parametrize(("layout", "policy"), LAYOUTS)
def test_accelerate_reads_its_parallelism_config(layout: str, policy: Any, tmp_path: Path) -> None:
    made = _exported("accelerate", layout, **policy)
    choice = made.choice.layout
    sizes = yaml.safe_load(made.files["accelerate.yaml"])["parallelism_config"]
    said = {name.removeprefix("parallelism_config_"): value for name, value in sizes.items()}
    assert (
        said["tp_size"] * said["cp_size"] * said["dp_shard_size"] * said["dp_replicate_size"] == 64
    )
    assert (said["tp_size"], said["cp_size"]) == (choice.tp, choice.cp)
    code = (
        "import json, sys\n"
        "from accelerate.commands.config.config_args import load_config_from_file\n"
        "from accelerate.commands.launch import launch_command_parser, _validate_launch_command\n"
        "from accelerate.utils import ParallelismConfig\n"
        "from accelerate.utils.launch import prepare_multi_gpu_env\n"
        "load_config_from_file(sys.argv[1])\n"
        "words = ['--config_file', sys.argv[1], '--main_process_ip', 'x', 'train.py']\n"
        "args = _validate_launch_command(launch_command_parser().parse_args(words))[0]\n"
        "env = prepare_multi_gpu_env(args)\n"
        "mesh = ParallelismConfig()\n"
        "print(json.dumps([env, [mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size,"
        " mesh.cp_size]]))\n"
    )
    own = dict(
        line.removeprefix("export ").split("=", 1)
        for line in made.files["env.sh"].splitlines()
        if line.startswith("export ")
    )
    env, mesh = _asked(code, made.files["accelerate.yaml"], tmp_path, **own)
    assert mesh == [choice.replicate, choice.shard, choice.tp, choice.cp]
    # What its launcher sets is what env.sh sets.
    assert {name: env.get(name) for name in own if name in env} == {
        name: value for name, value in own.items() if name in env
    }
    assert {"FSDP_VERSION", "PARALLELISM_CONFIG_TP_SIZE"} <= {*env} & {*own}


@pytest.mark.parametrize(("layout", "zero"), [("dp64", 3), ("cp4 dp16", 2), ("cp1 dp64", 1)])
def test_deepspeed_reads_its_json(layout: str, zero: int, tmp_path: Path) -> None:
    made = _exported("deepspeed", layout, sharding=f"zero{zero}")
    config = json.loads(made.files["ds_config.json"])
    choice = made.choice
    assert config["zero_optimization"]["stage"] == zero
    assert (
        config["train_micro_batch_size_per_gpu"]
        * config["gradient_accumulation_steps"]
        * choice.layout.dp
        == config["train_batch_size"]
        == 128
    )
    assert config.get("sequence_parallel_size", 1) == choice.layout.cp
    code = (
        "import json, sys\n"
        "from deepspeed.runtime import config\n"
        "config.dist.get_rank = lambda: 0\n"
        "config.dist.get_world_size = lambda: 64\n"
        "found = config.DeepSpeedConfig(json.load(open(sys.argv[1])))\n"
        "print(json.dumps([found.train_batch_size, found.zero_optimization_stage]))\n"
    )
    assert _asked(code, made.files["ds_config.json"], tmp_path) == [128, zero]


def test_megatron_bridge_has_every_field_and_recipe() -> None:
    made = _exported("megatron-bridge", "tp2 pp2 cp1 dp16", recompute="full")
    said = dict(word.split("=", 1) for word in made.files["engine.args"].split())
    assert said["model.tensor_model_parallel_size"] == "2"
    assert said["model.recompute_granularity"] == "full"
    assert said["train.global_batch_size"] == "128"
    assert "llama31_8b_pretrain_config" in made.files["pretrain.py"]
    compile(made.files["pretrain.py"], "pretrain.py", "exec")
    flags = ("--micro-batch-size", "2", "--recompute-modules", "layernorm", "mlp", "--qk-layernorm")
    assert {"train.micro_batch_size=2", "model.recompute_modules=[layernorm,mlp]"} <= {
        *megatron_bridge.overrides(flags)
    }


def test_a_model_without_a_recipe_is_sent_to_megatron() -> None:
    request = PlanRequest(
        model="mpt-7b", gpu="h100-80gb", gpus=8, seq_len=2048, global_batch=8,
        export="megatron-bridge",
    )  # fmt: skip
    with pytest.raises(UserError, match="--export megatron"):
        fourfold.export(request)


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_skypilot_takes_the_task(engine: str, tmp_path: Path) -> None:
    made = _exported(engine, "dp64", job="skypilot")
    task = yaml.safe_load(made.files["skypilot.yaml"])
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (8, "H100:8")
    _must_write(task["run"], made, tmp_path)
    code = (
        "import json, sky, sys, yaml\n"
        "found = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])))\n"
        "print(json.dumps([found.num_nodes, str(found.resources)]))\n"
    )
    nodes, resources = _asked(code, made.files["skypilot.yaml"], tmp_path)
    assert nodes == 8
    assert "H100" in resources


@pytest.mark.parametrize("engine", ["accelerate", "torchtitan"])
def test_kubeflow_takes_the_job(engine: str, tmp_path: Path) -> None:
    made = _exported(engine, "dp64", job="kubeflow")
    job = yaml.safe_load(made.files["kubeflow.yaml"])
    assert (job["kind"], job["spec"]["trainer"]["numNodes"]) == ("TrainJob", 8)
    _must_write(job["spec"]["trainer"]["command"][2], made, tmp_path)
    code = (
        "import json, sys, yaml\n"
        "from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob\n"
        "found = TrainerV1alpha1TrainJob.from_dict(yaml.safe_load(open(sys.argv[1])))\n"
        "print(json.dumps([found.spec.trainer.num_proc_per_node, found.to_dict()]))\n"
    )
    each, said = _asked(code, made.files["kubeflow.yaml"], tmp_path)
    assert each == 8
    assert said["spec"]["runtimeRef"]["name"] == "torch-distributed"


def _must_write(run: str, made: Exported, folder: Path) -> None:
    """The job's shell text makes the same files, and starts torchrun with the same words."""
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" >words\n')
    (folder / "torchrun").chmod(0o755)
    parts = folder / "parts"
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "EXPORT_DIR": str(parts), "TRAIN": "train.py",
           "SKYPILOT_NODE_RANK": "3", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
           "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29500",
           }  # fmt: skip
    subprocess.run(["bash", "-c", run], env=env, cwd=folder, check=True)
    words = (folder / "words").read_text().split("\n")
    assert words[:4] == ["--nnodes", "8", "--nproc-per-node", "8"]
    assert words[4:10] == [
        "--node-rank",
        "3",
        "--master-addr",
        "10.0.0.1",
        "--master-port",
        "29500",
    ]
    assert "" not in words[:-1]
    for name, text in made.files.items():
        if name not in ("run.sh", "skypilot.yaml", "kubeflow.yaml"):
            assert (parts / name).read_text().strip() == text.strip()


def test_a_job_of_our_own_engine_is_for_one_host() -> None:
    with pytest.raises(UserError, match="is for one host"):
        _exported("torchrun", "dp64", job="kubeflow")
