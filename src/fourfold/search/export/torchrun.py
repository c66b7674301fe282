"""fourfold's own engine under torchrun: a run file that `fourfold bench --spec` takes, with the
launch line for many hosts as a comment."""

from __future__ import annotations

from typing import Any

from fourfold.search.export.setup import Setup
from fourfold.spec import codec
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.toml import toml_text


def write(setup: Setup) -> str:
    table: dict[str, Any] = {"model": setup.model} if setup.model else {}
    table |= {
        "gpus": setup.layout.world,
        "layout": setup.layout.to_plain(),
        "batch": codec.encode(setup.batch, sparse=True),
        "policy": codec.encode(setup.policy, sparse=True),
    }
    launch = f"torchrun --nnodes {setup.hosts} --nproc-per-node {setup.per_host}"
    head = [
        f"# {setup.layout} on {setup.hosts} hosts of {setup.per_host} GPUs",
        "# fourfold bench --spec THIS.toml",
        f"# on several hosts the same workers start under: {launch}",
    ]
    return "\n".join([*head, toml_text(table)])


def read(text: str, *, layers: int) -> Setup:
    assert layers > 0
    table = codec.parse_toml(text)
    words = text.split()
    host = words.index("--nproc-per-node") if "--nproc-per-node" in words else -1
    layout = Layout.from_plain(table.get("layout", {}), "layout")
    return Setup(
        layout=layout,
        batch=codec.decode(Batch, table.get("batch", {}), "batch"),
        policy=codec.decode(Policy, table.get("policy", {}), "policy"),
        host_gpus=int(words[host + 1]) if host >= 0 else layout.world,
        shape=(),
        model=str(table.get("model", "")),
    )
