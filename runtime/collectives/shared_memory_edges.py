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
from graphflow.runtime.collectives.group_setup import Line
from graphflow.runtime.collectives.rank_buffers import Array
from graphflow.runtime.collectives.shared_counters import LINE, SLICE, SharedCounters
from graphflow.runtime.transport.shared_memory import Segment
from graphflow.runtime.wire.tensor_mailbox import Awaited

if TYPE_CHECKING:
    from graphflow.runtime.collectives.exchanges import Exchanges

MOST = 1 << 20
"""Bytes of a tensor that goes this way; for larger ones a message costs little beside the copy."""

ROOM = 32 << 20
"""Bytes of a passage's slots; edges that find no room in it go as messages."""

HELD = 64
"""Passages that a session has open on a worker; each takes file descriptors."""

_SLOTS = 2
_STAMP = 3  # the word of a gate's line in which stands when its tensor was there, in ns
_YES, _NO = b"yes", b"no"


def carried(specs: Mapping[int, TensorSpec]) -> dict[int, TensorSpec]:
    """The edges between two devices that a passage has room for: at both ends the same."""
    found, left = {}, ROOM
    for edge, spec in sorted(specs.items()):
        if 0 < nbytes(spec) <= MOST and _room(spec) <= left:
            found[edge] = spec
            left -= _room(spec)
    return found


def _room(spec: TensorSpec) -> int:
    """Bytes of an edge's slots."""
    return _SLOTS * align_up(nbytes(spec))


class _Slots:
    """What an edge has of the memory."""

    def __init__(self, gate: Array, memory: Array, spec: TensorSpec) -> None:
        self.gate = SharedCounters(gate, 1)
        self.stamp = gate.view(np.int64)[_STAMP : _STAMP + 1]
        step, size = align_up(nbytes(spec)), nbytes(spec)
        self.arrays: list[Array] = [
            memory[at : at + size].view(spec.dtype).reshape(spec.shape)
            for at in range(0, _room(spec), step)
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
        owner: Exchanges,
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
        self._round = -1  # of the ways that the session's devices agreed on
        self._step = -1
        self._use = 0  # steps since then
        self._segment: Segment | None = None
        self._begun: SharedCounters | None = None  # told by who receives
        self._slots: dict[int, _Slots] = {}

    def _line(self, step: int, edge: int) -> Line:
        """How the two ends agree; `edge` is what one of them waits for meanwhile."""
        return self._owner.line(step, self._key, self._what[edge].what)

    def _is_new(self, step: int) -> bool:
        """Whether a step is the first one, in which the way is agreed; else its use is counted."""
        self._step = step
        if self._round == self._owner.round:
            self._use += 1
            return False
        self.close()
        self._round, self._use = self._owner.round, 0
        return True

    def _ground(self) -> int:
        """Bytes of memory: gates, then slots."""
        return LINE * (1 + len(self._specs)) + sum(map(_room, self._specs.values()))

    def _map(self, segment: Segment) -> None:
        memory = segment.memory
        self._begun = SharedCounters(memory[:LINE], 1)
        gate, start = LINE, LINE * (1 + len(self._specs))
        for edge, spec in self._specs.items():
            end = start + _room(spec)
            self._slots[edge] = _Slots(memory[gate : gate + LINE], memory[start:end], spec)
            gate, start = gate + LINE, end

    def _wait(self, gate: SharedCounters, value: int, step: int, edge: int) -> None:
        if gate.pending(value, SLICE) >= 0:
            self._owner.mail.until(step, self._what[edge], lambda _: gate.pending(value, SLICE) < 0)

    def _held(self, segment: Callable[[], Segment]) -> Segment | None:
        """The memory, held from now on; None, and messages are the way, if it is not to be had."""
        if len(self._owner.open) < HELD:
            with contextlib.suppress(TransportError):
                self._segment = segment()
                self._owner.open.add(self)
        return self._segment

    def _let_go(self) -> None:
        self._owner.open.discard(self)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        """Let go of the memory."""
        self._slots.clear()
        self._begun = None
        self._round = -1
        self._let_go()


class ShmEdgeSender(ShmEdge):
    """The end that sends."""

    def send(self, step: int, edge: int, array: Array) -> bool:
        """Copy a tensor to where the other end finds it; False if it has to go as a message.

        Raises:
            GraphflowError: the step was given up, before the other end had room.
        """
        if step != self._step:
            if self._is_new(step):
                self._offer(step, edge)
            # Before memory is written to, a plain look is enough; before it is read, it is not.
            elif self._begun is not None and self._begun.words.item(0) < self._use - 1:
                self._wait(self._begun, self._use - 1, step, edge)
        slots = self._slots.get(edge)
        if slots is None:
            return False
        slots.arrays[self._use % _SLOTS][...] = array  # half of what `copyto` takes for small ones
        slots.stamp[0] = monotonic_ns()
        slots.gate.tell(0, self._use)
        return True

    def _offer(self, step: int, edge: int) -> None:
        segment = self._held(lambda: Segment.create(self._ground()))
        token = b"" if segment is None else segment.token.encode()
        self._line(step, edge).tell("token", self.peer, token)
        self._owner.offers.append(self)

    def settle(self, step: int) -> None:
        """Hear whether the other end found the memory, at the end of the step that offered it.

        Raises:
            GraphflowError: the step was given up.
        """
        answer = self._line(step, min(self._specs)).hear("found", self.peer)
        if answer == _YES and self._segment is not None:
            self._map(self._segment)
        else:
            self._let_go()


class ShmEdgeReceiver(ShmEdge):
    """The end that receives."""

    def take(self, step: int, edge: int) -> Array | None:
        """The tensor of an edge, in memory that nobody writes to before this end takes part in the
        next step but one; None if it comes as a message.

        Raises:
            StepTimeout: it did not come before the deadline.
            GraphflowError: what the step was cancelled with.
        """
        if step != self._step:
            if self._is_new(step):
                self._find(step, edge)
            elif self._begun is not None:
                self._begun.tell(0, self._use)
        slots = self._slots.get(edge) if self._use else None
        if slots is None:
            return None
        self._wait(slots.gate, self._use, step, edge)
        return slots.arrays[self._use % _SLOTS]

    def arrived(self, edge: int) -> int:
        """When the tensor that was taken last was there, in ns of the host's monotonic clock."""
        return min(int(self._slots[edge].stamp[0]), monotonic_ns())

    def _find(self, step: int, edge: int) -> None:
        line = self._line(step, edge)
        token = line.hear("token", self.peer).decode("ascii", "replace")
        segment = self._held(lambda: Segment.attach(token))
        if segment is not None and segment.memory.nbytes == self._ground():
            self._map(segment)
            for array in (each for slots in self._slots.values() for each in slots.arrays):
                array.flags.writeable = False
        else:
            self._let_go()
        line.tell("found", self.peer, _YES if self._slots else _NO)
