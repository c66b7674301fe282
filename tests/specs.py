"""A run for a test, from the names of what matters to it; all else is as users leave it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.experts import Latent, Moe
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape, Positions
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec


def run_spec(model: str | ModelShape, layout: str | Layout = "dp1", **named: Any) -> RunSpec:
    """`named`: fields of the run, of its batch and of its policy, whose names all differ. The GPUs
    are those of the layout."""
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    shape = catalog.model(model) if isinstance(model, str) else model
    for part, kind in (("batch", Batch), ("policy", Policy)):
        told = {f.name: named.pop(f.name) for f in fields(kind) if f.name in named}
        if told:
            named[part] = kind(**told)
    return RunSpec(model=shape, gpus=where.world, layout=where, **named)


_PARTS = {"positions": Positions, "moe": Moe, "latent": Latent}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def shape_of(said: str | dict[str, Any]) -> ModelShape:
    """A preset by its name; or, as tables of cases write it, the preset `of` a name with other
    fields."""
    if isinstance(said, str):
        return catalog.model(said)
    changes = {
        name: codec.decode(_PARTS[name], value) if name in _PARTS else _frozen(value)
        for name, value in said.items()
        if name != "of"
    }
    return replace(catalog.model(said["of"]), **changes)
