"""Flow control of edges inside loops: tensors are numbered, and senders wait for credits.

An edge in a loop carries many tensors in a step. Without a bound, a fast sender would fill the
memory of a slow receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from graphflow.runtime.program.generated_call_support import EdgeChannel
from graphflow.runtime.wire.messages import EDGE_BITS, SEND_PREFIX, WAIT_PREFIX

MAX_TENSORS_AHEAD = 64
"""Tensors of one edge that a sender may be ahead of the receiver."""
MAX_BYTES_AHEAD = 16 << 20
"""Bytes that a sender may be ahead of the receiver; two tensors are always allowed."""


def credit_size(nbytes: int) -> int:
    """Return how many tensors of `nbytes` one credit allows: half of those allowed ahead."""
    return max(1, min(MAX_TENSORS_AHEAD, MAX_BYTES_AHEAD // max(1, nbytes)) // 2)


class LoopEdgeChannel:
    """The edge channel of a program's bodies, which may run many times in a step.

    Both ends run the same iterations, so the n-th tensor sent is the n-th received. Its number is
    in its key, above the bits of the edge.

    The receiver grants a credit for each `credit_size` tensors that it has received. The sender may
    be two credits ahead. Both ends derive the size of a credit from the first tensor. This cannot
    deadlock: all devices run the iterations in one order, and a send waits only for receives of
    earlier iterations.

    Args:
        channel: the program's channel.
    """

    def __init__(self, channel: EdgeChannel) -> None:
        self._channel = channel
        self._step = -1
        self._count: dict[int, int] = {}
        self._credit_sizes: dict[int, int] = {}
        self._report: Callable[[str, int], None] | None = None

    @contextmanager
    def report_waits(self, report: Callable[[str, int], None]) -> Iterator[None]:
        """Call `report` after each send and receive in this context, for traced steps.

        Args:
            report: takes the name of the span and its begin, in ns of the monotonic clock.
        """
        self._report = report
        try:
            yield
        finally:
            self._report = None

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        """Send the edge's next tensor to a device, once there is a credit for it."""
        report, start = self._report, monotonic_ns() if self._report is not None else 0
        number = self._next_number(step, edge)
        granted, rest = divmod(number, self._credit_size(edge, array))
        if granted > 1 and not rest:
            self._channel.wait_for_credit(step, edge, granted - 1, target)
        self._channel.send(step, edge | number << EDGE_BITS, target, array)
        if report is not None:
            report(f"{SEND_PREFIX}{edge}", start)

    def recv(self, step: int, edge: int) -> Any:
        """Return the edge's next tensor, and grant a credit if one is due."""
        report, start = self._report, monotonic_ns() if self._report is not None else 0
        number = self._next_number(step, edge)
        array = self._channel.recv(step, edge | number << EDGE_BITS)
        if report is not None:
            report(f"{WAIT_PREFIX}{edge}", start)
        granted, rest = divmod(number + 1, self._credit_size(edge, array))
        if not rest:
            self._channel.grant_credit(step, edge, granted)
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
