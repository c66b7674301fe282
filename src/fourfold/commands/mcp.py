"""Answer coding agents: plan, predict, explain, check and collect as tools over MCP.

Speaks the Model Context Protocol on stdin and stdout. Clients name files below --folder only, and
nothing else is read or written; each call has its own process, with limits of time and memory.
Answers follow a versioned JSON schema, which --schema prints. Needs the extra 'mcp'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fourfold.errors import UserError, install
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.spec import check

EXAMPLES = """\
examples:
  fourfold mcp --folder ~/training
  fourfold mcp --schema > answers.schema.json
  {"mcpServers": {"fourfold": {"command": "fourfold", "args": ["mcp", "--folder", "/data/runs"]}}}
"""
OPTIONS = (
    option("--folder", "the only folder whose files are read and written (default: here)", "DIR"),
    option("--schema", "print the JSON schema of the answers and end", switch=True),
)


def run(args: Any, show: OnEvent) -> Output:
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
