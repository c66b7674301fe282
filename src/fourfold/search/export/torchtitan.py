"""torchtitan's configuration. Of 0.3 a Python function that its --module and --config name; of 0.2
--section.option flags, with the model in a module that it imports. Both share words for axes,
schedules and formats."""

from __future__ import annotations

from typing import Any

from fourfold.cost.stacks import ExportEngine
from fourfold.search.export.setup import (
    LLAMA_SHAPE,
    Package,
    Setup,
    check_model,
    filled,
    no_setting,
)
from fourfold.spec.model import ModelShape, Positions
from fourfold.spec.policy import Policy

CHOICES = {"policy.reduce_dtype": (None, "fp32"), "policy.attention": ("auto", "flash")}
_OWN = "tokenizer (hf_assets_path), data, learning rate and number of steps"
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}
# Beside products in fp8 everything else is bf16.
_DTYPES = {"bf16-mixed": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
# Its Llama 3, and its Qwen 3, which has norms of queries and keys and a head size of its own.
_SHAPES = {**LLAMA_SHAPE, "family": ("llama", "qwen"), "qk_norm": ("none", "head")}
_ABOUT_FP8 = (
    "products in fp8 but for the head's, scaled by rows; weights are gathered in bf16, where the"
    " published runs that seconds and bytes come from gathered them in fp8",
)
# What differs between its two models of this kind.
_LLAMA = {
    "package": "llama3",
    "model": "Llama3Model",
    "block": "Llama3TransformerBlock",
    "parallelize": "parallelize_llama",
    "adapter": "Llama3StateDictAdapter",
    "rope": "ComplexRoPE",
}
_QWEN = {
    "package": "qwen3",
    "model": "Qwen3Model",
    "block": "Qwen3TransformerBlock",
    "parallelize": "parallelize_qwen3",
    "adapter": "Qwen3StateDictAdapter",
    "rope": "CosSinRoPE",
}
_RECOMPUTE = {
    "none": "None",
    "selective": "SelectiveAC.Config()",  # by operators, its default
    "full": "FullAC.Config()",
}
_FP8_IMPORT = "from torchtitan.components.quantization import Float8LinearConverter\n"
_SCALING_IMPORT = "from torchtitan.models.llama3.model.args import RoPEScalingArgs\n"
# Release 0.2: its arguments of a model, and its converter to fp8.
_ARGUMENTS = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs"}
_FP8 = "quantize.linear.float8"
_SIZES = ("hidden", "vocab", "tied", "heads", "kv_heads", "head_size", "ffn", "layers")


def _is_qwen3(model: ModelShape) -> bool:
    return model.qk_norm == "head"


def _names(model: ModelShape) -> dict[str, str]:
    return _QWEN if _is_qwen3(model) else _LLAMA


def check(model: ModelShape, engine: ExportEngine) -> None:
    check_model(engine.name, model, _SHAPES)
    place = model.positions
    if place.kind != "rope":
        raise no_setting(engine.name, "model.positions.kind", place.kind, "rope")
    if place.scaling and (place.scaling.kind != "llama3" or _is_qwen3(model)):
        hint = "none" if _is_qwen3(model) else "llama3, or none"
        raise no_setting(engine.name, "model.positions.scaling", place.scaling.kind, hint)
    if not engine.before or _is_qwen3(model):
        return
    if model.tied:
        raise no_setting(engine.name, "model.tied", True, "release 0.3 (--export torchtitan)")
    if model.attention_width != model.hidden:
        raise no_setting(engine.name, "model.head_dim", model.head_dim, "hidden / heads")


def package(setup: Setup, engine: ExportEngine) -> Package:
    policy = setup.policy
    if policy.async_tp and not policy.compile:
        raise no_setting(engine.name, "policy.async_tp", True, "compile = true, which it needs")
    if engine.before:
        return _flags_package(setup, engine)
    return Package(
        engine=engine,
        entry="-m torchtitan.train",
        env=setup.env,
        engine_args=("--module", "fourfold_config", "--config", "pretrain"),
        files={"fourfold_config.py": _config(setup, engine)},
        python_path=True,
        own=f"{_OWN} (in fourfold_config.py, or as arguments of run.sh)",
        about=_ABOUT_FP8 if policy.precision == "fp8" else (),
    )


def _parallelism(setup: Setup) -> dict[str, Any]:
    """Fields of its parallelism section; both releases have them."""
    layout, policy = setup.layout, setup.policy
    plain = policy.zero == 0
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp if plain else layout.replicate,
        "data_parallel_shard_degree": 1 if plain else layout.shard,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if not plain:
        fields["fsdp_reshard_after_forward"] = "always" if policy.zero == 3 else "never"
    if layout.pp == 1:
        return fields
    chunks = layout.pp * policy.virtual_stages
    return fields | {
        "pipeline_parallel_schedule": _SCHEDULES[policy.schedule],
        "pipeline_parallel_layers_per_stage": -(-setup.model.layers // chunks),
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "pipeline_parallel_microbatch_size": setup.batch.micro_batch,
    }


def _training(setup: Setup) -> dict[str, Any]:
    """A pipeline takes a rank's whole share and cuts it; else micro batches are accumulated."""
    batch = setup.batch
    share = batch.global_batch // setup.layout.dp
    return {
        "seq_len": batch.seq_len,
        "local_batch_size": batch.micro_batch if setup.layout.pp == 1 else share,
        "global_batch_size": batch.global_batch,
        "dtype": "float32",
        "mixed_precision_param": _DTYPES[setup.policy.precision],
        "mixed_precision_reduce": "float32",
    }


def _config(setup: Setup, engine: ExportEngine) -> str:
    model, policy = setup.model, setup.policy
    # Captured graphs know no pipeline, and are not what was priced.
    trained = _training(setup) | {"disable_cuda_graphs": True}
    parallel = _parallelism(setup) | {"enable_sequence_parallel": policy.sequence_parallel}
    compiled = {"enable": policy.compile, "enable_async_tensor_parallel": policy.async_tp}
    values = {
        "eps": repr(model.norm_eps),
        "fp8_import": _FP8_IMPORT if policy.precision == "fp8" else "",
        "qk_norm": f"norm({model.head_size})" if _is_qwen3(model) else "None",
        "converted": _converted(policy),
        "recompute": _RECOMPUTE[policy.recompute],
        "rope_fields": _arguments(_rope(setup), 4),
        "training": _arguments(trained, 3),
        "parallelism": _arguments(parallel, 3),
        "compile": _arguments(compiled, 3),
    }
    sizes = {name: getattr(model, name) for name in _SIZES}
    return filled("torchtitan-config.py.txt", engine, {**_names(model), **sizes, **values})


def _arguments(fields: dict[str, Any], depth: int) -> str:
    indent = "    " * depth
    return "".join(f"{indent}{name}={value!r},\n" for name, value in fields.items())


def _converted(policy: Policy) -> str:
    """The model, its products in fp8 where the policy says so; its own 405B leaves the head out."""
    if policy.precision != "fp8":
        return "model()"
    settings = f"filter_fqns=['lm_head'], model_compile_enabled={policy.compile}"
    return f"Float8LinearConverter.Config({settings}).build().convert(model())"


def _rope(setup: Setup) -> dict[str, Any]:
    model, place = setup.model, setup.model.positions
    fields: dict[str, Any] = {
        "dim": model.head_size,
        "max_seq_len": max(setup.batch.seq_len, place.length or 0),
        "theta": place.theta,
    }
    return fields | ({"scaling": "llama"} | _scaling(place) if place.scaling else {})


_SCALED = (
    "scaling_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _scaling(place: Positions) -> dict[str, Any]:
    """Both releases have these names; {} without any."""
    scaling = place.scaling
    if scaling is None:
        return {}
    values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    return dict(zip(_SCALED, (*values, scaling.original_length), strict=True))


def _flags_package(setup: Setup, engine: ExportEngine) -> Package:
    """Of release 0.2."""
    model, policy = setup.model, setup.policy
    if _is_qwen3(model) and setup.layout.pp > 1:
        hint = "pp = 1 for a Qwen, or release 0.3"
        raise no_setting(engine.name, "layout.pp", setup.layout.pp, hint)
    words = [word for name, value in _options(setup).items() for word in (f"--{name}", str(value))]
    words += ["--compile.enable"] if policy.compile else []
    words += ["--parallelism.enable_async_tensor_parallel"] if policy.async_tp else []
    if policy.precision == "fp8" and policy.zero > 0:  # as in its published runs
        words += [f"--{_FP8}.enable_fsdp_float8_all_gather"]
        words += [f"--{_FP8}.precompute_float8_dynamic_scale_for_fsdp"]
    return Package(
        engine=engine,
        entry="-m torchtitan.train",
        env=setup.env,
        engine_args=tuple(words),
        files={
            "fourfold_model.py": filled("torchtitan-model.py.txt", engine, _arguments_02(setup)),
            # For benchmarks: its packages come without a dataset and a tokenizer.
            "fourfold_random.py": filled("torchtitan-random.py.txt", engine, {}),
        },
        python_path=True,
        own=f"{_OWN} (as arguments of run.sh)",
    )


def _options(setup: Setup) -> dict[str, object]:
    policy = setup.policy
    options: dict[str, object] = {
        "model.name": "fourfold",
        "model.flavor": "model",
        "experimental.custom_import": "fourfold_model",
    }
    options |= {f"parallelism.{name}": value for name, value in _parallelism(setup).items()}
    if setup.layout.cp > 1:
        options["parallelism.context_parallel_rotate_method"] = "allgather"
    options |= {f"training.{name}": value for name, value in _training(setup).items()}
    kind, _, every = policy.recompute.partition("-")
    options["activation_checkpoint.mode"] = "selective" if every else kind
    if every or kind == "selective":  # with a number it recomputes each N-th layer whole
        options["activation_checkpoint.selective_ac_option"] = every or "op"
    if policy.precision == "fp8":
        options |= {"model.converters": _FP8, f"{_FP8}.filter_fqns": "output"}
    return options


def _arguments_02(setup: Setup) -> dict[str, object]:
    """Of its model. A Llama's MLP width is a rounded multiple: one multiple, as wide as asked; a
    factor of 1 leaves the frequencies as they are."""
    model, place, package = setup.model, setup.model.positions, _names(setup.model)["package"]
    if _is_qwen3(model):
        more = {"head_dim": model.head_size, "hidden_dim": model.ffn, "qk_norm": True}
        more["enable_weight_tying"] = model.tied
        text = _arguments(more, 1)
    else:
        scaled = _scaling(place) or dict(zip(_SCALED, (1.0, 1.0, 4.0, 8192), strict=True))
        multiplier = 0.5 * model.ffn / (2 * 4 * model.hidden // 3)
        text = _arguments({"multiple_of": model.ffn, "ffn_dim_multiplier": multiplier}, 1)
        text += f"    rope_scaling_args=RoPEScalingArgs(\n{_arguments(scaled, 2)}    ),\n"
    return {
        "package": package,
        "arguments": _ARGUMENTS[package],
        "imports": "" if _is_qwen3(model) else _SCALING_IMPORT,
        "eps": repr(model.norm_eps),
        "theta": repr(place.theta),
        "length": max(setup.batch.seq_len, place.made_for or 0),
        "more": text,
        **{name: getattr(model, name) for name in _SIZES},
    }
