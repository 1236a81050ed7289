"""The way from a session to one of its workers: a connection, and for short messages the lane
beside it."""

from __future__ import annotations

from collections import deque
from typing import Any

from graphflow.runtime.protocol.coordinator_events import SendToWorker
from graphflow.runtime.transport.interface import Channel
from graphflow.runtime.transport.unix_socket import UnixSocketChannel
from graphflow.runtime.wire.messages import Hello, Open, Ping

_MAIN_ROUTE_MESSAGES = frozenset((Hello, Open, Ping))
"""What shows a worker the way that can take everything."""


class WorkerConnection:
    """The way to the worker at `address`.

    Args:
        channel: a connected `Channel`.
        secured: the worker shows a key, and has no lane.

    Attributes:
        unsent: messages for which the connection had no room yet.
    """

    __slots__ = ("_address", "_secured", "channel", "fast_channel", "unsent")

    def __init__(self, channel: Channel, address: str, secured: bool) -> None:
        self.channel = channel
        self.fast_channel: UnixSocketChannel | None = None
        self.unsent: deque[list[Any]] = deque()
        self._address = address
        self._secured = secured

    def open_fast_channel(self) -> UnixSocketChannel | None:
        """A lane that was not known yet, to a worker that is there."""
        if self.fast_channel is None and not self._secured:
            self.fast_channel = UnixSocketChannel.connect(self._address)
            return self.fast_channel
        return None

    def disable_fast_channel(self) -> None:
        """Everything goes by the connection from here on."""
        lane, self.fast_channel = self.fast_channel, None
        if lane is not None:
            lane.close()

    def send(self, frames: list[Any], action: SendToWorker) -> bool:
        """Sends a message, if the lane carries it; else it waits for `flush`."""
        lane = self.fast_channel
        if lane is not None:
            number = action.envelope.sequence
            if type(action.message) in _MAIN_ROUTE_MESSAGES:
                lane.last_over_zmq = number
            elif lane.send_in_order(frames, number, action.acknowledged):
                return True
        self.unsent.append(frames)
        return False

    def flush(self) -> bool:
        """Sends what waits, as far as the connection has room; whether something still waits."""
        waiting = self.unsent
        while waiting and self.channel.send(waiting[0]):
            waiting.popleft()
        return bool(waiting)

    def close(self) -> None:
        """Frees the connection and the lane."""
        self.channel.close()
        self.disable_fast_channel()
