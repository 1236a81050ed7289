"""The ways between workers: tensors of a session from this worker straight to another.

A link keeps what its peer has not acknowledged, and sends it again when asked. Each of two workers
has a connection to the other's listener, so what the peer says of this link comes in there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from graphflow.errors import TransportError
from graphflow.runtime.messages import Ack, Array, Key
from graphflow.runtime.protocol.jobs import Heard
from graphflow.runtime.protocol.stream import Letter, Outbound
from graphflow.runtime.wire import chunks, encode

_SLICE = 0.05  # seconds between two looks at whether a step was cancelled


class Link:
    """The way to one other worker: a connection and the numbering of what goes over it."""

    def __init__(self, channel: Any, outbound: Outbound) -> None:
        self._channel = channel
        self._outbound = outbound
        self._changed = threading.Condition(channel.lock)

    def send(
        self,
        purpose: str,
        number: int,
        name: Key,
        array: Array,
        *,
        owned: bool,
        go_on: Callable[[], bool],
    ) -> None:
        """Sends an array, as chunks; waits while the peer has not acknowledged enough of what was
        sent before, and `go_on`. What is not `owned` is copied until it is acknowledged.

        Raises:
            TransportError: `go_on` said to stop.
        """
        step = number if purpose == "edge" else 0
        for chunk, data in chunks(purpose, number, name, array):
            kept = data if owned else memoryview(bytes(data))
            with self._changed:
                self._await_room(kept.nbytes, go_on)
                self._put(self._outbound.post(chunk, step, kept))

    def heed(self, heard: Heard) -> None:
        """Takes note of what the peer said. Never waits."""
        with self._changed:
            self._outbound.received = heard.received
            if self._outbound.acknowledge(heard.acknowledged):
                self._changed.notify_all()
            if heard.told is not None:
                self._put(self._outbound.tell(heard.told))
            if heard.wanted is not None:
                for letter in self._outbound.again(heard.wanted):
                    self._put(letter)

    def beat(self, *, owed: bool) -> None:
        """Tells the peer what was sent, if it has not acknowledged that, and what was received."""
        with self._changed:
            if owed or self._outbound.pending:
                self._put(self._outbound.tell(Ack()))

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def _await_room(self, nbytes: int, go_on: Callable[[], bool]) -> None:
        while not self._outbound.room(nbytes):
            if not go_on():
                raise TransportError(f"{self._channel.address} takes no more messages")
            self._changed.wait(_SLICE)

    def _put(self, letter: Letter) -> None:
        head = encode(letter.envelope, letter.message)
        frames = [head] if letter.data is None else [head, letter.data]
        # The window is smaller than the queue: it is full only after a long cut, and then what it
        # does not take is asked for again.
        self._channel.send_unlocked(frames)
