"""Does `fourfold trace` answer in every form, and refuse in words?"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.cli import Cli

SIZES = ["--tokens", "4096", "--hidden", "512", "--heads", "8"]


def test_json_has_the_agreed_fields(cli: Cli) -> None:
    data = cli.json("trace", "ulysses", *SIZES, "--tp", "2", "--cp", "2")
    assert data["ranks"] == 4
    assert data["per_rank"] == {"heads": 2, "kv_heads": 2, "tokens": 1024}
    assert data["groups"][0]["members"] == [[0, 1, 2, 3]]
    step = data["steps"][1]
    assert {"name", "tensors", "flops_rank", "flops_all", "comm_bytes", "live_bytes",
            "peak_bytes"} <= step.keys()  # fmt: skip
    assert {"name", "symbolic", "shape", "elements", "bytes"} <= step["tensors"][0].keys()


@pytest.mark.parametrize("style", ["text", "md", "csv"])
def test_every_form_prints(style: str, cli: Cli) -> None:
    out = cli("trace", "ring", *SIZES, "--cp", "4", "--format", style)
    assert "kv_next" in out
    if style == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert sum(int(row["comm_bytes"] or 0) for row in rows) == 3 * 2 * 1024 * 512 * 2


def test_a_model_gives_sizes_and_flags_override(cli: Cli) -> None:
    words = ["trace", "allgather", "--tokens", "8192", "--model", "llama-3.1-8b", "--cp", "2"]
    sizes = cli.json(*words, "--kv-heads", "4")["sizes"]
    assert (sizes["hidden"], sizes["heads"], sizes["kv_heads"]) == (4096, 32, 4)


@pytest.mark.parametrize(("model", "matrices"), [("llama-3.1-8b", 3), ("gpt-tiny", 2)])
def test_mlp_trace_counts_every_matrix_of_the_model(model: str, matrices: int, cli: Cli) -> None:
    for kind in ("mlp", "mlp2d"):
        data = cli.json("trace", kind, "--tokens", "4096", "--model", model, "--tp", "4")
        hidden, ffn = data["sizes"]["hidden"], data["sizes"]["ffn"]
        weights = [t for t in data["steps"][0]["tensors"] if t["name"].startswith("W")]
        assert [tensor["elements"] for tensor in weights] == matrices * [hidden * ffn // 4]
        flops = sum(step["flops_all"] for step in data["steps"])
        assert flops == matrices * 2 * 4096 * hidden * ffn


def test_a_picture_is_drawn(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "memory.png"
    cli("trace", "mlp", "--tokens", "64", "--hidden", "64", "--ffn", "256", "--picture", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_layer_of_a_preset(cli: Cli) -> None:
    words = ["trace", "layer", "--model", "llama-3.1-8b", "--tokens", "8192", "--tp", "2", "--cp",
             "2", "--dp", "2", "--cp-kind", "ulysses", "--sharding", "zero3"]  # fmt: skip
    data = cli.json(*words)
    assert data["ranks"] == 8
    assert [group["size"] for group in data["groups"]] == [2, 2, 4]


def test_a_context_parallel_trace_ends_in_a_recommendation(cli: Cli) -> None:
    words = ["trace", "ring", "--model", "llama-3.1-8b", "--tokens", "65536", "--cp", "64"]
    out = cli(*words)
    assert "recommendation: allgather" in out
    assert "refused: ulysses: ranks=64" in out
    chosen = cli.json(*words)["recommendation"]
    assert chosen["best"] == "allgather"
    assert {choice["kind"] for choice in chosen["choices"]} == {"ulysses", "allgather", "ring"}


def test_another_rank_can_be_shown(cli: Cli) -> None:
    """The last rank of a ring sees all its queries in every round."""
    words = ["trace", "ring", *SIZES, "--cp", "4", "--rank", "3"]
    steps = cli.json(*words)["steps"]
    blocks = [t["shape"] for step in steps for t in step["tensors"] if t["name"] == "block"]
    assert blocks == [[8, 1024, 64]] * len(blocks)
