"""How does an engine get its settings? As files that a shell can use as they are.

env.sh is sourced, torchrun.args and engine.args have one word a line (`$(cat FILE)`, `@FILE`), and
run.sh puts them together.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from fourfold.search.export.setup import Setup

MARK = "# written by fourfold plan --export"
_END = "END_OF_FOURFOLD_FILE"
_STATIC = (
    'torchrun_args+=(--node-rank "${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK, from 0}}"\n'
    '    --master-addr "${MASTER_ADDR:?set MASTER_ADDR: the first host}" --master-port '
    '"${MASTER_PORT:-29500}")'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """`entry` is shell text: the program and what it needs besides engine.args, where `$here` is
    the folder of the files. `own` names what the user still has to add."""

    engine: str
    release: str
    entry: str
    env: dict[str, str] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    python_path: bool = False
    own: str = ""
    about: tuple[str, ...] = ()  # sentences on what this release does


def comments(package: Package, setup: Setup) -> list[str]:
    """What the files are for, and what is to be known about this choice."""
    batch, policy = setup.batch, setup.policy
    lines = [
        f"{MARK} {package.engine}, for {package.release}",
        f"{setup.model_name or setup.model.name}, {setup.layout} on {setup.hosts} hosts of"
        f" {setup.per_host} GPUs ({setup.device or 'any'}); sequences of {batch.seq_len}, global"
        f" batch {batch.global_batch}, micro batch {batch.micro_batch}, {policy.precision},"
        f" {policy.sharding}, recompute {policy.recompute}",
        *setup.notes,
        *package.about,
        *([f"yours to add: {package.own}"] if package.own else []),
    ]
    clean = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
    return [line if line.startswith("#") else f"# {line}" for line in clean]


def parts(package: Package, setup: Setup) -> dict[str, str]:
    """File name -> text of everything but run.sh."""
    torchrun = ["--nnodes", setup.hosts, "--nproc-per-node", setup.per_host]
    env = [f"export {name}={shlex.quote(value)}" for name, value in package.env.items()]
    texts = {
        "env.sh": "\n".join([*comments(package, setup), *env, ""]),
        "torchrun.args": "".join(f"{word}\n" for word in torchrun),
        "engine.args": "".join(f"{word}\n" for word in package.engine_args),
    }
    return texts | package.files


def folder(package: Package, setup: Setup) -> dict[str, str]:
    """Every file of an export folder; run.sh starts the run on each host."""
    here = ['here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)']
    return parts(package, setup) | {"run.sh": _script(package, setup, here)}


def script(package: Package, setup: Setup) -> str:
    """One file that brings its parts along: what standard output gets."""
    here = ["here=${EXPORT_DIR:-$(mktemp -d)}", 'mkdir -p -- "$here"']
    for name, text in parts(package, setup).items():
        here += [f"cat >\"$here/{name}\" <<'{_END}'", text.rstrip("\n"), _END]
    return _script(package, setup, here)


def _script(package: Package, setup: Setup, here: list[str]) -> str:
    path = 'export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *comments(package, setup),
            "set -euo pipefail",
            *here,
            '. "$here/env.sh"',
            *([path] if package.python_path else []),
            'mapfile -t torchrun_args <"$here/torchrun.args"',
            'mapfile -t engine_args <"$here/engine.args"',
            _STATIC if setup.hosts > 1 else "torchrun_args+=(--standalone)",
            f'exec "${{TORCHRUN:-torchrun}}" "${{torchrun_args[@]}}" {package.entry} '
            '"${engine_args[@]}" "$@"',
            "",
        ]
    )
