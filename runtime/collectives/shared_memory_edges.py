"""Passages: tensors of cut edges, from device to device, through memory that both processes see.

As a message a tensor costs who sends it 0.3 ms after long computation, and is there 0.2 ms later:
frames, sockets, acknowledgements. Here it is copied into a slot, and a counter says so
(`shared_counters.py`). Each edge has two slots, so who sends gets at most one step ahead of who
receives.

In a program's first step, who sends makes the memory and says where it lies, ahead of the tensors,
which still go as messages; it ends that step by hearing whether the memory was found. So from then
on both know the way. As the ways of exchanges, passages are forgotten when a step fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING

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
from graphflow.runtime.transport.shared_memory import Segment
from graphflow.runtime.wire.tensor_mailbox import Awaited

if TYPE_CHECKING:
    from graphflow.runtime.collectives.exchanges import SessionCollectives

MAX_TENSOR_BYTES = 1 << 20
"""Bytes of a tensor that goes this way; for larger ones a message costs little beside the copy."""

MAX_SLOT_BYTES = 32 << 20
"""Bytes of a passage's slots; edges that find no room in it go as messages."""

MAX_OPEN_EDGES = 64
"""Passages that a session has open on a worker; each takes file descriptors."""

_SLOTS = 2
_STAMP_WORD = 3  # the word of a gate's line in which stands when its tensor was there, in ns
_YES, _NO = b"yes", b"no"


def edges_that_fit(specs: Mapping[int, TensorSpec]) -> dict[int, TensorSpec]:
    """The edges between two devices that a passage has room for: at both ends the same."""
    found, left = {}, MAX_SLOT_BYTES
    for edge, spec in sorted(specs.items()):
        if 0 < nbytes(spec) <= MAX_TENSOR_BYTES and _slot_bytes(spec) <= left:
            found[edge] = spec
            left -= _slot_bytes(spec)
    return found


def _slot_bytes(spec: TensorSpec) -> int:
    """Bytes of an edge's slots."""
    return _SLOTS * align_up(nbytes(spec))


class _EdgeSlots:
    """What an edge has of the memory."""

    def __init__(self, gate: Array, memory: Array, spec: TensorSpec) -> None:
        self.counter = SharedCounters(gate, 1)
        self.stamp = gate.view(np.int64)[_STAMP_WORD : _STAMP_WORD + 1]
        step, size = align_up(nbytes(spec)), nbytes(spec)
        self.arrays: list[Array] = [
            memory[at : at + size].view(spec.dtype).reshape(spec.shape)
            for at in range(0, _slot_bytes(spec), step)
        ]


class ShmEdge:
    """One end of what goes from a device to another.

    Args:
        key: tells it from others, at both ends.
        peer: the worker at the other end.
        what: how each edge is told in errors, and where what is waited for comes from.
        specs: of its edges, as `carried` gives them.
    """

    def __init__(
        self,
        owner: SessionCollectives,
        key: tuple[str, str],
        peer: int,
        what: Mapping[int, Awaited],
        specs: Mapping[int, TensorSpec],
    ) -> None:
        self.peer = peer
        self._owner = owner
        self._key = key
        self._what = what
        self._specs = specs
        self._generation = -1  # of the ways that the session's devices agreed on
        self._step = -1
        self._use = 0  # steps since then
        self._segment: Segment | None = None
        self._receiver_progress: SharedCounters | None = None  # told by who receives
        self._slots: dict[int, _EdgeSlots] = {}

    def _handshake(self, step: int, edge: int) -> HandshakeChannel:
        """How the two ends agree; `edge` is what one of them waits for meanwhile."""
        return self._owner.handshake_channel(step, self._key, self._what[edge].what)

    def _begin_step(self, step: int) -> bool:
        """Whether a step is the first one, in which the way is agreed; else its use is counted."""
        self._step = step
        if self._generation == self._owner.generation:
            self._use += 1
            return False
        self.close()
        self._generation, self._use = self._owner.generation, 0
        return True

    def _total_bytes(self) -> int:
        """Bytes of memory: gates, then slots."""
        return COUNTER_BYTES * (1 + len(self._specs)) + sum(map(_slot_bytes, self._specs.values()))

    def _map(self, segment: Segment) -> None:
        memory = segment.memory
        self._receiver_progress = SharedCounters(memory[:COUNTER_BYTES], 1)
        gate, start = COUNTER_BYTES, COUNTER_BYTES * (1 + len(self._specs))
        for edge, spec in self._specs.items():
            end = start + _slot_bytes(spec)
            self._slots[edge] = _EdgeSlots(
                memory[gate : gate + COUNTER_BYTES], memory[start:end], spec
            )
            gate, start = gate + COUNTER_BYTES, end

    def _wait(self, gate: SharedCounters, value: int, step: int, edge: int) -> None:
        if gate.wait_all(value, CANCEL_CHECK_SECONDS) >= 0:
            self._owner.mail.until(
                step, self._what[edge], lambda _: gate.wait_all(value, CANCEL_CHECK_SECONDS) < 0
            )

    def _try_open(self, segment: Callable[[], Segment]) -> Segment | None:
        """The memory, held from now on; None, and messages are the way, if it is not to be had."""
        if len(self._owner.open_edges) < MAX_OPEN_EDGES:
            with contextlib.suppress(TransportError):
                self._segment = segment()
                self._owner.open_edges.add(self)
        return self._segment

    def _release(self) -> None:
        self._owner.open_edges.discard(self)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        """Let go of the memory."""
        self._slots.clear()
        self._receiver_progress = None
        self._generation = -1
        self._release()


class ShmEdgeSender(ShmEdge):
    """The end that sends."""

    def send(self, step: int, edge: int, array: Array) -> bool:
        """Copy a tensor to where the other end finds it; False if it has to go as a message.

        Raises:
            GraphflowError: the step was given up, before the other end had room.
        """
        if step != self._step:
            if self._begin_step(step):
                self._offer(step, edge)
            # Before memory is written to, a plain look is enough; before it is read, it is not.
            elif (
                self._receiver_progress is not None
                and self._receiver_progress.words.item(0) < self._use - 1
            ):
                self._wait(self._receiver_progress, self._use - 1, step, edge)
        slots = self._slots.get(edge)
        if slots is None:
            return False
        slots.arrays[self._use % _SLOTS][...] = array  # half of what `copyto` takes for small ones
        slots.stamp[0] = monotonic_ns()
        slots.counter.publish(0, self._use)
        return True

    def _offer(self, step: int, edge: int) -> None:
        segment = self._try_open(lambda: Segment.create(self._total_bytes()))
        token = b"" if segment is None else segment.token.encode()
        self._handshake(step, edge).send("token", self.peer, token)
        self._owner.offered_edges.append(self)

    def finish_handshake(self, step: int) -> None:
        """Hear whether the other end found the memory, at the end of the step that offered it.

        Raises:
            GraphflowError: the step was given up.
        """
        answer = self._handshake(step, min(self._specs)).receive("found", self.peer)
        if answer == _YES and self._segment is not None:
            self._map(self._segment)
        else:
            self._release()


class ShmEdgeReceiver(ShmEdge):
    """The end that receives."""

    def receive(self, step: int, edge: int) -> Array | None:
        """The tensor of an edge, in memory that nobody writes to before this end takes part in the
        next step but one; None if it comes as a message.

        Raises:
            StepTimeout: it did not come before the deadline.
            GraphflowError: what the step was cancelled with.
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
        return slots.arrays[self._use % _SLOTS]

    def arrival_time(self, edge: int) -> int:
        """When the tensor that was taken last was there, in ns of the host's monotonic clock."""
        return min(int(self._slots[edge].stamp[0]), monotonic_ns())

    def _attach(self, step: int, edge: int) -> None:
        line = self._handshake(step, edge)
        token = line.receive("token", self.peer).decode("ascii", "replace")
        segment = self._try_open(lambda: Segment.attach(token))
        if segment is not None and segment.memory.nbytes == self._total_bytes():
            self._map(segment)
            for array in (each for slots in self._slots.values() for each in slots.arrays):
                array.flags.writeable = False
        else:
            self._release()
        line.send("found", self.peer, _YES if self._slots else _NO)
