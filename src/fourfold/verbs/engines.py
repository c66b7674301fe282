"""Other engines by a command template, which gets a run's exported settings; its log becomes the
report."""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError, inside, nearest
from fourfold.launch.campaign import Say
from fourfold.launch.command import Ended, Watch, run_command
from fourfold.launch.outcomes import tail
from fourfold.launch.permit import Permit, gpu_count
from fourfold.launch.queue import Work
from fourfold.launch.slurm import Slurm
from fourfold.launch.slurm_command import follow_command, node_script
from fourfold.logs.book import step_words
from fourfold.result.files.stored import seal
from fourfold.result.job import ENGINE_FILE, REPORT_FILE, Job, JobReport
from fourfold.result.report import RunReport
from fourfold.search import export as exports
from fourfold.search.export.setup import Setup, run_file
from fourfold.spec import RunSpec, check, codec, texts
from fourfold.spec.engine import EXPORTS, READERS, TEMPLATES, engine_of
from fourfold.spec.site import Env, Site, require_form
from fourfold.verbs.engine_log import EngineLog
from fourfold.verbs.machine import Predictor

SETTINGS = "settings"
_ENDS_ITSELF_S = 60.0
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
# By these the nodes of a run meet, and its processes are found again.
_RESERVED = re.compile(r"MASTER_ADDR|MASTER_PORT|NODE_RANK|FOURFOLD_\w*")


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
        check.given(self.command, "command", 'write ["bash", "run.sh"]')
        if not self.command[0].strip() or any("\0" in word for word in self.command):
            rule = "must begin with a program, and have no NUL in a word"
            raise UserError(rule, field="command", value=list(self.command))
        require_form(self.env)
        for name, value in self.env:
            rule = "is set by fourfold for every node"
            check.that(not _RESERVED.fullmatch(name), f"env.{name}", value, rule, "remove it")
        if self.export:
            exports.stack_of(self.export)
        if self.reader and self.reader not in READERS:
            hint = nearest(self.reader, READERS)
            raise UserError("unknown reader", field="reader", value=self.reader, hint=hint)

    @property
    def release(self) -> str:
        """Whose rules say what it can run, if not its stack's."""
        return self.export if self.export in EXPORTS else ""

    @property
    def predicted_as(self) -> str:
        return self.stack or (exports.stack_of(self.export) if self.export else "generic")


def engine_template(name: str) -> EngineTemplate:
    """Of a name that comes along, or of a TOML file."""
    is_file = "/" in name or name.endswith(".toml")
    if not is_file and name not in TEMPLATES:
        hint = f"{nearest(name, TEMPLATES)}, or pass the path of a template"
        raise UserError("unknown engine", field="engine", value=name, hint=hint)
    path = name if is_file else TEMPLATES[name]
    data = texts.read(path, field="engine")
    with inside(path):
        return codec.decode(
            EngineTemplate, {"name": Path(path).stem.lower() if is_file else name, **data}
        )


def filled(word: str, places: Mapping[str, object]) -> str:
    """The word with its {places} filled in; one that nobody knows is refused."""

    def value(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in places:
            hint = nearest(name, places)
            raise UserError("unknown place", field="command", value=f"{{{name}}}", hint=hint)
        return str(places[name])

    return _PLACE.sub(value, word)


@dataclass(frozen=True, slots=True)
class Filled:
    """A template's words for one run, and the files of its settings by name."""

    command: list[str]
    env: dict[str, str]
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class TemplateRuns:
    """Runs specs by a template, each in its work folder. `site`: where they run, which then says
    how many GPUs a host has."""

    template: EngineTemplate
    known: Predictor
    permit: Permit
    site: Site | None = None

    def _setup(self, spec: RunSpec) -> Setup:
        cluster = self.known.cluster
        host_gpus = cluster.host_gpus if cluster else gpu_count() or min(8, spec.gpus)
        return Setup(
            model=spec.model,
            layout=spec.layout,
            batch=spec.batch,
            policy=spec.policy,
            host_gpus=self.site.gpus_per_node if self.site is not None else host_gpus,
            engine=engine_of(self.known.stack),
            device=cluster.device.id if cluster else "",
            model_name=spec.model.name,
        )

    def _settings(self, setup: Setup) -> dict[str, str]:
        """What the command finds in {settings}: our run file, and the engine's own files."""
        export = self.template.export
        own = exports.write_folder(export, setup) if export else {}
        return {"run.toml": run_file(setup)} | own

    def unsupported(self, spec: RunSpec) -> str:
        """Why the engine has no settings for a run, '' where it has."""
        setup = self._setup(spec)
        try:
            self._settings(setup)
        except UserError as error:
            return str(error)
        if self.template.export and spec.layout.world % setup.per_host:
            return (
                f"gpus = {spec.layout.world} is not a multiple of the {setup.per_host} of a host, "
                "on each of which the engine starts equally many ranks"
            )
        return ""

    def filled(self, spec: RunSpec, folder: Path) -> Filled:
        setup = self._setup(spec)
        places: dict[str, object] = {
            "settings": folder / SETTINGS,
            "model": spec.model.name,
            "gpus": spec.gpus,
            "hosts": setup.hosts,
            "per_host": setup.per_host,
            "iterations": spec.warmup + spec.steps,
            "warmup": spec.warmup,
            "seq_len": spec.batch.seq_len,
            "micro_batch": spec.batch.micro_batch,
            "global_batch": spec.batch.global_batch,
            "precision": spec.policy.precision_name,
            "sharding": spec.policy.sharding,
            "recompute": spec.policy.recompute,
            **spec.layout.sizes,
        }
        env = {name: filled(value, places) for name, value in self.template.env}
        return Filled(
            command=[filled(word, places) for word in self.template.command],
            env=env | dict(spec.policy.env) | dict(self.permit.env),
            settings=self._settings(setup),
        )

    def here(self, spec: RunSpec, folder: Path, say: Say) -> RunReport:
        ready, settings = self.filled(spec, folder), folder / SETTINGS
        settings.mkdir(parents=True, exist_ok=True)
        for name, text in ready.settings.items():
            files.write_text(settings / name, text)
        run = partial(run_command, ready.command, ready.env, folder)
        return self._watched(spec, say, run)

    def work(self, spec: RunSpec, place: Path) -> Work:
        """What a site gets for it: settings, the script of a node, and a job that is another one
        when its words, variables or settings change, and the same wherever it is asked for."""
        ready = self.filled(spec, place)
        script = node_script(ready.command, ready.env, folder=place, cwd=Path.cwd())
        words = codec.json_of(asdict(ready))
        options = (
            ("command", shlex.join(ready.command)),
            ("engine", self.template.name),
            ("steps", step_words(self.template.reader)),
            ("work_crc32", f"{zlib.crc32(words.encode()):08x}"),
        )
        named = {f"{SETTINGS}/{name}": text for name, text in ready.settings.items()}
        job = Job(job="engine", specs=(spec,), options=options)
        return Work(job, {**named, ENGINE_FILE: script})

    def on_site(self, slurm: Slurm, spec: RunSpec, folder: Path, say: Say) -> RunReport:
        job = self.work(spec, folder).job
        report = self._watched(spec, say, partial(follow_command, slurm, job, folder))
        whole = JobReport(job=job.job, outcome=report.outcome, seconds=0.0, runs=(report,))
        files.write_bytes(folder / REPORT_FILE, seal(codec.to_json(whole)), own=True)
        return report

    def _watched(self, spec: RunSpec, say: Say, run: Callable[[Watch], Ended]) -> RunReport:
        cluster, template = self.known.cluster, self.template
        log = EngineLog(
            spec,
            name=template.name,
            stack=self.known.stack,
            reader=template.reader,
            device=cluster.device.name if cluster else "",
        )
        watch = Watch(
            take=log.take,
            start_limit_s=spec.start_limit_s,
            step_limit_s=spec.step_limit_s,
            enough=spec.warmup + spec.steps,
            grace_s=_ENDS_ITSELF_S if template.ends_itself else 0.0,
            say=say,
        )
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        ended = run(watch)
        return replace(log.report(ended, tail(ended.log)), started_at=started_at)
