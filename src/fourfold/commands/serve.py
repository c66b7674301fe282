"""Who else asks: browsers, coding agents, the shell's TAB."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fourfold import options
from fourfold.commands import COMMANDS, command, load
from fourfold.cost.count.flops import ALIASES, CONVENTIONS
from fourfold.errors import UserError, install
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.spec import catalog, check

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_SERVE = """\
examples:
  fourfold serve --open
  fourfold serve --runs runs --train out
  fourfold serve --host 0.0.0.0 --name planner.example --token "$(openssl rand -hex 16)"
"""


@command(
    option("--runs", "also show this run store, live", "DIR"),
    option("--train", "also show this training's curves, live", "FOLDER"),
    option("--host", "address to listen on (default 127.0.0.1)", "ADDRESS"),
    option("--port", "port (default 8300; 0: any free one)", "N", read=int),
    option("--name", "another host name to accept from browsers", "NAME", repeated=True),
    option(
        "--token", "secret that browsers must send; required where others reach the address", "TEXT"
    ),
    option("--open", "show it in a browser", switch=True),
    examples=_SERVE,
    formats=False,
)
def serve(args: Arguments, show: OnEvent) -> Output:
    """Plan in a browser, and follow a run store or a training live.

    The app listens on this machine alone unless --host says otherwise, and then needs a --token. It
    only reads. Needs the extra 'serve': pip install 'fourfold[serve]'.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"needs {error.name}", hint="pip install 'fourfold[serve]'") from None
    from fourfold.page.document import plotly_script
    from fourfold.page.guard import Served, listening
    from fourfold.page.serve import app

    plotly_script("serve")
    settings, socket = listening(
        Served(
            host=args.host or "127.0.0.1",
            port=8300 if args.port is None else args.port,
            runs=args.runs,
            train=args.train,
            token=args.token or "",
            names=tuple(args.name or ()),
        )
    )
    secret = f"?token={settings.token}" if settings.token else ""
    address = f"http://{settings.address}:{settings.port}/{secret}"
    show(Event(f"serving {address} (Ctrl+C ends it)"))
    if args.open:
        import webbrowser

        webbrowser.open(address)
    quiet = {"ws": "none", "log_level": "error", "access_log": False}
    config = uvicorn.Config(app(settings), loop="asyncio", **quiet)
    uvicorn.Server(config).run(sockets=[socket])
    return Output(raw="")


_MCP = """\
examples:
  fourfold mcp --folder ~/training
  fourfold mcp --schema > answers.schema.json
  {"mcpServers": {"fourfold": {"command": "fourfold", "args": ["mcp", "--folder", "/data/runs"]}}}
"""


@command(
    option("--folder", "the only folder whose files are read and written (default: here)", "DIR"),
    option("--schema", "print the JSON schema of the answers and exit", switch=True),
    examples=_MCP,
    formats=False,
)
def mcp(args: Arguments, show: OnEvent) -> Output:
    """Answer coding agents: plan, predict, explain, check and collect as tools over MCP.

    Speaks the Model Context Protocol on stdin and stdout. Clients name files below --folder only,
    and nothing else is read or written; each call has its own process, with limits of time and
    memory. Answers follow a versioned JSON schema, which --schema prints. Needs the extra 'mcp'.
    """
    from fourfold.agents import tools

    if args.schema:
        return Output(raw=tools.schema_text())
    root = Path(args.folder or ".").expanduser().resolve()
    check.that(root.is_dir(), "folder", args.folder, "is not a folder")
    try:
        import anyio
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(f"needs {error.name}", hint=install("mcp")) from None
    from fourfold.agents.server import serve

    anyio.run(serve, root)
    return Output(raw="")


_COMPLETION = """\
install:
  bash   echo 'eval "$(fourfold completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(fourfold completion zsh)"' >> ~/.zshrc     (after compinit)
  fish   fourfold completion fish > ~/.config/fish/completions/fourfold.fish
"""


SHELLS = ("bash", "zsh", "fish")
_KNOWN = {"convention": (*CONVENTIONS, *ALIASES), "shell": SHELLS}


@command(
    option("shell", "shell: bash, zsh or fish", "{bash,zsh,fish}", nargs="?"),
    # 'completion words ...' is what the scripts call: what follows 'fourfold', up to the cursor.
    option("words", "", nargs="...", rare=True),
    examples=_COMPLETION,
    formats=False,
)
def completion(args: Arguments, show: OnEvent) -> Output:
    """Print a completion script for bash, zsh or fish.

    It completes commands, flags, choices and catalogue names by asking fourfold at each TAB, and
    file names elsewhere.
    """
    if args.shell == "words":
        return Output(raw="".join(f"{word}\n" for word in candidates(args.words)))
    if args.shell not in SHELLS or args.words:
        asked = " ".join([args.shell, *args.words]) if args.shell else None
        rule = "has no completion script" if asked else "is required"
        raise UserError(rule, field="shell", value=asked, hint=f"use {', '.join(SHELLS)}")
    return Output(raw=catalog.text(f"completion/fourfold.{args.shell}"))


def candidates(typed: list[str]) -> list[str]:
    """What may stand where the last word is; nothing for a place that takes any text or a file."""
    # bash cuts '--format=json' into three words.
    *before, current = [word for word in typed[:-1] if word != "="] + (typed[-1:] or [""])
    current = "" if current == "=" else current
    if not before or before == ["help"]:
        found: tuple[str, ...] = (*COMMANDS, *(() if before else ("help", "--help", "--version")))
    elif before[0] not in COMMANDS:
        found = ()
    else:
        command, (flag, equals, value) = load(before[0]), current.partition("=")
        if current.startswith("--") and equals:
            values = options.completed(command, [*before[1:], flag], value, **_KNOWN)
            return [f"{flag}={word}" for word in values if word.startswith(value)]
        found = options.completed(command, before[1:], current, **_KNOWN)
    return [word for word in found if word.startswith(current)]
