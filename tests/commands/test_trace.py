"""Does `fourfold trace` answer in every form, and refuse in words?"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fourfold.cli import main

SIZES = ["--tokens", "4096", "--hidden", "512", "--heads", "8"]


def test_json_has_the_agreed_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ulysses", *SIZES, "--tp", "2", "--cp", "2", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ranks"] == 4
    assert data["per_rank"] == {"heads": 2, "kv_heads": 2, "tokens": 1024}
    assert data["groups"][0]["members"] == [[0, 1, 2, 3]]
    step = data["steps"][1]
    assert {"name", "tensors", "flops_rank", "flops_all", "comm_bytes", "live_bytes",
            "peak_bytes"} <= step.keys()  # fmt: skip
    assert {"name", "symbolic", "shape", "elements", "bytes"} <= step["tensors"][0].keys()


@pytest.mark.parametrize("style", ["text", "md", "csv"])
def test_every_form_prints(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ring", *SIZES, "--cp", "4", "--format", style]) == 0
    out = capsys.readouterr().out
    assert "kv_next" in out
    if style == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert sum(int(row["comm_bytes"] or 0) for row in rows) == 3 * 2 * 1024 * 512 * 2


def test_a_model_gives_sizes_and_flags_override(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "allgather", "--tokens", "8192", "--model", "llama-3.1-8b", "--cp", "2"]
    assert main([*words, "--kv-heads", "4", "--format", "json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert (sizes["hidden"], sizes["heads"], sizes["kv_heads"]) == (4096, 32, 4)


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.png"
    assert main(["trace", "mlp", "--tokens", "64", "--hidden", "64", "--ffn", "256",
                 "--picture", str(path)]) == 0  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["ulysses", "--tokens", "4096"], "--hidden is required"),
        (["mlp2d", "--tokens", "4096", "--hidden", "64"], "--ffn is required"),
        (["ulysses", *SIZES, "--cp", "3"], "use 1, 2 ranks"),
        (["ring", *SIZES, "--cp", "0"], "--cp 0 must be from 1"),
        (["ring", "--tokens", "-8", "--hidden", "8", "--heads", "1"], "--tokens -8 must be"),
        (["ulysses", *SIZES, "--cluster", "nowhere"], "unknown cluster"),
        (["ulysses", *SIZES, "--picture", "x.gif"], "x.gif is not a supported picture format"),
        (["spiral", *SIZES], "is not one of"),
    ],
)
def test_bad_requests_exit_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *words]) == 2
    assert part in capsys.readouterr().err


def test_a_layer_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "layer", "--model", "llama-3.1-8b", "--tokens", "8192", "--tp", "2", "--cp",
             "2", "--dp", "2", "--cp-kind", "ulysses", "--sharding", "zero3"]  # fmt: skip
    assert main([*words, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ranks"] == 8
    assert [group["size"] for group in data["groups"]] == [2, 2, 4]
    assert main([*words, "--sharding", "zero9"]) == 2
    assert main(["trace", "layer", "--tokens", "8192"]) == 2
    assert main([*words, "--attention", "naive"]) == 2
    assert main(["trace", "ring", *SIZES, "--sharding", "zero3"]) == 2


def test_a_context_parallel_trace_ends_in_a_recommendation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["trace", "ring", "--model", "llama-3.1-8b", "--tokens", "65536", "--cp", "64"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "recommendation: allgather" in out
    assert "refused: ulysses: ranks=64" in out
    assert main([*words, "--format", "json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["recommendation"]
    assert chosen["best"] == "allgather"
    assert {choice["kind"] for choice in chosen["choices"]} == {"ulysses", "allgather", "ring"}


def test_another_rank_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The last rank of a ring sees all its queries in every round."""
    words = ["trace", "ring", *SIZES, "--cp", "4", "--rank", "3", "--format", "json"]
    assert main(words) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    blocks = [t["shape"] for step in steps for t in step["tensors"] if t["name"] == "block"]
    assert blocks == [[8, 1024, 64]] * len(blocks)
    assert main(["trace", "ring", *SIZES, "--cp", "4", "--rank", "4"]) == 2


def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "ring", "--hidden", "512", "--heads", "8", "--tokens", "65536", "--run"]
    assert main([*words, "--cp", "64"]) == 2
    assert "at most 32" in capsys.readouterr().err
    assert main([*words, "--cp", "2", "--rank", "1"]) == 2
    assert "--rank 1 must be 0" in capsys.readouterr().err
