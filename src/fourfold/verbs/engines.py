"""Other engines as runners of bench and sweep: a command template gets a run's exported settings,
and its log becomes the run's report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fourfold import files
from fourfold.cost.stacks import RELEASES
from fourfold.errors import UserError, nearest
from fourfold.events import OnEvent, progress, warnings
from fourfold.launch.campaign import Campaign, Runner, Say, launch_run
from fourfold.launch.command import LOG_FILE, Watch, run_command
from fourfold.launch.outcomes import tail
from fourfold.launch.permit import Permit, gpu_count
from fourfold.launch.queue import Queue
from fourfold.logs.log import READERS
from fourfold.result.files.store import Store
from fourfold.result.report import Failure, RunReport
from fourfold.search import export as exports
from fourfold.search.export.setup import Setup, run_file
from fourfold.search.query import match_stack
from fourfold.spec import catalog, check, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.run import RunSpec
from fourfold.spec.variables import Env
from fourfold.verbs.engine_log import EngineLog
from fourfold.verbs.machine import Predictor, predictor, read_calibration
from fourfold.verbs.run_requests import MeasureRequest, SweepRequest
from fourfold.verbs.where import launcher_of, site_of

_DATA = Path(catalog.DATA) / "engines"
SETTINGS = "settings"
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTemplate:
    """`export`: whose settings are written before it starts ('': only the run's own file);
    `command`: words with {places}; `reader`: how its log is read ('': recognised). `ends_itself`:
    it stops after {iterations} steps; else it is ended when they are done."""

    name: str
    command: tuple[str, ...]
    export: str = ""
    stack: str = ""
    reader: str = ""
    ends_itself: bool = True
    env: Env = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,40}", self.name):
            raise UserError("must be a short lower-case name", field="name", value=self.name)
        if not self.command:
            raise UserError("is required", field="command", hint='write ["bash", "run.sh"]')
        if self.export:
            exports.stack_of(self.export)
        if self.reader and self.reader not in READERS:
            hint = nearest(self.reader, READERS)
            raise UserError("unknown reader", field="reader", value=self.reader, hint=hint)

    @property
    def release(self) -> str:
        """Whose rules say what it can run, if not its stack's."""
        return self.export if self.export in RELEASES else ""

    @property
    def predicted_as(self) -> str:
        return self.stack or (exports.stack_of(self.export) if self.export else "generic")


def engine_names() -> list[str]:
    return sorted(path.stem for path in _DATA.glob("*.toml"))


def engine_template(name: str) -> EngineTemplate:
    """Of a name that comes along, or of a TOML file."""
    is_file = "/" in name or name.endswith(".toml")
    if not is_file and name not in engine_names():
        hint = f"{nearest(name, engine_names())}, or pass the path of a template"
        raise UserError("unknown engine", field="engine", value=name, hint=hint)
    path = name if is_file else str(_DATA / f"{name}.toml")
    try:
        data = codec.parse_toml(files.read_text(path, field="engine"))
        return codec.decode(EngineTemplate, {"name": Path(path).stem.lower(), **data})
    except UserError as error:
        raise error.inside(path) from None


# --- one run


def setup_of(spec: RunSpec, stack: str, cluster: Cluster | None) -> Setup:
    host_gpus = cluster.host_gpus if cluster else gpu_count() or min(8, spec.gpus)
    return Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=host_gpus,
        stack=stack,
        device=cluster.device.id if cluster else "",
        model_name=spec.model.name,
    )


def settings_files(template: EngineTemplate, setup: Setup) -> dict[str, str]:
    """What the command finds in {settings}: our run file, and the engine's own files."""
    own = exports.write_folder(template.export, setup) if template.export else {}
    return {"run.toml": run_file(setup)} | own


def filled(word: str, places: Mapping[str, object]) -> str:
    """The word with its {places} filled in; one that nobody knows is refused."""

    def value(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in places:
            hint = nearest(name, places)
            raise UserError("unknown place", field="command", value=f"{{{name}}}", hint=hint)
        return str(places[name])

    return _PLACE.sub(value, word)


def places_of(spec: RunSpec, setup: Setup, settings: Path) -> dict[str, object]:
    return {
        "settings": settings,
        "model": spec.model.name,
        "gpus": spec.gpus,
        "hosts": setup.hosts,
        "per_host": setup.per_host,
        "iterations": spec.warmup + spec.steps,
        "warmup": spec.warmup,
        "seq_len": spec.batch.seq_len,
        "micro_batch": spec.batch.micro_batch,
        "global_batch": spec.batch.global_batch,
        "precision": spec.policy.precision,
        "sharding": spec.policy.sharding,
        "recompute": spec.policy.recompute,
        **spec.layout.sizes,
    }


def template_runner(template: EngineTemplate, known: Predictor, permit: Permit) -> Runner:
    """Runs a spec by the template, in the run's work folder; one that the engine has no settings
    for is illegal."""

    def run(spec: RunSpec, folder: Path, say: Say) -> RunReport:
        cluster, stack = known.cluster, known.stack
        setup = setup_of(spec, stack, cluster)
        settings = folder / SETTINGS
        try:
            texts = settings_files(template, setup)
        except UserError as error:
            failure = Failure(rank=-1, stage=0, phase=template.name, message=str(error))
            return RunReport(spec=spec, outcome="illegal", failure=failure)
        settings.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            files.write_text(settings / name, text)
        places = places_of(spec, setup, settings)
        command = [filled(word, places) for word in template.command]
        env = {name: filled(value, places) for name, value in template.env}
        env |= dict(spec.policy.env) | dict(permit.env)
        device = cluster.device.name if cluster else ""
        log = EngineLog(
            spec, name=template.name, stack=stack, reader=template.reader, device=device
        )
        watch = Watch(
            take=log.take,
            start_limit_s=spec.start_limit_s,
            step_limit_s=spec.step_limit_s,
            enough=spec.warmup + spec.steps,
            grace_s=60.0 if template.ends_itself else 0.0,
            say=say,
        )
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        ended = run_command(command, env, folder, watch)
        report = log.report(ended, tail(folder / LOG_FILE))
        return replace(report, started_at=started_at)

    return run


# --- for bench and sweep


def asked_template(request: MeasureRequest) -> EngineTemplate | None:
    check.that(not request.stack or request.engine, "stack", request.stack, "needs --engine")
    if request.engine and site_of(request) is not None:
        hint = "omit one; an engine's template may call srun itself"
        raise UserError("cannot be combined with --engine", field="--on", hint=hint)
    return engine_template(request.engine) if request.engine else None


def engine_predictor(request: MeasureRequest) -> Predictor:
    """Whoever runs it: predictions by its stack, and the rules of its release."""
    template, site = asked_template(request), site_of(request)
    named = request.cluster or request.profile
    known = predictor(
        cluster=request.cluster if named or site is None else site.cluster or None,
        profile=request.profile,
        calibration=request.calibration,
    )
    known = replace(known, remote=site is not None)
    if template is None:
        return known
    asked = request.stack or template.predicted_as
    calibration = known.calibration or read_calibration(None)
    stack = match_stack(asked, known.cluster, calibration)
    return replace(known, stack=stack, release=template.release)


def campaign_of(
    request: MeasureRequest,
    known: Predictor,
    permit: Permit,
    on_event: OnEvent,
    options: tuple[tuple[str, str], ...] = (),
) -> Campaign:
    """Runs by the engine that was asked for, where that was asked for, into the request's store.
    `options` are those of our own engine's jobs."""
    template = asked_template(request)
    store, on = Store(request.runs, warn=warnings(on_event)), launcher_of(site_of(request))
    ours = partial(launch_run, options=options, permit=permit, on=on)
    return Campaign(
        store,
        runner=template_runner(template, known, permit) if template else ours,
        say=progress(on_event),
        again=request.again if isinstance(request, SweepRequest) else (),
        predictor=known,
        engine=template.name if template else "",
        queue=Queue(store.root, on, options) if on else None,
    )
