"""One rank of a training by accelerate, counted on fake tensors: a YAML of `accelerate launch` goes
to its own launcher, a model of transformers to its own `prepare`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.backends.transformers.adapter_memory import (
    CLIP,
    ScriptStep,
    count_steps,
    give_storage,
    job_of,
    loss_of,
    model_without_storage,
)
from fourfold.engine import compat
from fourfold.engine.one_rank.counted import CountedRank
from fourfold.result.one_rank import (
    EngineJob,
    EngineJobReply,
    EngineSetting,
    RankMemoryCount,
    RankMemoryRequest,
)
from fourfold.spec.layout import Layout


def count_rank(request: RankMemoryRequest, *, is_fake: bool = True) -> RankMemoryCount:
    """`is_fake`: False takes the same steps on real tensors, which must fit into host memory."""
    import accelerate
    import transformers

    job = job_of(request)
    packages = Path(accelerate.__path__[0]), Path(transformers.__path__[0])
    os.environ |= launched(_file(request, job), request.world)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    with CountedRank(request.rank, request.world, *packages, is_fake=is_fake) as rank:
        rank.enter_context(_prepares_without_storage(rank))
        accelerator = accelerate.Accelerator()
        model = model_without_storage(
            request.folder, has_fp32_weights=job.precision == "bf16-mixed"
        )
        parameters = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        model, prepared = accelerator.prepare(model, optimizer)

        def update() -> None:
            rank.ledger.mark("clip")
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            rank.ledger.mark("optimizer")
            prepared.step()
            prepared.zero_grad()

        loop = ScriptStep(
            model=model,
            loss=lambda tokens: loss_of(model, tokens),
            backward=accelerator.backward,
            update=update,
            optimizers=[optimizer],
        )
        return count_steps(rank, loop, job, request.limit_bytes)


# Variables of a launch whose values are counted, by the setting of the YAML that decides them.
_COUNTED = {
    "ACCELERATE_USE_FSDP": ("distributed_type", "true", "FSDP"),
    "FSDP_VERSION": ("fsdp_config.fsdp_version", "2", "2"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_config.fsdp_offload_params", "false", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        "fsdp_config.fsdp_activation_checkpointing_offload",
        "false",
        "false",
    ),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_config.dynamo_backend", "NO", "no"),
}
_AXES = {"replicate": "dp_replicate", "shard": "dp_shard", "cp": "cp", "tp": "tp"}


def read_job(request: RankMemoryRequest) -> EngineJobReply:
    """Return the request's job with what the YAML of its arguments says, as accelerate's launcher
    reads it, or the error that the launcher ends with."""
    try:
        set_here = launched(Path(request.arguments[-1]), request.world)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        return EngineJobReply(refusal=f"{type(error).__name__}: {' '.join(str(error).split())}")
    return EngineJobReply(job=_launched_job(job_of(request), set_here))


def _launched_job(job: EngineJob, set_here: dict[str, str]) -> EngineJob:
    uncounted = [
        (EngineSetting(name=name, value=set_here[variable]), written)
        for variable, (name, counted, written) in _COUNTED.items()
        if set_here.get(variable, counted).lower() != counted.lower()
        or (variable == "ACCELERATE_USE_FSDP" and variable not in set_here)
    ]
    sizes = {
        axis: int(set_here.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1))
        for axis, name in _AXES.items()
    }
    if "ACCELERATE_USE_PARALLELISM_CONFIG" not in set_here:
        sizes["shard"] = job.layout.world
    settings = {
        f"layout.{axis}": EngineSetting(
            name=f"parallelism_config.parallelism_config_{name}_size", value=str(sizes[axis])
        )
        for axis, name in _AXES.items()
    }
    mixed = set_here.get("ACCELERATE_MIXED_PRECISION", "no")
    unmixed = job.precision if job.precision == "bf16-pure" else "fp32"
    precision = {"bf16": "bf16-mixed", "no": unmixed}.get(mixed, mixed)
    settings["policy.precision"] = EngineSetting(name="mixed_precision", value=mixed)
    reshards = set_here.get("FSDP_RESHARD_AFTER_FORWARD", "true") != "false"
    recomputes = set_here.get("FSDP_ACTIVATION_CHECKPOINTING") == "true"
    return replace(
        job,
        layout=Layout(
            replicate=sizes["replicate"],
            shard=sizes["shard"],
            cp=sizes["cp"],
            tp=sizes["tp"],
        ),
        sharding="zero3" if reshards else "zero2",
        recompute="full" if recomputes else "none",
        precision=precision,
        precision_name=precision,
        settings=settings,
        uncounted=tuple(uncounted),
    )


def _file(request: RankMemoryRequest, job: EngineJob) -> Path:
    """The user's YAML, or one that says what the job says."""
    if request.arguments:
        return Path(request.arguments[-1])
    path = Path(request.folder) / "accelerate.yaml"
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": job.sharding == "zero3",
        "fsdp_activation_checkpointing": job.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16" if job.precision == "bf16-mixed" else "no",
        "num_machines": 1,
        "num_processes": job.layout.world,
        "fsdp_config": fsdp,
    }
    path.write_text(json.dumps(settings))  # which is YAML
    return path


def launched(path: Path, world: int) -> dict[str, str]:
    """Return the variables that `accelerate launch` starts a script with."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(path), "--num_processes", str(world), "script.py"]
    arguments: Any = launch.launch_command_parser().parse_args(words)
    arguments, _, _ = launch._validate_launch_command(arguments)
    set_here = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in set_here.items() if os.environ.get(name) != value}


@contextmanager
def _prepares_without_storage(rank: CountedRank) -> Iterator[None]:
    """Inside, its ranks are those of GPUs, and what it cuts has no storage before it is cut: it
    does the same where it reads weights on the first rank alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, fsdp_utils

    def backend(*_: Any) -> tuple[str, Any]:
        return "fake", DistributedType.MULTI_GPU

    def load(_: Any, model: nn.Module, *__: Any, **___: Any) -> None:
        give_storage(model, rank)

    def address(tensor: Tensor) -> int:
        """It finds an optimizer's weights again by what a tensor without storage has not."""
        return id(tensor)

    with (
        compat.patched(PartialState, "_prepare_backend", backend),
        compat.patched(fsdp_utils, "fsdp2_load_full_state_dict", load),
        compat.patched(fsdp_utils, "get_non_persistent_buffers", lambda *_, **__: set()),
        compat.patched(Tensor, "data_ptr", address),
    ):
        yield
