"""A page in a real browser, driven over its debugging port: clicks, keys, and all that it asks for.

Speaks the Chrome DevTools protocol through tornado, which bokeh brings along.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """A browser's path."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A file or address, opened. `requests` are what it asked for, `errors` what went wrong.

    Use as a context manager; waits until the expression `ready` is true. Only the page of an
    address may open WebSockets.
    """

    def __init__(
        self,
        file: Path | str,
        dark: bool = False,
        width: int = 1500,
        ready: str = "window.gfReady === true",
    ) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._url = file if isinstance(file, str) else file.as_uri()
        self._dark, self._width, self._ready = dark, width, ready
        self._is_file = not isinstance(file, str)
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._count = 0

    def __enter__(self) -> Page:
        browser = find()
        assert browser is not None
        self._process = subprocess.Popen(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--remote-debugging-port=0",
                f"--user-data-dir={self._folder.name}", f"--window-size={self._width},1500",
                "about:blank",
            ],
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._run(self._open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._loop.close()
        self._folder.cleanup()

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        done = self._send("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_until(self, code: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(code)):
            assert time.monotonic() < end, f"never true: {code}; {self.errors}"
            time.sleep(0.05)
        return value

    def click(self, place: str) -> None:
        """Press the left button where an expression says, [x, y] or an element's selector."""
        if not place.startswith("gf"):
            place = (
                f"(() => {{ const r = document.querySelector({json.dumps(place)})"
                ".getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
            )
        x, y = self.evaluate(place)
        if not 0 < y < 1400:  # scrolled to first
            self.evaluate(f"window.scrollBy(0, {y - 500})")
            x, y = self.evaluate(place)
        time.sleep(0.4)  # two clicks at one place are not to be a double click
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self) -> bytes:
        """Return the page as a PNG."""
        return base64.b64decode(self._send("Page.captureScreenshot")["data"])

    def write(self, text: str) -> None:
        """Type into what has the focus; "\\n" is the Enter key."""
        if text == "\n":
            for kind in ("keyDown", "keyUp"):
                self._send(
                    "Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13
                )
        else:
            self._send("Input.insertText", text=text)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 60))

    def _send(self, method: str, **values: Any) -> Any:
        return self._run(self._send_command(method, **values))

    async def _open(self) -> None:
        from tornado.httpclient import AsyncHTTPClient
        from tornado.websocket import websocket_connect

        told = Path(self._folder.name) / "DevToolsActivePort"
        while not told.exists() or len(told.read_text().split()) < 2:
            assert self._process.poll() is None, "the browser ended"
            await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json")
        tab = next(tab for tab in json.loads(answer.body) if tab["type"] == "page")
        self._socket = await websocket_connect(
            tab["webSocketDebuggerUrl"], max_message_size=1 << 28
        )
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send_command(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        await self._send_command("Emulation.setEmulatedMedia", features=[scheme])
        if self._width < 500:  # the least that a window can have
            size = {"width": self._width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
            await self._send_command("Emulation.setDeviceMetricsOverride", **size)
        await self._send_command("Page.navigate", url=self._url)
        while True:
            ready = await self._send_command("Runtime.evaluate", expression=self._ready)
            if ready.get("result", {}).get("value") or self.errors:
                return
            await asyncio.sleep(0.1)

    async def _send_command(self, method: str, **values: Any) -> Any:
        self._count += 1
        number = self._count
        await self._socket.write_message(
            json.dumps({"id": number, "method": method, "params": values})
        )
        while True:
            text = await self._socket.read_message()
            assert text is not None, "the browser hung up"
            message = json.loads(text)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Page.javascriptDialogOpening" or (
            method == "Network.webSocketCreated" and self._is_file
        ):
            self.errors.append(f"{method}: {told}")
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(str(told["args"]))
