"""Do agents get the answers of the commands over MCP, and nothing else?"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from fourfold.agents import server, tools
from fourfold.errors import UserError
from fourfold.spec import catalog, codec
from fourfold.verbs.question import EXPORTED
from tests.loops import awaited

ASKED = {"model": "llama-3.1-70b", "gpu": "h100-80gb", "gpus": 512, "seq_len": "8k",
         "global_batch": "4M", "stack": "megatron"}  # fmt: skip
SMALL = {"model": "llama-tiny", "gpu": "h100-80gb", "gpus": 2, "seq_len": 128, "global_batch": 8,
         "stack": "megatron"}  # fmt: skip
RUN = {"model": "mpt-7b", "gpus": 8, "seq_len": 2048, "global_batch": 64, "precision": "bf16"}


def _with_client(folder: Path, work: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        words = ["-m", "fourfold", "mcp", "--folder", str(folder)]
        server = StdioServerParameters(command=sys.executable, args=words)
        async with Client(stdio_client(server)) as client:
            await work(client)

    awaited(run())


def _text(result: Any) -> str:
    return result.content[0].text


def test_the_official_client_lists_tools_and_plans_70b_on_512_gpus(tmp_path: Path) -> None:
    whole = json.loads(_schema_file().read_text())

    async def work(client: Client) -> None:
        listed = (await client.list_tools()).tools
        assert {one.name for one in listed} == {*tools.TOOLS}
        for one in listed:
            jsonschema.Draft202012Validator.check_schema(one.input_schema)
        given = {
            "plan": ASKED,
            "explain": SMALL | {"explain": "tp2"},
            "fit_check": SMALL | {"explain": "tp2"},
            "predict": {"gpu": "h100-80gb", "runs": [RUN]},
            "flops": RUN | {"gpu": "h100-80gb", "tokens_per_s": 85144},
        }
        answers = {}
        for name, arguments in given.items():
            jsonschema.validate(arguments, tools.input_schema(name))
            result = await client.call_tool(name, arguments)
            assert not result.is_error, _text(result)
            answers[name] = result.structured_content
            jsonschema.validate(result.structured_content, whole)
            assert json.loads(_text(result)) == result.structured_content
        best = answers["plan"]["answer"]["ranked"][0]
        assert best["fit_chance"] >= 0.9
        assert best["step_s_low"] < best["step_s"] < best["step_s_high"]
        assert answers["fit_check"]["answer"]["fits"]
        assert answers["predict"]["answer"]["runs"][0]["provenance"]

    _with_client(tmp_path, work)


def test_a_model_and_a_cluster_may_be_tables() -> None:
    named = SMALL | {"gpu": None, "cluster": "nvidia-h100"}
    tables = {"model": codec.encode(catalog.model("llama-tiny")),
              "cluster": codec.dump(catalog.cluster("nvidia-h100"))}  # fmt: skip
    jsonschema.validate(SMALL | tables, tools.input_schema("plan"))
    answers = [tools.called("plan", one)["answer"]["ranked"] for one in (named, named | tables)]
    assert answers[0] == answers[1]


def test_no_file_outside_of_the_folder_is_read_or_written(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir(), outside.mkdir()
    log = outside / "secret.csv"
    log.write_text("secret,words\n1,2\n")
    (folder / "link.csv").symlink_to(log)
    (folder / "logs").symlink_to(outside)
    (folder / "own.csv").write_text("iteration,seconds\n1,2\n")
    refused = [
        ("collect", {"logs": [str(log)]}),
        ("collect", {"logs": ["../outside/secret.csv"]}),
        ("collect", {"logs": ["link.csv"]}),
        ("collect", {"logs": ["logs"]}),
        ("collect", {"logs": ["~/x.log"]}),
        ("collect", {"logs": ["own.csv"], "out": str(outside / "out.csv")}),
        ("collect", {"logs": ["own.csv"], "runs": "../outside"}),
        ("collect", {"logs": ["own.csv"], "out": "logs/out.csv"}),
        ("diagnose", {"traces": ["own.csv"], "log": str(log)}),
        ("plan", SMALL | {"model": "/etc/passwd"}),
        ("plan", SMALL | {"calibration": "link.csv"}),
        ("flops", RUN | {"model": str(outside)}),
        ("predict", {"gpu": "h100-80gb", "runs": [RUN | {"model": "../outside/x.json"}]}),
    ]

    async def work(client: Client) -> None:
        for name, arguments in refused:
            result = await client.call_tool(name, arguments)
            assert result.is_error, (name, arguments)
            assert "outside of the folder" in _text(result), _text(result)
            assert "secret" not in _text(result).replace("secret.csv", "")
        assert [*outside.iterdir()] == [log]

    _with_client(folder, work)


_ATTEMPTS = """
import json, pathlib, subprocess, sys
from fourfold import files
from fourfold.agents.server import confine
from fourfold.errors import UserError
from fourfold.result.files import stored
from fourfold.traces.examined import read_trace
from fourfold.spec import catalog
root = pathlib.Path(sys.argv[1])
confine(root)
def lock():
    with files.locked("door/x"):
        pass
calls = {
    "database": lambda: read_trace(pathlib.Path("door/x.sqlite")),
    "environment": lambda: files.read_text("environ.csv"),
    "memory": lambda: files.open_stream("/proc/self/maps"),
    "above": lambda: files.open_regular("../outside/secret"),
    "stored": lambda: stored.read_bytes(pathlib.Path("door/secret"), 100),
    "added": lambda: stored.appending(pathlib.Path("door/secret")),
    "written": lambda: files.write_text("door/y", "x"),
    "device": lambda: files.write_text("/dev/null", "x"),
    "lock": lock,
    "process": lambda: subprocess.run(["true"]),
    "own": lambda: files.write_text("own.csv", files.read_text("in.csv")),
    "processors": lambda: open("/proc/cpuinfo"),
    "model": lambda: catalog.model("llama-tiny"),
}
refused = []
for name, call in calls.items():
    try:
        call()
    except UserError as error:
        refused += [name] if "of this server" in str(error) else [str(error)]
print(json.dumps(refused))
"""


def test_confined_process_opens_what_a_name_really_leads_to(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir(), outside.mkdir()
    (folder / "environ.csv").symlink_to("/proc/self/environ")
    (folder / "door").symlink_to(outside)
    (folder / "in.csv").write_text("a\n1\n")
    secret = outside / "secret"
    secret.write_text("secret")
    words = [sys.executable, "-c", _ATTEMPTS, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        "database", "environment", "memory", "above", "stored", "added", "written", "device",
        "lock", "process",
    ]  # fmt: skip
    assert ([*outside.iterdir()], secret.read_text()) == ([secret], "secret")
    assert (folder / "own.csv").read_text() == "a\n1\n"


def test_calls_that_wait_for_a_pipe_end_and_others_are_answered(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALL_S", 3.0)
    os.mkfifo(tmp_path / "pipe.log")
    writer = os.open(tmp_path / "pipe.log", os.O_RDWR)  # it never writes

    async def ask_all() -> dict[str, Any]:
        asked = server.Server(tmp_path)
        for _ in range(2):
            with pytest.raises(UserError, match="takes more than the 3 seconds"):
                await asked.answer("collect", {"logs": ["pipe.log"]})
        monkeypatch.setattr(server, "MAX_CALL_S", 300.0)
        return await asked.answer("flops", RUN)

    assert awaited(ask_all())["answer"]["model"] == "mpt-7b"
    os.close(writer)


def test_a_small_plan_runs_before_large_ones_that_wait(tmp_path: Path, monkeypatch) -> None:
    begun: list[int] = []

    async def work(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        begun.append(given["gpus"])
        await asyncio.sleep(0.02)
        return {}

    monkeypatch.setattr(server.Server, "_in_process", work)

    async def ask_all() -> None:
        asked = server.Server(tmp_path)
        large = [ASKED | {"gpus": 16384, "top": 1 + number} for number in range(8)]
        await asyncio.gather(*(asked.answer("plan", given) for given in [*large, SMALL]))

    awaited(ask_all())
    assert SMALL["gpus"] in begun[:2]


def test_plan_compares_engines_in_few_fields() -> None:
    answer = tools.called("plan", {key: SMALL[key] for key in SMALL if key != "stack"})
    jsonschema.validate(answer, json.loads(_schema_file().read_text()))
    ranked, engines = answer["answer"]["ranked"], answer["answer"]["engines"]
    first = next(engine for engine in engines if engine["stack"] == answer["answer"]["stack"])
    assert (first["step_s"], first["peak_bytes"]) == (ranked[0]["step_s"], ranked[0]["peak_bytes"])
    assert len(engines) == len(EXPORTED)
    assert len(json.dumps(engines)) < 3000


def test_bad_calls_say_what_is_wrong(tmp_path: Path) -> None:
    cases = [
        ("no_such_tool", {}, "unknown tool"),
        ("plan", {}, "is required"),
        ("plan", SMALL | {"gpus": "many"}, "gpus"),
        ("plan", SMALL | {"export": "megatron"}, "unknown field"),
        ("plan", SMALL | {"top": 10_000}, "top"),
        ("plan", SMALL | {"model": "no-such-model"}, "no-such-model"),
        ("plan", SMALL | {"model": 7}, "model"),
        ("plan", SMALL | {"model": None}, "model is required"),
        ("plan", SMALL | {"gpu": "n" * 300}, "longer than the 255 bytes of a name"),
        ("collect", {"logs": ["n" * 300]}, "longer than the 255 bytes of a name"),
        ("plan", SMALL | {"gpus": 720720, "global_batch": 720720}, "layouts and policies"),
        ("explain", SMALL, "explain"),
        ("predict", {"runs": [RUN] * 257, "gpu": "h100-80gb"}, "1 to 256"),
        ("predict", {"runs": [{"tp": 2}], "gpu": "h100-80gb"}, "runs[0]"),
        ("flops", RUN | {"step_s": -1.0}, "above 0"),
        ("diagnose", {"traces": ["none.json"]}, "none.json"),
        ("collect", {"logs": ["x" * 2**19]}, "letters"),
    ]

    async def work(client: Client) -> None:
        for name, arguments, words in cases:
            result = await client.call_tool(name, arguments)
            assert result.is_error, (name, words)
            assert words in _text(result), (words, _text(result))

    _with_client(tmp_path, work)


def _garbage(at: int, draw: random.Random) -> bytes:
    """A message that no client should send."""
    good = {"jsonrpc": "2.0", "id": at, "method": "tools/call"}
    call = {"name": "plan", "arguments": SMALL}
    text = json.dumps(good | {"params": call})
    made = [
        lambda: os.urandom(draw.randrange(1, 200)).replace(b"\n", b"?"),
        lambda: text[: draw.randrange(1, len(text))].encode(),
        lambda: json.dumps(
            good | {"params": draw.choice([[], 7, "x", None, {"name": 3}])}
        ).encode(),
        lambda: json.dumps(good | {"method": draw.choice(["", "tools/none", 5, None])}).encode(),
        lambda: json.dumps(good | {"id": draw.choice([[], {}, True, 1e99])}).encode(),
        lambda: b"[" * draw.choice([5, 5000]),
        lambda: b'{"jsonrpc": "2.0", "id": 1, "method": "ping"' + b', "a": 1' * 1000,
        lambda: json.dumps([good] * 3).encode(),
        lambda: json.dumps({"jsonrpc": "1.0", "result": "\ud800"}).encode(),
        lambda: b"",
    ]
    return draw.choice(made)() + b"\n"


def test_a_thousand_malformed_messages_do_not_end_the_server(tmp_path: Path) -> None:
    draw = random.Random(7)
    words = [sys.executable, "-m", "fourfold", "mcp", "--folder", str(tmp_path)]
    hello = {"protocolVersion": "2025-06-18", "capabilities": {},
             "clientInfo": {"name": "test", "version": "1"}}  # fmt: skip
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": hello}),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}),
    ]
    last = {"name": "flops", "arguments": RUN}
    end = json.dumps({"jsonrpc": "2.0", "id": "last", "method": "tools/call", "params": last})
    sent = "\n".join(lines).encode() + b"\n" + b"".join(_garbage(at, draw) for at in range(1000))
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        os.set_blocking(server.stdout.fileno(), True)
        server.stdin.write(sent + end.encode() + b"\n")
        server.stdin.flush()
        for line in server.stdout:
            answer = json.loads(line)
            if answer.get("id") == "last":
                break
        assert answer["result"]["structuredContent"]["answer"]["model"] == "mpt-7b"
        server.stdin.close()
        assert server.wait(60) == 0


def _schema_file() -> Path:
    return Path(str(resources.files("fourfold").joinpath("data", "answers.schema.json")))


def test_the_schema_file_is_what_the_types_say() -> None:
    assert _schema_file().read_text() == tools.schema_text(), (
        "the answers changed: 'fourfold mcp --schema' makes the file again; a field that is "
        "gone or has another type also makes tools.VERSION one higher"
    )
    jsonschema.Draft202012Validator.check_schema(json.loads(tools.schema_text()))


def test_every_field_that_names_a_file_is_fenced() -> None:
    words = ("FILE", "DIR", "LOG", "toml")
    kinds = {one for tool in tools.TOOLS.values() for one in tool.requests}
    named = {
        field.name
        for kind in kinds
        for field in fields(kind)
        if "flag" in field.metadata
        and any(word in (field.metadata["flag"].metavar or "") for word in words)
    }
    assert named
    assert named <= server.FILES


@pytest.mark.parametrize("name", ["a\0b", "/", "..", "a/../../b", "~root/x"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="outside of the folder"):
        server.check({"runs": [{"model": name}]}, tmp_path)


def test_names_that_stay_inside_are_not(tmp_path: Path) -> None:
    given = {"model": "llama-3.1-8b", "logs": ["a/b.log", "./c"], "where": ["tp / 2 < 3"]}
    server.check(given, tmp_path)


def test_the_tool_chooses_better_than_a_rule_of_thumb() -> None:
    path = Path(__file__).parents[2] / "scripts" / "agent_tasks.py"
    spec = importlib.util.spec_from_file_location("agent_tasks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["agent_tasks"] = module
    spec.loader.exec_module(module)
    assert len(module.tasks()) == 20
    found = awaited(module.evaluate(20))
    tool, rule, constant = (
        [task.regret(chosen) for task, chosen, _ in found],
        [task.regret(chosen) for task, _, chosen in found],
        [module.constant_mfu(task) for task, _, _ in found],
    )
    assert sum(tool) < 0.5 * min(sum(rule), sum(constant))
    assert all(chosen["step_s"] for _, chosen, _ in found), "a choice ran out of memory"


def test_a_confined_plan_of_many_gpus_compares_engines(tmp_path: Path) -> None:
    """A plan of the command line looks for one of them in a second process; clients get none."""
    told = (
        "import pathlib, sys; from fourfold import PlanRequest, plan;"
        "from fourfold.agents.server import confine; confine(pathlib.Path(sys.argv[1]));"
        "asked = PlanRequest(model='mixtral-8x7b', gpu='a100-80gb', gpus=256, seq_len=4096,"
        " global_batch=256, layout='pp1 tp1'); print(len(plan(asked).engines))"
    )
    done = subprocess.run([sys.executable, "-c", told, tmp_path], capture_output=True, text=True)
    assert done.stdout == f"{len(EXPORTED)}\n", done.stderr
