"""Plan in a browser, and watch a run store or a training while it grows.

The app listens on this machine alone unless --host says otherwise, and then needs a --token. It
only reads. Needs the extra 'serve': pip install 'fourfold[serve]'.
"""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output

EXAMPLES = """\
examples:
  fourfold serve --open
  fourfold serve --runs runs --train out
  fourfold serve --host 0.0.0.0 --name planner.example --token "$(openssl rand -hex 16)"
"""
OPTIONS = (
    option("--runs", "also show this run store, live", "DIR"),
    option("--train", "also show this training's curves, live", "FOLDER"),
    option("--host", "address to listen on (default 127.0.0.1)", "ADDRESS"),
    option("--port", "port (default 8300; 0: any free one)", "N", read=int),
    option("--name", "another name that browsers may call this host by", "NAME", repeated=True),
    option("--token", "what every browser must know, on an address that others reach", "TEXT"),
    option("--open", "show it in a browser", switch=True),
)


def run(args: Any, show: OnEvent) -> Output:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"needs {error.name}", hint="pip install 'fourfold[serve]'") from None
    from fourfold.page.document import plotly_script
    from fourfold.page.guard import BACKLOG, Served, listening, protocol
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
    config = uvicorn.Config(
        app(settings),
        http=protocol(),
        ws="none",
        loop="asyncio",
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=[socket])
    return Output(raw="")
