"""Windows: what edges in loops carry is numbered, and never far ahead of who receives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from graphflow.runtime.program.generated_call_support import EdgeChannel
from graphflow.runtime.wire.messages import EDGE_BITS, SEND_PREFIX, WAIT_PREFIX

MAX_TENSORS_AHEAD = 64  # tensors of one edge that who sends may be ahead of who receives
MAX_BYTES_AHEAD = 16 << 20  # and their bytes, but two tensors always


def credit_size(nbytes: int) -> int:
    """How many tensors of an edge in a loop make a portion: half of what may be under way."""
    return max(1, min(MAX_TENSORS_AHEAD, MAX_BYTES_AHEAD // max(1, nbytes)) // 2)


class LoopEdgeChannel:
    """The channel inside bodies, which may run often in a step: what an edge carries is numbered.

    Both ends run the same iterations, so the n-th that is sent is the n-th that is received. The
    number stands above the edge's in its key.

    Who sends is at most two portions ahead of who receives, so a slow reader holds its writer back
    instead of filling memory. Both see how large a portion is by the first tensor. Nothing waits
    in a circle: devices go through iterations in one order, and a send waits only for receives of
    iterations before its own.
    """

    def __init__(self, channel: EdgeChannel) -> None:
        self._channel = channel
        self._step = -1
        self._count: dict[int, int] = {}
        self._credit_sizes: dict[int, int] = {}
        self._report: Callable[[str, int], None] | None = None

    @contextmanager
    def report_waits(self, told: Callable[[str, int], None]) -> Iterator[None]:
        """Meanwhile `told` hears of each send and wait that has ended: its name, and when it began,
        in ns of the monotonic clock."""
        self._report = told
        try:
            yield
        finally:
            self._report = None

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        told, start = self._report, monotonic_ns() if self._report is not None else 0
        number = self._next_number(step, edge)
        portion = self._credit_size(edge, array)
        full, rest = divmod(number, portion)
        if full > 1 and not rest:
            self._channel.wait_for_credit(step, edge, full - 1, target)
        self._channel.send(step, edge | number << EDGE_BITS, target, array)
        if told is not None:
            told(f"{SEND_PREFIX}{edge}", start)

    def recv(self, step: int, edge: int) -> Any:
        told, start = self._report, monotonic_ns() if self._report is not None else 0
        number = self._next_number(step, edge)
        array = self._channel.recv(step, edge | number << EDGE_BITS)
        if told is not None:
            told(f"{WAIT_PREFIX}{edge}", start)
        full, rest = divmod(number + 1, self._credit_size(edge, array))
        if not rest:
            self._channel.grant_credit(step, edge, full)
        return array

    def _next_number(self, step: int, edge: int) -> int:
        if step != self._step:
            self._step = step
            self._count.clear()
            self._credit_sizes.clear()
        number = self._count[edge] = self._count.get(edge, -1) + 1
        return number

    def _credit_size(self, edge: int, array: Any) -> int:
        found = self._credit_sizes.get(edge)
        if found is None:
            found = self._credit_sizes[edge] = credit_size(array.nbytes)
        return found
