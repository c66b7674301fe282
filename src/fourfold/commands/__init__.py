"""The commands, grouped by kind of work; each is options, one call of a verb and one display."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from fourfold.events import OnEvent
    from fourfold.flag import Arguments, Option
    from fourfold.output import Output

Run: TypeAlias = "Callable[[Arguments, OnEvent], Output]"
# kind of work -> name -> what it does; a command is imported only when it is called.
GROUPS = {
    "plan": {
        "plan": "find the fastest layout for a model on these GPUs, and whether it fits",
        "calendar": "days, GPU-hours, cost and energy of a whole training, with chances",
        "serve": "plan in a browser, and watch runs and trainings live",
        "mcp": "answer coding agents: plan, predict, explain and check as tools over MCP",
        "predict": "predict seconds, memory and fit for a table of runs",
        "advise": "find hidden sizes, heads, vocabularies and micro batches that suit a GPU",
        "support": "show what is counted, run, priced and exported of a model",
        "models": "list model presets and their sizes",
        "clusters": "list GPUs and clusters; 'clusters new' describes yours",
        "flops": "convert a measured speed to MFU, HFU and TFLOP/s by any convention",
        "trace": "show what every step of a parallel layer computes, sends and holds",
        "dryrun": "count what any rank of any layout holds, computes and sends, without hardware",
    },
    "measure": {
        "demo": "calibrate, plan and measure a small model on this machine",
        "bench": "measure one run",
        "sweep": "measure many runs; every outcome is stored, a stopped sweep resumes",
        "verify": "check that layouts compute what one process computes",
        "engines": "install other engines and make the matrix of 'verify --engine'",
        "calibrate": "measure this machine's kernels and links, for plan and predict",
        "diagnose": "tell from a profiler's trace why a run is slower than it should be",
        "collect": "turn logs and tables of other engines into measured rows",
        "fit": "fit the cost model to measured runs, or suggest which runs to measure",
        "score": "score predictions against measured runs",
    },
    "train": {
        "train": "train a model, or resume on any layout",
        "weights": "export trained weights as a Hugging Face folder",
    },
    "data": {"data": "make and inspect token files"},
    "publish": {
        "runs": "list stored runs",
        "diff": "compare two stored runs",
        "report": "print results in published styles: MPT, topology, scaling",
        "lint": "find mistakes in published tables",
        "completion": "print a completion script for bash, zsh or fish",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
# file -> the commands it declares.
_FILES = {
    "data": "data weights",
    "estimates": "calendar predict advise support",
    "fit": "fit score",
    "machines": "clusters calibrate demo",
    "models": "models flops dryrun",
    "plan": "plan",
    "read": "collect diagnose",
    "running": "bench sweep train",
    "serve": "serve mcp completion",
    "stored": "runs diff report lint",
    "trace": "trace",
    "verify": "verify engines",
}
_HOMES = {name: file for file, names in _FILES.items() for name in names.split()}
_NONE: Mapping[str, Command] = MappingProxyType({})


class Command(NamedTuple):
    """`actions` are sub-commands by name; a command with them may have no call of its own."""

    name: str
    description: str
    options: tuple[Option, ...] = ()
    run: Run | None = None
    examples: str = ""
    line: str = ""  # one line for the list of sub-commands
    actions: Mapping[str, Command] = _NONE


def command(
    *options: Option,
    examples: str = "",
    line: str = "",
    actions: Mapping[str, Command] = _NONE,
    formats: bool = True,
) -> Callable[[Run], Command]:
    """Make a command of a function, called as the function is; its docstring is the help. It has
    --format, unless what it prints has no `formats`."""
    from inspect import cleandoc  # not for the overview, which declares none

    from fourfold.options import FORMAT

    every = (*options, FORMAT) if formats else options

    def declared(run: Run) -> Command:
        text = cleandoc(run.__doc__ or "")
        return Command(run.__name__, text, every, run, examples, line, actions)

    return declared


def load(name: str) -> Command:
    """The file that declares the command, and no other, is imported."""
    return getattr(importlib.import_module(f"fourfold.commands.{_HOMES[name]}"), name)
