"""Runs in the environment of a megatron-core whose wheel has Megatron-LM's own parser: does it take
exported arguments, and what does it make of them?

Reads [{"args": [...], "env": {...}, "world": 64, "device": "b200"}] from standard input. Each case
goes through parse_args, validate_args, TransformerConfig,
DistributedDataParallelConfig and OptimizerConfig as Megatron's own training calls them. What is
missing here is supplied by the stand-ins below. Every answer lists what they were asked; with
--options also which exported options raise each question, by leaving out one after another; with
--whole every field of its configurations instead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
import typing
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
STANDINS: list[str] = []
if not hasattr(typing, "override"):
    typing.override = lambda method: method  # pyrefly: ignore
    STANDINS.append("typing.override (Python 3.12)")

import torch  # noqa: E402
from megatron.core import utils  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.training import arguments  # noqa: E402
from megatron.training.training import (  # noqa: E402
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
)
from megatron_read import experts, groups, parameters, stages  # noqa: E402
from packaging.version import Version  # noqa: E402
from telling import whole  # noqa: E402

# Kernels of Transformer Engine whose names must be there.
KERNELS: dict[ModuleType, tuple[str, ...]] = {
    moe_utils: ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index",
                "fused_sort_chunks_by_index_with_probs", "fused_unpermute"),
    rope_utils: ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
}  # fmt: skip
TE, GPU = "Transformer Engine", "GPU"
STANDINS += [TE, GPU]
# What is left to the user: the file's "yours to add".
OWN = ("--train-iters", "10", "--lr", "1e-4", "--mock-data", "--tokenizer-type", "NullTokenizer")
asked: dict[str, str] = {}  # where in Megatron a stand-in was asked, and for what
CAPABILITIES = {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "gb200": (10, 0)}
capability = [0, 0]


def _asker(depth: int) -> str:
    """Return the line of Megatron that asks a stand-in, by file and number."""
    frame = sys._getframe(depth + 1)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Any version is there, and the question is noted."""
    asked[_asker(1)] = f"{TE} {version}"
    return True


def _te_version() -> Version:
    return Version("99.0")


def _stand_in_kernels(module: ModuleType, names: tuple[str, ...]) -> None:
    """A module that says, when it is asked for one of the names, that it was."""

    def named(name: str) -> object:
        if name not in names:
            raise AttributeError(name)
        asked[_asker(1)] = f"{TE}'s {name}"
        return True

    for name in names:
        module.__dict__.pop(name, None)
    module.__getattr__ = named


def _capability(*_: object) -> tuple[int, int]:
    asked[_asker(1)] = GPU
    return capability[0], capability[1]


def _properties(*_: object) -> SimpleNamespace:
    asked[_asker(2)] = GPU
    return SimpleNamespace(major=capability[0], minor=capability[1])


for _module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
    if hasattr(_module, "is_te_min_version"):
        _module.is_te_min_version = _is_te_min_version
utils.get_te_version = _te_version
for _module, _names in KERNELS.items():
    _stand_in_kernels(_module, _names)
torch.cuda.get_device_capability = _capability
torch.cuda.get_device_properties = _properties  # pyrefly: ignore


@contextlib.contextmanager
def _started(args: list[str], env: dict[str, str], world: int) -> Iterator[None]:
    """As rank 0 of the launched program."""
    kept, words = dict(os.environ), sys.argv
    os.environ.update(env | {"RANK": "0", "WORLD_SIZE": str(world)})
    sys.argv = ["pretrain_gpt.py", *args, *OWN]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
        sys.argv = words


def validated(case: dict[str, Any], args: list[str]) -> tuple[Any, Any, Any, Any]:
    """Return Megatron's namespace, and what it builds of it: (args, transformer, data parallel,
    optimizer)."""
    asked.clear()
    capability[:] = CAPABILITIES[case["device"].partition("-")[0]]
    with _started(args, case["env"], case["world"]):
        found = arguments.parse_args()
        arguments.validate_args(found, {"tokenizer_type": "GPT2BPETokenizer"})
        config = arguments.core_transformer_config_from_args(found)
        ddp = get_megatron_ddp_config(found)
        optimizer, _ = get_megatron_optimizer_config(found)
    return found, config, ddp, optimizer


def answer(case: dict[str, Any]) -> dict[str, Any]:
    found, config, ddp, _ = validated(case, case["args"])
    about = dict(asked)
    groups(1)
    dp, ramp = found.data_parallel_size, found.rampup_batch_size
    size, micro = found.global_batch_size, found.micro_batch_size
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(0, ramp, size, micro, dp)
    micros = get_num_microbatches() if ramp is None else size // (dp * micro)
    return {
        **experts(config, case["world"]),
        "layers": stages(config),
        "params": parameters(
            config, found.padded_vocab_size, found.max_position_embeddings,
            found.position_embedding_type, not found.untie_embeddings_and_output_weights,
        ),
        "tokens": micros * micro * dp * found.seq_length,
        "fp32_gradients": ddp.grad_reduce_in_fp32,
        "overlap_tp": config.tp_comm_overlap,
        "values": values(found, config),
        "asked": about,
    }  # fmt: skip


def configured(case: dict[str, Any]) -> dict[str, Any]:
    """Return every field of the configurations that it builds, without the model."""
    _, config, ddp, optimizer = validated(case, case["args"])
    return {"whole": whole(model=config, ddp=ddp, optimizer=optimizer)}


def values(found: Any, config: Any) -> dict[str, Any]:
    """Return what became of a plan's choices, by Megatron's names."""
    plain = {
        name: getattr(found, name)
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size",
            "sequence_parallel", "micro_batch_size", "global_batch_size", "seq_length",
            "recompute_granularity", "recompute_method", "recompute_num_layers",
            "fp8", "fp8_recipe", "fp4", "use_distributed_optimizer", "use_megatron_fsdp",
            "data_parallel_sharding_strategy", "num_distributed_optimizer_instances",
            "overlap_grad_reduce", "overlap_param_gather", "num_layers", "hidden_size",
            "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_experts",
            "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "cuda_graph_impl",
            "overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap",
            "optimizer", "use_layer_wise_distributed_optimizer", "muon_momentum", "muon_nesterov",
            "muon_scale_mode", "muon_extra_scale_factor", "muon_num_ns_steps",
            "muon_coefficient_type", "muon_tp_mode",
        )
    }  # fmt: skip
    return plain | {
        "params_dtype": str(found.params_dtype).removeprefix("torch."),
        "query_groups": config.num_query_groups,
        "recompute_modules": config.recompute_modules,
        "cp_comm_type": config.cp_comm_type,
        "cuda_graph_modules": [one.name for one in config.cuda_graph_modules],
        "attention_backend": found.attention_backend.name,
    }


def raised_by(case: dict[str, Any], place: str) -> list[str]:
    """Return the options without which a stand-in is not asked there."""
    words: list[str] = case["args"]
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    found = []
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        try:
            validated(case, words[:start] + words[end:])
        except BaseException:  # its parser exits; what cannot be left out raises no question
            continue
        if place not in asked:
            found.append(words[start])
    return found


def reuse_parser() -> None:
    """Build its parser once from here on: most of the time of a case is that."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: parser


def main() -> None:
    asks: dict[str, tuple[str, dict[str, Any]]] = {}
    answers = []
    reader = configured if "--whole" in sys.argv else answer
    if reader is configured:
        reuse_parser()
    for case in json.load(sys.stdin):
        try:
            answers.append(reader(case) | {"standins": STANDINS})
        except BaseException as error:  # its parser exits
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            answers.append({"error": f"{place} {type(error).__name__}: {error}"[:600]})
        for place, what in answers[-1].get("asked", {}).items():
            asks.setdefault(place, (what, case))
    print()
    if "--options" not in sys.argv:
        json.dump(answers, sys.stdout)
        return
    reuse_parser()
    told = [
        {"place": place, "asked": what, "options": raised_by(case, place)}
        for place, (what, case) in asks.items()
    ]
    json.dump({"answers": answers, "asked": told}, sys.stdout)


if __name__ == "__main__":
    main()
