"""The two ends of a ring of slots in shared memory, and waits for any of several rings.

`shared_memory_rings.py` says how a ring works, and how its ends agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from time import monotonic_ns
from typing import Any, Protocol

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.jit.array_address import address
from graphflow.runtime.collectives.group_setup import HandshakeChannel
from graphflow.runtime.collectives.rank_buffers import Array
from graphflow.runtime.collectives.shared_counters import (
    CANCEL_CHECK_SECONDS,
    COUNTER_BYTES,
    DEFAULT_SPINS,
    SharedCounters,
    any_counter_function,
)
from graphflow.runtime.memory.ring_sizes import ROWS_BYTES, slot_bytes, slot_count
from graphflow.runtime.transport.nontemporal_copy import copy_array
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import EDGE_BITS

MAX_SEGMENT_BYTES = 256 << 20
"""Bytes of all rings into a device. Edges that do not fit use messages."""

_STAMP_WORD = 3  # word of a counter's line that holds the time of its tensor's arrival, in ns


class RingOwner(Protocol):
    """The session's side of its rings (`session_collectives.py`)."""

    mail: TensorMailbox
    generation: int
    open_edges: set[Any]

    def handshake_channel(self, step: int, key: Sequence[Any], purpose: str) -> HandshakeChannel:
        """Return the channel on which the two ends of a ring agree."""


class RingProgram(Protocol):
    """The program that its rings belong to (`shared_memory_rings.py`).

    Attributes:
        owner: the session's side.
        base: value of all counters when this step began.
    """

    owner: RingOwner
    base: int


@dataclass(frozen=True)
class LoopEdges:
    """The edges in loops between a device and one of another worker.

    Attributes:
        worker: the other worker.
        awaited: for each edge, how errors name a wait.
        specs: spec of each edge.
    """

    worker: int
    awaited: dict[int, Awaited]
    specs: dict[int, TensorSpec]


@dataclass(frozen=True)
class RingPlace:
    """The place of a ring in its segment: its counters, its first slot, and how many slots."""

    counters: int
    start: int
    slots: int


def plan_rings(specs: Mapping[int, TensorSpec]) -> tuple[dict[int, RingPlace], int]:
    """Return the place of each ring that fits, and the bytes of the segment."""
    sizes = {edge: slot_count(spec) * slot_bytes(spec) for edge, spec in sorted(specs.items())}
    fitting, left = [], MAX_SEGMENT_BYTES
    for edge, size in sizes.items():
        if size <= left:
            fitting.append(edge)
            left -= size
    places, start = {}, COUNTER_BYTES * (1 + 2 * len(fitting))
    for i, edge in enumerate(fitting):
        places[edge] = RingPlace(COUNTER_BYTES * (1 + 2 * i), start, slot_count(specs[edge]))
        start += sizes[edge]
    return places, start


class _Ring:
    """One end of a ring.

    Attributes:
        sent, taken: tensors that the sender has put in; slots that the receiver has given back.
    """

    def __init__(
        self, rings: RingProgram, edges: LoopEdges, edge: int, memory: Array, place: RingPlace
    ) -> None:
        self.peer = edges.worker
        self.slots = place.slots
        self.rings = rings
        self.awaited = edges.awaited[edge]
        self.line = address(memory) + place.counters
        lines = memory[place.counters : place.counters + 2 * COUNTER_BYTES]
        self.sent = SharedCounters(lines[:COUNTER_BYTES], 1)
        self.taken = SharedCounters(lines[COUNTER_BYTES:], 1)
        self.stamp = lines.view(np.int64)[_STAMP_WORD : _STAMP_WORD + 1]
        self.post = address(memory)
        spec, size = edges.specs[edge], nbytes(edges.specs[edge])
        step = slot_bytes(spec)
        self.arrays: list[Array] = [
            memory[at : at + size].view(spec.dtype).reshape(spec.shape)
            for at in range(place.start, place.start + place.slots * step, step)
        ]
        ends = range(place.start + step - ROWS_BYTES, place.start + place.slots * step, step)
        self.rows = [memory[at : at + 8].view(np.int64) for at in ends]


class RingSender(_Ring):
    """The sending end."""

    def free_slot(self, number: int) -> Array | None:
        """Return the slot of a tensor, to compute it there; None if it is not free yet."""
        if self.taken.words.item(0) < self.rings.base + max(0, number - self.slots + 1):
            return None
        return self.arrays[number % self.slots]

    def send(self, step: int, key: int, array: Array) -> bool:
        """Copy a tensor into its slot, once it is free. `key` is the edge with the tensor's number.

        The slot itself is not copied (`free_slot`).

        Raises:
            GraphflowError: the step was cancelled while there was no free slot.
        """
        number = key >> EDGE_BITS
        base = self.rings.base
        need = base + max(0, number - self.slots + 1)
        # A plain load is enough before a write to the slot. A read would need an ordered one.
        if self.taken.words.item(0) < need and self.taken.wait_all(need, CANCEL_CHECK_SECONDS) >= 0:
            self.rings.owner.mail.wait_until(
                step, self.awaited, lambda _: self.taken.wait_all(need, CANCEL_CHECK_SECONDS) < 0
            )
        slot = self.arrays[number % self.slots]
        if slot.ndim:
            rows = self.rows[number % self.slots][0] = array.shape[0]
            slot = slot if rows == slot.shape[0] else slot[:rows]
        if array is not slot:
            copy_array(slot, array)
        self.stamp[0] = monotonic_ns()
        self.sent.publish_at(self.post, base + number + 1)
        return True


class RingReceiver(_Ring):
    """The receiving end."""

    @cached_property
    def _wait(self) -> RingWait:
        return RingWait((self,))

    def receive(self, step: int, key: int) -> Array:
        """Return a tensor as a read-only view of its slot, valid until `release`.

        Raises:
            StepTimeout: the tensor did not come before the deadline.
            GraphflowError: the error that the step was cancelled with.
        """
        number = key >> EDGE_BITS
        wait = self._wait
        wait.values[0] = self.rings.base + number + 1
        if wait.poll() < 0:
            self.rings.owner.mail.wait_until(step, self.awaited, lambda _: wait.poll() >= 0)
        slot = self.arrays[number % self.slots]
        if slot.ndim and (rows := self.rows[number % self.slots].item(0)) < slot.shape[0]:
            return slot[:rows]
        return slot

    def release(self, count: int) -> None:
        """Give back the slots of the first `count` tensors of this step."""
        self.taken.publish(0, self.rings.base + count)

    def arrival_time(self, key: int) -> int:
        """Return when the last received tensor arrived, in ns of the host's monotonic clock."""
        return min(int(self.stamp[0]), monotonic_ns())


class RingWait:
    """Waits until any of some rings has reached a number of tensors.

    Attributes:
        values: int64, the number that each ring has to reach; the caller sets them.
    """

    def __init__(self, rings: Sequence[RingReceiver]) -> None:
        self._table = np.zeros(3 + 2 * len(rings), np.int64)
        self._table[1] = DEFAULT_SPINS
        self._table[3::2] = [ring.line for ring in rings]
        self.values = self._table[4::2]
        self._count = len(rings)
        self._table_address = address(self._table)
        self._post = rings[0].post if rings else 0
        self._wait_any = any_counter_function()

    def poll(self, first: int = 0, seconds: float = CANCEL_CHECK_SECONDS) -> int:
        """Return the index of a ring that has reached its number, looking at `first` first.

        Returns -1 if none has within some seconds.
        """
        self._table[2] = first
        self._wait_any(self._table_address, self._post, self._count, int(seconds * 1e9))
        return int(self._table[0])
