"""A run for a test, from the names of what matters to it; all else is as users leave it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
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
