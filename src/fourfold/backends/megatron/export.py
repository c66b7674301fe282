"""Megatron-LM's command line. Names are those of its arguments.py (tests/golden/megatron_flags.toml
has them, with the release); dp is what the world leaves."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.backends.megatron.export_experts import (
    about_experts,
    check_experts,
    expert_flags,
    has_all_biases,
    latent_flags,
    layer_pattern,
)
from fourfold.backends.megatron.export_positions import check_positions, position_flags
from fourfold.cost.count.params import end_layers
from fourfold.cost.scaling import KINDS
from fourfold.search.export.setup import Flags, Package, Setup, check_model, no_setting
from fourfold.spec.batch import Batch
from fourfold.spec.engine import Engine
from fourfold.spec.model import ModelShape
from fourfold.spec.muon import MATCHED_RMS
from fourfold.spec.policy import Policy

_CP = {"ring": "p2p", "allgather": "allgather", "ulysses": "a2a"}
_SHARDING = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
_ATTENTION = {"auto": "auto", "flash": "flash", "cudnn": "fused", "unfused": "unfused"}
_ACTIVATIONS: dict[str, str | None] = {
    "gelu": None,
    "swiglu": "--swiglu",
    "relu2": "--squared-relu",
}
# x * sigmoid(1.702 x), both halves cut off at 7, and 1 added to the other.
_CLIPPED_SWIGLU: Flags = {
    "--quick-geglu": None,
    "--activation-func-clamp-value": 7.0,
    "--glu-linear-offset": 1.0,
}
_PRECISIONS: dict[str, Flags] = {
    "fp32": {},
    "bf16-mixed": {"--bf16": None},
    "fp16": {"--fp16": None},
    "fp8": {"--bf16": None, "--fp8-format": "hybrid"},
    "fp4": {"--bf16": None, "--fp4-format": "e2m1"},
}
_RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "selective": {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"},
    "norm+mlp": {"--recompute-granularity": "selective", "--recompute-modules": "layernorm mlp"},
    "moe": {"--recompute-granularity": "selective", "--recompute-modules": "moe"},
    "moe-act": {"--recompute-granularity": "selective", "--recompute-modules": "moe_act"},
    "full": {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": 1,
    },
}
_MODELS: dict[str, tuple[object, ...]] = {
    "activation": tuple(_ACTIVATIONS),
    "norm": ("rmsnorm", "layernorm"),
    "embedding_norm": (False,),
    "qk_norm": ("none", "head"),
    "positions.kind": ("rope", "learned"),
    "positions.partial": (),  # --rotary-percent has any share
    "experts": (),
    "latent": (),
    "mtp": (),
}
# What GPT-OSS has beside; release 0.16 does not have all of it.
_RECENT: dict[str, tuple[object, ...]] = {
    "window": (),
    "mixers": (),
    "sinks": (),
    "variants": ("clipped-swiglu",),
}
CHOICES: dict[str, tuple[object, ...]] = {
    "policy.compile": (False,),
    "policy.attention": tuple(_ATTENTION),
    "policy.grad_dtype": (None, "bf16", "fp32"),
    "policy.reduce_dtype": (None, "bf16", "fp32"),
    "policy.cuda_graph": (),
    "policy.optimizer": ("adamw", "muon"),
    "batch.ramp": (),
}
_STEP_GRAPH: Flags = {
    "--cuda-graph-impl": "full_iteration",
    "--te-rng-tracker": None,
    "--no-check-for-nan-in-loss-and-grad": None,
}
# GPUs from which on its tensor-parallel streams need no single queue.
_BLACKWELL = ("b100", "b200", "b300", "gb200", "gb300")


def check(model: ModelShape, engine: Engine) -> None:
    check_model(engine.name, model, _MODELS if engine.export.before else _MODELS | _RECENT)
    _check_biases(model)
    if model.latent and not model.latent.q_rank and not engine.export.plain_queries:
        hint = "a rank of compressed queries, or --export megatron-0.16 (0.18.2 takes it, too)"
        raise no_setting(engine.name, "model.latent.q_rank", "none", hint)
    if model.moe:
        check_experts(model, model.moe)
    check_positions(model, engine)


def _check_biases(model: ModelShape) -> None:
    """All linears of a layer have one, or none has, or queries, keys and values alone."""
    if has_all_biases(model):
        return
    parts = {name: getattr(model, name) for name in ("qkv_bias", "out_bias", "mlp_bias")}
    odd = [name for name, has in parts.items() if has is not None and has != model.bias]
    if odd and (model.bias or odd != ["qkv_bias"]):
        hint = "a bias in every linear, in none, or in qkv alone"
        raise no_setting("megatron", f"model.{odd[0]}", parts[odd[0]], hint)


def package(setup: Setup, engine: Engine) -> Package:
    flags = _model(setup.model, setup.batch) | _axes(setup) | _stages(setup) | _batch(setup.batch)
    flags |= _precision(setup) | _data_parallel(setup) | _recompute(setup.policy)
    if setup.model.moe:
        flags |= expert_flags(setup, setup.model.moe)
    if setup.policy.cuda_graph:
        flags |= _STEP_GRAPH
    if setup.policy.optimizer == "muon":
        flags |= _muon(setup, engine)
    flags["--attention-backend"] = _ATTENTION[setup.policy.attention]
    flags["--transformer-impl"] = "transformer_engine"
    # As the recipes behind its seconds: a fused loss (Transformer Engine's own is refused since
    # 0.18), garbage collected on all ranks in the same step.
    flags |= {"--cross-entropy-loss-fusion": None, "--cross-entropy-fusion-impl": "native"}
    flags |= {"--manual-gc": None, "--manual-gc-interval": 100}
    words = [
        str(word)
        for name, value in flags.items()
        for word in (
            engine.export.older_flags.get(name, name),
            *(() if value is None else str(value).split()),
        )
    ]
    return Package(
        engine=engine,
        entry='"${PRETRAIN:-pretrain_gpt.py}"',
        env=_environment(setup),
        engine_args=tuple(words),
        own="tokenizer, data, learning rate, number of steps, checkpoints (as arguments of run.sh)",
        about=tuple(_about(setup, flags)),
    )


def _about(setup: Setup, flags: Flags) -> Iterator[str]:
    if "--bf16" in flags:
        held = "bf16" if "--grad-reduce-in-bf16" in flags else "fp32"
        yield f"gradients of all micro batches are summed, and reduced, in {held}"
    if setup.policy.optimizer == "muon" and setup.model.gated:
        yield "Megatron-LM makes the gate of an MLP orthogonal together with the matrix beside it"
    if setup.policy.zero >= 2 and setup.layout.tp > 1:
        yield "Megatron-LM advises against its FSDP with tensor parallelism (other queues)"
    if setup.model.moe:
        yield from about_experts(setup, setup.model.moe)


def _model(model: ModelShape, batch: Batch) -> Flags:
    flags: Flags = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_size,
    }
    if model.kv_heads != model.heads:
        flags |= {"--group-query-attention": None, "--num-query-groups": model.kv_heads}
    activation = _ACTIVATIONS[model.activation]
    if "clipped-swiglu" in model.variants:
        flags |= _CLIPPED_SWIGLU
    elif activation:
        flags[activation] = None
    flags["--normalization"] = "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"
    flags["--norm-epsilon"] = f"{model.norm_eps:g}"
    if not model.bias and not has_all_biases(model):
        flags["--disable-bias-linear"] = None
        if model.qkv_bias:
            flags["--add-qkv-bias"] = None
    if model.qk_norm == "head":
        flags["--qk-layernorm"] = None
    if model.window is not None:
        flags["--window-size"] = f"{model.window - 1},0"  # before the token itself
        if model.mixers is not None:
            *before, last = model.mixers
            is_last_full = last == "full" and "full" not in before
            every = len(model.mixers) if is_last_full else layer_pattern(model, "window")
            flags["--window-attn-skip-freq"] = every
    if model.sinks:
        flags["--softmax-type"] = "learnable"
    if model.latent:
        flags |= latent_flags(model.latent)
    if model.mtp:
        flags["--mtp-num-layers"] = model.mtp
    if model.activation == "relu2" or (model.activation == "gelu" and not model.bias):
        flags["--no-bias-gelu-fusion"] = None
    flags |= position_flags(model, batch)
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = None
    flags |= {"--attention-dropout": "0.0", "--hidden-dropout": "0.0"}
    return flags | {"--vocab-size": model.vocab, "--make-vocab-size-divisible-by": 1}


def _axes(setup: Setup) -> Flags:
    layout, policy = setup.layout, setup.policy
    # Its embedding is cut over tp: rows are added until they divide.
    padded = -(-setup.model.vocab // layout.tp) * layout.tp
    flags: Flags = {
        "--padded-vocab-size": padded,
        "--tensor-model-parallel-size": layout.tp,
        "--context-parallel-size": layout.cp,
        "--pipeline-model-parallel-size": layout.pp,
    }
    if layout.cp > 1:
        flags["--cp-comm-type"] = _CP[policy.cp_kind]
    if policy.sequence_parallel and layout.tp > 1:
        flags["--sequence-parallel"] = None
    if setup.overlaps_tp:
        flags["--tp-comm-overlap"] = None
    return flags


def _stages(setup: Setup) -> Flags:
    """Stages as they were priced: equal ones, with fewer layers at the ends where they must be."""
    virtual, model = setup.policy.virtual_stages, setup.model
    chunks = setup.layout.pp * virtual
    if setup.layout.pp == 1:
        return {}
    if model.layers % chunks == 0 and not model.mtp:
        return {"--num-virtual-stages-per-pipeline-rank": virtual} if virtual > 1 else {}
    further = model.mtp or 0
    layers = model.layers + further
    first, last = end_layers(layers, chunks, further)
    inner = f"({_layers(-(-layers // chunks))}|)*{chunks - 2}" if chunks > 2 else ""
    ends = f"E{_layers(first)}|", f"{_layers(last - further)}{'m' * further}L"
    return {"--pipeline-model-parallel-layout": inner.join(ends)}


def _layers(count: int) -> str:
    return "t" * count if count < 4 else f"t*{count}"


def _batch(batch: Batch) -> Flags:
    flags: Flags = {
        "--seq-length": batch.seq_len,
        "--micro-batch-size": batch.micro_batch,
        "--global-batch-size": batch.global_batch,
    }
    if batch.ramp:
        numbers = (batch.ramp.start, batch.ramp.increment, batch.ramp.samples)
        flags["--rampup-batch-size"] = " ".join(str(number) for number in numbers)
    return flags


def _precision(setup: Setup) -> Flags:
    policy = setup.policy
    flags = dict(_PRECISIONS[policy.precision])
    if policy.precision == "fp8":
        flags["--fp8-recipe"] = KINDS[policy.scaling_kind].names[0]
    stated = {"grad_dtype": policy.grad_dtype, "reduce_dtype": policy.reduce_dtype}
    if "--bf16" in flags:
        formats = set(stated.values()) - {None}
        if len(formats) > 1:
            rule = f"the same as reduce_dtype ({policy.reduce_dtype}): it has one buffer for both"
            raise no_setting("megatron", "policy.grad_dtype", policy.grad_dtype, rule)
        if "bf16" in formats or (not formats and setup.defaults.acc_bytes == 2.0):
            flags["--grad-reduce-in-bf16"] = None
        else:
            flags["--accumulate-allreduce-grads-in-fp32"] = None
    for name, value in stated.items():
        if value is not None and "--bf16" not in flags:
            raise no_setting("megatron", f"policy.{name}", value, "precision bf16-mixed")
    return flags


def _data_parallel(setup: Setup) -> Flags:
    """Sharding, and the overlap that the seconds assume: without ZeRO always, else by habit."""
    layout, policy = setup.layout, setup.policy
    flags: Flags = {}
    if policy.zero >= 1:
        flags["--use-distributed-optimizer"] = None
        if layout.replicate > 1:
            flags["--num-distributed-optimizer-instances"] = layout.replicate
    if policy.zero >= 2:
        flags |= {
            "--use-megatron-fsdp": None,
            "--data-parallel-sharding-strategy": _SHARDING[policy.sharding],
            "--ckpt-format": "fsdp_dtensor",
        }
    usual = setup.defaults.overlap_dp or policy.zero in (0, 3)
    if usual and policy.overlap_grad_reduce and layout.dp * layout.cp > 1:
        flags["--overlap-grad-reduce"] = None
        if policy.zero >= 1 and policy.overlap_param_gather:
            flags["--overlap-param-gather"] = None
    return flags


def _muon(setup: Setup, engine: Engine) -> Flags:
    """Whole matrices, as ours: gathered by every tensor rank, or in blocks with summed products.
    Its usual `blockwise` makes each rank's part orthogonal apart, which is another optimizer."""
    muon = setup.policy.muon
    if engine.export.before:
        raise no_setting(engine.name, "policy.optimizer", "muon", "adamw, or --export megatron")
    if setup.policy.zero >= 2:
        raise no_setting("megatron", "policy.sharding", setup.policy.sharding, "zero1, with muon")
    # Its parser takes these two; its optimizer raises when it is made (0.18.2 and 0.19.2).
    if setup.policy.precision == "fp16":
        raise no_setting("megatron", "policy.precision", "fp16", "bf16-mixed, with muon")
    if setup.layout.replicate > 1:
        hint = f"dp={setup.layout.dp}, with muon"
        raise no_setting("megatron", "layout.replicate", setup.layout.replicate, hint)
    if muon.dtype != "bf16":
        raise no_setting("megatron", "policy.muon.dtype", muon.dtype, "bf16")
    if muon.matrices != "layers":
        raise no_setting("megatron", "policy.muon.matrices", muon.matrices, "layers")
    is_matched = muon.scale == "match-rms"
    flags: Flags = {
        "--optimizer": "muon",
        "--muon-momentum": f"{muon.momentum:g}",
        "--muon-scale-mode": "spectral" if is_matched else "shape_scaling",
        "--muon-extra-scale-factor": f"{muon.factor * (MATCHED_RMS if is_matched else 1.0):g}",
        "--muon-num-ns-steps": muon.steps,
        "--muon-coefficient-type": muon.coefficients,
        "--muon-fp32-matmul-prec": "medium",
        "--muon-tp-mode": "distributed" if muon.placement == "blocks" else "duplicated",
    }
    return flags | ({"--muon-nesterov": None} if muon.nesterov else {})


def _recompute(policy: Policy) -> Flags:
    if policy.recompute_kind != "block":
        return _RECOMPUTE[policy.recompute]
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "block",
        "--recompute-num-layers": policy.recompute_number,
    }


def _environment(setup: Setup) -> dict[str, str]:
    """It demands one queue for tensor and context parallelism and several for its FSDP; its recipes
    have many where they hide the exchange of tokens."""
    layout, queues = setup.layout, ""
    if setup.policy.zero >= 2:
        queues = "8"
    elif setup.policy.overlap_exchange:
        queues = "32"
    elif (layout.tp > 1 or layout.cp > 1) and not setup.device.startswith(_BLACKWELL):
        queues = "1"
    kernels = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
    graph = kernels if setup.policy.cuda_graph and setup.model.moe else {}
    return ({"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}) | graph | setup.env
