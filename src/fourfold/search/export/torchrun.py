"""fourfold's own engine under torchrun: a run file that `fourfold bench --spec` takes, with the
launch line for many hosts as a comment."""

from __future__ import annotations

from typing import Any

from fourfold.search.export.setup import Setup
from fourfold.spec import codec
from fourfold.spec.model import ModelShape
from fourfold.spec.toml import toml_text


def check(model: ModelShape) -> None:
    """Whatever the stack's rules let pass, the run file can say."""
    assert model.layers > 0


def write(setup: Setup) -> str:
    table: dict[str, Any] = {"model": setup.model_name} if setup.model_name else {}
    table |= {
        "gpus": setup.layout.world,
        "layout": setup.layout.to_plain(),
        "batch": codec.encode(setup.batch, sparse=True),
        "policy": codec.encode(setup.policy, sparse=True),
    }
    launch = f"torchrun --nnodes {setup.hosts} --nproc-per-node {setup.per_host}"
    head = [
        f"# {setup.layout} on {setup.hosts} hosts of {setup.per_host} GPUs",
        *(f"# {note}" for note in setup.notes),
        "# fourfold bench --spec THIS.toml",
        f"# on several hosts the same workers start under: {launch}",
    ]
    return "\n".join([*head, toml_text(table)])
