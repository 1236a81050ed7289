"""The server of the dashboard: bokeh's, on loopback, for holders of the token."""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import Any

from graphflow.dashboard.live_page import build_page
from graphflow.dashboard.session_watcher import SessionWatcher
from graphflow.errors import AddressInUse, ArgumentError

LOOPBACK = "127.0.0.1"
_COOKIE = "graphflow-token"


class DashboardServer:
    """Serves the page of a watched session until `close`.

    A request without the token, or for another host name than this one's, is answered with 403: a
    page of a stranger could make a browser send it (DNS rebinding).

    Args:
        port: 0 for any free one.
        token: default: a new random one.

    Attributes:
        url: the page's address, with the token.

    Raises:
        AddressInUse: another process listens at the port.
        ArgumentError: bokeh is not installed.
    """

    def __init__(self, watcher: SessionWatcher, port: int = 0, token: str | None = None) -> None:
        try:
            from bokeh.application import Application
            from bokeh.application.handlers import FunctionHandler
            from bokeh.server.server import Server
        except ImportError:
            raise ArgumentError("the dashboard needs bokeh: pip install 'graphflow[viz]'") from None
        self._token = token or secrets.token_urlsafe(24)
        self._port = port = port or _free_port()
        pages = {"/": Application(FunctionHandler(lambda doc: build_page(doc, watcher)))}
        try:
            self._server = Server(
                pages, port=port, address=LOOPBACK, auth_provider=_make_auth_provider(self._check),
                extra_patterns=[("/plan", _make_plan_handler(watcher, self._check))],
                allow_websocket_origin=[f"{LOOPBACK}:{port}", f"localhost:{port}"],
            )  # fmt: skip
        except OSError as error:
            raise AddressInUse(
                f"port {port} of {LOOPBACK} is in use; choose another by --port, or 0 for any"
            ) from error
        self.url = f"http://{LOOPBACK}:{self._port}/?token={self._token}"

    def run(self) -> None:
        """Serve until `close`, on this thread."""
        self._server.start()
        self._server.io_loop.start()

    def close(self) -> None:
        """End `run`; callable from any thread."""
        self._server.io_loop.add_callback(self._server.io_loop.stop)

    def _check(self, handler: Any) -> str:
        """Return a user's name for a request with the token.

        Raises:
            tornado.web.HTTPError: 403: it has none, or names another host.
        """
        from tornado.web import HTTPError

        names = {f"{name}:{self._port}" for name in (LOOPBACK, "localhost")}
        if handler.request.host not in names:
            raise HTTPError(403, "this is not a name of this machine")
        given = handler.get_query_argument("token", None)
        if given is None:
            given = handler.get_cookie(_COOKIE) or ""
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise HTTPError(403, "the token is wrong or missing: open the address that was printed")
        if handler.get_cookie(_COOKIE) != self._token and handler.request.method == "GET":
            handler.set_cookie(_COOKIE, self._token, httponly=True, samesite="Strict")
        return "user"


def _free_port() -> int:
    """Return a port that nobody uses now; bokeh must know it before it listens."""
    with socket.create_server((LOOPBACK, 0)) as free:
        return int(free.getsockname()[1])


def _make_auth_provider(check: Any) -> Any:
    """Return bokeh's provider of users, who are those that `check` lets in."""
    from bokeh.server.auth_provider import AuthProvider

    class TokenAuth(AuthProvider):
        """Lets in who has the token."""

        get_user_async = None
        get_login_url = login_handler = logout_handler = logout_url = None

        @property
        def get_user(self) -> Any:
            return check

        @property
        def login_url(self) -> str:
            return "/"  # never used: `check` raises instead

    return TokenAuth()


def _make_plan_handler(watcher: SessionWatcher, check: Any) -> Any:
    """Return the handler of the plan's page."""
    from tornado.web import RequestHandler

    class PlanHandler(RequestHandler):
        """Answers with the page of the plan that the session follows."""

        def prepare(self) -> None:
            check(self)

        def get(self) -> None:
            try:
                self.finish(watcher.plan_page())
            except OSError as error:
                self.set_status(503)
                self.finish(f"the session does not answer: {error}")

        def data_received(self, chunk: bytes) -> None:
            """Refuse bodies."""

    return PlanHandler
