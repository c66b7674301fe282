"""A run to export, what an engine refuses of it, and its settings as files that a shell can use.

env.sh is sourced, torchrun.args and engine.args have one word a line (`$(cat FILE)`, `@FILE`), and
run.sh puts them together.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from string import Template
from typing import Any

from fourfold.errors import UserError
from fourfold.escape import toml_text
from fourfold.search.legal import Target, why_not
from fourfold.search.plan_answer import Choice
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.engine import EXPORTS, FOLDER, Engine, EngineHabits
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.model import VARIANTS, ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.units import counted

# Fields of a model that every writer looks at; another one must have its default to be exported.
KNOWN_OF_MODEL = {
    "family",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "positions",
    "norm",
    "activation",
    "bias",
    "tied",
    "embedding_norm",
    "head_dim",
    "experts",
    "top_k",
    "norm_eps",
    "name",
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "qk_norm",
    "moe",
    "latent",
    "mtp",
}
# Fields of a policy that only our own engine has.
OWN_OF_POLICY = (
    "param_dtype",
    "compute_dtype",
    "grad_dtype",
    "optimizer_dtype",
    "optimizer",
    "prefetch",
    "loss_chunks",
    "offload",
    "fused_projections",
    "cuda_graph",
)
# Values that an engine has, by field; (): all.
Choices = Mapping[str, tuple[object, ...]]
# Names and values on a command line; None: a switch.
Flags = dict[str, str | int | float | None]
_PLAIN = Policy()
_PLAIN_CHOICES: Choices = {f"policy.{name}": (getattr(_PLAIN, name),) for name in OWN_OF_POLICY}
# What few engines have: a writer that has it says so in its choices.
_RARE: Choices = {"positions.partial": (1.0,), "experts": (0,), "latent": (None,), "mtp": (None,)}
# What an engine must find in a model that it knows only as a Llama.
LLAMA_SHAPE: Choices = {
    "family": ("llama",),
    "activation": ("swiglu",),
    "norm": ("rmsnorm",),
    "bias": (False,),
    "embedding_norm": (False,),
    "qkv_bias": (None, False),
    "out_bias": (None, False),
    "mlp_bias": (None, False),
    "qk_norm": ("none",),
}
MARK = "# written by fourfold plan --export"
_END = "END_OF_FOURFOLD_FILE"
_STATIC = (
    'torchrun_args+=(--node-rank "${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK, from 0}}"\n'
    '    --master-addr "${MASTER_ADDR:?set MASTER_ADDR: the first host}" --master-port '
    '"${MASTER_PORT:-29500}")'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run in fourfold's words. `model_name` is the name or path the user gave; `stack` says
    whose habits the predicted seconds assume; `notes` are sentences about this choice that belong
    into the files."""

    model: ModelShape
    layout: Layout
    batch: Batch
    policy: Policy
    host_gpus: int
    engine: Engine
    device: str = ""
    model_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def spec(self) -> RunSpec:
        return RunSpec(
            model=self.model,
            gpus=self.layout.world,
            layout=self.layout,
            batch=self.batch,
            policy=self.policy,
        )

    @property
    def chosen(self) -> Choice:
        return Choice(layout=self.layout, policy=self.policy, micro_batch=self.batch.micro_batch)

    @property
    def hosts(self) -> int:
        return -(-self.layout.world // self.host_gpus)

    @property
    def per_host(self) -> int:
        return min(self.host_gpus, self.layout.world)

    @property
    def defaults(self) -> EngineHabits:
        return self.engine.habits

    @property
    def overlaps_tp(self) -> bool:
        """Whether the seconds assume tensor-parallel traffic under its matrix products."""
        usual = self.defaults.overlap_tp and self.policy.sequence_parallel
        return self.layout.tp > 1 and (self.policy.async_tp or usual)

    @property
    def dispatcher(self) -> str:
        """How tokens reach experts, as it was priced."""
        if self.layout.ep * self.layout.etp == 1:
            return "local"
        asked = self.policy.dispatcher
        return self.defaults.dispatcher if asked == "auto" else asked

    @property
    def env(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"} | dict(self.policy.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """`entry` is shell text: the program and what it needs besides engine.args, where `$here` is
    the folder of the files. `own` names what the user still has to add."""

    engine: Engine
    entry: str
    env: dict[str, str]
    engine_args: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    python_path: bool = False
    own: str = ""
    about: tuple[str, ...] = ()  # sentences on what this release does


def filled(name: str, engine: Engine, values: Mapping[str, object]) -> str:
    """A file for an engine, of the template of this name in its folder, or at this path."""
    text = Template(catalog.text(os.path.join(FOLDER, engine.folder, name)))
    return text.substitute(values, mark=MARK, release=engine.release)


def no_setting(engine: str, field: str, value: object, hint: str) -> UserError:
    return UserError(f"is not supported by {engine}", field=field, value=value, hint=f"use {hint}")


def _check_choices(engine: str, owner: str, holder: object, choices: Choices) -> None:
    for name, values in choices.items():
        value = attrgetter(name)(holder)
        if values and value not in values:
            words = ", ".join("none" if item is None else str(item) for item in values)
            raise no_setting(engine, f"{owner}{name}", value, words)


def check_model(engine: str, model: ModelShape, choices: Choices) -> None:
    lacking = ", ".join(
        VARIANTS[variant]
        for variant in model.variants
        if variant not in choices.get("variants", ())
    )
    if lacking:
        scripts = [name for name, engine in EXPORTS.items() if engine.export.user_script]
        hint = f"--export {' or '.join(scripts)}, where the model is your script"
        rule = f"needs {lacking}, for which --export {engine} has no settings"
        raise UserError(rule, field="model", value=model.name, hint=f"use {hint}")
    rest = {name: values for name, values in choices.items() if name != "variants"}
    _check_choices(engine, "model.", model, {**_RARE, **rest})
    if model.window is not None and "window" not in choices:
        hint = f"sequences of at most {model.window} tokens"
        raise no_setting(engine, "model.window", model.window, hint)
    for one in fields(model):
        default = one.default if one.default is not MISSING else None
        value = getattr(model, one.name)
        if one.name not in KNOWN_OF_MODEL and one.name not in choices and value != default:
            raise no_setting(engine, f"model.{one.name}", value, f"{default}")


def check_rules(engine: str, setup: Setup) -> None:
    """Refuse a layout that breaks a rule of the engine's release."""
    if setup.layout.order != AXES:
        raise no_setting(engine, "layout.order", " ".join(setup.layout.order), " ".join(AXES))
    target = Target(engine=setup.engine, release=engine, runs=False)
    for broken in why_not(setup.model, setup.layout, setup.batch, setup.policy, target):
        raise broken.error


def check_choices(engine: str, setup: Setup, choices: Choices) -> None:
    """Refuse what has no setting there, whatever the layout."""
    if setup.batch.ramp and "batch.ramp" not in choices:
        raise no_setting(engine, "batch.ramp", setup.batch.ramp.start, "a fixed global batch")
    _check_choices(engine, "", setup, {**_PLAIN_CHOICES, **choices})


def _comments(package: Package, setup: Setup) -> list[str]:
    """What the files are for, and what is to be known about this choice."""
    batch, policy = setup.batch, setup.policy
    where = f"{counted(setup.hosts, 'host')} of {counted(setup.per_host, 'GPU')}"
    lines = [
        f"{MARK} {package.engine.name}, for {package.engine.release}",
        f"{setup.model_name or setup.model.name}, {setup.chosen} on {where}"
        f" ({setup.device or 'any'}); sequences of {batch.seq_len}, global"
        f" batch {batch.global_batch}, micro batch {batch.micro_batch}, {policy.scaled_name},"
        f" {policy.sharding}, recompute {policy.recompute}",
        *setup.notes,
        *package.about,
        *([f"yours to add: {package.own}"] if package.own else []),
    ]
    clean = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
    return [line if line.startswith("#") else f"# {line}" for line in clean]


def _parts(package: Package, setup: Setup) -> dict[str, str]:
    """File name -> text of everything but run.sh."""
    torchrun = ["--nnodes", setup.hosts, "--nproc-per-node", setup.per_host]
    env = [f"export {name}={shlex.quote(value)}" for name, value in package.env.items()]
    return {
        "env.sh": "\n".join([*_comments(package, setup), *env, ""]),
        "torchrun.args": "".join(f"{word}\n" for word in torchrun),
        "engine.args": "".join(f"{word}\n" for word in package.engine_args),
        **package.files,
    }


def folder(package: Package, setup: Setup) -> dict[str, str]:
    """Every file of an export folder; run.sh starts the run on each host."""
    unpack = ['here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)']
    return _parts(package, setup) | {"run.sh": _script(package, setup, unpack)}


def script(package: Package, setup: Setup) -> str:
    """One file that brings its parts along: what standard output gets."""
    unpack = ["here=${EXPORT_DIR:-$(mktemp -d)}", 'mkdir -p -- "$here"']
    for name, text in _parts(package, setup).items():
        lines = [text.rstrip("\n")] if text else []  # an empty line would be an argument
        unpack += [f"cat >\"$here/{name}\" <<'{_END}'", *lines, _END]
    return _script(package, setup, unpack)


def _script(package: Package, setup: Setup, unpack: list[str]) -> str:
    path = 'export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'
    lines = [
        "#!/usr/bin/env bash",
        *_comments(package, setup),
        "set -euo pipefail",
        *unpack,
        '. "$here/env.sh"',
        *([path] if package.python_path else []),
        'mapfile -t torchrun_args <"$here/torchrun.args"',
        'mapfile -t engine_args <"$here/engine.args"',
        _STATIC if setup.hosts > 1 else "torchrun_args+=(--standalone)",
        f'exec "${{TORCHRUN:-torchrun}}" "${{torchrun_args[@]}}" {package.entry} '
        '"${engine_args[@]}" "$@"',
    ]
    return "\n".join([*lines, ""])


def run_file(setup: Setup) -> str:
    """What `fourfold bench --spec` takes, with the launch line for many hosts as a comment."""
    model = setup.model
    table: dict[str, Any] = {
        "model": model.name if catalog.is_preset(model) else codec.encode(model),
        "gpus": setup.layout.world,
        "layout": setup.layout.to_plain(),
        "batch": codec.encode(setup.batch, sparse=True),
        "policy": codec.encode(setup.policy, sparse=True),
    }
    launch = f"torchrun --nnodes {setup.hosts} --nproc-per-node {setup.per_host}"
    head = [
        f"# {setup.chosen} on {counted(setup.hosts, 'host')} of {counted(setup.per_host, 'GPU')}",
        *(f"# {note}" for note in setup.notes),
        "# fourfold bench --spec THIS.toml",
        f"# on several hosts the same workers start under: {launch}",
    ]
    return "\n".join([*head, toml_text(table)])
