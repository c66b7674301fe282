"""The tools over MCP on stdin and stdout. Each call has a process of its own, confined to the
folder and to so much time and memory: what is asked cannot take the server with it.

One folder for a client's files: what a request names must lie in it, and whatever the code then
opens outside of it, by a link for example, is refused where it is opened.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fourfold
from fourfold.agents import tools
from fourfold.errors import UserError
from fourfold.escape import json_text
from fourfold.page.planner import MOST_BYTES, MOST_CPU_S, answer_within_limits
from fourfold.page.turns import QueuedCall, Turns

# Fields of requests that may name a file.
FILES = {"model", "cluster", "gpu", "profile", "calibration", "log", "logs", "runs", "out", "map",
         "side", "traces", "data", "device"}  # fmt: skip
# Events of the interpreter: files that are named, and what leaves the process.
_PATHS = {"open": 1, "os.listdir": 1, "os.scandir": 1, "os.remove": 1, "os.rmdir": 1,
          "os.mkdir": 1, "os.chmod": 1, "os.truncate": 1, "os.rename": 2, "os.link": 2,
          "os.symlink": 2, "shutil.rmtree": 1, "sqlite3.connect": 1, "os.utime": 1,
          "os.chown": 1}  # fmt: skip
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty",
          "socket.connect", "socket.bind", "socket.sendto", "ctypes.dlopen")  # fmt: skip
# Facts of the system that code reads by itself: no process's environment or memory.
_SYSTEM = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/fs/cgroup", "/sys/devices/system",
           "/dev/null", "/dev/urandom")  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class OutsideError(UserError):
    """A file that is not the client's to name."""


_MAX_NAME_BYTES = 255  # of a file, on every common file system


def refusal(path: str, root: Path) -> OutsideError:
    return OutsideError(
        "is outside of the folder of this server", field="file", value=path,
        hint=f"put it below {root}, or start the server with another --folder",
    )  # fmt: skip


def check(request: Any, root: Path) -> None:
    """Every name in the request that is a path, wherever it stands, lies below `root`."""
    for name in _named(request):
        if "\0" in name:
            raise refusal(name, root)
        if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in name.split("/")):
            raise UserError(f"is longer than the {_MAX_NAME_BYTES} bytes of a name",
                            field="file", value=name)  # fmt: skip
        if not _inside(root / Path(name).expanduser(), (root,)):
            raise refusal(name, root)


def _named(value: Any, field: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item, field)
    elif isinstance(value, str) and field in FILES:
        yield value


def _inside(path: Path, roots: tuple[Path, ...]) -> bool:
    """Links followed, as opening would."""
    real = Path(os.path.realpath(path))
    return any(real == root or root in real.parents for root in roots)


def _database_path(name: str) -> str:
    """Return the file that SQLite opens by this name, which may be an escaped address."""
    if not name.startswith("file:"):
        return name
    return unquote(re.split("[?#]", name.removeprefix("file:"), maxsplit=1)[0])


def confine(root: Path) -> None:
    """From now on this process opens nothing outside of `root` but its own code and data, and the
    system's facts about itself; it starts and calls nothing. There is no way back."""
    places = sysconfig.get_paths()
    code = {places[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    code |= {path for path in sys.path if path}
    ours = Path(__file__).parents[1]
    readable = (root, ours, *(Path(os.path.realpath(path)) for path in code))
    own = (Path(f"/proc/{os.getpid()}/{name}") for name in ("stat", "status"))
    system = (*readable, *map(Path, _SYSTEM), *own)
    os.chdir(root)
    sys.dont_write_bytecode = True  # of what is imported from now on

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in _NEVER:
            raise OutsideError(f"{event} is not for clients of this server")
        count = _PATHS.get(event)
        if count is None:
            return
        reads = event in ("os.listdir", "os.scandir") or (
            event == "open" and not (given[2] or 0) & _WRITES
        )
        for path in given[:count]:
            if isinstance(path, str | bytes | os.PathLike):
                name = os.fsdecode(path)
                if event == "sqlite3.connect":
                    name = _database_path(name)
                if "\0" in name or not _inside(
                    Path(name), system if reads else (root, Path("/dev/null"))
                ):
                    raise refusal(name, root)

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

    async def answer(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the tool says; raises UserError where it refuses."""
        if name not in tools.TOOLS:
            raise UserError("unknown tool", field="name", value=name,
                            hint=f"use {', '.join(tools.TOOLS)}")  # fmt: skip
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

    async def _in_process(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
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


def _work(answer: Connection, name: str, given: Mapping[str, Any], root: Path) -> None:
    """In the call's own process."""
    os.environ["HOME"] = str(root)
    confine(root)
    full = f"the question takes more than {MOST_BYTES >> 30} GiB"
    answer_within_limits(answer, lambda: json.loads(json_text(tools.called(name, given))), full)


def listed() -> list[dict[str, Any]]:
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


def _closed(answers: dict[str, Any], name: str) -> dict[str, Any]:
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
        "fourfold", version=fourfold.__version__, instructions=_INSTRUCTIONS,
        on_list_tools=list_tools, on_call_tool=call_tool,
    )  # fmt: skip
    async with stdio_server() as (read, write):
        await protocol.run(read, write, protocol.create_initialization_options())
