"""The door of a listening socket: how many may stand in it, how long in silence, and with how much.

ZeroMQ accepts whoever connects, keeps who says nothing, and collects the frames of a message in
its own memory until the last one has come, however many there are. So a thread of ours watches:
its monitor tells of connections, the kernel how many bytes came over each: it looks often while
much comes, and else waits for the first byte. Beyond the cap those who have not said who they are
go first; who stays silent goes after a while; so does who has more under way than any valid message
has, and who keeps sending what is not valid.
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
"""For a new connection to say who it is; longer than the guard keeps an unknown key waiting."""
SILENCE_SECONDS = 30.0
"""Without a byte, after which a connection is dropped: peers of ours have a heartbeat."""
STRIKES = 16.0
"""Messages that are not valid, after which who sent them is dropped; one a second is forgiven."""
STRAY_WEIGHT = 1 / 256
"""What a valid message counts that belongs to no session: 4,096 at once, 256 a second."""

_LEAST_CAP, _MOST_CAP = 16, 4096
_HEARTBEATS_SECONDS = 2.5  # in which a peer has at least one
_BUSY_SECONDS = 0.02  # between looks while more comes than heartbeats
_BUSY_BYTES = 1024  # between two looks
_CHECKS_A_SECOND = 1000  # at one connection, a second: each takes some 10 µs
_POLLED_CONNECTIONS = 64  # connections, of which the first byte is waited for at a time
_ROUTE_BYTES = 5  # of a route that ZeroMQ has made: a zero and a number
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_log = Log("graphflow.security")


def connection_cap() -> int:
    """The connections that a process can serve: a quarter of its file descriptors, since each
    session takes some for its own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_CAP
    return max(_LEAST_CAP, min(_MOST_CAP, limit // 4))


@dataclass
class _TrackedConnection:
    """One connection."""

    descriptor: int
    peer: Any  # its address, by which the descriptor is known not to be another's by now
    accepted_at: float
    heard_at: float  # when its last byte came
    received: int = 0  # bytes
    route: bytes | None = None  # once a message has come over it
    counter: UnframedByteCounter = field(default_factory=UnframedByteCounter)
    drains_when_over: int | None = None  # of the socket, when it had too much under way


@dataclass
class _Sender:
    """Whom messages come from, by their route."""

    descriptor: int = -1  # of the connection; -1: not known
    peer: Any = None  # its address, as a connection's
    messages: int = 1
    strikes: float = 0.0
    struck_at: float = -inf  # when, last
    fault: str = ""  # for which it is to be dropped


@dataclass
class ConnectionLimiter:
    """Watches one bound socket, on a thread of its own.

    `took`, `drained` and `blame` are for the thread that reads the socket.

    Args:
        socket: before it is bound.
        most: connections at a time; None: by the limit on the process's file descriptors.
        wake: has the reading thread look at its socket soon.
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
        """The connections that there are."""
        return len(self._connections)

    # From the reading thread ----------------------------------------------------------------------

    def has_route(self, route: bytes) -> bool:
        """Whether a message came by a route before; if not, `meet` is told the next frame's
        descriptor."""
        sender = self._senders.get(route)
        if sender is None:
            return False
        sender.messages += 1
        return sender.descriptor >= 0

    def register(self, route: bytes, descriptor: int) -> None:
        """A message of a route of which it is not known yet over which connection it came; -1: it
        is still not. The monitor may tell later of the connection itself."""
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
        """Return whether a route is that of the connection which has a descriptor now. Messages of
        one that has ended may be read late, when its descriptor is another's: of two routes that
        lead to the same peer, the later one is the connection's, the earlier one leads nowhere."""
        before = self._routes.get(descriptor, route)
        known = self._senders.get(before)
        if before == route or known is None or known.peer != peer:
            return True
        if _is_later(before, route):
            return False
        known.descriptor, known.peer = -1, None
        return True

    def note_drained(self) -> None:
        """The socket has no message: what is under way is not whole."""
        self._drains += 1

    def report_invalid(self, route: bytes, why: str, weight: float = 1.0) -> None:
        """A message that came by a route is not valid, or of no use: who sends many is dropped.

        Args:
            weight: how many of STRIKES it counts.
        """
        sender = self._senders.get(route)
        if sender is None:
            return
        now = monotonic()
        sender.strikes = max(0.0, sender.strikes - (now - sender.struck_at)) + weight
        sender.struck_at = now
        if sender.strikes >= STRIKES:
            sender.fault = why  # where the monitor has not told of the connection yet: see `_look`
            connection = self._connections.get(sender.descriptor)
            if connection is not None and connection.peer == sender.peer:
                self._drop(connection, why)

    # On its own thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._monitor_connections()
        except zmq.ZMQError:
            return  # the context was destroyed, and the socket with it

    def _monitor_connections(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._end.fileno(), zmq.POLLIN)
        quiet: list[int] = []  # whose first byte is waited for; of who is gone, the monitor told
        now, seconds = monotonic(), check_interval(0)
        while True:
            ready = dict(poller.poll(int(seconds * 1000) if self._connections else None))
            if self._end.fileno() in ready:
                return
            begun = any(each in ready for each in quiet)
            for each in quiet:
                poller.unregister(each)
            due, now = now + seconds, monotonic()
            if now > due + check_interval(0):  # this process was stopped, and could hear nobody
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
            if begun:  # it is seen at the next look how much comes
                seconds = min(seconds, self._busy_interval())
            busy = seconds < check_interval(0) or len(self._connections) > _POLLED_CONNECTIONS
            quiet = [] if busy else list(self._connections)
            for each in quiet:
                poller.register(each, zmq.POLLIN)

    def _busy_interval(self) -> float:
        """Seconds between looks while more comes than heartbeats."""
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
        """By which messages come over a connection, once one has; not that of who had its
        descriptor before, nor of who has it by now."""
        route = self._routes.get(connection.descriptor, b"")
        sender = self._senders.get(route)
        return route if sender is not None and sender.peer == connection.peer else None

    def _check_connections(self, now: float) -> float:
        """Look at everybody; the seconds until the next time."""
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
            ):  # unless they are whole messages that nobody has read yet
                connection.drains_when_over = self._drains
                self.wake()
            elif self._drains > connection.drains_when_over + 1:
                self._drop(
                    connection, f"a message of over {under_way} bytes did not come to its end"
                )
            else:  # a reader that was woken once may have found the socket empty once
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
        """The bytes that a connection has under way."""
        with SocketHandle(connection.descriptor, connection.peer) as handle:
            received = handle.bytes_received()
        connection.route = self._route_of(connection)
        if received is None:  # not told by this system: then ZeroMQ's own time limits have to do
            connection.heard_at = now
            return 0
        if received != connection.received:
            connection.received, connection.heard_at = received, now
        sender = self._senders.get(connection.route or b"")
        messages = 0 if sender is None else sender.messages
        return connection.counter.count(received, messages, now)

    def _drop(self, connection: _TrackedConnection, why: str) -> None:
        with SocketHandle(connection.descriptor, connection.peer) as handle:
            if handle.reset():
                _log.tell("connection.dropped", address=_host_of(connection.peer), reason=why)

    def close(self) -> None:
        """Watches no longer; before the socket is closed. Idempotent."""
        if self._thread.is_alive():
            self._end.wake()
            self._thread.join()
            self._end.close()
            self.socket.disable_monitor()
            self._monitor.close(linger=0)


def _select_surplus(
    connections: Sequence[_TrackedConnection], beyond: int, now: float
) -> list[_TrackedConnection]:
    """Those who make room: first who has not said yet who it is, of the host that has the most of
    these, there who said least for longest; then who has no heartbeat any more, and may be here
    anew; then who came last, so that nobody who is served is pushed out by who comes."""
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
    """Return whether ZeroMQ has given a route later than another: it counts them in 32 bits."""
    if not len(route) == len(other) == _ROUTE_BYTES:
        return False
    difference = int.from_bytes(route[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < difference % (1 << 32) < 1 << 31


def _host_of(peer: Any) -> str:
    """The host, not the port: what one host causes is told together."""
    return str(peer[0]) if isinstance(peer, tuple) and peer else "somebody"
