"""The ways between workers: tensors of a session from this worker straight to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.errors import TransportError
from graphflow.runtime.messages import Array, Key
from graphflow.runtime.protocol.stream import Stream
from graphflow.runtime.wire import chunks, encode

_SLICE = 0.05  # seconds between two looks at whether a step was cancelled


class Link:
    """The way to one other worker: a connection and the numbering of what goes over it."""

    def __init__(self, channel: Any, stream: Stream) -> None:
        self._channel = channel
        self._stream = stream

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
        """Sends an array, as one run of chunks; waits while the peer takes no more and `go_on`.

        Raises:
            TransportError: `go_on` said to stop; the link is then at an unfinished array.
        """
        step = number if purpose == "edge" else 0
        with self._channel.lock:
            for chunk, data in chunks(purpose, number, name, array):
                numbered = self._stream.sent
                try:
                    head = encode(self._stream.stamp(step), chunk)
                    self._push([head, data if owned else bytes(data)], go_on)
                except BaseException:
                    self._stream.sent = numbered  # a number that is never sent would be a gap
                    raise

    def _push(self, frames: list[bytes | memoryview], go_on: Callable[[], bool]) -> None:
        while not self._channel.send_unlocked(frames):
            if not go_on():
                raise TransportError(f"{self._channel.address} takes no more messages")
            self._channel.wait_writable(_SLICE)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
