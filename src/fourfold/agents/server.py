"""The tools over MCP on stdin and stdout. Each call has a process of its own, confined to the
folder and to so much time and memory: what is asked cannot take the server with it.

One folder for a client's files: what a request names must lie in it, and what leads out of it, by a
link for example, is refused at the door that every reader and writer goes through.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fourfold
from fourfold import files
from fourfold.agents import tools
from fourfold.agents.schema import Schema
from fourfold.agents.tools import Call
from fourfold.errors import UserError
from fourfold.escape import json_text
from fourfold.page.planner import MOST_BYTES, MOST_CPU_S, answer_within_limits
from fourfold.page.turns import QueuedCall, Turns

# Fields of requests that may name a file.
FILES = {
    "model",
    "cluster",
    "gpu",
    "profile",
    "calibration",
    "log",
    "logs",
    "runs",
    "out",
    "map",
    "side",
    "traces",
    "data",
    "device",
}
# Events of the interpreter that lead out of the process.
_NEVER = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "ctypes.dlopen",
)
_MAX_NAME_BYTES = 255  # of a file, on every common file system


def check(request: Any, root: Path) -> None:
    """Every name in the request that is a path, wherever it stands, lies below `root`."""
    for name in _named(request):
        if "\0" in name:
            raise files.outside(name, root)
        if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in name.split("/")):
            raise UserError(
                f"is longer than the {_MAX_NAME_BYTES} bytes of a name", field="file", value=name
            )
        if not files.is_below(root / Path(name).expanduser(), os.path.realpath(root)):
            raise files.outside(name, root)


def _named(value: Any, field: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item, field)
    elif isinstance(value, str) and field in FILES:
        yield value


def confine(root: Path) -> None:
    """From now on this process reads and writes files of `root` alone, beside its own code and
    data; it starts and calls nothing. There is no way back."""
    os.chdir(root)
    sys.dont_write_bytecode = True  # of what is imported from now on
    files.keep_within(root)

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in _NEVER:
            raise UserError(f"{event} is not for clients of this server")

    sys.addaudithook(hook)


# Seconds of a call by the clock: one that waits for a disk or a pipe ends as well.
MAX_CALL_S = 300.0
MOST_LETTERS = 2**18  # of the arguments of a call
_INSTRUCTIONS = (
    "Plans, predicts and checks layouts of language-model pretraining (tensor, pipeline, data, "
    "context parallelism) on GPUs. Numbers are in base units: seconds, bytes, FLOPs. An interval "
    "(step_s_low, step_s_high) holds 80% of measured runs; fit_chance is the chance that the run "
    "does not go out of memory: take 0.9 and more. provenance says what a prediction rests on: "
    "measured, near, blended or physics. Files are read and written below one folder only."
)


class Server:
    """`root`: the only folder that clients' files may be in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.turns: Turns[QueuedCall] = Turns()
        self._context = multiprocessing.get_context("forkserver")
        # Imported once: a call's process is a copy that begins at once.
        self._context.set_forkserver_preload([__name__])

    async def answer(self, name: str, given: Call) -> dict[str, Any]:
        """What the tool says; raises UserError where it refuses."""
        if name not in tools.TOOLS:
            raise UserError(
                "unknown tool", field="name", value=name, hint=f"use {', '.join(tools.TOOLS)}"
            )
        if len(json.dumps(given)) > MOST_LETTERS:
            raise UserError(f"must have at most {MOST_LETTERS:,} letters", field="arguments")
        check(given, self.root)
        call = QueuedCall(client=f"{id(given)}", cost_s=tools.estimated_cpu_s(name, given))
        self.turns.enter(call)
        try:
            await call.turn.wait()
            return await self._in_process(name, given)
        finally:
            self.turns.leave(call)

    async def _in_process(self, name: str, given: Call) -> dict[str, Any]:
        import anyio

        ours, theirs = self._context.Pipe(duplex=False)
        target = (theirs, name, dict(given), self.root)
        process = self._context.Process(target=_work, args=target, daemon=True)
        process.start()
        theirs.close()
        try:
            with anyio.fail_after(MAX_CALL_S):
                good, said = await anyio.to_thread.run_sync(ours.recv, abandon_on_cancel=True)
        except TimeoutError:
            rule = f"the call takes more than the {MAX_CALL_S:g} seconds that this server gives"
            hint = "is a file on a disk that does not answer, or a pipe that nobody closes?"
            raise UserError(rule, hint=hint) from None
        except EOFError:
            process.join()
            raise _ended(process.exitcode) from None
        finally:
            process.kill()  # of a call that was cancelled
            process.join()
            ours.close()
        if not good:
            raise UserError(said)
        return said


def _ended(code: int | None) -> UserError:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        rule = f"the question takes more than the {MOST_CPU_S} CPU seconds of a call here"
        return UserError(rule, hint="fix some axes, such as layout 'tp8 pp4', or fewer GPUs")
    return UserError("the call failed", hint="the server's standard error says why")


def _work(answer: Connection, name: str, given: Call, root: Path) -> None:
    """In the call's own process."""
    os.environ["HOME"] = str(root)
    confine(root)
    full = f"the question takes more than {MOST_BYTES >> 30} GiB"
    answer_within_limits(answer, lambda: json.loads(json_text(tools.called(name, given))), full)


def listed() -> list[Schema]:
    """The tools as the protocol has them."""
    answers = tools.answers_schema()
    return [
        {
            "name": name,
            "description": tool.about,
            "inputSchema": tools.input_schema(name),
            "outputSchema": _closed(answers, f"{name}_answer"),
            "annotations": {"readOnlyHint": not tool.writes, "openWorldHint": False},
        }
        for name, tool in tools.TOOLS.items()
    ]


def _closed(answers: Schema, name: str) -> Schema:
    """One definition with those that it needs."""
    parts = answers["$defs"]
    needed, left = {}, [name]
    while left:
        one = left.pop()
        if one not in needed:
            needed[one] = parts[one]
            text = json.dumps(parts[one])
            left += [other for other in parts if f'"#/$defs/{other}"' in text]
    return {**needed.pop(name), "$defs": needed}


async def serve(root: Path) -> None:
    """Until the client closes its end."""
    from mcp import types
    from mcp.server import Server as Protocol
    from mcp.server.stdio import stdio_server

    server = Server(root)

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult.model_validate({"tools": listed()})

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            found = await server.answer(params.name, params.arguments or {})
        except UserError as error:
            text = types.TextContent(type="text", text=str(error))
            return types.CallToolResult(content=[text], is_error=True)
        text = types.TextContent(type="text", text=json.dumps(found))
        return types.CallToolResult(content=[text], structured_content=found)

    protocol = Protocol(
        "fourfold",
        version=fourfold.__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as (read, write):
        await protocol.run(read, write, protocol.create_initialization_options())
