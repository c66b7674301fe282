"""Settings for other engines: a chosen layout written in their words, for a named release of each.

What an engine cannot do is refused by name, so that what was priced is what will run.

Jobs of a cloud around any export: a SkyPilot task, a Kubeflow TrainJob.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from textwrap import indent
from typing import Any

from fourfold.errors import UserError
from fourfold.search.export.setup import (
    Package,
    Setup,
    check_choices,
    check_rules,
    filled,
    folder,
    run_file,
    script,
)
from fourfold.search.legal import Target, certain_refusals, why_not_spec
from fourfold.search.query import PlanQuery, policy_of_engine
from fourfold.spec import catalog
from fourfold.spec.engine import EXPORTS, Engine, engine_of, is_known
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.spec.supported import without_idle_window

# Their file, and how deep the script stands in it.
AROUND = {"skypilot": ("skypilot.yaml", 2), "kubeflow": ("kubeflow.yaml", 8)}


def around(kind: str, engine: str, setup: Setup, script: str) -> dict[str, str]:
    """File name -> text: a job that writes the script on every host and runs it."""
    if kind not in AROUND:
        raise UserError("unknown job", field="job", value=kind, hint=f"use {' or '.join(AROUND)}")
    if not EXPORTS[engine].export.writer:
        if setup.hosts > 1:
            hint = "use --export of another engine, or 'fourfold bench --on' for Slurm"
            raise UserError("is for one host", field="job", value=kind, hint=hint)
        script = (
            f"cat >run.toml <<'END_OF_RUN'\n{script}END_OF_RUN\nfourfold bench --spec run.toml\n"
        )
    name, depth = AROUND[kind]
    known = catalog.data("jobs/skypilot.toml")
    values = {
        "engine": engine.replace(".", "-"),
        "hosts": setup.hosts,
        "per_host": setup.per_host,
        "accelerator": known.get(setup.device, setup.device.upper()),
        "resource": f"{'amd' if setup.device.startswith('mi') else 'nvidia'}.com/gpu",
        "script": indent(script.rstrip("\n"), " " * depth, lambda line: bool(line.strip())),
    }
    return {
        name: filled(os.path.join(catalog.DATA, "jobs", f"{name}.txt"), EXPORTS[engine], values)
    }


__all__ = [
    "ENGINES",
    "USUAL",
    "around",
    "check",
    "check_always",
    "check_settings",
    "engine_named",
    "has_rules_of",
    "is_written",
    "runs_in",
    "stack_of",
    "why_not_written",
    "write",
    "write_folder",
    "writers",
]
ENGINES = tuple(EXPORTS)
USUAL = tuple(engine.name for engine in EXPORTS.values() if not engine.export.on_demand)


def engine_named(text: str) -> str:
    """Return the engine of an export by its name, or by the name of a stack with its rules:
    'Megatron-LM' is megatron, 'nemo' too."""
    name = text.strip().lower()
    if name in EXPORTS or not is_known(name):
        return name
    rules = engine_of(name).rules.name
    return next(
        (engine.name for engine in EXPORTS.values() if engine.export.predicted_as == rules), name
    )


def stack_of(engine: str) -> str:
    """Whose engine the numbers must be for, so that they are the exported run's."""
    return _entry(engine).export.predicted_as


def has_rules_of(engine: str, stack: str | None) -> bool:
    """Return whether a stack's rules are those of the engine, so that its numbers may be an
    export's."""
    return (
        bool(stack) and engine_of(stack or "").rules.name == engine_of(stack_of(engine)).rules.name
    )


def check(engine: str, model: ModelShape) -> None:
    """Refuse a model that an engine has no settings for."""
    entry = _entry(engine)
    if entry.export.writer:
        _writer(entry).check(model, entry)


def check_always(engine: str, setup: Setup) -> None:
    """Refuse what an engine has no settings for in any layout: a model, a batch or a policy."""
    setup = replace(setup, model=without_idle_window(setup.model, setup.batch.seq_len))
    check(engine, setup.model)
    release = engine if _entry(engine).export.writer else ""
    target = Target(engine=setup.engine, release=release)
    for refusal in certain_refusals(setup.model, setup.batch, setup.policy, target):
        raise refusal.error
    check_settings(engine, setup)


def check_settings(engine: str, setup: Setup) -> None:
    """Refuse what the engine's settings have no words for, of a model that they have words for and
    in a setup that breaks none of its rules."""
    if _entry(engine).export.writer:
        _settings(_entry(engine), setup)


def write(engine: str, setup: Setup) -> str:
    """One file: a run file for our own engine, else a script that brings its parts along."""
    package = _legal_package(engine, setup)
    return run_file(setup) if package is None else script(package, setup)


def write_folder(engine: str, setup: Setup) -> dict[str, str]:
    """File name -> text: environment, launcher's and engine's arguments, and a script over them;
    {} for our own engine, which takes one file."""
    package = _legal_package(engine, setup)
    return {} if package is None else folder(package, setup)


def why_not_written(engine: str, setup: Setup) -> UserError | None:
    """Return why an engine has no settings for a run; None where `write` writes them."""
    try:
        _legal_package(engine, setup)
    except UserError as error:
        return error
    return None


def writers(query: PlanQuery, spec: RunSpec) -> tuple[str, ...]:
    """Return the engines that --export writes a layout of a plan for, by their names there."""
    return tuple(name for name in EXPORTS if _can_write(name, query, spec))


def runs_in(query: PlanQuery, spec: RunSpec) -> tuple[str, ...]:
    """Return titles of engines that --export writes a layout for, that of the stack whose numbers
    they are among them; an older release counts where the newer one cannot."""
    own = query.resolved.engine.rules.name
    titles: dict[str, str] = {}
    for name, engine in EXPORTS.items():
        is_listed = name in (*USUAL, own) and engine.export.before not in titles
        if is_listed and _can_write(name, query, spec):
            titles[name] = engine.title
    return tuple(titles.values())


def is_written(query: PlanQuery, spec: RunSpec) -> bool:
    """Return whether --export writes a layout for the engine whose seconds a plan has; for any
    engine, where there is no export of that one."""
    rules = query.resolved.engine.rules.name
    own = [
        name
        for name, engine in EXPORTS.items()
        if engine_of(engine.export.predicted_as).rules.name == rules
    ]
    return any(_can_write(name, query, spec) for name in own or EXPORTS)


def _can_write(engine: str, query: PlanQuery, spec: RunSpec) -> bool:
    """Return whether the same question with --export of an engine writes this layout."""
    numbers = query.export_engines.get(engine) or engine_of(stack_of(engine))
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=policy_of_engine(query, spec.policy, numbers),
        host_gpus=query.resolved.cluster.host_gpus,
        engine=numbers,
    )
    return why_not_written(engine, setup) is None


def _legal_package(engine: str, setup: Setup) -> Package | None:
    """Return what is written for a run, after every rule of the engine's release; None for our own
    engine."""
    entry = _entry(engine)
    if not entry.export.writer:
        for refusal in why_not_spec(setup.spec):
            raise refusal.error
        return None
    setup = replace(setup, model=without_idle_window(setup.model, setup.batch.seq_len))
    check(engine, setup.model)
    check_rules(engine, setup)
    return _settings(entry, setup)


def _settings(engine: Engine, setup: Setup) -> Package:
    """Return the files of a setup whose layout breaks no rule. What is refused here, is refused in
    every layout: rules that read a layout are the search's too (search/rules)."""
    writer = _writer(engine)
    check_choices(engine.name, setup, writer.CHOICES)
    return writer.package(setup, engine)


def _writer(engine: Engine) -> Any:
    return importlib.import_module(f"fourfold.backends.{engine.folder}.{engine.export.writer}")


def _entry(engine: str) -> Engine:
    if engine not in EXPORTS:
        rule = "unknown engine"
        if is_known(engine):
            rule = "is planned and its logs are read, but no settings are written for it"
        hint = f"use one of {', '.join(ENGINES)}"
        raise UserError(rule, field="export", value=engine, hint=hint)
    return EXPORTS[engine]
