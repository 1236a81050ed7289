"""The interface of a transport: all that a session, a worker and their security ask of one.

    address ─parse→ Address ─check_address→ ─listen→ Listener   (a worker, one for each process)
                                            ─connect→ Channel   (who talks to it, one for each peer)

To add a transport, write one file with a subclass of `Transport` and register an instance of it
with `register_transport`. A transport over ZeroMQ takes its sockets from `zmq_sockets`; any other
one ignores the context. The Unix socket, bulk TCP and shared memory are no transports: they carry
messages beside one, and lose none when they end.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from graphflow.base.addresses import Address

if TYPE_CHECKING:
    import zmq

    from graphflow.errors import ProtocolError
    from graphflow.runtime.security.authenticator import ZapAuthenticator

Frames = Sequence[bytes | memoryview]
"""A message: a control frame, and for a chunk of an array its bytes (`wire.frame_codec`)."""

HANDSHAKE_ENDED = (
    "took the connection and ended it before a word was said: a worker that asks for a key, or "
    "that has as many connections as it takes (`graphflow worker --max-connections`; its log tells)"
    ", or no graphflow worker"
)
"""The end of an error about a listener that ends every handshake without keys."""


class Listener(Protocol):
    """A worker's end: receives from all connections, sends to each by its route.

    One thread at a time uses it. A route is valid until its connection ends.

    Attributes:
        address: Where it is reached, with the port that was taken.
    """

    address: str

    @property
    def connections(self) -> int:
        """The number of open connections."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when messages may have arrived.

        It may report an arrival only once, so ask `has_message` before each wait for it.
        """
        ...

    def has_message(self) -> bool:
        """Return True if `receive` may have a message. Ask after each `send`, too."""
        ...

    def receive(self) -> tuple[bytes, list[Any], str] | None:
        """Return the next message, or None: its route, its frames, its sender's public key.

        The key is "" without keys.
        """
        ...

    def note_drained(self) -> None:
        """Note that all messages were received, so that bytes under way belong to none of them."""
        ...

    def send(self, route: bytes, frames: Frames) -> bool:
        """Send without waiting; return False if the connection's queue is full.

        A message to a route that is gone is dropped, and the result is True.
        """
        ...

    def report_invalid(self, route: bytes, error: ProtocolError) -> None:
        """Count an invalid message; end the connection that sends many of them."""
        ...

    def report_stray(self, route: bytes) -> None:
        """Count a message of no session; end the connection that sends very many of them."""
        ...

    def drop_slow_reader(self, route: bytes) -> None:
        """End the connection of a peer that does not read what is sent to it."""
        ...

    def close(self, linger: int = 0) -> None:
        """Stop listening; drop what is still queued after `linger` milliseconds."""
        ...


class Channel(Protocol):
    """A connection to a listener, which is made anew whenever it ends.

    Sending is safe from any thread. All else is for one thread at a time.

    Attributes:
        address: Where the listener is.
        refused: True if the last handshake failed: untrusted keys, or see `HANDSHAKE_ENDED`.
        silent: True if a connection without keys is there and nothing has come over it yet.
    """

    address: str
    refused: bool
    silent: bool

    @property
    def lock(self) -> threading.Lock:
        """The lock to hold while several messages are sent in a row by `send_unlocked`."""
        ...

    def fileno(self) -> int:
        """As `Listener.fileno`."""
        ...

    def monitor_fileno(self) -> int:
        """Return the file descriptor that becomes readable when `read_link_changes` has news."""
        ...

    def has_message(self) -> bool:
        """As `Listener.has_message`."""
        ...

    def receive(self) -> list[Any] | None:
        """Return the next message's frames, or None."""
        ...

    def send(self, frames: Frames) -> bool:
        """Send without waiting; return False if the queue is full."""
        ...

    def send_unlocked(self, frames: Frames) -> bool:
        """As `send`, for a thread that holds the lock."""
        ...

    def read_link_changes(self) -> list[bool]:
        """Return what happened to the link since the last call: True for up, False for down.

        The peer's liveness is read from these alone: a process that ended, froze or cannot be
        reached for seconds takes the link down.
        """
        ...

    def count_unframed(self, now: float) -> int:
        """Return an upper bound of the bytes that came and belong to no received message.

        `now` is in seconds. The result is 0 where the system does not tell.
        """
        ...

    def reset(self) -> None:
        """End the connection as if the peer had; it is made anew."""
        ...

    def disconnect(self) -> None:
        """End the connection for good and let go of what was collected from it."""
        ...

    def close(self) -> None:
        """End the connection; drop what is queued. Idempotent."""
        ...


class Transport(ABC):
    """A way of carrying messages between processes, for all addresses of one scheme.

    Attributes:
        scheme: The part of its addresses before `://`.
    """

    scheme: str

    @abstractmethod
    def parse(self, address: str) -> Address | None:
        """Return the parts of `address`, or None if it is malformed."""

    @abstractmethod
    def check_address(self, address: str, *, insecure: bool, listening: bool) -> Address:
        """Return the parts of `address` if it may be used.

        Args:
            insecure: There are keys for it, or the user does without.
            listening: It is to be listened at, so the system may choose its port.

        Raises:
            TransportError: The address is malformed.
            InsecureAddress: Other machines can reach it, and `insecure` is not set.
        """

    @abstractmethod
    def listen(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        insecure: bool,
        guard: ZapAuthenticator | None = None,
        most: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> Listener:
        """Listen at `address`.

        Args:
            context: What ZeroMQ's sockets of this session or worker share.
            guard: Admits connections by their keys. None: anybody may connect.
            most: Connections at a time. None: by the limit on the process's file descriptors.
            wake: Has the thread of the listener call `receive` soon.

        Raises:
            AddressInUse: Another socket listens there.
            TransportError: The address is malformed, not of this machine, or insecure.
        """

    @abstractmethod
    def connect(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        insecure: bool,
        watch: bool = False,
        guard: ZapAuthenticator | None = None,
        key: str = "",
    ) -> Channel:
        """Start to connect to `address`, and go on trying.

        Args:
            watch: `read_link_changes` is going to be called.
            guard: Holds the key of this process.
            key: The public key that the listener must hold. "": nothing is encrypted.

        Raises:
            TransportError: The address is malformed or insecure.
            KeyFileError: The listener has a key, and this process has none to show.
        """

    def check_host(self, address: Address) -> None:
        """Check that the host of `address` is known, for an error that comes at once.

        Raises:
            TransportError: No name service knows it.
        """
        return
