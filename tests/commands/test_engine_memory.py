"""`dryrun --engine`: what it asks of an engine's process, and what it makes of the answer. Here the
process is a script; tests/engines has the engine itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fourfold.result.one_rank import (
    AllocatorBytes,
    AllocatorFits,
    LiveTensor,
    MemoryKind,
    RankMemoryCount,
)
from fourfold.spec import codec
from fourfold.units import bytes_from

GIB = 2**30
TITAN = "dryrun --engine torchtitan==0.2.2 --engines engines --model llama-3.1-8b"
RUN = f"{TITAN} --seq-len 8192".split()
COUNT = RankMemoryCount(
    rank=0,
    stage=0,
    params=8_030_261_248,
    allocated_bytes=AllocatorBytes(segments=50 * GIB, expandable=50 * GIB),
    reserved_bytes=AllocatorBytes(segments=70 * GIB, expandable=60 * GIB),
    kinds=(MemoryKind(name="activations", bytes=40 * GIB),),
    phases=(MemoryKind(name="backward", bytes=50 * GIB),),
    peak_phase="backward",
    peak=(
        LiveTensor(
            bytes=4 * GIB,
            kind="temporary",
            module="output",
            line="torchtitan/components/loss.py:22",
            shape="8192x128256",
            dtype="float32",
            op="aten::mm",
            phase="backward",
        ),
    ),
    num_events=2,
    num_unknown_values=0,
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed release whose process keeps its requests, and the files that came with them, in
    this folder, and answers with what is in `answer.json` there."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "engines" / "torchtitan-0.2.2"
    (home / "bin").mkdir(parents=True)
    (home / ".ready").write_text("torchtitan==0.2.2")
    python = home / "bin" / "python"
    python.write_text(
        f"#!/bin/sh\ncat >{tmp_path}/request.$$\ncat {tmp_path}/answer.json || exit 3\n"
    )
    python.chmod(0o755)
    (tmp_path / "answer.json").write_text(codec.to_json(COUNT))
    return tmp_path


def requests(folder: Path) -> list[dict]:
    found = [json.loads(path.read_text()) for path in folder.glob("request.*")]
    return sorted(found, key=lambda request: request["rank"])


def test_request_has_the_exported_settings(engine, cli) -> None:
    answer = cli.json(*RUN, "--layout", "dp64 zero3", "--recompute", "full")
    (request,) = requests(engine)
    assert (request["rank"], request["world"]) == (0, 64)
    words = request["arguments"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--training.seq_len"] == "8192"
    assert options["--parallelism.data_parallel_shard_degree"] == "64"
    assert options["--activation_checkpoint.mode"] == "full"
    # It gathers the last layers once where nobody asks for something else.
    assert "--parallelism.fsdp_reshard_after_forward" not in options
    assert (answer["gpus"], answer["sharding"], answer["global_batch"]) == (64, "zero3", 64)


def test_engine_keeps_its_own_stages(engine, cli) -> None:
    cli.json(*RUN, *["--gpus", "64", "--pp", "4", "--tp", "8", "--rank", "last"])
    (request,) = requests(engine)
    assert request["rank"] == 63
    names = {word for word in request["arguments"] if word.startswith("--")}
    assert "--parallelism.pipeline_parallel_microbatch_size" in names
    assert "--parallelism.pipeline_parallel_layers_per_stage" not in names
    # Enough micro batches to fill the pipeline twice: a rank's share of the batch is 8 sequences.
    at = request["arguments"].index("--training.local_batch_size")
    assert request["arguments"][at + 1] == "8"


def test_other_sharding_than_its_own_is_passed_on(engine, cli) -> None:
    cli.json(*RUN, "--layout", "pp4 dp2 zero3", "--rank", "0")
    (request,) = requests(engine)
    at = request["arguments"].index("--parallelism.fsdp_reshard_after_forward")
    assert request["arguments"][at + 1] == "always"


def test_worst_rank_is_looked_for_in_every_stage(engine, cli) -> None:
    answer = cli.json(*RUN, "--layout", "pp4 dp2 tp8")
    assert [request["rank"] for request in requests(engine)] == [0, 16, 32, 48]
    assert len(answer["ranks"]) == 4


def test_answer_has_bytes_by_kind_tensor_and_place(engine, cli) -> None:
    answer = cli.json(*RUN, "--layout", "dp64")
    assert answer["allocated_bytes"] == answer["peak_bytes"] == 50 * GIB
    assert answer["reserved_bytes"] == {"segments": 70 * GIB, "expandable": 60 * GIB}
    assert answer["by_kind"] == {"activations": 40 * GIB}
    assert answer["by_phase"] == {"backward": 50 * GIB}
    assert answer["peak"][0]["line"] == "torchtitan/components/loss.py:22"
    names = [part["name"] for part in answer["outside"]]
    assert "cuBLAS workspace" not in names  # the engine's process counts it
    assert answer["outside_bytes"] == sum(part["bytes"] for part in answer["outside"]) > 0
    assert "fits" not in answer


def test_limit_leaves_room_for_what_is_outside(engine, cli) -> None:
    fits = AllocatorFits(segments="retries", expandable="fits")
    (engine / "answer.json").write_text(codec.to_json(codec.decode(
        RankMemoryCount, codec.encode(COUNT) | {"fits": codec.encode(fits)}
    )))  # fmt: skip
    answer = cli.json(*RUN, "--layout", "dp64", "--limit", "70GiB")
    (request,) = requests(engine)
    assert request["limit_bytes"] == 70 * GIB - answer["outside_bytes"]
    left = 70 * GIB - answer["outside_bytes"] - 60 * GIB
    assert answer["left_bytes"] == {"segments": left - 10 * GIB, "expandable": left}
    page = cli(*RUN, "--layout", "dp64", "--limit", "70GiB")
    assert "the limit of 70.00 GiB: runs, but returns cached memory when short" in page
    assert "8192x128256 float32, mm in backward" in page
    assert "torchtitan/components/loss.py:22" in page


def test_command_fails_where_nothing_fits(engine, cli) -> None:
    plain = codec.encode(COUNT) | {"fits": {"segments": "oom", "expandable": "oom"}}
    (engine / "answer.json").write_text(codec.to_json(codec.decode(RankMemoryCount, plain)))
    cli(*RUN, "--layout", "dp64", "--gpu", "a100-40gb", status=1)
    (request,) = requests(engine)
    assert request["limit_bytes"] < bytes_from("40GiB")


def test_failed_process_is_told_with_its_last_words(engine, cli) -> None:
    (engine / "answer.json").unlink()
    cli(*RUN, "--layout", "dp64", status=1)
    assert "--engine 'torchtitan 0.2.2' could not build rank 0: cat:" in cli.err


def test_error_of_the_engine_is_told_without_what_follows(engine, cli) -> None:
    script = engine / "engines" / "torchtitan-0.2.2" / "bin" / "python"
    script.write_text(
        "#!/bin/sh\necho '[rank0]: [rank0]: ValueError: too odd' >&2\n"
        "echo '[rank0]: see the manual' >&2\nexit 1\n"
    )
    cli(*RUN, "--layout", "dp64", status=1)
    assert cli.err.endswith("could not build rank 0: ValueError: too odd\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--layout dp64 --rank 64", "--rank 64 must be a rank of pp1 dp64 cp1 tp1, 0 to 63"),
        ("--layout dp8 --set policy.compile=true", "policy.compile=True is not counted yet"),
        ("--layout dp64 --precision fp8", "use bf16-mixed or bf16-pure"),
        ("--layout 'dp8 cp2'", "layout.cp=2 is not counted yet by the dry run of torchtitan 0.2.2"),
        ("--layout dp8 --model mixtral-8x7b", "has experts, and not counted yet"),
        ("--layout dp8 --dp 8", "--layout dp8 does not go with another layout"),
        ("--layout dp8 --model gpt-3-175b", "is not supported by torchtitan-0.2"),
        ("--layout 'dp8 zero0'", "policy.sharding=zero0 is not counted yet by the dry run of"),
        ("--layout tp8", "layout.dp=1 is not counted yet by the dry run of torchtitan 0.2.2"),
        ("--layout dp8 --stages", "use --rank worst"),
    ],
)
def test_unknown_territory_is_refused(words, said, engine, cli) -> None:
    assert said in cli(*RUN, *shlex.split(words), status=2)
    assert not requests(engine)


def test_engine_that_is_not_installed_names_the_command(tmp_path, monkeypatch, cli) -> None:
    monkeypatch.chdir(tmp_path)
    error = cli(*RUN, "--layout", "dp64", status=2)
    assert "--engine torchtitan==0.2.2 is not installed" in error
    assert "fourfold engines install torchtitan==0.2.2" in error


def test_release_without_a_dry_run_names_those_with_one(engine, cli) -> None:
    (engine / "engines" / "torchtitan-0.2.2" / ".ready").write_text("torchtitan==0.3.0")
    words = [word.replace("0.2.2", "0.3.0") for word in RUN]
    error = cli(*words, "--layout", "dp64", status=2)
    assert "torchtitan==0.3.0 has no dry run of its own code; use torchtitan==0.2.2" in error
