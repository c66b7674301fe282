"""A site: how this cluster's scheduler wants jobs to be asked for. Read from a TOML file.

Environment variables that a file may set for a run.

What names a file, a folder, a plugin, a loader, a compiler or an interpreter loads code or writes
where it says; that is taken from the command line only (`--env NAME=VALUE`), for this one start.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fourfold import files
from fourfold.errors import UserError, inside, nearest
from fourfold.escape import toml_text
from fourfold.spec import catalog, check, codec

Env = tuple[tuple[str, str], ...]
MAX_VARIABLES, MAX_NAME_CHARS, MAX_VALUE_CHARS = 64, 128, 1024
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME_CHARS - 1}}}")
# What the launcher itself tells its processes; another value would make it lose them.
_RESERVED = re.compile(
    r"FOURFOLD_[A-Z0-9_]*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR"
    r"|MASTER_PORT|TORCHELASTIC_[A-Z0-9_]*"
)


# No path, no pattern, nothing that a shell would take for more than a word.
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.:,;=^@()\[\]> +-]*")


@functools.cache
def plain_names() -> frozenset[str]:
    """Variables that a file may set."""
    return frozenset(catalog.data("variables.toml")["names"].split())


def require_form(env: Env) -> None:
    """What holds for every variable, whoever sets it: a name, and one short line as its value."""
    if len(env) > MAX_VARIABLES:
        raise UserError(f"has more than {MAX_VARIABLES} variables", field="env", value=len(env))
    if len({name for name, _ in env}) != len(env):
        raise UserError("names a variable twice", field="env", value=[name for name, _ in env])
    for name, value in env:
        check.that(_NAME.fullmatch(name), "env", name, "is not a variable name")
        if len(value) > MAX_VALUE_CHARS or not value.isprintable():
            rule = f"must be printable text of at most {MAX_VALUE_CHARS} characters"
            raise UserError(rule, field=f"env.{name}", value=value)


def is_plain(name: str, value: str) -> bool:
    """Whether a file may set it."""
    return name in plain_names() and _PLAIN_VALUE.fullmatch(value) is not None


def require_plain(env: Env, *, granted: Env = ()) -> None:
    """Refuse what a file may not set, unless the command line `granted` it with this very value."""
    for name, value in env:
        field, hint = f"policy.env.{name}", "remove it"
        rule = "is set by fourfold for its own processes"
        check.that(not _RESERVED.fullmatch(name), field, value, rule, hint)
        if is_plain(name, value) or (name, value) in granted:
            continue
        rule = "has a value that a file may not give it"
        if name not in plain_names():
            rule, guess = "is not a variable that a file may set", nearest(name, plain_names())
            hint += f" ({guess})" if guess.startswith("did you mean") else ""
        hint += f" or, if you trust it, pass --env {name}=VALUE on the command line of every start"
        raise UserError(rule, field=field, value=value, hint=hint)


def parse_assignments(words: Iterable[str]) -> Env:
    """`--env NAME=VALUE`, in order; the same name twice must say the same."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        check.that(equals, "--env", word, "must be NAME=VALUE")
        check.that(values.setdefault(name, value) == value, "--env", name, "is given two values")
    env = tuple(values.items())
    require_form(env)
    return env


Queue = Literal["each", "array", "allocation"]
LOCAL = "local"
# One word of an #SBATCH line; what a site needs beyond that goes into `extra` or `prelude`.
_WORDS = ("account", "partition", "qos", "reservation", "constraint", "time", "mem", "exclude")
_WORD = re.compile(r"[^\s#\"'`$\\]*\Z")
_ONE_LINE = re.compile(r"[^\r\n\0]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """`hosts`: ranks follow this order; empty: Slurm's own. `wrapper`: words before python on every
    node (a container's exec). `queue`: a job for each run, one array, or one allocation in which
    the runs follow each other. `interface`: the network interface between hosts, '' for the one
    that reaches the first host. `shared`: a folder that all nodes see, '' for the current one.
    `cluster`: by which runs are predicted unless a command names another."""

    name: str = "slurm"
    account: str = ""
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    time: str = ""
    mem: str = ""
    exclude: str = ""
    gpus_per_node: int = 8
    ask_gpus: Literal["gpus-per-node", "gres", "no"] = "gpus-per-node"
    gpu_type: str = ""
    cpus_per_rank: int = 0
    exclusive: bool = True
    hosts: tuple[str, ...] = ()
    prelude: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    python: str = ""
    interface: str = ""
    shared: str = ""
    cluster: str = ""
    queue: Queue = "each"
    most_queued: int = 32
    warn_s: int = 120
    poll_s: float = 3.0

    def __post_init__(self) -> None:
        check.whole(1, 4096, gpus_per_node=self.gpus_per_node, most_queued=self.most_queued)
        check.whole(0, 2**20, cpus_per_rank=self.cpus_per_rank, warn_s=self.warn_s)
        check.positive(poll_s=self.poll_s)
        words = {name: (getattr(self, name),) for name in (*_WORDS, "gpu_type", "interface")}
        for name, values in {**words, "hosts": self.hosts}.items():
            for value in values:
                check.that(_WORD.match(value), name, value, "must be one word")
        for name in ("prelude", "wrapper", "srun", "extra"):
            for line in getattr(self, name):
                check.that(_ONE_LINE.match(line), name, line, "must hold single lines")

    def nodes(self, ranks: int) -> int:
        return -(-ranks // self.gpus_per_node)

    def per_node(self, ranks: int) -> int:
        return min(ranks, self.gpus_per_node)

    def asked(self) -> list[str]:
        """The words of the site for #SBATCH lines."""
        return [f"--{name}={value}" for name in _WORDS if (value := getattr(self, name))]


def site_start(gpus_per_node: int, cluster: str = "") -> str:
    """A site file to complete; `cluster`: the file by which its runs are predicted."""
    line = toml_text({"cluster": cluster}) if cluster else ""
    text = catalog.text("site.txt")
    return text.format(folder=own_folder(), gpus_per_node=gpus_per_node, cluster=line)


def own_folder() -> str:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return f"{home}/fourfold"


def read_site(name: str) -> Site | None:
    """None for this host. NAME is NAME.toml in the user's own folder, anything with a slash or
    .toml a path. A site's lines are run as they are: none is taken from the folder a command
    happens to be called in."""
    is_path = "/" in name or name.endswith(".toml")
    path = name if is_path else f"{own_folder()}/{name}.toml"
    if not is_path and not os.path.isfile(path):
        if name == LOCAL:
            return None
        if name == "slurm":  # nothing but nodes and GPUs
            return Site()
        hint = f"pass local, slurm or a site file, or write {path}"
        raise UserError("unknown site", field="on", value=name, hint=hint)
    text = files.read_text(path, field="on")
    with inside(path):
        site = codec.from_toml(Site, text)
    return replace(site, name=os.path.basename(path).removesuffix(".toml"))
