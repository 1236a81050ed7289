"""Limits on the connections of a listening socket: how many, how long silent, with how many bytes.

ZeroMQ accepts everybody who connects, keeps silent connections, and collects the frames of a
message in its own memory until the last one has come. So a thread watches each listening socket.
ZeroMQ's monitor reports connections, the kernel how many bytes came over each. The thread checks
often while many bytes come. Otherwise it waits for the first byte.

Above the cap, connections without a message yet are closed first. A connection is closed, too, if
it is silent for long, has more bytes of an incomplete message than a valid one has, or keeps
sending invalid messages.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from math import inf
from time import monotonic
from typing import Any

import zmq

from graphflow.base.lazy_dataclass import dataclass
from graphflow.runtime.polling.socket_monitor import read_monitor_event
from graphflow.runtime.polling.wakeup import WakeupFd
from graphflow.runtime.security.receive_accounting import (
    UNFRAMED_CAP,
    SocketHandle,
    UnframedByteCounter,
    check_interval,
)
from graphflow.runtime.telemetry.logs import Log

HANDSHAKE_SECONDS = 6.0
"""For a new connection to authenticate: longer than an unknown key is kept waiting."""
SILENCE_SECONDS = 30.0
"""Without a byte, after which a connection is closed: valid peers send heartbeats."""
STRIKES = 16.0
"""Invalid messages after which a connection is closed. The count decays by one a second."""
STRAY_WEIGHT = 1 / 256
"""The weight of a valid message of no session: 4,096 at once, 256 a second."""

_LEAST_CAP, _MOST_CAP = 16, 4096
_HEARTBEATS_SECONDS = 2.5  # a peer sends at least one meanwhile
_BUSY_SECONDS = 0.02  # between checks while more than heartbeats comes
_BUSY_BYTES = 1024  # between two checks
_CHECKS_A_SECOND = 1000  # of one connection: each takes some 10 µs
_POLLED_CONNECTIONS = 64  # at a time, for their first byte
_ROUTE_BYTES = 5  # of a route that ZeroMQ has made: a zero and a number
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_log = Log("graphflow.security")


def connection_cap() -> int:
    """Return how many connections a process can serve: a quarter of its file descriptors.

    Each session takes some for its own.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_CAP
    return max(_LEAST_CAP, min(_MOST_CAP, limit // 4))


@dataclass
class _TrackedConnection:
    """One connection of the listening socket."""

    descriptor: int
    peer: Any  # its address, which tells if the descriptor is another's by now
    accepted_at: float
    heard_at: float  # when its last byte came
    received: int = 0  # bytes
    route: bytes | None = None  # once a message has come over it
    counter: UnframedByteCounter = field(default_factory=UnframedByteCounter)
    drains_when_over: int | None = None  # of the socket, when it had too many bytes under way


@dataclass
class _Sender:
    """The sender of messages with one route."""

    descriptor: int = -1  # of the connection; -1: unknown
    peer: Any = None  # its address, as of a connection
    messages: int = 1
    strikes: float = 0.0
    struck_at: float = -inf  # when the last strike came
    fault: str = ""  # for which its connection is to be closed


@dataclass
class ConnectionLimiter:
    """Watches one bound socket on a thread of its own.

    `has_route`, `register`, `note_drained` and `report_invalid` are for the thread that reads the
    socket.

    Args:
        socket: Not bound yet.
        most: Connections at a time. None: by the limit on the process's file descriptors.
        wake: Has the reading thread look at its socket soon.
    """

    socket: zmq.Socket[bytes]
    most: int | None = None
    wake: Callable[[], None] = lambda: None
    _connections: dict[int, _TrackedConnection] = field(default_factory=dict)
    _senders: dict[bytes, _Sender] = field(default_factory=dict)
    _routes: dict[int, bytes] = field(default_factory=dict)  # by descriptor, the latest
    _drains: int = 0

    def __post_init__(self) -> None:
        self._cap = connection_cap() if self.most is None else self.most
        self._end = WakeupFd()
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    # On the reading thread ------------------------------------------------------------------------

    def has_route(self, route: bytes) -> bool:
        """Count a message of `route`; return True if its connection is known.

        If it is not, call `register` with the descriptor of the next frame.
        """
        sender = self._senders.get(route)
        if sender is None:
            return False
        sender.messages += 1
        return sender.descriptor >= 0

    def register(self, route: bytes, descriptor: int) -> None:
        """Note that messages of `route` come over the connection with `descriptor`.

        -1 is a descriptor that ZeroMQ does not know any more. The monitor may report the connection
        itself later.
        """
        if len(self._senders) > 4 * max(self._cap, len(self._connections)):
            gone = set(self._senders) - {each.route for each in list(self._connections.values())}
            for each in gone:
                del self._senders[each]
        with SocketHandle(descriptor) as handle:
            peer = handle.peer
        if peer is not None and not self._owns_descriptor(route, descriptor, peer):
            peer = None
        sender = self._senders.setdefault(route, _Sender())
        sender.descriptor, sender.peer = -1 if peer is None else descriptor, peer
        if peer is not None:
            self._routes[descriptor] = route

    def _owns_descriptor(self, route: bytes, descriptor: int, peer: Any) -> bool:
        """Return True if `route` is of the connection that has `descriptor` now.

        Messages of a connection that has ended may be read late, when its descriptor is another
        one's. Of two routes that lead to the same peer, the later one is the connection's. The
        earlier one leads nowhere.
        """
        before = self._routes.get(descriptor, route)
        known = self._senders.get(before)
        if before == route or known is None or known.peer != peer:
            return True
        if _is_later(before, route):
            return False
        known.descriptor, known.peer = -1, None
        return True

    def note_drained(self) -> None:
        """Note that the socket has no message, so bytes under way are of incomplete ones."""
        self._drains += 1

    def report_invalid(self, route: bytes, why: str, weight: float = 1.0) -> None:
        """Count an invalid or useless message of `route`; close its connection after many.

        Args:
            weight: How many of STRIKES the message counts.
        """
        sender = self._senders.get(route)
        if sender is None:
            return
        now = monotonic()
        sender.strikes = max(0.0, sender.strikes - (now - sender.struck_at)) + weight
        sender.struck_at = now
        if sender.strikes >= STRIKES:
            sender.fault = why  # the monitor may report the connection later
            connection = self._connections.get(sender.descriptor)
            if connection is not None and connection.peer == sender.peer:
                self._drop(connection, why)

    # On its own thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        """Watch until the socket is closed."""
        try:
            self._monitor_connections()
        except zmq.ZMQError:
            return  # the context was destroyed, and the socket with it

    def _monitor_connections(self) -> None:
        """Wait for news of connections and for their bytes, and check all of them."""
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._end.fileno(), zmq.POLLIN)
        quiet: list[int] = []  # polled for their first byte; the monitor reports ends
        now, seconds = monotonic(), check_interval(0)
        while True:
            ready = dict(poller.poll(int(seconds * 1000) if self._connections else None))
            if self._end.fileno() in ready:
                return
            begun = any(each in ready for each in quiet)
            for each in quiet:
                poller.unregister(each)
            due, now = now + seconds, monotonic()
            if now > due + check_interval(0):  # this process was stopped, and nobody was silent
                for connection in self._connections.values():
                    connection.heard_at += now - due
            while self._monitor.poll(0):
                event, descriptor = read_monitor_event(self._monitor)
                if event == zmq.EVENT_ACCEPTED:
                    self._add_connection(descriptor)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._remove_connection(descriptor)
                else:
                    return  # the socket is closed
            seconds = self._check_connections(now)
            if begun:  # the next check shows how much comes
                seconds = min(seconds, self._busy_interval())
            busy = seconds < check_interval(0) or len(self._connections) > _POLLED_CONNECTIONS
            quiet = [] if busy else list(self._connections)
            for each in quiet:
                poller.register(each, zmq.POLLIN)

    def _busy_interval(self) -> float:
        """Return the seconds between checks while more than heartbeats comes."""
        return max(_BUSY_SECONDS, len(self._connections) / _CHECKS_A_SECOND)

    def _add_connection(self, descriptor: int) -> None:
        now = monotonic()
        with SocketHandle(descriptor) as handle:
            self._connections[descriptor] = _TrackedConnection(descriptor, handle.peer, now, now)

    def _remove_connection(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            self._senders.pop(self._route_of(connection) or b"", None)

    def _route_of(self, connection: _TrackedConnection) -> bytes | None:
        """Return the route of a connection's messages, once one has come.

        Neither the route of an earlier connection with the same descriptor nor that of a later one
        counts.
        """
        route = self._routes.get(connection.descriptor, b"")
        sender = self._senders.get(route)
        return route if sender is not None and sender.peer == connection.peer else None

    def _check_connections(self, now: float) -> float:
        """Check all connections; return the seconds until the next check."""
        most = came = 0
        for connection in self._connections.values():
            before = connection.received
            under_way = self._measure_unframed(connection, now)
            most = max(most, under_way)
            came = max(came, connection.received - before)
            sender = self._senders.get(connection.route or b"")
            patience = SILENCE_SECONDS if connection.route else HANDSHAKE_SECONDS
            if sender is not None and sender.fault:
                self._drop(connection, sender.fault)
            elif now > connection.heard_at + patience:
                self._drop(connection, f"nothing came from it for {patience:g} s")
            elif under_way <= UNFRAMED_CAP:
                connection.drains_when_over = None
            elif (
                connection.drains_when_over is None
            ):  # perhaps complete messages that were not read yet
                connection.drains_when_over = self._drains
                self.wake()
            elif self._drains > connection.drains_when_over + 1:
                self._drop(
                    connection, f"a message of over {under_way} bytes did not come to its end"
                )
            else:  # a woken reader may have found the socket empty just before
                self.wake()
        beyond = len(self._connections) - self._cap
        if beyond > 0:
            for connection in _select_surplus(list(self._connections.values()), beyond, now):
                self._drop(connection, f"there are over {self._cap} connections")
        return (
            min(check_interval(most), self._busy_interval())
            if came > _BUSY_BYTES
            else check_interval(most)
        )

    def _measure_unframed(self, connection: _TrackedConnection, now: float) -> int:
        """Return the bytes of a connection that belong to no received message."""
        with SocketHandle(connection.descriptor, connection.peer) as handle:
            received = handle.bytes_received()
        connection.route = self._route_of(connection)
        if received is None:  # the system does not tell: ZeroMQ's own time limits must do
            connection.heard_at = now
            return 0
        if received != connection.received:
            connection.received, connection.heard_at = received, now
        sender = self._senders.get(connection.route or b"")
        messages = 0 if sender is None else sender.messages
        return connection.counter.count(received, messages, now)

    def _drop(self, connection: _TrackedConnection, why: str) -> None:
        """Close a connection and log why."""
        with SocketHandle(connection.descriptor, connection.peer) as handle:
            if handle.reset():
                _log.tell("connection.dropped", address=_host_of(connection.peer), reason=why)

    def close(self) -> None:
        """Stop watching. Call before the socket is closed. Idempotent."""
        if self._thread.is_alive():
            self._end.wake()
            self._thread.join()
            self._end.close()
            self.socket.disable_monitor()
            self._monitor.close(linger=0)


def _select_surplus(
    connections: Sequence[_TrackedConnection], beyond: int, now: float
) -> list[_TrackedConnection]:
    """Return the `beyond` connections that make room for others.

    The order protects those that are served. First come connections without a message yet, from the
    host with most of these, those with fewest bytes and the oldest first. Then come those without
    heartbeats, whose peer may be back by another connection. Last come the newest ones.
    """
    unknown = Counter(_host_of(each.peer) for each in connections if each.route is None)

    def rank(connection: _TrackedConnection) -> tuple[float, ...]:
        if connection.route is None:
            return (
                0,
                -unknown[_host_of(connection.peer)],
                connection.received,
                connection.accepted_at,
            )
        if now > connection.heard_at + _HEARTBEATS_SECONDS:
            return 1, connection.heard_at
        return 2, -connection.accepted_at

    return sorted(connections, key=rank)[:beyond]


def _is_later(route: bytes, other: bytes) -> bool:
    """Return True if ZeroMQ made `route` after `other`: it counts routes in 32 bits."""
    if not len(route) == len(other) == _ROUTE_BYTES:
        return False
    difference = int.from_bytes(route[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < difference % (1 << 32) < 1 << 31


def _host_of(peer: Any) -> str:
    """Return the host of a peer without its port, so that a host's connections are counted
    together.
    """
    return str(peer[0]) if isinstance(peer, tuple) and peer else "an unknown host"
