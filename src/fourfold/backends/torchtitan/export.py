"""torchtitan's configuration. Of 0.3 a Python function that its --module and --config name; of 0.2
--section.option flags, with the model in a module that it imports. Both share words for axes,
schedules and formats."""

from __future__ import annotations

from typing import Any

from fourfold.backends.torchtitan.export_model import (
    about,
    arguments,
    arguments_02,
    backend,
    check,
    parts,
)
from fourfold.search.export.setup import Package, Setup, filled, no_setting
from fourfold.spec.engine import Engine
from fourfold.spec.policy import Policy

__all__ = ["CHOICES", "check", "package"]

CHOICES = {
    "policy.reduce_dtype": (None, "fp32"),
    "policy.attention": ("auto", "flash"),
}
_OWN = "tokenizer (hf_assets_path), data, learning rate and number of steps"
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}
# Beside products in fp8 everything else is bf16.
_DTYPES = {"bf16-pure": "bfloat16", "bf16-mixed": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
_ABOUT_FP8 = (
    "products in fp8 but for the head's, scaled by rows; weights are gathered in bf16, where the"
    " published runs that seconds and bytes come from gathered them in fp8",
)
_RECOMPUTE = {
    "none": "None",
    "selective": "SelectiveAC.Config()",  # by operators, its default
    "full": "FullAC.Config()",
}
_FP8_IMPORT = "from torchtitan.components.quantization import Float8LinearConverter\n"
_FP8 = "quantize.linear.float8"  # release 0.2: its converter


def package(setup: Setup, engine: Engine) -> Package:
    policy = setup.policy
    if policy.async_tp and not policy.compile:
        raise no_setting(engine.name, "policy.async_tp", True, "compile = true, which it needs")
    if engine.export.before:
        return _flags_package(setup, engine)
    return Package(
        engine=engine,
        entry="-m torchtitan.train",
        env=setup.env,
        engine_args=("--module", "fourfold_config", "--config", "pretrain"),
        files={"fourfold_config.py": _config(setup, engine)},
        python_path=True,
        own=f"{_OWN} (in fourfold_config.py, or as arguments of run.sh)",
        about=(_ABOUT_FP8 if policy.precision == "fp8" else ()) + about(setup),
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
    if setup.model.moe:
        fields["expert_parallel_degree"] = layout.ep
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
        # Of weights, their gradients and moments; reductions are in fp32 whatever it is.
        "dtype": "bfloat16" if setup.policy.precision == "bf16-pure" else "float32",
        "mixed_precision_param": _DTYPES[setup.policy.precision],
        "mixed_precision_reduce": "float32",
    }


def _config(setup: Setup, engine: Engine) -> str:
    policy = setup.policy
    # Captured graphs know no pipeline, and are not what was priced.
    trained = _training(setup) | {"disable_cuda_graphs": True}
    parallel = _parallelism(setup) | {"enable_sequence_parallel": policy.sequence_parallel}
    compiled = {"enable": policy.compile, "enable_async_tensor_parallel": policy.async_tp}
    forced = policy.routing == "forced"
    values = {
        "fp8_import": _FP8_IMPORT if policy.precision == "fp8" else "",
        "debug_import": "DebugConfig, " if forced else "",
        "converted": _converted(policy),
        "recompute": _RECOMPUTE[policy.recompute],
        "training": arguments(trained, 3),
        "parallelism": arguments(parallel, 3),
        "compile": arguments(compiled, 3),
        "debug": "        debug=DebugConfig(moe_force_load_balance=True),\n" if forced else "",
    }
    return filled("config.py.txt", engine, {**parts(setup, engine), **values})


def _converted(policy: Policy) -> str:
    """The model, its products in fp8 where the policy says so; its own 405B leaves the head out."""
    if policy.precision != "fp8":
        return "model()"
    settings = f"filter_fqns=['lm_head'], model_compile_enabled={policy.compile}"
    return f"Float8LinearConverter.Config({settings}).build().convert(model())"


def _flags_package(setup: Setup, engine: Engine) -> Package:
    """Of release 0.2."""
    policy = setup.policy
    words = [word for name, value in _options(setup).items() for word in (f"--{name}", str(value))]
    words += ["--compile.enable"] if policy.compile else []
    words += ["--parallelism.enable_async_tensor_parallel"] if policy.async_tp else []
    words += ["--debug.moe_force_load_balance"] if policy.routing == "forced" else []
    by_row = policy.scaling == "row"
    if policy.precision == "fp8" and policy.zero > 0 and not by_row:  # as in its published runs
        words += [f"--{_FP8}.enable_fsdp_float8_all_gather"]
        words += [f"--{_FP8}.precompute_float8_dynamic_scale_for_fsdp"]
    return Package(
        engine=engine,
        entry="-m torchtitan.train",
        env=setup.env,
        engine_args=tuple(words),
        files={
            "fourfold_model.py": filled("model.py.txt", engine, arguments_02(setup)),
            # For benchmarks: its packages come without a dataset and a tokenizer.
            "fourfold_random.py": filled("random.py.txt", engine, {}),
        },
        python_path=True,
        own=f"{_OWN} (as arguments of run.sh)",
        about=about(setup),
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
    if setup.model.latent:
        options["parallelism.expert_parallel_comm_backend"] = backend(setup)
    options |= {f"training.{name}": value for name, value in _training(setup).items()}
    kind, _, every = policy.recompute.partition("-")
    options["activation_checkpoint.mode"] = "selective" if every else kind
    if every or kind == "selective":  # with a number it recomputes each N-th layer whole
        options["activation_checkpoint.selective_ac_option"] = every or "op"
    if policy.precision == "fp8":
        options |= {"model.converters": _FP8, f"{_FP8}.filter_fqns": "output"}
        if policy.scaling == "row":
            options[f"{_FP8}.recipe_name"] = "rowwise"
    return options
