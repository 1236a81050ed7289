"""ZeroMQ over TCP: a worker listens with one ROUTER, everybody who talks to it has a DEALER.

Thin shells: they move frames and say whether a peer's process is there. ZeroMQ's own heartbeats run
in its I/O thread, so they tell a dead or stopped process from one whose Python is busy.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    AddressInUse,
    InsecureAddress,
    KeyFileError,
    MessageTooLarge,
    ProtocolError,
    TransportError,
)
from graphflow.runtime.polling.socket_monitor import read_monitor_event
from graphflow.runtime.security.authenticator import ZapAuthenticator
from graphflow.runtime.security.connection_guard import (
    HANDSHAKE_SECONDS,
    STRAY_WEIGHT,
    STRIKES,
    ConnectionLimiter,
)
from graphflow.runtime.security.receive_accounting import (
    UNKNOWN_COUNT,
    SocketHandle,
    UnframedByteCounter,
)
from graphflow.runtime.wire.frame_codec import CHUNK_BYTES, ZERO_COPY_BYTES

Frames = Sequence[bytes | memoryview]

HANDSHAKE_ENDED = (
    "took the connection and ended it before a word was said: a worker that asks for a key, or "
    "that has as many connections as it takes (`graphflow worker --max-connections`; its log tells)"
    ", or no graphflow worker"
)
"""What to say of a listener with which no handshake without keys comes to its end."""

_FRAME_CAP = CHUNK_BYTES  # of one frame; control frames have a lower cap of their own
_ENCRYPTION_BYTES = (
    64  # more than a frame grows by when it is encrypted: ZeroMQ counts it as it travels
)
_FRAMES_KEPT = 4  # one more than any valid message has, so that it is seen to be invalid
_FRAMES_SKIPPED = 4096  # of a message with more, before anything else has its turn
_HIGH_WATER = 1000  # messages in a socket's queue
_NO_WAIT = int(zmq.NOBLOCK)  # plain integers: flags as enumerations take longer than small messages
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
_HEARTBEAT_MS = 1000
_SILENCE_MS = 2000  # after a beat: a stopped worker is noticed within 3 s
_CONNECT_MS = 500
_NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_FAILURES = (
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), _NO_DETAIL,
)  # fmt: skip
_MONITORED = sum(_FAILURES) + int(
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
)
_DESCRIPTORS_NEEDED = (
    16  # file descriptors that a socket may take, with its context's threads and pyzmq's own
)
_ABANDONED: list[zmq.Context[Any]] = []
_PATIENCE_MS = 30_000  # of a worker towards those who connect to it


_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):(\d{1,5}|\*)")


@dataclass(frozen=True)
class TcpAddress:
    """The parts of a `tcp://host:port`; port 0 lets the system choose one."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


def check_address(address: str, *, insecure: bool, listening: bool) -> TcpAddress:
    """The parts of an address that may be used.

    Args:
        insecure: there are keys for it, or the user does without.

    Raises:
        TransportError: it is malformed.
        InsecureAddress: it is beyond loopback, and `insecure` is not set.
    """
    match = _ADDRESS.fullmatch(address)
    port = int(match[2].replace("*", "0")) if match else -1
    if match is None or port > 65535 or (not listening and (port == 0 or match[1] == "*")):
        if match is not None and port > 65535:
            raise TransportError(f"{address!r}: port {port} is above 65535, the highest there is")
        example = "tcp://127.0.0.1:7001"
        raise TransportError(f"{address!r} is not of the form tcp://host:port, such as {example}")
    parts = TcpAddress(match[1].strip("[]"), port)
    if not parts.loopback and not insecure:
        keyed = "give it a key (graphflow keys new; see docs/security.md)"
        if not listening:
            keyed = 'name its key (key = "box1" in a cluster file, --worker-key box1 for status; '
            keyed += "graphflow keys new makes keys; see docs/security.md)"
        raise InsecureAddress(
            f"{address} can be reached from other machines; {keyed}, or use 127.0.0.1, or, on a "
            "network that you trust, --insecure (insecure = true in a cluster file): then nothing "
            "is authenticated or encrypted"
        )
    return parts


def _set_socket_options(sock: zmq.Socket[bytes], *, sealed: bool) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    sock.setsockopt(zmq.MAXMSGSIZE, _FRAME_CAP + (_ENCRYPTION_BYTES if sealed else 0))
    sock.setsockopt(zmq.IPV6, 1)


def _enable_heartbeats(sock: zmq.Socket[bytes], silence_ms: int) -> None:
    """Heartbeats, of both ends: while a chunk takes seconds on a slow link, those from the other
    end tell that it is there. A link that is dead in one direction only the protocol finds."""
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)


def _send_frames(sock: zmq.Socket[bytes], frames: Frames) -> None:
    # Below this size a copy costs less than the bookkeeping of a frame that is lent.
    copied = max(map(len, frames)) < ZERO_COPY_BYTES
    for frame in frames[:-1]:
        sock.send(frame, _MORE, copy=copied)
    sock.send(frames[-1], _NO_WAIT, copy=copied)


def _receive_frames(sock: zmq.Socket[bytes], lent_from: int) -> list[Any] | None:
    """The next message's frames, or None; those from index `lent_from` on without a copy."""
    try:
        first: Any = sock.recv(_NO_WAIT)
    except zmq.Again:
        return None
    frames = _receive_rest(sock, [first], lent_from)
    while len(frames) >= _FRAMES_KEPT and sock.getsockopt(_RCVMORE):
        sock.recv()
    return frames


def _receive_rest(sock: zmq.Socket[bytes], frames: list[Any], lent_from: int) -> list[Any]:
    """The frames of a message whose first one was read, up to one more than a valid one has."""
    while len(frames) < _FRAMES_KEPT and sock.getsockopt(_RCVMORE):
        frame: Any = sock.recv(copy=False).buffer if len(frames) >= lent_from else sock.recv()
        frames.append(frame)
    return frames


class TcpListener:
    """Where a worker is reached. For one thread only."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        insecure: bool,
        guard: ZapAuthenticator | None = None,
        most: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Binds the address. With a guard, only those connect whom it lets in.

        Args:
            most: connections at a time; None: by the limit on the process's file descriptors.
            wake: has the thread of this listener call `receive` soon.

        Raises:
            AddressInUse: another socket listens there.
            TransportError: the address is malformed, not of this machine, or insecure.
        """
        parts = check_address(address, insecure=insecure or guard is not None, listening=True)
        self._guarded = guard is not None
        self.socket = _create_socket(context, zmq.ROUTER)
        _set_socket_options(self.socket, sealed=self._guarded)
        _enable_heartbeats(self.socket, _PATIENCE_MS)
        if guard is not None:
            guard.secure_listener(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        self._skipping = False  # the rest of a message with too many frames
        self.limiter = ConnectionLimiter(self.socket, most, wake)
        try:
            self.socket.bind(str(_resolve_host(parts)))
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(
                    f"another process listens at {address} already; choose another port, or "
                    "port * for any that is free"
                ) from error
            raise TransportError(
                f"cannot listen at {address}: {error.strerror}; give an address of this machine"
            ) from error
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        bound = endpoint.rstrip(b"\0").decode()
        self.address = str(TcpAddress(parts.host, int(bound.rpartition(":")[2])))

    def receive(self) -> tuple[bytes, list[Any], str] | None:
        """The next message: the connection that it came by, its frames, and, with a guard, the key
        of who sent it; None if there is none now."""
        if self._skipping and not self._skip_excess_frames():
            return None
        try:
            first: Any = self.socket.recv(_NO_WAIT, copy=not self._guarded)
        except zmq.Again:
            self.limiter.note_drained()
            return None
        route: bytes = first.bytes if self._guarded else first
        if self.limiter.has_route(route):
            frames = _receive_rest(
                self.socket, [route, self.socket.recv()], 2
            )  # a route is never alone
        else:
            head: Any = self.socket.recv(copy=False)
            self.limiter.register(route, _descriptor(head))
            frames = _receive_rest(self.socket, [route, head.bytes], 2)
        self._skipping = len(frames) >= _FRAMES_KEPT
        return frames[0], frames[1:], str(first.get("User-Id")) if self._guarded else ""

    def _skip_excess_frames(self) -> bool:
        """Goes on with the frames that no valid message has; whether there are no more."""
        for _ in range(_FRAMES_SKIPPED):
            if not self.socket.getsockopt(_RCVMORE):
                self._skipping = False
                return True
            self.socket.recv()
        return False

    def has_message(self) -> bool:
        """Whether there is something to receive, perhaps. To be asked after each time that
        something was sent, before waiting for the socket: sending takes in what arrives
        meanwhile."""
        return bool(int(self.socket.getsockopt(_EVENTS)) & _POLLIN)

    def report_invalid(self, route: bytes, error: ProtocolError) -> None:
        """Notes that a message was not valid; drops the connection of who sent several, or one
        that is too large."""
        at_once = isinstance(error, MessageTooLarge)
        self.limiter.report_invalid(route, str(error), STRIKES if at_once else 1.0)

    def report_stray(self, route: bytes) -> None:
        """Notes a valid message that belongs to no session; drops who sends very many."""
        self.limiter.report_invalid(route, "too many messages of no session", STRAY_WEIGHT)

    def drop_slow_reader(self, route: bytes) -> None:
        """Drops the connection of who takes no answers."""
        self.limiter.report_invalid(route, "it does not read what it asked for", STRIKES)

    def send(self, route: bytes, frames: Frames) -> bool:
        """Sends to a connection; False when its queue is full. For a peer that is gone there is
        nothing to send, which is no failure."""
        try:
            _send_frames(self.socket, [route, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def close(self, linger: int = 0) -> None:
        """Stops listening; what is queued after so many milliseconds is dropped."""
        self.limiter.close()
        self.socket.close(linger=linger)


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection that a frame came over; -1 where ZeroMQ does not know it any more."""
    try:
        found: int = frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return -1
    return found


def abandon_context(context: zmq.Context[Any]) -> None:
    """Leaves a context, whose sockets another thread may still use, to the end of the process: who
    collects it would wait for them to be closed."""
    _ABANDONED.append(context)


def _check_descriptors() -> None:
    """Whether there are file descriptors for a socket: where ZeroMQ's own threads find none, it
    ends the process.

    Raises:
        OSError: there are not.
    """
    found: list[int] = []
    try:
        while len(found) < _DESCRIPTORS_NEEDED:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for each in found:
            os.close(each)


def _create_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """A socket.

    Raises:
        TransportError: the process has no file descriptors for it.
    """
    try:
        _check_descriptors()
        # pyzmq begins a thread with sockets of its own at the first of these: not in mid-step.
        zmq.Frame(b"\0", copy=False, copy_threshold=0)
        made: zmq.Socket[bytes] = context.socket(kind)
    except (zmq.ZMQError, OSError) as error:
        raise TransportError(
            f"no more connections from here: {error.strerror}; close sessions, or let the process "
            "have more file descriptors (`ulimit -n`)"
        ) from error
    return made


def _resolve_host(parts: TcpAddress) -> TcpAddress:
    """The address with its host as ZeroMQ can bind it: a number or *."""
    if parts.host == "*":
        return parts
    try:
        found = socket.getaddrinfo(parts.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(describe_unknown_host(parts, error)) from error
    return TcpAddress(str(found[0][4][0]), parts.port)


def describe_unknown_host(address: TcpAddress, error: OSError) -> str:
    """What to say of a host that no name service knows."""
    return f"host {address.host!r} is unknown: {error}; correct its name, or give its number"


class TcpChannel:
    """A connection to a listener. Sending is safe from any thread; all else is for one thread."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        insecure: bool,
        watch: bool = False,
        guard: ZapAuthenticator | None = None,
        key: str = "",
    ) -> None:
        """Starts to connect, and goes on trying. With `watch`, `changes` tells of the link.

        Args:
            guard: who has a key of ours to show.
            key: the public key that the listener must hold; without one, nothing is encrypted.

        Raises:
            TransportError: the address is malformed or insecure.
            KeyFileError: the listener has a key, and we have none to show.
        """
        parts = check_address(address, insecure=insecure or bool(key), listening=False)
        if key and guard is None:
            raise KeyFileError(
                f"{address} asks for a key, and this process has none to show; "
                "start it with one (--key NAME)"
            )
        self.address = address
        self.refused = False
        """Whether somebody there has not come to the end of the handshake: keys that are not
        trusted, which a worker takes its time for; without a key see `ENDED`."""
        self.silent = False
        """Whether a connection without keys is there, and nobody has said anything yet."""
        self._sealed = bool(key)
        self._descriptor = -1  # of the connection, for who watches it
        self._peer: Any = None  # its address, by which the descriptor is known not to be another's
        self._inflow = UnframedByteCounter()
        self._taken = 0  # messages
        self._lock = threading.Lock()
        self.socket = _create_socket(context, zmq.DEALER)
        _set_socket_options(self.socket, sealed=bool(key))
        _enable_heartbeats(self.socket, _SILENCE_MS)
        if guard is not None and key:
            guard.secure_channel(self.socket, key)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        # The system would wait longer each time: a cut of 3 s must not become one of 5 s.
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self.monitor: zmq.Socket[bytes] | None = None
        if watch:
            self.monitor = self.socket.get_monitor_socket(_MONITORED)
        self._endpoint = str(parts)
        self.socket.connect(self._endpoint)

    def send(self, frames: Frames) -> bool:
        """Sends without waiting; False when the queue is full."""
        with self._lock:
            return self.send_unlocked(frames)

    @property
    def lock(self) -> threading.Lock:
        """Hold it to send several messages in a row with `send_unlocked`."""
        return self._lock

    def send_unlocked(self, frames: Frames) -> bool:
        """As `send`, for a thread that holds the lock."""
        try:
            _send_frames(self.socket, frames)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """The next message's frames, or None."""
        frames = _receive_frames(self.socket, 1)
        if frames is not None:
            self._taken += 1
        return frames

    def has_message(self) -> bool:
        """As `Listener.has_message`."""
        return bool(int(self.socket.getsockopt(_EVENTS)) & _POLLIN)

    def read_link_changes(self) -> list[bool]:
        """What has happened to the link since the last call: True for up, False for down."""
        found = []
        while self.monitor is not None and self.monitor.poll(0):
            event, detail = read_monitor_event(self.monitor)
            if event == zmq.EVENT_CONNECTED:
                self._note_connection(detail)
                self.refused |= self._sealed  # until the handshake is done
            elif event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._descriptor = -1  # it may be another's by now
                self._inflow = UnframedByteCounter(UNKNOWN_COUNT if self._taken else 0)
            self.silent = event == zmq.EVENT_CONNECTED and not self._sealed
            if (
                event in _FAILURES
            ):  # of which this number is ZeroMQ's for a handshake without an end
                self.refused |= event != _NO_DETAIL or detail != errno.EAGAIN
            elif event != zmq.EVENT_CONNECTED:
                up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self.refused = self.refused and not up
                found.append(up)
        return found

    def _note_connection(self, descriptor: int) -> None:
        with SocketHandle(descriptor) as connection:
            self._peer = connection.peer
        self._descriptor = descriptor if self._peer is not None else -1

    def count_unframed(self, now: float) -> int:
        """Bytes that came over the connection, which is watched, and belong to no message that was
        received, at most; 0 where the system does not tell. Those of messages that wait to be
        received are among them."""
        with SocketHandle(self._descriptor, self._peer) as connection:
            received = connection.bytes_received()
        return 0 if received is None else self._inflow.count(received, self._taken, now)

    def reset(self) -> None:
        """Ends the connection, which is watched, as if the other side had: it is made anew."""
        with SocketHandle(self._descriptor, self._peer) as connection:
            connection.reset()

    def disconnect(self) -> None:
        """Ends the connection for good. ZeroMQ lets go of what it has collected by the time that
        somebody asks for messages again, of which there are none."""
        with self._lock, contextlib.suppress(zmq.ZMQError):  # it was left already
            self.socket.disconnect(self._endpoint)
        self._descriptor = -1

    def close(self) -> None:
        """Ends the connection; what is queued is dropped. Idempotent."""
        with self._lock:
            if self.monitor is not None and not self.socket.closed:
                self.socket.disable_monitor()
                self.monitor.close(linger=0)
            self.socket.close(linger=0)


Listener, Channel = TcpListener, TcpChannel
