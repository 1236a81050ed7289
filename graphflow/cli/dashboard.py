"""`graphflow dashboard`: a page in the browser that follows a running session."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from graphflow.cli.options import AskInsecurely, OwnKey
from graphflow.errors import ArgumentError

_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


def dashboard(
    session: Annotated[
        str, typer.Argument(help="Where the session serves its metrics: 127.0.0.1:9100.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port of the page; 0: any free one.")
    ] = 0,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Who gives it may look; default: a new random one."),
    ] = None,
    key: OwnKey = None,
    insecure: AskInsecurely = False,
) -> None:
    """Serve a page that follows a session: steps, loss, workers, memory, links, its plan.

    The page is on loopback, and opens with the token in the printed address only.

    Example: graphflow dashboard 127.0.0.1:9100, with gf.Session(metrics="127.0.0.1:9100")
    """
    if not _ADDRESS.fullmatch(session):
        raise ArgumentError(f"{session!r} is not an address such as 127.0.0.1:9100")
    if token is not None and not re.fullmatch(r"[A-Za-z0-9_-]{8,}", token):
        raise ArgumentError("--token is at least eight letters, digits, dashes or underscores")
    from graphflow.dashboard.server import DashboardServer
    from graphflow.dashboard.session_watcher import SessionWatcher
    from graphflow.runtime.security.keys import Keyring
    from graphflow.runtime.worker.worker_status import choose_key_pair

    pair = None if key is None else choose_key_pair(Keyring(), key)
    watcher = SessionWatcher(session, pair, insecure)
    watcher.start()
    server = DashboardServer(watcher, port, token)
    typer.echo(f"open {server.url}")
    typer.echo("Ctrl-C ends the dashboard; the session goes on", err=True)
    try:
        server.run()
    finally:
        watcher.stop()
