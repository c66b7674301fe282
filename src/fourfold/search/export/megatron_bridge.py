"""Megatron-Bridge: one of its recipes, and Hydra overrides for what Megatron-LM has flags for."""

from __future__ import annotations

import functools
import re
from typing import Any

from fourfold.cost.stacks import ExportEngine
from fourfold.search.export import megatron
from fourfold.search.export.setup import Package, Setup, filled, no_setting
from fourfold.spec import catalog
from fourfold.spec.model import ModelShape

CHOICES = {**megatron.CHOICES, "policy.attention": ("auto",)}

_LISTED = ("--recompute-modules", "--rampup-batch-size", "--cuda-graph-modules")


@functools.cache
def _tables() -> dict[str, Any]:
    return catalog.data("megatron-bridge.toml")


def check(model: ModelShape, engine: ExportEngine) -> None:
    recipes = _tables()["recipes"]
    if model.name not in recipes:
        known = ", ".join(name for name in recipes if name in catalog.model_names())
        hint = f"{known} (it has recipes of these), or --export megatron"
        raise no_setting(engine.name, "model", model.name, hint)
    megatron.check(model, engine)


def package(setup: Setup, engine: ExportEngine) -> Package:
    plain, tables = megatron.package(setup, engine), _tables()
    kind = {"fp8": f"fp8-{setup.policy.scaling_kind}"}
    asked = kind.get(setup.policy.precision, setup.policy.precision)
    precision = tables["precisions"].get(asked)
    if precision is None:
        known = dict.fromkeys(re.sub(r"^fp8-.*", "fp8", name) for name in tables["precisions"])
        precision = setup.policy.precision
        raise no_setting(engine.name, "policy.precision", precision, ", ".join(known))
    module, _, recipe = tables["recipes"][setup.model.name].rpartition(".")
    values = {"module": module, "recipe": recipe, "precision": precision,
              "overlaps_tp": setup.overlaps_tp}  # fmt: skip
    return Package(
        engine=engine,
        entry='"$here/pretrain.py"',
        env=plain.env,
        engine_args=overrides(plain.engine_args),
        files={"pretrain.py": filled("megatron-bridge.py.txt", engine, values)},
        own="tokenizer, data, learning rate, steps, checkpoints (as overrides after run.sh)",
        about=plain.about,
    )


def overrides(flags: tuple[str, ...]) -> tuple[str, ...]:
    """'--micro-batch-size 2' -> 'train.micro_batch_size=2'. Sizes of the model are the recipe's."""
    said: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            said[word] = []
        else:
            said[[*said][-1]].append(word)
    tables = _tables()
    found: dict[str, str] = dict(tables["otherwise"])
    for name, values in said.items():
        value = " ".join(values) or "true"
        if name in _LISTED:
            value = f"[{','.join(values)}]"
        elif "|" in value:  # else a word of Hydra's grammar
            value = f"'{value}'"
        found |= dict.fromkeys(tables["fields"].get(name, "").split(), value)
    return tuple(f"{name}={value}" for name, value in found.items())
