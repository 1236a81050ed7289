"""The metrics endpoint: a small HTTP server for Prometheus, with one page for browsers.

    Meters.samples → GET /metrics (text for Prometheus, by `prometheus_client`), GET / (a page)

It has a few threads of its own and reads only numbers that are kept anyway. Clients that send too
much, or too slowly, or too often are disconnected, and the worker does not notice.

The server does not authenticate clients. So it listens on loopback unless its address begins with
`insecure://`. It refuses requests of pages from other origins, and requests for another host name
than this machine's: a browser could make them for a stranger (DNS rebinding).
"""

from __future__ import annotations

import errno
import ipaddress
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

from graphflow.base.addresses import is_ip_address
from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.html_escape import escape
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import AddressInUse, ArgumentError, InsecureAddress, TransportError
from graphflow.placement.plans.reports.tables import TextTable
from graphflow.runtime.polling.wakeup import WakeupFd
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.telemetry.metrics import (
    BUCKETS,
    COUNTER,
    HISTOGRAM,
    Histogram,
    Meters,
    MetricSample,
)

REQUEST_CAP = 8192
"""Bytes of a request with its headers. Larger requests are answered with 431."""
REQUEST_SECONDS = 5.0
"""Seconds that a connection may last."""
CONNECTIONS = 8
"""Connections at a time. For a further one, the connection with the oldest unfinished request is
closed, or else the one that has been reading its answer for longest."""
_SLOT_SECONDS = 0.5  # to free a slot; after that the new connection is closed

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>\d{1,5}|\*)")
_INSECURE = "insecure://"
_REASONS = {
    200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
}  # fmt: skip
_HEADERS = (
    "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
)

_log = Log("graphflow.metrics")


@dataclass(frozen=True)
class _HttpResponse:
    """A complete HTTP response."""

    status: int
    kind: str
    body: bytes

    def encode(self) -> bytes:
        head = f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\n{_HEADERS}"
        kind = f"Content-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n\r\n"
        return (head + kind).encode() + self.body


@dataclass(frozen=True)
class _HttpRequest:
    """The parts of a request that are used."""

    method: str
    path: str
    headers: dict[str, str]


def _refusal(status: int, reason: str) -> _HttpResponse:
    return _HttpResponse(status, "text/plain; charset=utf-8", f"{reason}\n".encode())


class MetricsServer:
    """Serves the metrics of `meters` at an address until `close`.

    Args:
        address: such as `127.0.0.1:9100`. Port `*` takes any free port. `insecure://0.0.0.0:9100`
            serves all clients that can reach this machine.

    Attributes:
        address: the bound address, `host:port`.
        documents: JSON that is served besides, by path.

    Raises:
        ArgumentError: the address is malformed, or `graphflow[metrics]` is not installed.
        InsecureAddress: the address is beyond loopback and lacks `insecure://`.
        AddressInUse, TransportError: the address cannot be bound.
    """

    def __init__(self, address: str, meters: Meters) -> None:
        host, port = parse_address(address)
        _check_library()
        self._meters = meters
        self.documents: Mapping[str, Callable[[], bytes]] = {}
        self._socket = _listen(address, host, port)
        bound = self._socket.getsockname()
        self._is_open = not ipaddress.ip_address(bound[0]).is_loopback
        own = socket.gethostname().lower()
        self._names = {"localhost", "127.0.0.1", "::1", bound[0]}
        self._names |= {own, own.partition(".")[0]} if self._is_open else set()
        self.address = f"{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        self._wakeup = WakeupFd()
        self._slots = threading.Semaphore(CONNECTIONS)
        # Connections with an unfinished request, and those still reading the answer; oldest first.
        self._asking: dict[socket.socket, None] = {}
        self._answered: dict[socket.socket, None] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()
        _log.tell("metrics.listening", address=self.address)

    def close(self) -> None:
        """Stop listening. Further calls do nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._wakeup.wake()
        self._thread.join(REQUEST_SECONDS)
        self._socket.close()
        self._wakeup.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wakeup.fileno(), selectors.EVENT_READ)
            while not self._stopping:
                selector.select()
                try:
                    connection, peer = self._socket.accept()
                except OSError:  # woken by `close`, or the client is gone, or descriptors are short
                    if not self._stopping:
                        time.sleep(0.01)
                    continue
                if not self._acquire_slot():
                    connection.close()
                    continue
                self._asking[connection] = None
                threading.Thread(
                    target=self._serve_connection, args=(connection, str(peer[0])),
                    name="metrics-request", daemon=True,
                ).start()  # fmt: skip

    def _acquire_slot(self) -> bool:
        """Take a slot for a connection, if need be by closing the oldest; return True on success.

        The oldest unfinished request is closed first, else the oldest unread answer.
        """
        if self._slots.acquire(blocking=False):
            return True
        for oldest in (list(self._asking) or list(self._answered))[:1]:
            told = oldest in self._answered
            with suppress(OSError):  # it has just finished or hung up
                oldest.shutdown(socket.SHUT_RDWR if told else socket.SHUT_RD)
        return self._slots.acquire(timeout=_SLOT_SECONDS)

    def _serve_connection(self, connection: socket.socket, peer: str) -> None:
        until = time.monotonic() + REQUEST_SECONDS
        try:
            with connection:
                try:
                    request = _read_request(connection, until)
                finally:
                    self._asking.pop(connection, None)
                answer = self._answer(request) if isinstance(request, _HttpRequest) else request
                if answer.status != 200:
                    reason = f"{answer.status}: {answer.body.decode().strip()}"
                    _log.tell("metrics.refused", peer=peer, reason=reason)
                connection.settimeout(max(0.01, until - time.monotonic()))
                self._answered[connection] = None
                try:
                    connection.sendall(answer.encode())
                finally:
                    del self._answered[connection]
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it hung up
        finally:
            self._slots.release()

    def _answer(self, request: _HttpRequest) -> _HttpResponse:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._is_own_host(host):
            return _refusal(403, "this is not a name of this machine")
        if origin is not None and origin != f"http://{host}":
            return _refusal(403, "pages of other origins may not ask")
        if request.method != "GET":
            return _refusal(405, "only GET is answered")
        if request.path == "/metrics":
            text, kind = exposition(self._meters, request.headers.get("accept", ""))
            return _HttpResponse(200, kind, text)
        if request.path == "/":
            return _HttpResponse(200, "text/html; charset=utf-8", html_page(self._meters).encode())
        if document := self.documents.get(request.path):
            return _HttpResponse(200, "application/json", document())
        return _refusal(404, f"there is {', '.join(['/', '/metrics', *self.documents])}")

    def _is_own_host(self, header: str) -> bool:
        """Return True if a Host header is an IP address or a name of this machine.

        Any other name may be controlled by a stranger.
        """
        with_port = header if header.rpartition("]")[2].count(":") else f"{header}:80"
        parts = _ADDRESS.fullmatch(with_port)
        if parts is None:
            return False
        host = parts["host"].strip("[]").lower()
        return host in self._names or (self._is_open and is_ip_address(host))


def parse_address(address: str) -> tuple[str, int]:
    bare = address.removeprefix(_INSECURE) if isinstance(address, str) else ""
    parts = _ADDRESS.fullmatch(bare)
    port = 0 if parts is None or parts["port"] == "*" else int(parts["port"])
    if parts is None or port > 65535:
        raise ArgumentError(
            f"metrics are served at an address such as 127.0.0.1:9100, not at {address!r}"
        )
    host = parts["host"].strip("[]")
    try:
        beyond = host != "localhost" and not ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ArgumentError(
            f"the host of {address!r} is not a number: metrics are served at the address of one "
            "interface of this machine, such as 127.0.0.1:9100"
        ) from None
    if beyond and bare == address:
        raise InsecureAddress(
            f"metrics at {address} would be open to whoever reaches this machine, for no key is "
            f"asked for; use 127.0.0.1, or say so: insecure://{address}"
        )
    return host, port


def _listen(address: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"another process serves at {address} already; choose another port, or port * for "
                "any that is free"
            ) from error
        raise TransportError(
            f"cannot serve metrics at {address}: {error.strerror}; give an address of this machine"
        ) from error
    return made


def _read_request(connection: socket.socket, until: float) -> _HttpRequest | _HttpResponse:
    """Read a request; return the refusal if it is invalid, too large or too slow."""
    data = b""
    while b"\r\n\r\n" not in data:
        left = until - time.monotonic()
        if left <= 0:
            return _refusal(408, "the request took too long")
        connection.settimeout(left)
        try:
            piece = connection.recv(REQUEST_CAP)
        except TimeoutError:
            continue
        data += piece
        if len(data) > REQUEST_CAP:
            return _refusal(431, f"a request may have {REQUEST_CAP} bytes")
        if not piece:
            return _refusal(400, "the request is not whole")
    first, *lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _refusal(400, "this is no HTTP")
    headers: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition(":")
        name = name.lower()
        if not separator or name in headers:  # a repeated header is ambiguous
            return _refusal(400, "a header is not valid")
        headers[name] = value.strip()
    return _HttpRequest(words[0], words[1].partition("?")[0], headers)


# What is answered -------------------------------------------------------------------------------


def _check_library() -> None:
    if find_spec("prometheus_client") is None:
        raise ArgumentError(
            "metrics need the package prometheus_client: pip install 'graphflow[metrics]'"
        )


def exposition(meters: Meters, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics in the format that Prometheus accepts, and its media type.

    Args:
        accept: the request's Accept header.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PrometheusCollector(meters))
    # The header itself is not passed on: the library would copy a stranger's text to its answer.
    wanted = "application/openmetrics-text"
    encode, kind = choose_encoder(wanted if wanted in accept else "")
    return encode(registry), kind


class _PrometheusCollector:
    """Converts samples to metric families of `prometheus_client`."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def collect(self) -> Iterator[Any]:
        return map(_family, self._meters.samples())


def _family(sample: MetricSample) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    name, meaning, labels = sample.name, sample.metric.meaning, sample.metric.labels
    if sample.metric.kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, meaning, labels=labels)
        for each, value in sample.values.items():
            assert isinstance(value, Histogram)
            below = list(accumulate(value.counts))
            bounds = [*map(str, BUCKETS), "+Inf"]
            histogram.add_metric(each, list(zip(bounds, below, strict=True)), value.total)
        return histogram
    kind = CounterMetricFamily if sample.metric.kind == COUNTER else GaugeMetricFamily
    family = kind(name, meaning, labels=labels)
    for each, value in sample.values.items():
        assert not isinstance(value, Histogram)
        family.add_metric(each, value)
    return family


def html_page(meters: Meters) -> str:
    """Return the metrics as an HTML page."""
    rows = []
    for sample in meters.samples():
        for labels, value in sample.values.items():
            named = ", ".join(
                f"{name}={each}" for name, each in zip(sample.metric.labels, labels, strict=True)
            )
            rows.append(
                (sample.name, sample.metric.meaning, named, _format_value(sample.name, value))
            )
    table = TextTable("", ("metric", "what it is", "of", "now"), tuple(rows), left=3)
    title = "graphflow metrics"
    style = "body{font:14px/1.5 system-ui,sans-serif;margin:2em;color-scheme:light dark}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style><h1>{escape(title)}</h1>{table.html()}"
        "<p>For Prometheus: /metrics</p></html>"
    )


def _format_value(name: str, value: float | Histogram) -> str:
    if isinstance(value, Histogram):
        count = sum(value.counts)
        mean = show_seconds(value.total / count) if count else "–"
        return f"{count:,} times, {mean} on average"
    if "_seconds" in name:
        return show_seconds(value)
    return show_bytes(value) if "_bytes" in name else f"{value:,.6g}"
