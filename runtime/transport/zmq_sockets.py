"""ZeroMQ's sockets behind `Listener` and `Channel`, for transports that ZeroMQ carries.

A worker listens with one ROUTER; everybody who talks to it has a DEALER. Both are thin: they move
frames and report whether the peer's process is there. ZeroMQ sends heartbeats from its own I/O
thread. They tell a dead or stopped process from one whose Python code is busy.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any

import zmq

from graphflow.errors import (
    AddressInUse,
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
from graphflow.runtime.transport.interface import Frames
from graphflow.runtime.transport.zmq_setup import (
    create_socket,
    enable_heartbeats,
    set_socket_options,
)
from graphflow.runtime.wire.frame_codec import ZERO_COPY_BYTES

_FRAMES_KEPT = 4  # one more than any valid message has, so that it is seen to be invalid
_FRAMES_SKIPPED = 4096  # of a message with more, before anything else has its turn
_NO_WAIT = int(zmq.NOBLOCK)  # plain integers: flags as enumerations take longer than small messages
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
_SILENCE_MS = 2000  # after a heartbeat: a stopped worker is noticed within 3 s
_PATIENCE_MS = 30_000  # of a worker towards those who connect to it
_CONNECT_MS = 500
_NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_FAILURES = (
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), _NO_DETAIL,
)  # fmt: skip
_MONITORED = sum(_FAILURES) + int(
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
)


class ZmqListener:
    """A ROUTER socket that is bound to an endpoint. For one thread only."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        endpoint: str,
        *,
        guard: ZapAuthenticator | None = None,
        most: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind `endpoint`, which is what ZeroMQ calls `address`.

        Args:
            guard: Admits connections by their keys. None: anybody may connect.
            most: Connections at a time. None: by the limit on the process's file descriptors.
            wake: Has the thread of this listener call `receive` soon.

        Raises:
            AddressInUse: Another socket listens there.
            TransportError: The endpoint is not of this machine.
        """
        self.address = address
        self._guarded = guard is not None
        self.socket = create_socket(context, zmq.ROUTER)
        set_socket_options(self.socket, sealed=self._guarded)
        enable_heartbeats(self.socket, _PATIENCE_MS)
        if guard is not None:
            guard.secure_listener(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        self._skipping = False  # the rest of a message with too many frames
        self.limiter = ConnectionLimiter(self.socket, most, wake)
        try:
            self.socket.bind(endpoint)
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

    @property
    def endpoint(self) -> str:
        """The bound endpoint, with the port that the system has chosen."""
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self.limiter.connections

    def fileno(self) -> int:
        """Return the descriptor to poll. It reports an arrival only after `has_message` was False:
        ZeroMQ signals it when its queue stops being empty."""
        return int(self.socket.getsockopt(zmq.FD))

    def has_message(self) -> bool:
        """Return True if `receive` may have a message.

        Ask after each send and before each poll: sending takes in what arrives meanwhile.
        """
        return bool(int(self.socket.getsockopt(_EVENTS)) & _POLLIN)

    def receive(self) -> tuple[bytes, list[Any], str] | None:
        """Return the next message or None: its route, its frames and, with a guard, its key."""
        if self._skipping and not self._skip_excess_frames():
            return None
        try:
            first: Any = self.socket.recv(_NO_WAIT, copy=not self._guarded)
        except zmq.Again:
            self.limiter.note_drained()
            return None
        route: bytes = first.bytes if self._guarded else first
        if self.limiter.has_route(route):  # a route is never alone
            frames = _receive_rest(self.socket, [route, self.socket.recv()], 2)
        else:
            head: Any = self.socket.recv(copy=False)
            self.limiter.register(route, _descriptor_of(head))
            frames = _receive_rest(self.socket, [route, head.bytes], 2)
        self._skipping = len(frames) >= _FRAMES_KEPT
        return frames[0], frames[1:], str(first.get("User-Id")) if self._guarded else ""

    def _skip_excess_frames(self) -> bool:
        """Drop frames that no valid message has; return True if none is left."""
        for _ in range(_FRAMES_SKIPPED):
            if not self.socket.getsockopt(_RCVMORE):
                self._skipping = False
                return True
            self.socket.recv()
        return False

    def note_drained(self) -> None:
        """Note that all messages were received."""
        self.limiter.note_drained()

    def report_invalid(self, route: bytes, error: ProtocolError) -> None:
        """Count an invalid message of `route`.

        The connection ends after several, or at once if the message is too large.
        """
        at_once = isinstance(error, MessageTooLarge)
        self.limiter.report_invalid(route, str(error), STRIKES if at_once else 1.0)

    def report_stray(self, route: bytes) -> None:
        """Count a valid message that belongs to no session; the connection ends after very many."""
        self.limiter.report_invalid(route, "too many messages of no session", STRAY_WEIGHT)

    def drop_slow_reader(self, route: bytes) -> None:
        """End the connection of a peer that does not read its answers."""
        self.limiter.report_invalid(route, "it does not read what it asked for", STRIKES)

    def send(self, route: bytes, frames: Frames) -> bool:
        """Send to a connection; return False if its queue is full.

        A peer that is gone gets nothing, which is no failure.
        """
        try:
            _send_frames(self.socket, [route, *frames])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def close(self, linger: int = 0) -> None:
        """Stop listening; drop what is still queued after `linger` milliseconds."""
        self.limiter.close()
        self.socket.close(linger=linger)


class ZmqChannel:
    """A DEALER socket that connects to an endpoint.

    Sending is safe from any thread; all else is for one thread.

    Attributes:
        refused: True if the last handshake failed: untrusted keys, or a worker that keeps an
            unknown key waiting; without a key see `HANDSHAKE_ENDED`.
        silent: True if a connection without keys is there and nobody has said anything yet.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        endpoint: str,
        *,
        watch: bool = False,
        guard: ZapAuthenticator | None = None,
        key: str = "",
    ) -> None:
        """Start to connect to `endpoint`, which is what ZeroMQ calls `address`; go on trying.

        Args:
            watch: `read_link_changes` is going to be called.
            guard: Holds the key of this process.
            key: The public key that the listener must hold. "": nothing is encrypted.

        Raises:
            KeyFileError: The listener has a key, and this process has none to show.
        """
        if key and guard is None:
            raise KeyFileError(
                f"{address} asks for a key, and this process has none to show; "
                "start it with one (--key NAME)"
            )
        self.address = address
        self.refused = False
        self.silent = False
        self._sealed = bool(key)
        self._descriptor = -1  # of the connection, if it is watched
        self._peer: Any = None  # its address, by which the descriptor is known not to be another's
        self._counter = UnframedByteCounter()
        self._received = 0  # messages
        self._lock = threading.Lock()
        self.socket = create_socket(context, zmq.DEALER)
        set_socket_options(self.socket, sealed=bool(key))
        enable_heartbeats(self.socket, _SILENCE_MS)
        if guard is not None and key:
            guard.secure_channel(self.socket, key)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        # The system would wait longer each time: a cut of 3 s must not become one of 5 s.
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self.monitor: zmq.Socket[bytes] | None = None
        if watch:
            self.monitor = self.socket.get_monitor_socket(_MONITORED)
        self._endpoint = endpoint
        self.socket.connect(self._endpoint)

    @property
    def lock(self) -> threading.Lock:
        """Hold it to send several messages in a row with `send_unlocked`."""
        return self._lock

    def fileno(self) -> int:
        """As `ZmqListener.fileno`."""
        return int(self.socket.getsockopt(zmq.FD))

    def monitor_fileno(self) -> int:
        """Return the descriptor to poll for `read_link_changes`."""
        assert self.monitor is not None
        return int(self.monitor.getsockopt(zmq.FD))

    def has_message(self) -> bool:
        """As `ZmqListener.has_message`."""
        return bool(int(self.socket.getsockopt(_EVENTS)) & _POLLIN)

    def send(self, frames: Frames) -> bool:
        """Send without waiting; return False if the queue is full."""
        with self._lock:
            return self.send_unlocked(frames)

    def send_unlocked(self, frames: Frames) -> bool:
        """As `send`, for a thread that holds the lock."""
        try:
            _send_frames(self.socket, frames)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """Return the next message's frames, or None."""
        frames = _receive_frames(self.socket, 1)
        if frames is not None:
            self._received += 1
        return frames

    def read_link_changes(self) -> list[bool]:
        """Return what happened to the link since the last call: True for up, False for down."""
        found = []
        while self.monitor is not None and self.monitor.poll(0):
            event, detail = read_monitor_event(self.monitor)
            if event == zmq.EVENT_CONNECTED:
                self._note_connection(detail)
                self.refused |= self._sealed  # until the handshake is done
            elif event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._descriptor = -1  # it may be another's by now
                self._counter = UnframedByteCounter(UNKNOWN_COUNT if self._received else 0)
            self.silent = event == zmq.EVENT_CONNECTED and not self._sealed
            if event in _FAILURES:
                # ZeroMQ reports EAGAIN for a handshake that did not come to its end.
                self.refused |= event != _NO_DETAIL or detail != errno.EAGAIN
            elif event != zmq.EVENT_CONNECTED:
                up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self.refused = self.refused and not up
                found.append(up)
        return found

    def _note_connection(self, descriptor: int) -> None:
        with SocketHandle(descriptor) as handle:
            self._peer = handle.peer
        self._descriptor = descriptor if self._peer is not None else -1

    def count_unframed(self, now: float) -> int:
        """Return an upper bound of the bytes that came and belong to no received message.

        Messages that wait to be received count, too. The result is 0 if the connection is not
        watched, or the system does not tell.
        """
        with SocketHandle(self._descriptor, self._peer) as handle:
            received = handle.bytes_received()
        return 0 if received is None else self._counter.count(received, self._received, now)

    def reset(self) -> None:
        """End the watched connection as if the peer had; ZeroMQ makes it anew."""
        with SocketHandle(self._descriptor, self._peer) as handle:
            handle.reset()

    def disconnect(self) -> None:
        """End the connection for good.

        ZeroMQ frees what it has collected when messages are asked for the next time.
        """
        with self._lock, contextlib.suppress(zmq.ZMQError):  # it was disconnected already
            self.socket.disconnect(self._endpoint)
        self._descriptor = -1

    def close(self) -> None:
        """End the connection; drop what is queued. Idempotent."""
        with self._lock:
            if self.monitor is not None and not self.socket.closed:
                self.socket.disable_monitor()
                self.monitor.close(linger=0)
            self.socket.close(linger=0)


# Frames ----------------------------------------------------------------------------------------


def _send_frames(sock: zmq.Socket[bytes], frames: Frames) -> None:
    # Below this size a copy costs less than the bookkeeping of a frame that is lent.
    copied = max(map(len, frames)) < ZERO_COPY_BYTES
    for frame in frames[:-1]:
        sock.send(frame, _MORE, copy=copied)
    sock.send(frames[-1], _NO_WAIT, copy=copied)


def _receive_frames(sock: zmq.Socket[bytes], lent_from: int) -> list[Any] | None:
    """Return the next message's frames, those from index `lent_from` on without a copy, or None."""
    try:
        first: Any = sock.recv(_NO_WAIT)
    except zmq.Again:
        return None
    frames = _receive_rest(sock, [first], lent_from)
    while len(frames) >= _FRAMES_KEPT and sock.getsockopt(_RCVMORE):
        sock.recv()
    return frames


def _receive_rest(sock: zmq.Socket[bytes], frames: list[Any], lent_from: int) -> list[Any]:
    """Add the rest of a message to its first `frames`, up to one more than a valid one has."""
    while len(frames) < _FRAMES_KEPT and sock.getsockopt(_RCVMORE):
        frame: Any = sock.recv(copy=False).buffer if len(frames) >= lent_from else sock.recv()
        frames.append(frame)
    return frames


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that `frame` came over; -1 if ZeroMQ forgot it."""
    try:
        found: int = frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return -1
    return found
