"""The connection from a session to one worker, with a fast channel for short messages."""

from __future__ import annotations

from collections import deque
from typing import Any

from graphflow.runtime.protocol.coordinator_events import SendToWorker
from graphflow.runtime.transport.interface import Channel
from graphflow.runtime.transport.unix_socket import UnixSocketChannel
from graphflow.runtime.wire.messages import Hello, Open, Ping

_MAIN_ROUTE_MESSAGES = frozenset((Hello, Open, Ping))
"""Messages that always take the main connection: they tell the worker its route."""


class WorkerConnection:
    """The connection to the worker at `address`.

    Args:
        channel: a connected `Channel`.
        secured: the worker has a key. It then gets no fast channel, which is not encrypted.

    Attributes:
        unsent: messages that wait for room in the connection.
    """

    __slots__ = ("_address", "_secured", "channel", "fast_channel", "unsent")

    def __init__(self, channel: Channel, address: str, secured: bool) -> None:
        self.channel = channel
        self.fast_channel: UnixSocketChannel | None = None
        self.unsent: deque[list[Any]] = deque()
        self._address = address
        self._secured = secured

    def open_fast_channel(self) -> UnixSocketChannel | None:
        """Open the fast channel if there is none yet; return it if it is new."""
        if self.fast_channel is None and not self._secured:
            self.fast_channel = UnixSocketChannel.connect(self._address)
            return self.fast_channel
        return None

    def disable_fast_channel(self) -> None:
        """Send everything over the main connection from now on."""
        channel, self.fast_channel = self.fast_channel, None
        if channel is not None:
            channel.close()

    def send(self, frames: list[Any], action: SendToWorker) -> bool:
        """Send a message over the fast channel, and return True; else queue it for `flush`."""
        channel = self.fast_channel
        if channel is not None:
            number = action.envelope.sequence
            if type(action.message) in _MAIN_ROUTE_MESSAGES:
                channel.last_over_zmq = number
            elif channel.send_in_order(frames, number, action.acknowledged):
                return True
        self.unsent.append(frames)
        return False

    def flush(self) -> bool:
        """Send queued messages while the connection has room; return True if some are left."""
        waiting = self.unsent
        while waiting and self.channel.send(waiting[0]):
            waiting.popleft()
        return bool(waiting)

    def close(self) -> None:
        """Close the connection and the fast channel."""
        self.channel.close()
        self.disable_fast_channel()
