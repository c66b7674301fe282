"""What DeepSpeed reads: its JSON."""

from __future__ import annotations

import json
from typing import Any

from fourfold.search.export.setup import Package, Setup
from fourfold.search.export.user_script import CHOICES, ENTRY, accumulated, left_to_script
from fourfold.spec.engine import Engine
from fourfold.spec.model import ModelShape

__all__ = ["CHOICES", "check", "package"]
_BUCKET = 500_000_000  # elements that it sends at once: its default


def check(model: ModelShape, engine: Engine) -> None:
    """Any model that transformers has."""


def package(setup: Setup, engine: Engine) -> Package:
    layout, policy = setup.layout, setup.policy
    config: dict[str, Any] = {
        "train_batch_size": setup.batch.global_batch,
        "train_micro_batch_size_per_gpu": setup.batch.micro_batch,
        "gradient_accumulation_steps": accumulated(setup),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": policy.zero},
    }
    if policy.precision != "fp32":
        config["bf16" if policy.precision == "bf16-mixed" else "fp16"] = {"enabled": True}
    if policy.zero:
        config["zero_optimization"] |= {
            "overlap_comm": policy.overlap_grad_reduce,
            "contiguous_gradients": True,
            "reduce_bucket_size": _BUCKET,
        }
    if layout.cp > 1:
        config |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
    return Package(
        engine=engine,
        entry=f'{ENTRY} --deepspeed "$here/ds_config.json"',
        env=setup.env,
        files={"ds_config.json": json.dumps(config, indent=2) + "\n"},
        own=left_to_script(setup),
    )
