"""Settings for other engines: a chosen layout written in their words, for a named release of each.

What an engine cannot do is refused by name, so that what was priced is what will run.

Jobs of a cloud around any export: a SkyPilot task, a Kubeflow TrainJob.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from textwrap import indent
from typing import Any

from fourfold.cost.stacks import EXPORTS, ExportEngine, stack_rules
from fourfold.errors import UserError
from fourfold.search.export.setup import (
    Package,
    Setup,
    check_setup,
    filled,
    folder,
    run_file,
    script,
)
from fourfold.search.legal import why_not_spec
from fourfold.spec import catalog
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.spec.supported import without_idle_window

# Their file, and how deep the script stands in it.
AROUND = {"skypilot": ("skypilot.yaml", 2), "kubeflow": ("kubeflow.yaml", 8)}


def around(kind: str, engine: str, setup: Setup, script: str) -> dict[str, str]:
    """File name -> text: a job that writes the script on every host and runs it."""
    if kind not in AROUND:
        raise UserError("unknown job", field="job", value=kind, hint=f"use {' or '.join(AROUND)}")
    if not EXPORTS[engine].writer:
        if setup.hosts > 1:
            hint = "use --export of another engine, or 'fourfold bench --on' for Slurm"
            raise UserError("is for one host", field="job", value=kind, hint=hint)
        script = (
            f"cat >run.toml <<'END_OF_RUN'\n{script}END_OF_RUN\nfourfold bench --spec run.toml\n"
        )
    name, depth = AROUND[kind]
    known = catalog.data("stacks.toml")["skypilot"]
    values = {
        "engine": engine.replace(".", "-"),
        "hosts": setup.hosts,
        "per_host": setup.per_host,
        "accelerator": known.get(setup.device, setup.device.upper()),
        "resource": f"{'amd' if setup.device.startswith('mi') else 'nvidia'}.com/gpu",
        "script": indent(script.rstrip("\n"), " " * depth, lambda line: bool(line.strip())),
    }
    return {name: filled(f"{name}.txt", EXPORTS[engine], values)}


__all__ = ["ENGINES", "USUAL", "around", "check", "runs_in", "stack_of", "write", "write_folder"]
ENGINES = tuple(EXPORTS)
USUAL = tuple(engine.name for engine in EXPORTS.values() if not engine.on_demand)


def stack_of(engine: str) -> str:
    """Whose engine the numbers must be for, so that they are the exported run's."""
    return _entry(engine).stack


def check(engine: str, model: ModelShape) -> None:
    entry = _entry(engine)
    if entry.writer:
        _writer(entry).check(model, entry)


def write(engine: str, setup: Setup) -> str:
    """One file: a run file for our own engine, which can hold any run, else a script that brings
    its parts along."""
    entry = _entry(engine)
    return script(_package(entry, setup), setup) if entry.writer else run_file(setup)


def write_folder(engine: str, setup: Setup) -> dict[str, str]:
    """File name -> text: environment, launcher's and engine's arguments, and a script over them."""
    return folder(_package(_entry(engine), setup), setup)


def runs_in(spec: RunSpec, host_gpus: int, stack: str) -> tuple[str, ...]:
    """Titles of engines that can run a layout, that of the stack whose numbers they are among them;
    an older release counts where the newer one cannot. What one engine does by habit (compiling,
    its own sums) asks nothing of another."""
    attention = "auto" if spec.policy.attention == "fused-softmax" else spec.policy.attention
    policy = replace(
        spec.policy, compile=False, async_tp=False, grad_dtype=None, reduce_dtype=None,
        attention=attention,
    )  # fmt: skip
    spec = replace(spec, policy=policy)
    found: dict[str, str] = {}
    for name, engine in EXPORTS.items():
        if name not in (*USUAL, stack_rules(stack).name) or not engine.writer:
            continue
        if engine.before not in found and _can_write(engine, spec, host_gpus):
            found[engine.name] = engine.title or engine.name
    return (*found.values(), *(["fourfold"] if not why_not_spec(spec) else []))


def _can_write(engine: ExportEngine, spec: RunSpec, host_gpus: int) -> bool:
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=host_gpus,
        stack=engine.stack,
    )
    try:
        _package(engine, setup)
    except UserError:
        return False
    return True


def _package(engine: ExportEngine, setup: Setup) -> Package:
    writer = _writer(engine)
    setup = replace(setup, model=without_idle_window(setup.model, setup.batch.seq_len))
    writer.check(setup.model, engine)
    check_setup(engine.name, setup, writer.CHOICES)
    return writer.package(setup, engine)


def _writer(engine: ExportEngine) -> Any:
    return importlib.import_module(f"{__name__}.{engine.writer}")


def _entry(engine: str) -> ExportEngine:
    if engine not in EXPORTS:
        hint = f"use one of {', '.join(ENGINES)}"
        raise UserError("unknown engine", field="export", value=engine, hint=hint)
    return EXPORTS[engine]
