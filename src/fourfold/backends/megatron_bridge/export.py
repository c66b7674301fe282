"""Megatron-Bridge: one of its recipes, and Hydra overrides for what Megatron-LM has flags for."""

from __future__ import annotations

import functools
import os
from dataclasses import fields, replace
from typing import Any

from fourfold.backends.megatron import export as megatron
from fourfold.search.export.setup import Package, Setup, filled, no_setting
from fourfold.spec import catalog
from fourfold.spec.engine import Engine
from fourfold.spec.model import ModelShape

CHOICES = {
    **megatron.CHOICES,
    "policy.attention": ("auto",),
    "policy.optimizer": ("adamw",),
}

_LISTED = ("--recompute-modules", "--rampup-batch-size", "--cuda-graph-modules")


@functools.cache
def _tables() -> dict[str, Any]:
    return catalog.data(os.path.join(os.path.dirname(__file__), "recipes.toml"))


def check(model: ModelShape, engine: Engine) -> None:
    megatron.check(model, engine)  # what its core has no settings for, no recipe builds
    recipes = _tables()["recipes"]
    if model.name not in recipes:
        hint = f"{', '.join(recipes)} (it has recipes of these), or --export megatron"
        raise no_setting(engine.name, "model", model.name, hint)
    _check_sizes(model, engine)


def _check_sizes(model: ModelShape, engine: Engine) -> None:
    """Refuse what a recipe, which has its sizes from the Hub, would build otherwise."""
    preset = catalog.model(model.name)
    if model.window is None:  # or one as long as the sequence
        preset = replace(preset, window=None, mixers=None)
    for one in fields(model):
        value, built = getattr(model, one.name), getattr(preset, one.name)
        if one.compare and value != built:
            hint = f"{built}, which its recipe of {model.name} builds, or --export megatron"
            raise no_setting(engine.name, f"model.{one.name}", value, hint)


def package(setup: Setup, engine: Engine) -> Package:
    plain, tables = megatron.package(setup, engine), _tables()
    kind = {"fp8": f"fp8-{setup.policy.scaling_kind}"}
    precision = tables["precisions"][kind.get(setup.policy.precision, setup.policy.precision)]
    module, _, recipe = tables["recipes"][setup.model.name].rpartition(".")
    values = {
        "module": module,
        "recipe": recipe,
        "precision": precision,
        "overlaps_tp": setup.overlaps_tp,
    }
    return Package(
        engine=engine,
        entry='"$here/pretrain.py"',
        env=plain.env,
        engine_args=overrides(plain.engine_args, setup.policy.virtual_stages),
        files={"pretrain.py": filled("pretrain.py.txt", engine, values)},
        own="tokenizer, data, learning rate, steps, checkpoints (as overrides after run.sh)",
        about=plain.about,
    )


def overrides(flags: tuple[str, ...], virtual_stages: int = 1) -> tuple[str, ...]:
    """'--micro-batch-size 2' -> 'train.micro_batch_size=2'. Sizes of the model are the recipe's; a
    flag without a field of its container is refused."""
    said: dict[str, list[str]] = {}
    if virtual_stages > 1:  # its checks of overlap want them beside a layout of stages, too
        said["--num-virtual-stages-per-pipeline-rank"] = [str(virtual_stages)]
    values: list[str] = []
    for word in flags:
        if word.startswith("--"):
            values = said[word] = []
        else:
            values.append(word)
    tables = _tables()
    found: dict[str, str] = dict(tables["otherwise"])
    if "--multi-latent-attention" in said:
        found |= tables["latent"]
    unsaid = {flag for flags in tables["unsaid"].values() for flag in flags}
    for name, values in said.items():
        if name in unsaid:
            continue
        if name not in tables["fields"]:
            shown = " ".join(values) or "true"
            raise no_setting("megatron-bridge", name, shown, "--export megatron")
        value = " ".join(values) or ("false" if name.startswith("--no-") else "true")
        if name in _LISTED:
            value = f"[{','.join(values)}]"
        elif "|" in value:  # else a word of Hydra's grammar
            value = f"'{value}'"
        found |= dict.fromkeys(tables["fields"][name].split(), value)
    return tuple(f"{name}={value}" for name, value in found.items())
