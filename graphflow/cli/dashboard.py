"""`graphflow dashboard`: a page in the browser that follows a running session."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from graphflow.cli.arguments import option_errors
from graphflow.cli.options import AskInsecurely, OwnKey
from graphflow.errors import ArgumentError

_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


def dashboard(
    session: Annotated[
        str, typer.Argument(help="Address of the session's metrics, e.g. 127.0.0.1:9100.")
    ],
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="N", help="Port of the page; 0 means any free port."
        ),
    ] = 0,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Token that opens the page; default: a random one."),
    ] = None,
    key: OwnKey = None,
    insecure: AskInsecurely = False,
) -> None:
    """Serve a web page that follows a running session: loss, workers, memory, links, plan.

    The session must serve metrics: gf.Session(metrics="127.0.0.1:9100"). The page is served on
    loopback only. The printed address contains the token that opens it.

    Example: graphflow dashboard 127.0.0.1:9100
    """
    if not _ADDRESS.fullmatch(session):
        raise ArgumentError(f"{session!r} is not an address such as 127.0.0.1:9100")
    if token is not None and not re.fullmatch(r"[A-Za-z0-9_-]{8,}", token):
        raise ArgumentError("--token is at least eight letters, digits, dashes or underscores")
    from graphflow.dashboard.server import DashboardServer
    from graphflow.dashboard.session_watcher import SessionWatcher
    from graphflow.runtime.security.keys import Keyring
    from graphflow.runtime.worker.worker_status import choose_key_pair

    with option_errors("--key"):
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
