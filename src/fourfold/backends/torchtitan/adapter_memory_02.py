"""One rank of a torchtitan 0.2 job, counted on fake tensors: its own Trainer, started by its own
arguments, takes two steps. What is replaced here asks for a GPU, for other ranks or for files."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # flex attention is compiled while the module loads

import torch
from torch import Tensor, nn

from fourfold.backends.torchtitan.shims import titan_on_cpu
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

_STEPS = 2  # the optimizer's state exists from the second one on
_SPEC = "fourfold_memory"
# Buffers that `init_weights` of its models makes, by the methods that make them.
_BUFFERS = {"freqs_cis": "_precompute_freqs_cis", "rope_cache": "_precompute_rope_cache"}
# Settings that change what a rank holds in ways that are not counted, with the values that are.
_COUNTED: dict[str, tuple[object, ...]] = {
    "model.name": ("llama3", "qwen3"),
    "experimental.custom_import": ("",),
    "training.enable_cpu_offload": (False,),
    "optimizer.early_step_in_backward": (False,),
    "parallelism.disable_loss_parallel": (False,),
    "parallelism.enable_async_tensor_parallel": (False,),
    "parallelism.pipeline_parallel_schedule": (
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
    ),
    "parallelism.pipeline_parallel_schedule_csv": ("",),
    "parallelism.module_fqns_per_model_part": (None,),
    "checkpoint.create_seed_checkpoint": (False,),
    "memory_estimation.enable": (False,),
    "fault_tolerance.enable": (False,),
    "validation.enable": (False,),
    "debug.deterministic": (False,),
}
# What its parser, its meshes and its models raise for settings that they do not take.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# By the dtypes of weights with their moments, and of what is computed with.
_PRECISIONS = {
    ("float32", "bfloat16"): "bf16-mixed",
    ("bfloat16", "bfloat16"): "bf16-pure",
    ("float32", "float32"): "fp32",
}
_AXES = {
    "pp": "pipeline_parallel_degree",
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


def read_job(request: RankMemoryRequest) -> EngineJobReply:
    """Return the job that torchtitan's own parser makes of the request's arguments, in a world of
    its ranks, or the error that the parser ends with."""
    titan_on_cpu()
    from torchtitan.config import ConfigManager

    try:
        config = ConfigManager().parse_args(list(request.arguments))
        _require_types(config)
        return EngineJobReply(job=_job(config, request.world))
    except _REFUSALS as error:
        return EngineJobReply(refusal=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _require_types(config: Any) -> None:
    """Raise TypeError where a value is not of its setting's type: the parser lets it pass, and code
    that runs later does not."""
    default_config = type(config)()
    for section in fields(config):
        values = getattr(config, section.name)
        defaults = getattr(default_config, section.name)
        if not is_dataclass(values):
            raise TypeError(f"{section.name} must be a table")
        for setting in fields(defaults):
            value, default = getattr(values, setting.name), getattr(defaults, setting.name)
            if isinstance(default, bool | int | str) and type(value) is not type(default):
                name = f"{section.name}.{setting.name}"
                raise TypeError(f"{name} = {value!r} must be of type {type(default).__name__}")


def _job(config: Any, world: int) -> EngineJob:
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    def setting(name: str) -> EngineSetting:
        return EngineSetting(name=name, value=_written(attrgetter(name)(config)))

    parallelism, training = config.parallelism, config.training
    degrees = {axis: getattr(parallelism, name) for axis, name in _AXES.items()}
    named = {
        f"dp_{axis}" if axis in ("replicate", "shard") else axis: n for axis, n in degrees.items()
    }
    dims = ParallelDims(**named, world_size=world)
    layout = Layout(**{**degrees, "shard": dims.dp_shard})
    settings = {f"layout.{axis}": setting(f"parallelism.{name}") for axis, name in _AXES.items()}
    settings["layout.dp"] = settings["layout.shard"]
    settings["policy.sharding"] = setting("parallelism.fsdp_reshard_after_forward")
    settings["policy.compile"] = setting("compile.enable")
    settings["model"] = setting("model.flavor")
    flavors = get_train_spec(config.model.name).model_args
    if config.model.flavor not in flavors:
        names = ", ".join(flavors)
        raise ValueError(f"model.flavor {config.model.flavor} is not one of {names}")
    arguments = flavors[config.model.flavor]
    arguments.update_from_config(config)
    uncounted = [
        (setting(name), " or ".join(map(_written, counted)))
        for name, counted in _COUNTED.items()
        if attrgetter(name)(config) not in counted
    ]
    if config.activation_checkpoint.mode == "memory_budget":  # torch.compile's
        uncounted.append((setting("activation_checkpoint.mode"), "another mode"))
    attention = getattr(arguments, "attn_type", "sdpa")
    if attention != "sdpa":
        uncounted.append((settings["model"], "a flavor whose attention is sdpa"))
    precision = _PRECISIONS.get((training.dtype, training.mixed_precision_param), "unknown")
    settings["policy.precision"] = setting("training.mixed_precision_param")
    if config.model.converters:
        precision, settings["policy.precision"] = "fp8", setting("model.converters")
    in_pipeline = layout.pp > 1
    reshards = parallelism.fsdp_reshard_after_forward
    is_zero3 = reshards == "always" or (reshards == "default" and not in_pipeline)
    rows, batch = training.local_batch_size, training.global_batch_size
    return EngineJob(
        model=f"{config.model.name} {config.model.flavor}",
        has_experts=hasattr(arguments, "moe_args") and getattr(arguments, "moe_enabled", True),
        layout=layout,
        sharding="zero3" if is_zero3 else "zero2",
        recompute=_recompute(config.activation_checkpoint),
        precision=precision,
        precision_name=precision,
        is_compiled=config.compile.enable,
        seq_len=training.seq_len,
        micro_batch=parallelism.pipeline_parallel_microbatch_size if in_pipeline else rows,
        global_batch=batch if batch > 0 else rows * layout.dp,
        settings=settings,
        uncounted=tuple(uncounted),
    )


def _written(value: object) -> str:
    """Return a setting's value as TOML has it, without quotes around a word."""
    if value is None:
        return "nothing (omit it)"
    return json.dumps(value) if isinstance(value, bool | list) or value == "" else str(value)


def _recompute(checkpoints: Any) -> str:
    """As a run's policy names it: by operators (selective), or each N-th layer whole."""
    option = checkpoints.selective_ac_option
    if checkpoints.mode == "selective" and option != "op":
        return f"every-{option}"
    return checkpoints.mode


def count_rank(request: RankMemoryRequest, *, is_fake: bool = True) -> RankMemoryCount:
    """`is_fake`: False takes the same steps on real tensors, which must fit into host memory."""
    os.environ["NGPU"] = str(request.world)
    titan_on_cpu()
    import torchtitan
    from torchtitan.config import ConfigManager

    package = Path(torchtitan.__path__[0])
    with (
        tempfile.TemporaryDirectory() as dump,
        CountedRank(request.rank, request.world, package, is_fake=is_fake) as rank,
    ):
        words = ["--comm.mode", "fake_backend", "--job.dump_folder", dump, "--debug.seed", "1"]
        config = ConfigManager().parse_args([*request.arguments, *words])
        _without_files(config, rank)
        _without_gpu(rank)
        if config.parallelism.pipeline_parallel_degree > 1:
            _without_neighbours(config, rank)
        return _counted(config, rank, request.limit_bytes)


def _counted(config: Any, rank: CountedRank, limit_bytes: int | None) -> RankMemoryCount:
    from torchtitan.distributed import utils
    from torchtitan.train import Trainer

    trainer = Trainer(config)
    trainer.device = torch.device("cpu")  # without the number of a GPU
    trainer.metrics_processor.should_log = lambda step: False
    parts, ledger = trainer.model_parts, rank.ledger
    rank.own_model(parts)
    backward, clip, update = Tensor.backward, utils.clip_grad_norm_, trainer.optimizers.step

    def marked_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        ledger.mark("backward")
        backward(loss, *args, **kwargs)

    def marked_clip(*args: Any, **kwargs: Any) -> Any:
        rank.own_gradients(parts)
        ledger.mark("clip")
        return clip(*args, **kwargs)

    def marked_step(*args: Any, **kwargs: Any) -> Any:
        ledger.mark("optimizer")
        made = update(*args, **kwargs)
        rank.own_optimizer(trainer.optimizers.optimizers)
        return made

    rank.enter_context(compat.patched(Tensor, "backward", marked_backward))
    rank.enter_context(compat.patched(utils, "clip_grad_norm_", marked_clip))
    trainer.optimizers.step = marked_step
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, _STEPS + 1):
        trainer.step = step
        ledger.mark("forward")
        ledger.begin()
        trainer.train_step(batches)
    ledger.mark("end")
    dims = trainer.parallel_dims
    return ledger.count(
        rank=rank.rank,
        stage=dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0,
        params=sum(parameter.numel() for part in parts for parameter in part.parameters()),
        limit_bytes=limit_bytes,
    )


def _without_files(config: Any, rank: CountedRank) -> None:
    """The run's model with tokens of its own: no tokenizer, dataset, checkpoint or validation, and
    no logs."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    if config.experimental.custom_import:
        importlib.import_module(config.experimental.custom_import)
    config.checkpoint.enable = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    shape = (config.training.local_batch_size, config.training.seq_len)

    class HostTokens(BaseDataLoader):
        def __init__(self, **_: Any) -> None: ...

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                with rank.ledger.paused():  # in the host's memory
                    tokens = torch.zeros(shape, dtype=torch.long)
                    labels = torch.zeros(shape, dtype=torch.long)
                yield {"input": tokens}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    spec = get_train_spec(config.model.name)
    none = dict.fromkeys(("build_tokenizer_fn", "build_validator_fn", "state_dict_adapter"))
    register_train_spec(_SPEC, replace(spec, build_dataloader_fn=HostTokens, **none))
    config.model.name, config.experimental.custom_import = _SPEC, ""

    def init_buffers(model: Any, buffer_device: torch.device | None = None) -> None:
        """Values of weights do not matter; buffers are made anew, as it does."""
        for name, method in _BUFFERS.items():
            if hasattr(model, method):
                with torch.device(buffer_device or getattr(model, name).device):
                    setattr(model, name, getattr(model, method)())

    rank.enter_context(compat.patched(spec.model_cls, "init_weights", init_buffers))


def _without_gpu(rank: CountedRank) -> None:
    """The name and capacity of a GPU, which it only logs; storage begins with the weights."""
    from torchtitan.components import metrics
    from torchtitan.tools import utils

    peaks = SimpleNamespace(
        max_reserved_gib=0.0, max_reserved_pct=0.0, num_alloc_retries=0, num_ooms=0
    )
    monitor = SimpleNamespace(
        device_name="GPU", get_peak_stats=lambda: peaks, reset_peak_stats=lambda: None
    )
    rank.enter_context(compat.patched(metrics, "build_device_memory_monitor", lambda: monitor))
    rank.enter_context(compat.patched(utils, "get_peak_flops", lambda name: 1.0))
    to_empty = nn.Module.to_empty

    def begin_and_empty(module: nn.Module, **kwargs: Any) -> nn.Module:
        rank.begin_storage()
        return to_empty(module, **kwargs)

    rank.enter_context(compat.patched(nn.Module, "to_empty", begin_and_empty))


def _without_neighbours(config: Any, rank: CountedRank) -> None:
    """Stages of a pipeline ask each other for shapes, once: here they are told them. Passes of a
    micro batch are marked, since schedules mix them."""
    from torch.distributed.pipelining import PipelineStage
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed import pipeline_parallel
    from torchtitan.protocols.train_spec import get_train_spec

    arguments = get_train_spec(config.model.name).model_args[config.model.flavor]
    parallelism, tokens = config.parallelism, config.training.seq_len
    tp, rows = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_microbatch_size
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]

    def values(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    class MarkedStage(PipelineStage):
        def __init__(
            self, model: nn.Module, index: int, stages: int, device: torch.device, **kwargs: Any
        ) -> None:
            between = values(rows, tokens // tp, arguments.dim)
            first = torch.empty(rows, tokens, dtype=torch.long, device="meta")
            last = values(rows, tokens, arguments.vocab_size // tp)
            super().__init__(
                model,
                index,
                stages,
                torch.device("cpu"),
                input_args=(first if index == 0 else between,),
                output_args=(last if index == stages - 1 else between,),
                **kwargs,
            )

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            rank.ledger.mark("forward")
            return super().forward_one_chunk(*args, **kwargs)

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            rank.ledger.mark("backward")
            made = super().backward_one_chunk(*args, **kwargs)
            rank.own_gradients([self.submod])
            return made

    # torch 2.13 asks whether all stages know their shapes: they do.
    votes = {
        "_warmup_forward_vote": None,
        "_warmup_backward_result": SimpleNamespace(item=lambda: 1),
    }
    for name, vote in votes.items():
        if hasattr(PipelineStage, name):
            answer = partial(_answer, vote)
            rank.enter_context(compat.patched(PipelineStage, name, answer))
    rank.enter_context(compat.patched(pipeline_parallel, "PipelineStage", MarkedStage))


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value
