"""Jobs of a cloud around any export: a SkyPilot task, a Kubeflow TrainJob."""

from __future__ import annotations

from textwrap import indent

from fourfold.cost.stacks import EXPORTS
from fourfold.errors import UserError
from fourfold.search.export.setup import Setup, filled
from fourfold.spec import catalog

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
        "script": indent(script.rstrip("\n"), " " * depth, lambda line: bool(line.strip())),
    }
    return {name: filled(f"{name}.txt", EXPORTS[engine], values)}
