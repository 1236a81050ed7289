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
    UNDER_WAY,
    Connection,
    UnframedByteCounter,
    pause,
)
from graphflow.runtime.telemetry.logs import Log

HANDSHAKE_SECONDS = 6.0
"""For a new connection to say who it is; longer than the guard keeps an unknown key waiting."""
SILENCE_SECONDS = 30.0
"""Without a byte, after which a connection is dropped: peers of ours have a heartbeat."""
STRIKES = 16.0
"""Messages that are not valid, after which who sent them is dropped; one a second is forgiven."""
STRANGER = 1 / 256
"""What a valid message counts that belongs to no session: 4,096 at once, 256 a second."""

_FEWEST, _MOST = 16, 4096
_HEARTBEATS_SECONDS = 2.5  # in which a peer has at least one
_BUSY_SECONDS = 0.02  # between looks while more comes than heartbeats
_BUSY_BYTES = 1024  # between two looks
_LOOKS = 1000  # at one connection, a second: each takes some 10 µs
_WAITED_FOR = 64  # connections, of which the first byte is waited for at a time
_ROUTE_BYTES = 5  # of a route that ZeroMQ has made: a zero and a number
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_log = Log("graphflow.security")


def most_connections() -> int:
    """The connections that a process can serve: a quarter of its file descriptors, since each
    session takes some for its own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, limit // 4))


@dataclass
class _Visitor:
    """One connection."""

    descriptor: int
    peer: Any  # its address, by which the descriptor is known not to be another's by now
    since: float
    heard: float  # when its last byte came
    received: int = 0  # bytes
    route: bytes | None = None  # once a message has come over it
    inflow: UnframedByteCounter = field(default_factory=UnframedByteCounter)
    drains: int | None = None  # of the socket, when it had too much under way


@dataclass
class _Sender:
    """Whom messages come from, by their route."""

    descriptor: int = -1  # of the connection; -1: not known
    peer: Any = None  # its address, as a visitor's
    messages: int = 1
    strikes: float = 0.0
    struck: float = -inf  # when, last
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
    _visitors: dict[int, _Visitor] = field(default_factory=dict)
    _senders: dict[bytes, _Sender] = field(default_factory=dict)
    _routes: dict[int, bytes] = field(default_factory=dict)  # by descriptor, the latest
    _drains: int = 0

    def __post_init__(self) -> None:
        self._cap = most_connections() if self.most is None else self.most
        self._end = WakeupFd()
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)
        self._thread.start()

    @property
    def visitors(self) -> int:
        """The connections that there are."""
        return len(self._visitors)

    # From the reading thread ----------------------------------------------------------------------

    def knows(self, route: bytes) -> bool:
        """Whether a message came by a route before; if not, `meet` is told the next frame's
        descriptor."""
        sender = self._senders.get(route)
        if sender is None:
            return False
        sender.messages += 1
        return sender.descriptor >= 0

    def meet(self, route: bytes, descriptor: int) -> None:
        """A message of a route of which it is not known yet over which connection it came; -1: it
        is still not. The monitor may tell later of the connection itself."""
        if len(self._senders) > 4 * max(self._cap, len(self._visitors)):
            gone = set(self._senders) - {each.route for each in list(self._visitors.values())}
            for each in gone:
                del self._senders[each]
        with Connection(descriptor) as connection:
            peer = connection.peer
        if peer is not None and not self._owns(route, descriptor, peer):
            peer = None
        sender = self._senders.setdefault(route, _Sender())
        sender.descriptor, sender.peer = -1 if peer is None else descriptor, peer
        if peer is not None:
            self._routes[descriptor] = route

    def _owns(self, route: bytes, descriptor: int, peer: Any) -> bool:
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

    def drained(self) -> None:
        """The socket has no message: what is under way is not whole."""
        self._drains += 1

    def blame(self, route: bytes, why: str, weight: float = 1.0) -> None:
        """A message that came by a route is not valid, or of no use: who sends many is dropped.

        Args:
            weight: how many of STRIKES it counts.
        """
        sender = self._senders.get(route)
        if sender is None:
            return
        now = monotonic()
        sender.strikes = max(0.0, sender.strikes - (now - sender.struck)) + weight
        sender.struck = now
        if sender.strikes >= STRIKES:
            sender.fault = why  # where the monitor has not told of the connection yet: see `_look`
            visitor = self._visitors.get(sender.descriptor)
            if visitor is not None and visitor.peer == sender.peer:
                self._drop(visitor, why)

    # On its own thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_on()
        except zmq.ZMQError:
            return  # the context was destroyed, and the socket with it

    def _watch_on(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._end.fileno(), zmq.POLLIN)
        quiet: list[int] = []  # whose first byte is waited for; of who is gone, the monitor told
        now, seconds = monotonic(), pause(0)
        while True:
            ready = dict(poller.poll(int(seconds * 1000) if self._visitors else None))
            if self._end.fileno() in ready:
                return
            begun = any(each in ready for each in quiet)
            for each in quiet:
                poller.unregister(each)
            due, now = now + seconds, monotonic()
            if now > due + pause(0):  # this process was stopped, and could hear nobody
                for visitor in self._visitors.values():
                    visitor.heard += now - due
            while self._monitor.poll(0):
                event, descriptor = read_monitor_event(self._monitor)
                if event == zmq.EVENT_ACCEPTED:
                    self._arrive(descriptor)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._leave(descriptor)
                else:
                    return  # the socket is closed
            seconds = self._look(now)
            if begun:  # it is seen at the next look how much comes
                seconds = min(seconds, self._busy())
            busy = seconds < pause(0) or len(self._visitors) > _WAITED_FOR
            quiet = [] if busy else list(self._visitors)
            for each in quiet:
                poller.register(each, zmq.POLLIN)

    def _busy(self) -> float:
        """Seconds between looks while more comes than heartbeats."""
        return max(_BUSY_SECONDS, len(self._visitors) / _LOOKS)

    def _arrive(self, descriptor: int) -> None:
        now = monotonic()
        with Connection(descriptor) as connection:
            self._visitors[descriptor] = _Visitor(descriptor, connection.peer, now, now)

    def _leave(self, descriptor: int) -> None:
        visitor = self._visitors.pop(descriptor, None)
        if visitor is not None:
            self._senders.pop(self._route(visitor) or b"", None)

    def _route(self, visitor: _Visitor) -> bytes | None:
        """By which messages come over a connection, once one has; not that of who had its
        descriptor before, nor of who has it by now."""
        route = self._routes.get(visitor.descriptor, b"")
        sender = self._senders.get(route)
        return route if sender is not None and sender.peer == visitor.peer else None

    def _look(self, now: float) -> float:
        """Look at everybody; the seconds until the next time."""
        most = came = 0
        for visitor in self._visitors.values():
            before = visitor.received
            under_way = self._measure(visitor, now)
            most = max(most, under_way)
            came = max(came, visitor.received - before)
            sender = self._senders.get(visitor.route or b"")
            patience = SILENCE_SECONDS if visitor.route else HANDSHAKE_SECONDS
            if sender is not None and sender.fault:
                self._drop(visitor, sender.fault)
            elif now > visitor.heard + patience:
                self._drop(visitor, f"nothing came from it for {patience:g} s")
            elif under_way <= UNDER_WAY:
                visitor.drains = None
            elif visitor.drains is None:  # unless they are whole messages that nobody has read yet
                visitor.drains = self._drains
                self.wake()
            elif self._drains > visitor.drains + 1:
                self._drop(visitor, f"a message of over {under_way} bytes did not come to its end")
            else:  # a reader that was woken once may have found the socket empty once
                self.wake()
        beyond = len(self._visitors) - self._cap
        if beyond > 0:
            for visitor in _superfluous(list(self._visitors.values()), beyond, now):
                self._drop(visitor, f"there are over {self._cap} connections")
        return min(pause(most), self._busy()) if came > _BUSY_BYTES else pause(most)

    def _measure(self, visitor: _Visitor, now: float) -> int:
        """The bytes that a connection has under way."""
        with Connection(visitor.descriptor, visitor.peer) as connection:
            received = connection.received()
        visitor.route = self._route(visitor)
        if received is None:  # not told by this system: then ZeroMQ's own time limits have to do
            visitor.heard = now
            return 0
        if received != visitor.received:
            visitor.received, visitor.heard = received, now
        sender = self._senders.get(visitor.route or b"")
        messages = 0 if sender is None else sender.messages
        return visitor.inflow.under_way(received, messages, now)

    def _drop(self, visitor: _Visitor, why: str) -> None:
        with Connection(visitor.descriptor, visitor.peer) as connection:
            if connection.shut():
                _log.tell("connection.dropped", address=_shown(visitor.peer), reason=why)

    def close(self) -> None:
        """Watches no longer; before the socket is closed. Idempotent."""
        if self._thread.is_alive():
            self._end.wake()
            self._thread.join()
            self._end.close()
            self.socket.disable_monitor()
            self._monitor.close(linger=0)


def _superfluous(visitors: Sequence[_Visitor], beyond: int, now: float) -> list[_Visitor]:
    """Those who make room: first who has not said yet who it is, of the host that has the most of
    these, there who said least for longest; then who has no heartbeat any more, and may be here
    anew; then who came last, so that nobody who is served is pushed out by who comes."""
    unknown = Counter(_shown(each.peer) for each in visitors if each.route is None)

    def rank(visitor: _Visitor) -> tuple[float, ...]:
        if visitor.route is None:
            return 0, -unknown[_shown(visitor.peer)], visitor.received, visitor.since
        if now > visitor.heard + _HEARTBEATS_SECONDS:
            return 1, visitor.heard
        return 2, -visitor.since

    return sorted(visitors, key=rank)[:beyond]


def _is_later(route: bytes, other: bytes) -> bool:
    """Return whether ZeroMQ has given a route later than another: it counts them in 32 bits."""
    if not len(route) == len(other) == _ROUTE_BYTES:
        return False
    difference = int.from_bytes(route[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < difference % (1 << 32) < 1 << 31


def _shown(peer: Any) -> str:
    """The host, not the port: what one host causes is told together."""
    return str(peer[0]) if isinstance(peer, tuple) and peer else "somebody"
