"""What accelerate reads: its configuration with `parallelism_config`."""

from __future__ import annotations

import json
from typing import Any

from fourfold.search.export.setup import Package, Setup, filled
from fourfold.search.export.user_script import CHOICES, ENTRY, left_to_script
from fourfold.spec.engine import Engine
from fourfold.spec.model import ModelShape

__all__ = ["CHOICES", "check", "package"]
_MIXED = {"fp32": "no", "bf16-mixed": "bf16", "fp16": "fp16"}
_ROTATES = {"ring": "alltoall", "allgather": "allgather"}


def check(model: ModelShape, engine: Engine) -> None:
    """Any model that transformers has."""


def package(setup: Setup, engine: Engine) -> Package:
    layout, zero = setup.layout, setup.policy.zero
    values = {
        "distributed_type": "FSDP" if zero else "MULTI_GPU",
        "mixed_precision": _MIXED[setup.policy.precision],
        "hosts": setup.hosts,
        "world": layout.world,
        "reshard": json.dumps(zero == 3),
        "checkpointing": json.dumps(setup.policy.recompute == "full"),
        "replicate": layout.replicate if zero else 1,
        "shard": layout.shard if zero else 1,
        "tp": layout.tp,
        "cp": layout.cp,
        "cp_strategy": _ROTATES[setup.policy.cp_kind if layout.cp > 1 else "ring"],
    }
    return Package(
        engine=engine,
        entry=ENTRY,
        env=_variables(values) | setup.env,
        files={"accelerate.yaml": filled("accelerate.yaml.txt", engine, values)},
        own=left_to_script(setup),
    )


def _variables(values: dict[str, Any]) -> dict[str, str]:
    """What `accelerate launch` would set."""
    plain = {"ACCELERATE_MIXED_PRECISION": values["mixed_precision"]}
    if values["distributed_type"] != "FSDP":
        return plain
    axes = {"DP_REPLICATE": "replicate", "DP_SHARD": "shard", "TP": "tp", "CP": "cp"}
    strategy = {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": values["cp_strategy"]}
    return {
        **plain,
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": values["reshard"],
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_ACTIVATION_CHECKPOINTING": values["checkpointing"],
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"PARALLELISM_CONFIG_{name}_SIZE": str(values[axis]) for name, axis in axes.items()},
        **(strategy if values["cp"] > 1 else {}),
    }
