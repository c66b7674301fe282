"""support: what is known of a model, by engine and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.cost.count.params import model_params
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.stacks import EXPORTS
from fourfold.errors import UserError, nearest
from fourfold.flag import flag
from fourfold.search import export as exports
from fourfold.search.legal import why_not_spec
from fourfold.search.query import entry_for, usual_cluster
from fourfold.search.stack_names import match_stack
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.verbs import Answer

# One of each generation, where none is asked for; prices are those of a few hosts.
_GPUS, _COUNT, _TOKENS = ("a100-80gb", "h100-80gb", "b200", "mi300x"), 64, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportRequest:
    model: str = flag("preset, or a file", "MODEL", names=("model",), default="")
    engine: str | None = flag("only this engine", "ENGINE", names=("engine",), nargs="?")
    gpu: str | None = flag("only this GPU", "GPU", names=("gpu",), nargs="?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportRow:
    """`priced`: what seconds rest on (measured rows of `stack`); `settings`: 'yes', or why none are
    written for this model."""

    engine: str
    gpu: str
    stack: str
    priced: str
    rows: int
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Support(Answer):
    """`runs_here`: 'yes', or why our own engine does not run it."""

    model: str
    params: int
    runs_here: str
    lines: tuple[SupportRow, ...]

    def rows(self) -> list[dict[str, Any]]:
        return [{"model": self.model, **codec.encode(line)} for line in self.lines]


def support(request: SupportRequest) -> Support:
    """What is counted, run, priced (from measured rows or by physics) and exported."""
    if not request.model:
        raise UserError("is required", field="MODEL", hint="'fourfold models' lists presets")
    model = catalog.model(request.model)
    if request.engine is not None and request.engine not in EXPORTS:
        hint = nearest(request.engine, EXPORTS)
        raise UserError("unknown engine", field="engine", value=request.engine, hint=hint)
    engines = (request.engine,) if request.engine else tuple(EXPORTS)
    gpus = (request.gpu,) if request.gpu else _GPUS
    batch = Batch(seq_len=_TOKENS, global_batch=1)
    refusals = why_not_spec(RunSpec(model=model, gpus=1, layout=Layout(), batch=batch))
    return Support(
        model=model.name,
        params=model_params(model, _TOKENS),
        runs_here="; ".join(map(str, refusals)) or "yes",
        lines=tuple(_line(model, engine, gpu) for engine in engines for gpu in gpus),
    )


def _line(model: ModelShape, engine: str, gpu: str) -> SupportRow:
    known, cluster = calibrations.shipped(), usual_cluster(catalog.device(gpu), _COUNT)
    stack = match_stack(exports.stack_of(engine), cluster, known, experts=model.moe is not None)
    entry, _ = entry_for(known, stack, cluster, experts=model.moe is not None)
    try:
        exports.check(engine, model)
        settings = "yes"
    except UserError as error:
        settings = str(error)
    return SupportRow(
        engine=engine,
        gpu=cluster.device.id,
        stack=stack,
        priced=entry.basis,
        rows=entry.rows_time,
        settings=settings,
    )
