"""export: a planned layout as settings of another engine, or of our own.

support: what is known of a model, by engine and GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold import files
from fourfold.cost.count.params import model_params
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.memory.peak import SURE, memory_bounds
from fourfold.errors import UserError, nearest
from fourfold.events import Event, OnEvent, ignore
from fourfold.flag import flag
from fourfold.search import export as exports
from fourfold.search.answer import answer
from fourfold.search.assumed import assumed
from fourfold.search.compare import best_of
from fourfold.search.export.setup import Setup
from fourfold.search.legal import why_not_spec
from fourfold.search.plan_answer import PlanRow
from fourfold.search.query import usual_cluster, usual_policy
from fourfold.search.ranking import Ranking
from fourfold.search.resolve import resolve
from fourfold.spec import Batch, Layout, ModelShape, RunSpec, catalog, check
from fourfold.spec.engine import EXPORTS, Engine
from fourfold.spec.policy import Policy
from fourfold.spec.supported import left_out
from fourfold.spec.words import OURS
from fourfold.units import counted, three_digits
from fourfold.verbs import Answer, Request
from fourfold.verbs.question import require_plan_request, resolved, with_export_named
from fourfold.verbs.requests import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Settings of one engine, for the `release` they name. `files` are names and texts for a folder
    ({}: the engine takes one file), `script` the same as one text; `choice` is the layout that it
    runs."""

    engine: str
    release: str
    files: dict[str, str]
    script: str
    notes: tuple[str, ...]
    choice: PlanRow

    def write(self, out: Path, *, force: bool) -> str:
        """Into the folder `out`, or into that file; replaces nothing unasked. Returns what a folder
        got, in words."""
        texts = {out / name: text for name, text in self.files.items()} or {out: self.script}
        for path in texts:
            files.require_mine(path, mark="", force=force)
        for path, text in texts.items():
            files.write_text(path, text)
        if not self.files:
            return ""
        os.chmod(out / "run.sh", 0o755)
        return f"{', '.join(self.files)} in {out}"


def export(
    request: PlanRequest,
    engine: str | None = None,
    *,
    pick: int = 1,
    name: str = "",
    job: str = "",
    on_event: OnEvent = ignore,
) -> Exported:
    """The layout at place `pick` of the plan, as settings of `engine`, or of `request.export`.
    `name`: what the model is called there; `job`: also as a job of skypilot or kubeflow, which is
    then `script`."""
    require_plan_request(request)
    request = replace(request, export=engine or request.export)
    check.given(request.export, "export", "pass the name of an engine")
    request = with_export_named(request)
    engine = request.export or ""
    check.that(pick >= 1, "pick", pick, "must be 1 or more")
    query, counts = resolved(request, on_event)
    ranking, _ = best_of(query, counts, least=max(request.top, pick))
    if not len(ranking):
        raise UserError(f"nothing to export: {answer(ranking, top=1).reason}")
    check.that(
        pick <= len(ranking),
        "pick",
        pick,
        f"exceeds the {counted(len(ranking), 'layout')} that fit",
    )
    setup = _setup(ranking, pick - 1, name)
    written = exports.write_folder(engine, setup)
    script = exports.write(engine, setup)
    if job:
        around = exports.around(job, engine, setup, script)
        written, script = (written | around) if written else {}, "".join(around.values())
    return Exported(
        engine=engine,
        release=EXPORTS[engine].release,
        files=written,
        script=script,
        notes=setup.notes,
        choice=answer(ranking, top=pick).ranked[pick - 1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotExported:
    """An engine that cannot run what was asked for, and why."""

    engine: str
    reason: str


def export_all(
    request: PlanRequest, *, name: str = "", on_event: OnEvent = ignore
) -> tuple[Exported | NotExported, ...]:
    """The best layout for every engine, each by its own rules: what one cannot do, another can."""
    found: list[Exported | NotExported] = []
    for engine in exports.USUAL:
        stack = request.stack if exports.has_rules_of(engine, request.stack) else None
        on_event(Event(f"settings for {engine}", "progress"))
        try:
            asked = replace(request, export=engine, stack=stack)
            found.append(export(asked, name=name))
        except UserError as error:
            found.append(NotExported(engine=engine, reason=str(error)))
    return tuple(found)


def _setup(ranking: Ranking, place: int, name: str) -> Setup:
    query, spec = ranking.query, ranking.spec(place)
    return Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=query.resolved.cluster.host_gpus,
        engine=query.resolved.engine,
        device=query.resolved.cluster.device.id,
        model_name=name,
        notes=_export_notes(ranking, place),
    )


def _export_notes(ranking: Ranking, place: int) -> tuple[str, ...]:
    """Seconds and bytes of the choice, and whether it surely fits."""
    query, predicted, gib = ranking.query, ranking.predicted, 2.0**30
    c = predicted.columns.take(slice(place, place + 1))
    low, high = memory_bounds(c, query.resolved.entry)
    limit = query.resolved.cluster.device.memory_bytes
    needs = (
        f"{low[0] / gib:.0f} to {high[0] / gib:.0f} GiB of {limit / gib:.0f} on the fullest rank"
    )
    ends = (three_digits(float(end[place])) for end in (predicted.low_s, predicted.high_s))
    seconds = f"{' to '.join(ends)} s per step"
    chance = float(ranking.fits[place])
    fits = f"{100 * chance:.0f}% chance to fit"
    advice = "; --safe prefers layouts that surely fit" if chance < SURE and not query.safe else ""
    known = assumed(ranking, place)
    assumes = (f"a{known.text[1:]}",) if known else ()
    return (f"predicted as {query.resolved.stack}: {seconds}; {fits}: {needs}{advice}", *assumes)


# One of each generation, where none is asked for; prices are those of a few hosts.
_GPUS, _COUNT, _TOKENS = ("a100-80gb", "h100-80gb", "b200", "mi300x"), 64, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportRequest(Request):
    model: str = flag("preset, or a file", "MODEL", names=("model",), default="")
    engine: str | None = flag("only this engine", "ENGINE", names=("engine",), nargs="?")
    gpu: str | None = flag("only this GPU", "GPU", names=("gpu",), nargs="?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportRow:
    """`priced`: what seconds rest on (measured rows of `stack`); `settings`: 'yes', or why --export
    writes none for this model; `release`: the one that they are for."""

    engine: str
    release: str
    gpu: str
    stack: str
    priced: str
    rows: int
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Support(Answer):
    """`runs_here`: 'yes', or why our own engine does not run it."""

    TABLE, SHARED = "lines", ("model",)
    model: str
    params: int
    runs_here: str
    lines: tuple[SupportRow, ...]


def support(request: SupportRequest) -> Support:
    """What is counted, run, priced (from measured rows or by physics) and exported."""
    model = catalog.model(check.given(request.model, "MODEL", "'fourfold models' lists presets"))
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
        runs_here="; ".join(map(str, refusals))
        or ", ".join(filter(None, ("yes", left_out(model)))),
        lines=tuple(_line(model, engine, gpu) for engine in engines for gpu in gpus),
    )


def _line(model: ModelShape, engine: str, gpu: str) -> SupportRow:
    known, cluster = calibrations.shipped(), usual_cluster(catalog.device(gpu), _COUNT)
    priced = resolve(exports.stack_of(engine), cluster, known, experts=model.moe is not None)
    return SupportRow(
        engine=engine,
        release=EXPORTS[engine].release or OURS,
        gpu=cluster.device.id,
        stack=priced.stack,
        priced=priced.entry.basis,
        rows=priced.entry.rows_time,
        settings=_settings(model, engine, priced.engine),
    )


def _settings(model: ModelShape, engine: str, priced: Engine) -> str:
    """Return 'yes', or why --export of an engine writes no settings of a model, however it is laid
    out."""
    policy = usual_policy(priced, Policy(), set(), release=True)
    batch = Batch(seq_len=_TOKENS, global_batch=1)
    setup = Setup(
        model=model, layout=Layout(), batch=batch, policy=policy, host_gpus=1, engine=priced
    )
    try:
        exports.check_always(engine, setup)
    except UserError as error:
        return str(error)
    return "yes"
