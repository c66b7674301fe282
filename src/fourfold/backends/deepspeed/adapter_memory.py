"""One rank of a training by DeepSpeed, counted on fake tensors: a model of transformers in its own
`initialize`, with ZeRO 1 to 3 by its own JSON."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch import Tensor, nn

from fourfold import files
from fourfold.backends.deepspeed.shims import nothing_compiled
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
from fourfold.spec.texts import parse_json

_ADDRESS_UNIT = 512  # addresses of a GPU's allocator are multiples


def count_rank(request: RankMemoryRequest, *, is_fake: bool = True) -> RankMemoryCount:
    """`is_fake`: False takes the same steps on real tensors, which must fit into host memory."""
    import deepspeed
    import transformers

    job = job_of(request)
    packages = Path(deepspeed.__path__[0]), Path(transformers.__path__[0])
    with CountedRank(request.rank, request.world, *packages, is_fake=is_fake) as rank:
        rank.enter_context(_as_on_gpus(rank))
        model = model_without_storage(request.folder, has_fp32_weights=False)
        if job.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        is_cut_at_once = job.sharding == "zero3"
        give_storage(model, rank, on_host=is_cut_at_once)
        model.tie_weights()  # storage came to each by itself
        model.to = lambda *_: model  # it is there; fake weights cannot be swapped
        parameters = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_settings(request, job, model)
        )

        def update() -> None:
            rank.ledger.mark("optimizer")
            engine.step()

        def backward(loss: Tensor) -> None:
            engine.backward(loss)
            if not engine.is_gradient_accumulation_boundary():
                engine.step()

        loop = ScriptStep(
            model=engine.module,
            loss=lambda tokens: loss_of(engine, tokens),
            backward=backward,
            update=update,
            optimizers=[optimizer],
            state=lambda: _state(engine),
        )
        return count_steps(rank, loop, job, request.limit_bytes)


# Tables of its JSON that change what a rank holds in ways that are not counted.
_UNCOUNTED = (
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.mics_shard_size",
    "fp16",
    "amp",
    "compression_training",
    "sparse_attention",
    "activation_checkpointing.cpu_checkpointing",
    "sequence_parallel_size",
    "tensor_parallel",
    "pipeline",
    "torch_autocast",
)
_OFF = (None, False, 0, 1, "none", "auto", {})


def read_job(request: RankMemoryRequest) -> EngineJobReply:
    """Return the request's job with what the JSON of its arguments says; what is left to "auto"
    there is the job's."""
    job = job_of(request)
    try:
        table = parse_json(files.read_text(request.arguments[-1], field="config"))
        return EngineJobReply(job=_job_of_settings(job, table))
    except (LookupError, TypeError, ValueError) as error:
        return EngineJobReply(refusal=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _job_of_settings(job: EngineJob, table: object) -> EngineJob:
    if not isinstance(table, dict):
        raise TypeError("it is no JSON object")
    stage = _value(table, "zero_optimization.stage") or 0
    uncounted = []
    for path in _UNCOUNTED:
        value = _value(table, path)
        if isinstance(value, dict):
            value = value.get("device", value.get("enabled", value))
        if value not in _OFF:
            uncounted.append((EngineSetting(name=path, value=json.dumps(value)), "the default"))
    if _value(table, "bf16.enabled") not in (True, "auto"):
        value = json.dumps(_value(table, "bf16.enabled"))
        uncounted.append((EngineSetting(name="bf16.enabled", value=value), "true"))
    kind = _value(table, "optimizer.type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw"):
        uncounted.append((EngineSetting(name="optimizer.type", value=str(kind)), "AdamW"))
    rows = _number(table, "train_micro_batch_size_per_gpu") or job.micro_batch
    accumulated = _number(table, "gradient_accumulation_steps")
    whole = _number(table, "train_batch_size")
    ranks = job.layout.dp
    if whole and accumulated and not rows:
        rows = whole // (ranks * accumulated)
    if job.micro_batch and rows != job.micro_batch:
        raise ValueError(
            f"train_micro_batch_size_per_gpu is {rows}, and --micro-batch says {job.micro_batch}"
        )
    rows = rows or 1
    return replace(
        job,
        sharding=f"zero{stage}",
        micro_batch=rows,
        global_batch=whole or ranks * rows * (accumulated or 1),
        settings={
            "policy.sharding": EngineSetting(name="zero_optimization.stage", value=str(stage))
        },
        uncounted=tuple(uncounted),
    )


def _value(table: dict[str, Any], path: str) -> Any:
    value: Any = table
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _number(table: dict[str, Any], name: str) -> int:
    """A whole number; 0 where it is left to the script."""
    value = table.get(name)
    if value in (None, "auto"):
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r} must be a whole number from 1")
    return value


def _settings(request: RankMemoryRequest, job: EngineJob, model: Any) -> dict[str, Any]:
    """The user's JSON, with each "auto" as transformers' Trainer fills it in, or one that says what
    the job says."""
    if not request.arguments:
        return {
            "train_batch_size": job.global_batch,
            "train_micro_batch_size_per_gpu": job.micro_batch,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": int(job.sharding.removeprefix("zero"))},
            "zero_allow_untested_optimizer": True,
        }
    from transformers.integrations import deepspeed as integration

    arguments: Any = SimpleNamespace(
        world_size=job.layout.world,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.global_batch // (job.micro_batch * job.layout.dp),
        max_grad_norm=CLIP,
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 1,
    )
    filled = integration.HfTrainerDeepSpeedConfig(request.arguments[-1])
    filled.trainer_config_process(arguments, auto_find_batch_size=True)
    filled.mismatches.clear()  # with values of a script that nobody has stated
    filled.trainer_config_finalize(arguments, model, num_training_steps=1000)
    table = filled.config
    table.pop("optimizer", None)  # the fused AdamW that is passed keeps what its own keeps
    table.pop("scheduler", None)
    return table | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def _state(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Its own copies of weights, and its buffers of gradients."""
    zero = engine.optimizer
    for name, kind in (
        ("bit16_groups_flat", "parameters"),
        ("fp16_partitioned_groups_flat", "parameters"),
        ("single_partition_of_fp32_groups", "parameters"),
        ("fp32_partitioned_groups_flat", "parameters"),
        ("grad_partitions_flat_buffer", "gradients"),
    ):
        values = getattr(zero, name, None)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, Tensor):
                yield kind, value
                if value.grad is not None:
                    yield "gradients", value.grad
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        buffers = getattr(bucket, "buffer", None)
        for buffer in buffers if isinstance(buffers, list) else [buffers]:
            if isinstance(buffer, Tensor):
                yield "communication", buffer


class _Event:
    """A mark on a stream that has always been reached."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _gpu(rank: CountedRank) -> Any:
    """DeepSpeed's accelerator of CPUs, with streams and an allocator that keeps freed memory."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    first = torch.cpu.current_stream()
    kind: Any = torch.cpu.Stream
    kind.synchronize = lambda self: None  # which those of CPUs lack

    class CountedAccelerator(CPU_Accelerator):
        Stream = kind
        Event = _Event

        def is_synchronized_device(self) -> bool:
            return False

        def is_available(self) -> bool:
            return True

        def stream(self, stream: Any) -> AbstractContextManager[None]:
            return torch.cpu.stream(stream)

        def current_stream(self, device_index: int | None = None) -> Any:
            return torch.cpu.current_stream()

        def default_stream(self, device_index: int | None = None) -> Any:
            return first

        def available_memory(self, device_index: int | None = None) -> int:
            return 2**60  # it flattens weights where there is room

        def empty_cache(self) -> None:
            rank.ledger.empty_cache()

        def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
            return tensor

    return CountedAccelerator()


@contextmanager
def _as_on_gpus(rank: CountedRank) -> Iterator[None]:
    """Inside, DeepSpeed runs as on GPUs, without what it compiles, and sends nothing."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2
    from deepspeed.runtime.zero.partition_parameters import Init

    nothing_compiled()
    set_accelerator(_gpu(rank))
    cut = Init._zero_init_param

    def move_and_cut(init: Any, parameter: nn.Parameter) -> None:
        """A weight is on the GPU from here until it is cut."""
        parameter.data = parameter.data.clone()
        cut(init, parameter)

    def address(tensor: Tensor) -> int:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return _ADDRESS_UNIT * compat.storage_key(tensor) + offset

    with contextlib.ExitStack() as patches:
        patches.enter_context(compat.patched(Init, "_zero_init_param", move_and_cut))
        patches.enter_context(compat.patched(Tensor, "data_ptr", address))
        patches.enter_context(compat.patched(Tensor, "record_stream", lambda *_: None))
        # Every rank has what this one has.
        same = "assert_ints_same_as_other_ranks"
        patches.enter_context(compat.patched(partitioned_param_coordinator, same, lambda _: None))
        if rank.is_fake:
            zeros = stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3
            for owner, name in (
                *((zero, "has_overflow") for zero in zeros),
                *((module, "is_invalid_grad_norm") for module in (stage_1_and_2, stage3)),
            ):
                patches.enter_context(compat.patched(owner, name, _no(getattr(owner, name))))
        yield


def _no(question: Callable[..., object]) -> Callable[..., bool]:
    """The question whether a gradient is infinite, answered by no: nobody knows."""

    def ask(*args: Any, **kwargs: Any) -> bool:
        question(*args, **kwargs)
        return False

    return ask
