"""`dryrun --engine`: what it asks of an engine's process, and what it makes of the answer. Here the
process is a script; tests/engines has the engine itself."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.result.one_rank import (
    AllocatorBytes,
    AllocatorFits,
    EngineJob,
    EngineJobReply,
    EngineSetting,
    LiveTensor,
    MemoryKind,
    RankMemoryCount,
)
from fourfold.spec import codec
from fourfold.spec.layout import Layout
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

CONFIG = ["dryrun", "--engine", "torchtitan==0.2.2", "--engines", "engines", "--config", "own.toml"]
JOB = EngineJob(
    model="llama3 8B",
    has_experts=False,
    layout=Layout(pp=4, shard=2, tp=8),
    sharding="zero2",
    recompute="selective",
    precision="bf16-mixed",
    precision_name="bf16-mixed",
    is_compiled=False,
    seq_len=8192,
    micro_batch=1,
    global_batch=16,
    settings={
        "layout.cp": EngineSetting(name="parallelism.context_parallel_degree", value="2"),
        "layout.ep": EngineSetting(name="parallelism.expert_parallel_degree", value="2"),
        "layout.dp": EngineSetting(name="parallelism.data_parallel_shard_degree", value="1"),
        "model": EngineSetting(name="model.flavor", value="8B"),
        "policy.precision": EngineSetting(name="model.converters", value='["float8"]'),
        "policy.compile": EngineSetting(name="compile.enable", value="true"),
    },
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed release whose process keeps its requests, and the files that came with them, in
    this folder, and answers with what is in `answer.json` there, of its own settings with what is
    in `job.json`."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "engines" / "torchtitan-0.2.2"
    (home / "bin").mkdir(parents=True)
    (home / ".ready").write_text("torchtitan==0.2.2")
    python = home / "bin" / "python"
    python.write_text(
        f"#!/bin/sh\nif [ $6 = read_job ]; then\n  cat >{tmp_path}/job.request\n"
        f"  cp $(grep -o '/[^\"]*config.toml' {tmp_path}/job.request) {tmp_path}/copied\n"
        f"  exec cat {tmp_path}/job.json\nfi\n"
        f"cat >{tmp_path}/request.$$\ncat {tmp_path}/answer.json || exit 3\n"
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


def own_settings(folder: Path, reply: EngineJobReply) -> None:
    (folder / "own.toml").write_bytes(b"# mine\r\n[training]\r\nseq_len = 8192\r\n")
    (folder / "job.json").write_text(codec.to_json(reply))


def test_config_goes_to_the_engine_as_it_is(engine, cli) -> None:
    own_settings(engine, EngineJobReply(job=JOB))
    answer = cli.json(*CONFIG, "--gpus", "64", "--limit", "80GiB")
    assert json.loads((engine / "job.request").read_text())["world"] == 64
    assert (engine / "copied").read_bytes() == (engine / "own.toml").read_bytes()
    asked = requests(engine)
    assert [request["rank"] for request in asked] == [0, 16, 32, 48]
    for request in asked:
        assert request["arguments"][0] == "--job.config_file"
        assert len(request["arguments"]) == 2
        assert request["limit_bytes"] == 80 * GIB - answer["outside_bytes"]
    for field in ("model", "sharding", "recompute", "seq_len", "micro_batch", "global_batch"):
        assert answer[field] == getattr(JOB, field), field
    assert (answer["layout"], answer["gpus"]) == ("pp4 dp2 cp1 tp8", 64)


def test_outside_bytes_of_config_equal_those_of_flags(engine, cli) -> None:
    own_settings(engine, EngineJobReply(job=JOB))
    answers = [
        cli.json(*CONFIG, "--gpus", "64"),
        cli.json(*RUN, "--layout", "pp4 dp2 tp8"),
    ]
    assert answers[0]["outside"] == answers[1]["outside"]
    assert [part["name"] for part in answers[0]["outside"]][-1] == "5 NCCL communicators"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layout": Layout(shard=32, cp=2)},
            "parallelism.context_parallel_degree = 2 in own.toml is not counted yet by the dry run "
            "of torchtitan 0.2.2; use 1",
        ),
        ({"layout": Layout(shard=64, ep=2)}, "parallelism.expert_parallel_degree = 2 in own.toml"),
        ({"layout": Layout(tp=64)}, "parallelism.data_parallel_shard_degree = 1 in own.toml"),
        ({"precision": "fp8"}, 'model.converters = ["float8"] in own.toml is not counted yet'),
        ({"is_compiled": True}, "compile.enable = true in own.toml is not counted yet"),
        ({"has_experts": True}, "model.flavor = 8B in own.toml has experts, and not counted yet"),
        (
            {"uncounted": ((EngineSetting(name="validation.enable", value="true"), "false"),)},
            "validation.enable = true in own.toml is not counted yet by the dry run of torchtitan "
            "0.2.2; use false",
        ),
    ],
)
def test_config_is_refused_by_the_name_of_its_setting(changes, said, engine, cli) -> None:
    own_settings(engine, EngineJobReply(job=replace(JOB, **changes)))
    assert said in cli(*CONFIG, "--gpus", "64", status=2)
    assert not requests(engine)


def test_config_that_the_engine_refuses_is_told_in_its_words(engine, cli) -> None:
    own_settings(engine, EngineJobReply(refusal="TOMLDecodeError: Invalid value (at line 3)"))
    said = cli(*CONFIG, "--gpus", "64", status=2)
    assert "--config own.toml is refused by torchtitan 0.2.2: TOMLDecodeError: Invalid " in said
    assert not requests(engine)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--gpus is required; say how many ranks the job has"),
        ("--gpus 0", "--gpus 0 must be from 1 to 16777216"),
        ("--gpus 64 --rank 64", "--rank 64 must be a rank of pp4 dp2 cp1 tp8, 0 to 63"),
        ("--gpus 64 --model llama-3.1-8b", "--model llama-3.1-8b does not go with --config; omit"),
        ("--gpus 64 --layout dp64", "--layout dp64 does not go with --config"),
        ("--gpus 64 --tp 8", "--tp 8 does not go with --config"),
        ("--gpus 64 --seq-len 8192", "--seq-len 8192 does not go with --config"),
        ("--gpus 64 --micro-batch 1", "--micro-batch 1 does not go with --config"),
        ("--gpus 64 --recompute full", "--recompute full does not go with --config"),
        ("--gpus 64 --set policy.compile=true", "--set policy.compile=True does not go with"),
        ("--gpus 64 --config none.toml", "--config none.toml cannot be read"),
    ],
)
def test_flags_that_contradict_a_config_are_refused(words, said, engine, cli) -> None:
    own_settings(engine, EngineJobReply(job=JOB))
    assert said in cli(*CONFIG, *shlex.split(words), status=2)
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
    assert "torchtitan==0.3.0 has no dry run of its own code; use " in error
    assert "torchtitan==0.2.2" in error
