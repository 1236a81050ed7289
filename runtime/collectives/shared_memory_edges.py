"""Tensors of cut edges between two processes of one host, through shared memory.

A small tensor sent as a message costs its sender 0.3 ms after a long computation, and arrives
0.2 ms later: frames, sockets, acknowledgements. Here the sender copies the tensor into a slot of
shared memory and publishes a counter (`shared_counters.py`). Each edge has two slots, so the sender
gets at most one step ahead of the receiver.

The two ends agree on the memory in a program's first step. The sender makes it and sends its token
ahead of the tensors, which still travel as messages in this step. At the end of the step the sender
waits for the answer whether the receiver could attach the memory, so both ends know from then on
how tensors travel. A failed step discards these agreements, as it does those of collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic_ns
from typing import Any, Protocol

import numpy as np

from graphflow.errors import TransportError
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.runtime.collectives.group_setup import HandshakeChannel
from graphflow.runtime.collectives.rank_buffers import Array
from graphflow.runtime.collectives.shared_counters import (
    CANCEL_CHECK_SECONDS,
    COUNTER_BYTES,
    SharedCounters,
)
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox

MAX_TENSOR_BYTES = 1 << 20
"""Largest tensor that goes through a slot. Beside a larger copy, a message costs little."""

MAX_RAGGED_BYTES = 8 << 20
"""Largest tensor on a ragged edge that goes through a slot. Most of its rows are not in use."""

MAX_SLOT_BYTES = 32 << 20
"""Bytes of all slots between two devices. Edges that do not fit use messages."""

MAX_OPEN_EDGES = 64
"""Open `ShmEdge` objects of a session on a worker, since each takes file descriptors."""

_SLOTS = 2
_STAMP_WORD = 3  # word of a counter's line that holds the time of its tensor's arrival, in ns
_ROWS_WORD = 4  # first of the words that hold the number of rows in each slot, for ragged edges
_YES, _NO = b"yes", b"no"


class EdgeOwner(Protocol):
    """The session's side of its shared-memory edges (`exchanges.SessionCollectives`).

    Attributes:
        generation: how often all agreements were discarded.
        offered_edges: senders that still wait for the receiver's answer.
        open_edges: edges that hold memory.
    """

    mail: TensorMailbox
    generation: int
    offered_edges: list[ShmEdgeSender]
    open_edges: set[Any]

    def handshake_channel(self, step: int, key: Sequence[Any], purpose: str) -> HandshakeChannel:
        """Return the channel on which the two ends of an edge agree."""


def edges_that_fit(
    specs: Mapping[int, TensorSpec], ragged: Collection[int] = ()
) -> dict[int, TensorSpec]:
    """Return the edges between two devices that go through shared memory; equal at both ends.

    Args:
        ragged: the edges on which only rows in use travel.
    """
    found, left = {}, MAX_SLOT_BYTES
    for edge, spec in sorted(specs.items()):
        most = MAX_RAGGED_BYTES if edge in ragged else MAX_TENSOR_BYTES
        if 0 < nbytes(spec) <= most and _slot_bytes(spec) <= left:
            found[edge] = spec
            left -= _slot_bytes(spec)
    return found


def _slot_bytes(spec: TensorSpec) -> int:
    """Return the bytes of all slots of an edge."""
    return _SLOTS * align_up(nbytes(spec))


class _EdgeSlots:
    """An edge's counter and slots.

    Args:
        line: the counter's line of memory.
        memory: the slots, one after the other.
    """

    def __init__(self, line: Array, memory: Array, spec: TensorSpec) -> None:
        self.counter = SharedCounters(line, 1)
        self.stamp = line.view(np.int64)[_STAMP_WORD : _STAMP_WORD + 1]
        self.rows = line.view(np.int64)[_ROWS_WORD : _ROWS_WORD + _SLOTS]
        step, size = align_up(nbytes(spec)), nbytes(spec)
        self.arrays: list[Array] = [
            memory[at : at + size].view(spec.dtype).reshape(spec.shape)
            for at in range(0, _slot_bytes(spec), step)
        ]


class ShmEdge:
    """One end of all shared-memory edges from one device to another.

    Args:
        key: identifies the pair of devices and the program; the same at both ends.
        peer: the worker at the other end.
        awaited: for each edge, how errors name it and which worker it comes from.
        specs: spec of each edge, as `edges_that_fit` selects them.
    """

    def __init__(
        self,
        owner: EdgeOwner,
        key: tuple[str, str],
        peer: int,
        awaited: Mapping[int, Awaited],
        specs: Mapping[int, TensorSpec],
    ) -> None:
        self.peer = peer
        self._owner = owner
        self._key = key
        self._awaited = awaited
        self._specs = specs
        self._generation = -1  # the owner's, when the two ends last agreed
        self._step = -1
        self._use = 0  # steps since the two ends agreed
        self._segment: SharedMemorySegment | None = None
        self._receiver_progress: SharedCounters | None = None  # published by the receiver
        self._slots: dict[int, _EdgeSlots] = {}

    def _handshake(self, step: int, edge: int) -> HandshakeChannel:
        """Return the channel to the other end; errors name `edge` as the reason of a wait."""
        return self._owner.handshake_channel(step, self._key, self._awaited[edge].what)

    def _begin_step(self, step: int) -> bool:
        """Begin a step; return True if the two ends have to agree in it."""
        self._step = step
        if self._generation == self._owner.generation:
            self._use += 1
            return False
        self.close()
        self._generation, self._use = self._owner.generation, 0
        return True

    def _total_bytes(self) -> int:
        """Return the bytes of the receiver's counter, the edges' counters and the slots."""
        return COUNTER_BYTES * (1 + len(self._specs)) + sum(map(_slot_bytes, self._specs.values()))

    def _map(self, segment: SharedMemorySegment) -> None:
        memory = segment.memory
        self._receiver_progress = SharedCounters(memory[:COUNTER_BYTES], 1)
        line, start = COUNTER_BYTES, COUNTER_BYTES * (1 + len(self._specs))
        for edge, spec in self._specs.items():
            end = start + _slot_bytes(spec)
            self._slots[edge] = _EdgeSlots(
                memory[line : line + COUNTER_BYTES], memory[start:end], spec
            )
            line, start = line + COUNTER_BYTES, end

    def _wait(self, counter: SharedCounters, value: int, step: int, edge: int) -> None:
        if counter.wait_all(value, CANCEL_CHECK_SECONDS) >= 0:
            self._owner.mail.wait_until(
                step,
                self._awaited[edge],
                lambda _: counter.wait_all(value, CANCEL_CHECK_SECONDS) < 0,
            )

    def _try_open(self, make: Callable[[], SharedMemorySegment]) -> SharedMemorySegment | None:
        """Create or attach the memory and hold it; None if that fails or too many are open."""
        if len(self._owner.open_edges) < MAX_OPEN_EDGES:
            with contextlib.suppress(TransportError):
                self._segment = make()
                self._owner.open_edges.add(self)
        return self._segment

    def _release(self) -> None:
        self._owner.open_edges.discard(self)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        """Release the memory. The next step agrees anew."""
        self._slots.clear()
        self._receiver_progress = None
        self._generation = -1
        self._release()


class ShmEdgeSender(ShmEdge):
    """The sending end."""

    def send(self, step: int, edge: int, array: Array) -> bool:
        """Copy a tensor into its slot; return False if it has to go as a message.

        Raises:
            GraphflowError: the step was cancelled while the receiver had no free slot.
        """
        if step != self._step:
            if self._begin_step(step):
                self._offer(step, edge)
            # A plain load is enough before a write to the slot. A read would need an ordered one.
            elif (
                self._receiver_progress is not None
                and self._receiver_progress.words.item(0) < self._use - 1
            ):
                self._wait(self._receiver_progress, self._use - 1, step, edge)
        slots = self._slots.get(edge)
        if slots is None:
            return False
        which = self._use % _SLOTS
        slot = slots.arrays[which]
        if slot.ndim:
            slots.rows[which] = rows = array.shape[0]
            slot = slot if rows == slot.shape[0] else slot[:rows]
        slot[...] = array  # for small arrays this takes half the time of `copyto`
        slots.stamp[0] = monotonic_ns()
        slots.counter.publish(0, self._use)
        return True

    def _offer(self, step: int, edge: int) -> None:
        segment = self._try_open(lambda: SharedMemorySegment.create(self._total_bytes()))
        token = b"" if segment is None else segment.token.encode()
        self._handshake(step, edge).send("token", self.peer, token)
        self._owner.offered_edges.append(self)

    def finish_handshake(self, step: int) -> None:
        """Wait for the receiver's answer, at the end of the step that offered the memory.

        Raises:
            GraphflowError: the step was cancelled.
        """
        answer = self._handshake(step, min(self._specs)).receive("found", self.peer)
        if answer == _YES and self._segment is not None:
            self._map(self._segment)
        else:
            self._release()


class ShmEdgeReceiver(ShmEdge):
    """The receiving end."""

    def receive(self, step: int, edge: int) -> Array | None:
        """Return the tensor of an edge; None if it comes as a message.

        The array is a read-only view of its slot. The sender writes to the slot again two steps
        later, once this end has begun the step in between.

        Raises:
            StepTimeout: the tensor did not come before the deadline.
            GraphflowError: the error that the step was cancelled with.
        """
        if step != self._step:
            if self._begin_step(step):
                self._attach(step, edge)
            elif self._receiver_progress is not None:
                self._receiver_progress.publish(0, self._use)
        slots = self._slots.get(edge) if self._use else None
        if slots is None:
            return None
        self._wait(slots.counter, self._use, step, edge)
        which = self._use % _SLOTS
        slot = slots.arrays[which]
        if slot.ndim and (rows := slots.rows.item(which)) < slot.shape[0]:
            return slot[:rows]
        return slot

    def arrival_time(self, edge: int) -> int:
        """Return when the last received tensor arrived, in ns of the host's monotonic clock."""
        return min(int(self._slots[edge].stamp[0]), monotonic_ns())

    def _attach(self, step: int, edge: int) -> None:
        channel = self._handshake(step, edge)
        token = channel.receive("token", self.peer).decode("ascii", "replace")
        segment = self._try_open(lambda: SharedMemorySegment.attach(token))
        if segment is not None and segment.memory.nbytes == self._total_bytes():
            self._map(segment)
            for array in (each for slots in self._slots.values() for each in slots.arrays):
                array.flags.writeable = False
        else:
            self._release()
        channel.send("found", self.peer, _YES if self._slots else _NO)
