"""Flow control of edges inside loops: tensors are numbered, and senders wait for receivers.

An edge in a loop carries many tensors in a step. Without a bound, a fast sender would fill the
memory of a slow receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from graphflow.ops.communication.channels import wanted_channel
from graphflow.runtime.program.generated_call_support import EdgeChannel
from graphflow.runtime.transport.nontemporal_copy import copy_array
from graphflow.runtime.wire.step_values import EDGE_BITS, SEND_PREFIX, WAIT_PREFIX

MAX_TENSORS_AHEAD = 64
"""Tensors of one edge that a sender may be ahead of the receiver."""
MAX_BYTES_AHEAD = 16 << 20
"""Bytes that a sender may be ahead of the receiver; two tensors are always allowed."""


def credit_size(nbytes: int) -> int:
    """Return how many tensors of `nbytes` one credit allows: half of those allowed ahead."""
    return max(1, min(MAX_TENSORS_AHEAD, MAX_BYTES_AHEAD // max(1, nbytes)) // 2)


def copy_slot(buffer: Any, array: Any) -> None:
    """Copy a result to its buffer, if it was computed in a slot."""
    if array is not buffer:
        copy_array(buffer, array)


class LoopEdgeChannel:
    """The edge channel of a program's bodies, which may run many times in a step.

    The n-th tensor that is sent over an edge is the n-th that is received, however many iterations
    the loops around its two ends run. Its number is in its key, above the bits of the edge.

    Between two processes of one host, tensors go through rings in shared memory. A sender waits
    while its ring is full.

    Otherwise tensors are messages. The receiver grants a credit for each `credit_size` tensors that
    it has received. The sender may be two credits ahead. Both ends derive the size of a credit from
    the first tensor.

    Waits of one loop that is cut over devices cannot form a circle: all devices run the iterations
    in one order, and a send waits only for receives of earlier iterations. Loops of several parties
    may wait in a circle if they rely on more room than a channel has (`channel_scheduler.py`).

    Args:
        channel: the program's channel.
        copy: copies a tensor that is sent as a message, if the next iteration overwrites it.
    """

    def __init__(self, channel: EdgeChannel, copy: Callable[[Any], Any] = lambda x: x) -> None:
        self._channel = channel
        self._copy = copy
        self._lock = threading.Lock()
        self._step = -1
        self._sent: dict[int, int] = {}  # the number of the last tensor of each edge
        self._received: dict[int, int] = {}
        self._credit_sizes: dict[int, int] = {}
        self._chosen: dict[int, int] = {}
        self._heard = 0  # the index that a merge chose last
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
        """Send the edge's next tensor to a device, once there is room for it."""
        report, start = self._report, monotonic_ns() if self._report is not None else 0
        if step != self._step:
            self._begin_step(step)
        number = self._sent[edge] = self._sent.get(edge, -1) + 1
        key = edge | number << EDGE_BITS
        ring = self._channel.rings.senders.get(edge)
        if ring is not None:
            self._channel.send_through(ring, step, key, array)
        else:
            granted, rest = divmod(number, self._credit_size(edge, array))
            if granted > 1 and not rest:
                self._channel.wait_for_credit(step, edge, granted - 1, target)
            self._channel.send(step, key, target, self._copy(array))
        if report is not None:
            report(f"{SEND_PREFIX}{edge}", start)

    def free_slot(self, step: int, edges: Sequence[int], buffer: Any) -> Any:
        """Return a slot in which the next tensor of some edges can be computed; `buffer` if there
        is none.

        The slot is that of the edge whose other end was heard last, which is the likeliest to get
        the tensor, if it has a free one.
        """
        if step != self._step:
            self._begin_step(step)
        edge = edges[self._heard if self._heard < len(edges) else 0]
        ring = self._channel.rings.senders.get(edge)
        slot = None if ring is None else ring.free_slot(self._sent.get(edge, -1) + 1)
        return buffer if slot is None else slot

    def send_where(
        self, step: int, edges: Sequence[int], targets: Sequence[str], array: Any, mask: Any
    ) -> None:
        """Send a tensor as the next one of each edge for which a mask is true."""
        for i, wanted in enumerate(mask.tolist()):
            if wanted:
                self.send(step, edges[i], targets[i], array)

    def recv(self, step: int, edge: int) -> Any:
        """Return the edge's next tensor. It is valid until the next one is asked for."""
        report, start = self._report, monotonic_ns() if self._report is not None else 0
        if step != self._step:
            self._begin_step(step)
        number = self._received[edge] = self._received.get(edge, -1) + 1
        key = edge | number << EDGE_BITS
        ring = self._channel.rings.receivers.get(edge)
        if ring is not None:
            ring.release(number)
            array = self._channel.receive_through(ring, step, key)
            if edge in self._channel.rings.copied:
                array = array.copy()
        else:
            array = self._channel.recv(step, key)
            granted, rest = divmod(number + 1, self._credit_size(edge, array))
            if not rest:
                self._channel.grant_credit(step, edge, granted)
        if report is not None:
            report(f"{WAIT_PREFIX}{edge}", start)
        return array

    def recv_any(self, step: int, edges: Sequence[int], order: Any = None) -> Any:
        """Return the next tensor of any of some edges.

        It is valid until this is called again. `received_from` returns the index of its edge.

        Args:
            order: index of the edge to take from; None or a negative one: the edge whose tensor is
                there first.
        """
        if step != self._step:
            self._begin_step(step)
        chosen = wanted_channel(order, len(edges))
        before = self._chosen.get(edges[0], -1)
        if before >= 0:
            ring = self._channel.rings.receivers.get(edges[before])
            if ring is not None:
                ring.release(self._received[edges[before]] + 1)
        if chosen < 0:
            report, start = self._report, monotonic_ns() if self._report is not None else 0
            numbers = [self._received.get(edge, -1) + 1 for edge in edges]
            chosen = self._channel.wait_for_any(step, edges, numbers, (before + 1) % len(edges))
            if report is not None:
                report(f"{WAIT_PREFIX}{edges[chosen]}", start)
        self._chosen[edges[0]] = self._heard = chosen
        return self.recv(step, edges[chosen])

    def received_from(self, edge: int) -> int:
        """Return the index of the edge that `recv_any` received from last; `edge` is its first."""
        return self._chosen[edge]

    def _begin_step(self, step: int) -> None:
        with self._lock:  # parties of one device begin a step at the same time
            if step != self._step:
                self._sent.clear()
                self._received.clear()
                self._credit_sizes.clear()
                self._chosen.clear()
                self._channel.rings.begin_step()
                self._step = step

    def _credit_size(self, edge: int, array: Any) -> int:
        found = self._credit_sizes.get(edge)
        if found is None:
            found = self._credit_sizes[edge] = credit_size(array.nbytes)
        return found
