"""One unit and one convention: what a number is called is what it is, in every command."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.cost.count.flops import DEFAULT
from fourfold.show.runs import runs_page
from fourfold.spec import catalog
from fourfold.spec.catalog import generation_of
from fourfold.spec.expression import memory_values, parse
from fourfold.tables.document import after
from fourfold.tables.publish import STYLE_CONVENTION
from fourfold.tables.row import PublishedRow
from fourfold.verbs.requests import PlanRequest
from fourfold.verbs.runs import StoredRuns
from tests.cli import Cli

PLAN = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--seq-len", "4096",
        "--global-batch", "64", "--stack", "megatron", "--top", "1"]  # fmt: skip


def test_one_default_convention() -> None:
    assert DEFAULT == "causal"
    for request in (PlanRequest,):
        (default,) = (f.default for f in dataclasses.fields(request) if f.name == "convention")
        assert default == DEFAULT, request
    assert STYLE_CONVENTION == {"mpt": "mpt", "topology": DEFAULT, "scaling": DEFAULT}


def test_plan_counts_by_the_convention_asked_for(cli: Cli) -> None:
    said = {}
    for words in ([], ["--convention", "causal"], ["--convention", "full-attention"]):
        found = cli.json(*PLAN, *words)
        said[found["flop_rule"]] = found["ranked"][0]["tflops_gpu"]
    assert list(said) == ["causal", "full-attention"]
    assert said["full-attention"] > 1.02 * said["causal"]


@pytest.mark.parametrize(("name", "unit"), [("mem_gib", 2**30), ("mem_gb", 1e9)])
def test_conditions_read_memory_in_the_unit_they_name(cli: Cli, name: str, unit: float) -> None:
    row = cli.json(*PLAN)["ranked"][0]
    size = row["peak_bytes"] / unit
    first = cli.json(*PLAN, "--where", f"{name} < {size + 0.01:.4f}")["ranked"][0]
    assert first["peak_bytes"] == row["peak_bytes"]
    below = cli.json(*PLAN, "--where", f"{name} < {size - 0.01:.4f}")["ranked"][0]
    assert below["peak_bytes"] < row["peak_bytes"]
    assert parse(f"{name} == 3").holds(memory_values(3 * unit))


@pytest.mark.parametrize("device", catalog.device_names())
def test_every_gpu_of_the_catalogue_is_known_in_a_heading(device: str) -> None:
    name, _, size = device.partition("-")
    texts = [f"## {device}", f"## {device.replace('-', '_').upper()}"]
    if size.endswith("gb"):
        texts.append(f"## {name.upper()} ({size.upper()})")
    for text in texts:
        assert after(PublishedRow(), (text,)).hardware == device
    if not size:
        memory = round(catalog.device(device).memory_bytes / 1e9)
        assert after(PublishedRow(), (f"## {name.upper()} ({memory}GB)",)).hardware == device


def test_generations() -> None:
    same = {"a": ("a100-80gb", "a800"), "h": ("h100-80gb", "h200", "h800"), "b": ("b200", "gb300"),
            "mi": ("mi300x",), "x9": ("x9-96gb",)}  # fmt: skip
    for generation, names in same.items():
        assert {generation_of(name) for name in names} == {generation}
    own = replace(catalog.device("h200"), id="x9-96gb", generation="h")
    assert generation_of(own) == "h"


def test_every_gpu_says_how_it_is_linked() -> None:
    """One that left it out would silently get PCIe and a card of 100 Gbit/s."""
    data = Path(catalog.__file__).parent.parent / "data" / "devices.toml"
    for name, stated in tomllib.loads(data.read_text())["devices"].items():
        device = catalog.device(name)
        assert device.generation
        assert device.usual_link_bytes_per_s == device.peer_bytes_per_s > 0
        assert "network_bytes_per_s" in stated
    assert replace(catalog.device("h200"), links=0).usual_link_bytes_per_s == 64e9


def test_runs_tell_shardings_apart() -> None:
    grid, *_ = runs_page(StoredRuns(()), "runs")
    assert "sharding" in grid.headings
