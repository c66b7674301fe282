"""Runs in an environment of torchtitan 0.2 or 0.3: what does it make of exported settings?

Reads a JSON list of cases ({"args": [...], "folder": ..., "world": N}) from standard input. Its own
manager parses the arguments, its own classes build the model on the meta device and cut it into
stages. Writes layers of every stage, parameters, tokens a step and micro batches for each case.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

# Kernels of DeepEP need a GPU to install; its models import their names where they are built.
NAMES = {"deep_ep": "Buffer ElasticBuffer", "deep_ep.utils": "EventHandle EventOverlap"}
for _module, _names in NAMES.items():
    sys.modules[_module] = ModuleType(_module)
    for _name in _names.split():
        setattr(sys.modules[_module], _name, object)
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import torch  # noqa: E402
from telling import tell  # noqa: E402
from torch._opaque_base import OpaqueBase  # noqa: E402
from torchtitan.components.quantization import float8  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims, pipeline_parallel  # noqa: E402

# HybridEP's module asks for a class of a torch later than ours.
torch._library.opaque_object.CustomClassBase = OpaqueBase  # pyrefly: ignore
# It refuses fp8 where no GPU is; these settings are for one.
float8.has_cuda_capability = lambda *_: True  # pyrefly: ignore


class Dims(ParallelDims):
    """Its own checks of the degrees; no processes, so no mesh."""

    def get_mesh(self, dims: Any) -> Any:
        return None


class CutError(Exception):
    """Carries the stages out of pipeline_llm before it needs processes."""


def dims_of(parallelism: Any, world: int) -> Dims:
    fields = {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
        "ep": parallelism.expert_parallel_degree,
        "world_size": world,
    }
    if hasattr(parallelism, "expert_tensor_parallel_degree"):
        fields["etp"] = parallelism.expert_tensor_parallel_degree
    if hasattr(parallelism, "spmd_backend"):
        fields["spmd_backend"] = parallelism.spmd_backend
    known = ParallelDims.__dataclass_fields__
    return Dims(**{name: value for name, value in fields.items() if name in known})


def old_case(case: dict) -> tuple[Any, Any, tuple[int, int], list[list[str]]]:
    """torchtitan 0.2: flags; the model comes from a module that they name."""
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec

    config = ConfigManager().parse_args(case["args"])
    _extra_train_specs.pop(config.model.name, None)
    importlib.import_module(config.experimental.custom_import)
    spec = get_train_spec(config.model.name)
    model = spec.model_args[config.model.flavor]
    model.update_from_config(config)
    dims = dims_of(config.parallelism, case["world"])
    convert = build_model_converters(config, dims).convert if config.model.converters else None
    names: list[list[str]] = []
    if dims.pp > 1:

        def capture(_model: Any, _mesh: Any, _schedule: str, _device: Any, names_: Any) -> None:
            names.extend(names_)
            raise CutError

        real, pipeline_parallel.pipeline_module_split = (
            pipeline_parallel.pipeline_module_split,
            capture,
        )
        try:
            pipeline_parallel.pipeline_llm(None, dims, config, None, model, None, None)  # pyrefly: ignore
        except CutError:
            pass
        finally:
            pipeline_parallel.pipeline_module_split = real
    return config, dims, built(repr((model, convert)), spec.model_cls, model, convert), names


def new_case(case: dict) -> tuple[Any, Any, tuple[int, int], list[list[str]]]:
    """torchtitan 0.3: a function of a module."""
    config = ConfigManager().parse_args(case["args"])
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    dims = dims_of(config.parallelism, case["world"])
    names: list[list[str]] = []
    if dims.pp > 1:
        numbers = pipeline_parallel._get_pipeline_metadata(dims, config.parallelism, spec.model)
        names = pipeline_parallel._generate_llm_fqn_per_model_part(*numbers)
    return config, dims, built(repr(spec.model), None, spec.model), names


_COUNTS: dict[str, tuple[int, int]] = {}


def built(key: str, cls: Any, model: Any, convert: Any = None) -> tuple[int, int]:
    """Parameters of the whole model, shared ones once, and how many products are in fp8."""
    if key not in _COUNTS:
        with torch.device("meta"):
            whole = cls(model) if cls else model.build()
            if convert:
                convert(whole)
        products = sum("Float8" in type(module).__name__ for module in whole.modules())
        _COUNTS[key] = sum(weight.numel() for weight in whole.parameters()), products
    return _COUNTS[key]


@cache
def is_old() -> bool:
    return hasattr(pipeline_parallel, "pipeline_module_split")


def answer(case: dict) -> dict[str, Any]:
    for name in ("fourfold_model", "fourfold_config"):
        sys.modules.pop(name, None)
    sys.path.insert(0, case["folder"])
    try:
        config, dims, (params, fp8), names = old_case(case) if is_old() else new_case(case)
    finally:
        sys.path.remove(case["folder"])
    training, dp = config.training, dims.dp_replicate * dims.dp_shard
    local = training.local_batch_size
    assert training.global_batch_size % (local * dp) == 0
    steps = training.global_batch_size // (local * dp)
    pieces = 1
    if dims.pp > 1:
        each = config.parallelism.pipeline_parallel_microbatch_size
        assert local % each == 0
        pieces = local // each
    assert training.seq_len % dims.seq_len_divisor == 0
    layers = [sum(name.startswith("layers.") for name in stage) for stage in names]
    return {
        **experts(config, dims),
        "layers": layers or [case["layers"]],
        "params": params,
        "fp8": fp8 > 0,
        "tokens": local * dp * steps * training.seq_len,
        "micro_batches": steps * pieces,
    }


BACKENDS = {"standard": "alltoall", "deepep": "deepep"}
DISPATCHERS = {
    "AllToAllTokenDispatcher": "alltoall",
    "DeepEPTokenDispatcher": "deepep",
    "HybridEPTokenDispatcher": "hybridep",
}


def experts(config: Any, dims: Any) -> dict[str, Any]:
    """Of a model with experts: what its router, its experts and its dispatcher will be."""
    found = old_experts(config) if is_old() else new_experts(config)
    if not found:
        return {}
    sharded = dims.dp_shard * dims.cp * dims.tp
    assert sharded % dims.ep == 0
    return found | {
        "ep": dims.ep,
        # The innermost axis of its mesh for experts (pp, dp_replicate, efsdp, ep).
        "group": list(range(sharded))[: dims.ep],
        "forced": config.debug.moe_force_load_balance,
    }


def new_experts(config: Any) -> dict[str, Any]:
    layers = config.model_spec.model.layers
    routed = [number for number, layer in enumerate(layers) if layer.moe is not None]
    if not routed:
        return {}
    moe = layers[routed[0]].moe
    router, inner = moe.router, moe.routed_experts.inner_experts
    kind = type(moe.routed_experts.token_dispatcher).__qualname__.partition(".")[0]
    shared = moe.shared_experts
    return {
        "experts": router.num_experts,
        "top_k": router.top_k,
        "expert_ffn": inner.hidden_dim,
        "shared_ffn": shared.w1.out_features if shared else 0,
        "routed": routed,
        "dispatcher": DISPATCHERS[kind],
        "router": [router.score_func, router.route_norm, router.route_scale,
                   router.num_expert_groups or 1, router.num_limited_groups or 1],
    }  # fmt: skip


def old_experts(config: Any) -> dict[str, Any]:
    from torchtitan.protocols.train_spec import get_train_spec

    model = get_train_spec(config.model.name).model_args[config.model.flavor]
    if not getattr(model, "moe_enabled", hasattr(model, "n_dense_layers")):
        return {}
    moe, dense = model.moe_args, getattr(model, "n_dense_layers", 0)
    return {
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "expert_ffn": model.moe_inter_dim,
        "shared_ffn": moe.num_shared_experts * model.moe_inter_dim,
        "routed": list(range(dense, model.n_layers)),
        "dispatcher": BACKENDS[config.parallelism.expert_parallel_comm_backend],
        "router": [moe.score_func, moe.route_norm, moe.route_scale,
                   moe.num_expert_groups or 1, moe.num_limited_groups or 1],
    }  # fmt: skip


if __name__ == "__main__":
    tell(answer, ["DeepEP", "a class of a later torch (HybridEP)", "a GPU's capability (fp8)"])
