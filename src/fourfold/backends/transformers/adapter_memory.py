"""One rank of a training of transformers' models, counted on fake tensors: its own code, built from
a config.json, its layers cut by torch's FSDP2. What accelerate and DeepSpeed do with such a model
is in their folders."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.engine import compat
from fourfold.engine.one_rank.counted import CountedRank
from fourfold.result.one_rank import EngineJob, RankMemoryCount, RankMemoryRequest

_STEPS = 2  # the optimizer's state exists from the second one on
# Micro batches of a step that are run: all after the first find gradients there and are alike.
_MICRO_BATCHES = 2
CLIP = 1.0


class ScriptStep(NamedTuple):
    """What a script calls: a loss by tokens, its backward pass, and what follows the last one of a
    step. `optimizers`: whose state the rank holds; `state` what else of it is not in theirs."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], object]
    update: Callable[[], None]
    optimizers: list[torch.optim.Optimizer]
    state: Callable[[], Iterator[tuple[str, Tensor]]] = lambda: iter(())


def count_rank(request: RankMemoryRequest, *, is_fake: bool = True) -> RankMemoryCount:
    """`is_fake`: False takes the same steps on real tensors, which must fit into host memory."""
    import transformers

    job = job_of(request)
    package = Path(transformers.__path__[0])
    with CountedRank(request.rank, request.world, package, is_fake=is_fake) as rank:
        model = model_without_storage(
            request.folder, has_fp32_weights=job.precision == "bf16-mixed"
        )
        if job.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shard(model, job)
        give_storage(model, rank)
        parameters = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def update() -> None:
            rank.ledger.mark("clip")
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            rank.ledger.mark("optimizer")
            optimizer.step()
            optimizer.zero_grad()

        loop = ScriptStep(
            model=model,
            loss=lambda tokens: loss_of(model, tokens),
            backward=Tensor.backward,
            update=update,
            optimizers=[optimizer],
        )
        return count_steps(rank, loop, job, request.limit_bytes)


def job_of(request: RankMemoryRequest) -> EngineJob:
    if request.job is None:
        raise ValueError("a model of transformers needs the job of a script")
    return request.job


def model_without_storage(folder: str, *, has_fp32_weights: bool) -> Any:
    """The model of the folder's config.json by the class that the file names, in training."""
    import transformers
    from transformers import masking_utils
    from transformers.integrations import moe

    # It takes fake tensors for a graph being traced, and then masks what is one sequence.
    masking_utils.is_tracing = lambda *_: False
    # Experts run by grouped products on a GPU; a CPU's check of addresses is not for fake tensors.
    moe._can_use_grouped_mm = lambda *_: True
    config = transformers.AutoConfig.from_pretrained(folder)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    kind = getattr(transformers, names[0]) if names else None
    dtype = torch.float32 if has_fp32_weights else torch.bfloat16
    with torch.device("meta"):
        if kind is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = kind._from_config(config, dtype=dtype)
    return model.train()


def layer_names(model: Any) -> set[str]:
    """Classes of layers that transformers itself keeps whole on a device."""
    names = set(model._no_split_modules or ())
    if not names:
        raise ValueError(f"{type(model).__name__} does not name its layers (_no_split_modules)")
    return names


def shard(model: Any, job: EngineJob) -> None:
    """Cut each layer, then what is left, as torch's documentation of FSDP2 does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names, layout = layer_names(model), job.layout
    if layout.replicate > 1:
        sizes = (layout.replicate, layout.shard)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    formats = MixedPrecisionPolicy()
    if job.precision == "bf16-mixed":
        formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": formats,
        "reshard_after_forward": job.sharding == "zero3",
    }
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, **options)
    fully_shard(model, **options)


def give_storage(model: nn.Module, rank: CountedRank, *, on_host: bool = False) -> None:
    """Weights get memory, without values where they are fake; `on_host`: none of the GPU's."""
    rank.begin_storage()
    with rank.ledger.paused() if on_host else contextlib.nullcontext():
        model.to_empty(device="cpu")
    if not rank.is_fake:
        with torch.no_grad(), rank.ledger.paused():
            for tensor in (*model.parameters(), *model.buffers()):
                compat.local(tensor).zero_()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model's own loss, as a Trainer takes it: logits are let go of before the backward pass
    begins."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def count_steps(
    rank: CountedRank, loop: ScriptStep, job: EngineJob, limit_bytes: int | None
) -> RankMemoryCount:
    """Take two steps and return what the second one holds."""
    ledger = rank.ledger
    rank.own_model([loop.model])
    own_state(rank, loop)
    params = sum(weight.numel() for weight in loop.model.parameters())
    # Python would collect reference cycles at any moment: here it does so between passes.
    gc.disable()
    gc.collect()
    gc.freeze()
    accumulated = max(1, job.global_batch // (job.micro_batch * job.layout.dp))
    for _ in range(_STEPS):
        ledger.begin()
        for _ in range(min(accumulated, _MICRO_BATCHES)):
            ledger.mark("forward")
            with ledger.paused():
                tokens = torch.zeros(job.micro_batch, job.seq_len, dtype=torch.long)
            loss = loop.loss(tokens)
            gc.collect()
            ledger.mark("backward")
            loop.backward(loss)
            rank.own_gradients([loop.model])
            own_state(rank, loop)
            gc.collect()
        loop.update()
        rank.own_optimizer(loop.optimizers)
        own_state(rank, loop)
    ledger.mark("end")
    return ledger.count(rank=rank.rank, stage=0, params=params, limit_bytes=limit_bytes)


def own_state(rank: CountedRank, loop: ScriptStep) -> None:
    for kind, tensor in loop.state():
        rank.ledger.own(kind, tensor)
