"""Other engines by a command template, which gets a run's exported settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.cost.stacks import RELEASES
from fourfold.errors import UserError, inside, nearest
from fourfold.launch.permit import gpu_count
from fourfold.logs.book import READERS
from fourfold.search import export as exports
from fourfold.search.export.setup import Setup, run_file
from fourfold.spec import Cluster, RunSpec, catalog, check, codec
from fourfold.spec.site import Env, Site, require_form

_DATA = Path(catalog.DATA) / "engines"
SETTINGS = "settings"
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
        return self.export if self.export in RELEASES else ""

    @property
    def predicted_as(self) -> str:
        return self.stack or (exports.stack_of(self.export) if self.export else "generic")


def engine_template(name: str) -> EngineTemplate:
    """Of a name that comes along, or of a TOML file."""
    is_file = "/" in name or name.endswith(".toml")
    if not is_file and name not in catalog.engine_names():
        hint = f"{nearest(name, catalog.engine_names())}, or pass the path of a template"
        raise UserError("unknown engine", field="engine", value=name, hint=hint)
    path = name if is_file else str(_DATA / f"{name}.toml")
    with inside(path):
        data = codec.parse_toml(files.read_text(path, field="engine"))
        return codec.decode(EngineTemplate, {"name": Path(path).stem.lower(), **data})


# --- one run


def setup_of(spec: RunSpec, stack: str, cluster: Cluster | None, site: Site | None = None) -> Setup:
    """`site`: where it runs, which then says how many GPUs a host has."""
    host_gpus = cluster.host_gpus if cluster else gpu_count() or min(8, spec.gpus)
    if site is not None:
        host_gpus = site.gpus_per_node
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


@dataclass(frozen=True, slots=True)
class Filled:
    """A template's words for one run, and the files of its settings by name."""

    command: list[str]
    env: dict[str, str]
    settings: dict[str, str]


def filled_template(
    template: EngineTemplate, spec: RunSpec, setup: Setup, settings: Path, granted: Env
) -> Filled:
    """`settings`: the folder that will hold them; `granted`: variables of the command line."""
    places = places_of(spec, setup, settings)
    env = {name: filled(value, places) for name, value in template.env}
    return Filled(
        command=[filled(word, places) for word in template.command],
        env=env | dict(spec.policy.env) | dict(granted),
        settings=settings_files(template, setup),
    )


def unsupported(template: EngineTemplate, setup: Setup) -> str:
    """Why the engine has no settings for a run, '' where it has."""
    try:
        settings_files(template, setup)
    except UserError as error:
        return str(error)
    if template.export and setup.layout.world % setup.per_host:
        return (
            f"gpus = {setup.layout.world} is not a multiple of the {setup.per_host} of a host, on "
            "each of which the engine starts equally many ranks"
        )
    return ""
