"""Rings of slots in shared memory, for tensors of edges in loops between two processes of one host.

An edge in a loop carries many tensors in a step. Each goes through the next slot of the edge's
ring. Two counters tell how many tensors the sender has put in, and how many slots the receiver has
given back. A sender that finds no free slot waits, so a ring bounds the memory of its edge.

The receiving device makes one segment for all its rings:

    post | counters of ring 0 | counters of ring 1 | … | slots of ring 0 | slots of ring 1 | …

A device that waits for any of several rings sleeps at its post, where every sender wakes it.

The two ends agree at the end of a program's first step, whose tensors travel as messages. The
receiver sends what it has made, and the sender answers whether it could attach it. Afterwards both
count the steps. A counter holds the number of the step in its upper half, so each step begins with
empty rings, whatever the ends left in them. A failed step discards what was agreed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from graphflow.errors import ProtocolError, TransportError
from graphflow.runtime.collectives.group_setup import HandshakeChannel
from graphflow.runtime.collectives.ring_ends import (
    LoopEdges,
    RingOwner,
    RingPlace,
    RingReceiver,
    RingSender,
    RingWait,
    plan_rings,
)
from graphflow.runtime.collectives.shared_counters import (
    CANCEL_CHECK_SECONDS,
    COUNTER_BYTES,
    any_counter_function,
    counter_functions,
)
from graphflow.runtime.collectives.shared_memory_edges import MAX_OPEN_EDGES
from graphflow.runtime.memory.ring_sizes import MIN_SLOTS, slot_bytes
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited
from graphflow.runtime.wire.step_values import EDGE_BITS

MIXED_WAIT_SECONDS = 0.0005
"""Seconds for which a device looks at rings before it looks at messages, if it waits for both."""

_STEP_BITS = 32  # of a counter, below the number of the step


class LoopRings:
    """The rings of a program's edges in loops, at one device.

    Args:
        key: identifies the program and its sizes; the same on all workers.
        device: the device.
        outgoing, incoming: the edges to and from each device of another worker.
        copied: edges whose tensors are copied as they are received. A slot is free again when the
            next tensor is asked for, but of these another node may still read the one before.

    Attributes:
        senders, receivers: the rings that both ends have agreed on, by edge.
        base: value of all counters when this step began.
    """

    def __init__(
        self,
        owner: RingOwner,
        key: str,
        device: str,
        outgoing: Mapping[str, LoopEdges],
        incoming: Mapping[str, LoopEdges],
        copied: frozenset[int],
    ) -> None:
        self.owner = owner
        self.copied = copied
        self.senders: dict[int, RingSender] = {}
        self.receivers: dict[int, RingReceiver] = {}
        self.base = 0
        self._key = key
        self._device = device
        self._outgoing = outgoing
        self._incoming = incoming
        self._generation = -1  # the owner's, when the ends last agreed
        self._segments: list[SharedMemorySegment] = []
        self._places: dict[int, RingPlace] = {}
        self._waits: dict[tuple[int, ...], tuple[RingWait, list[int]]] = {}
        if outgoing or incoming:  # no step should have to compile them
            counter_functions()
            any_counter_function()

    def begin_step(self) -> None:
        """Forget what was agreed before a step failed."""
        if self._generation != self.owner.generation:
            self.close()

    def wait_for_any(
        self, step: int, edges: Sequence[int], numbers: Sequence[int], first: int, awaited: Awaited
    ) -> int:
        """Return the index of an edge whose next tensor is there, through its ring or as a message.

        Args:
            numbers: the number of the next tensor of each edge.
            first: index of the edge to look at first.
            awaited: how errors name the wait.

        Raises:
            StepTimeout: no tensor came before the deadline.
            GraphflowError: the error that the step was cancelled with.
        """
        found, mail = -1, self.owner.mail
        wait, ringed = self._find_wait(tuple(edges))
        for place, i in enumerate(ringed):
            wait.values[place] = self.base + numbers[i] + 1
        begin = sum(i < first for i in ringed) % max(1, len(ringed))
        turned = [*range(first, len(edges)), *range(first)]
        keys = {
            i: (step, edges[i] | numbers[i] << EDGE_BITS)
            for i in (turned if len(ringed) < len(edges) else ())
            if i not in ringed
        }

        def look(seconds: float) -> bool:
            nonlocal found
            if ringed:
                place = wait.poll(begin, MIXED_WAIT_SECONDS if keys else CANCEL_CHECK_SECONDS)
                found = ringed[place] if place >= 0 else -1
            if found < 0 and keys:
                mail.look([*keys.values()], min(seconds, MIXED_WAIT_SECONDS if ringed else seconds))
                found = next((i for i, key in keys.items() if mail.has_tensor(*key)), -1)
            return found >= 0

        if not ringed or not look(0.0):
            mail.wait_until(step, awaited, look)
        return found

    def _find_wait(self, edges: tuple[int, ...]) -> tuple[RingWait, list[int]]:
        """Return what waits for those of some edges that have rings, and the edges' indices."""
        known = self._waits.get(edges)
        if known is None:
            ringed = [i for i, edge in enumerate(edges) if edge in self.receivers]
            wait = RingWait([self.receivers[edges[i]] for i in ringed])
            known = self._waits[edges] = (wait, ringed)
        return known

    @property
    def is_agreed(self) -> bool:
        """Whether the two ends know how their tensors travel."""
        return self._generation == self.owner.generation or not (self._outgoing or self._incoming)

    def end_step(self) -> None:
        """Empty the rings; the two ends count this step."""
        self.begin_step()
        if self._generation == self.owner.generation:
            self.base += 1 << _STEP_BITS
            for ring in self.receivers.values():
                ring.release(0)

    def offer(self, step: int) -> None:
        """Make the rings into this device, and send their places to the senders' devices."""
        specs = {e: s for each in self._incoming.values() for e, s in each.specs.items()}
        self._places, size = plan_rings(specs)
        segment = None
        if self._places:
            segment = self._try_open(lambda: SharedMemorySegment.create(size))
        for source, edges in self._incoming.items():
            places = [
                (edge, place.counters, place.start, place.slots)
                for edge, place in self._places.items()
                if edge in edges.specs and segment is not None
            ]
            told = ["" if segment is None else segment.token, places]
            channel = self._handshake(step, source, self._device)
            channel.send("rings", edges.worker, json.dumps(told).encode())

    def attach(self, step: int) -> None:
        """Attach the rings that lead to other devices, and answer whether that succeeded.

        Raises:
            GraphflowError: the step was cancelled.
            ProtocolError: the receiver names rings that cannot be.
        """
        for target, edges in self._outgoing.items():
            channel = self._handshake(step, self._device, target)
            token, rows = json.loads(channel.receive("rings", edges.worker))
            places = {int(row[0]): RingPlace(*map(int, row[1:])) for row in rows}
            segment = None
            if places:
                segment = self._try_open(partial(SharedMemorySegment.attach, token))
            if segment is not None:
                for edge, place in places.items():
                    _check_place(edges, edge, place, segment.memory.nbytes)
                    self.senders[edge] = RingSender(self, edges, edge, segment.memory, place)
            channel.send("attached", edges.worker, b"no" if segment is None else b"yes")

    def confirm(self, step: int) -> None:
        """Hear which senders have attached their rings.

        Raises:
            GraphflowError: the step was cancelled.
        """
        for source, edges in self._incoming.items():
            channel = self._handshake(step, source, self._device)
            if channel.receive("attached", edges.worker) == b"yes":
                memory = self._segments[0].memory
                for edge in [edge for edge in edges.specs if edge in self._places]:
                    ring = RingReceiver(self, edges, edge, memory, self._places[edge])
                    for array in ring.arrays:
                        array.flags.writeable = False
                    self.receivers[edge] = ring
        self._waits.clear()
        self._generation, self.base = self.owner.generation, 0

    def _handshake(self, step: int, source: str, target: str) -> HandshakeChannel:
        ends = f"from {source} to {target}"
        return self.owner.handshake_channel(
            step, (self._key, f"rings {ends}"), f"shared memory {ends}"
        )

    def _try_open(self, make: Callable[[], SharedMemorySegment]) -> SharedMemorySegment | None:
        """Create or attach memory and hold it; None if that fails or too many are open."""
        if len(self.owner.open_edges) >= MAX_OPEN_EDGES:
            return None
        with contextlib.suppress(TransportError):
            segment = make()
            self._segments.append(segment)
            self.owner.open_edges.add(segment)
            return segment
        return None

    def close(self) -> None:
        """Release the memory. The ends agree anew at the end of the next step."""
        self.senders.clear()
        self.receivers.clear()
        self._waits.clear()
        self._generation = -1
        while self._segments:
            segment = self._segments.pop()
            self.owner.open_edges.discard(segment)
            segment.close()


def agree_on_rings(all_rings: Iterable[LoopRings], step: int) -> None:
    """End a step of a worker's programs; agree on rings where that is due.

    Every worker first sends its offers, then its answers. So none waits in a circle.

    Raises:
        GraphflowError: the step was cancelled.
    """
    due = []
    for rings in all_rings:
        rings.end_step()
        if not rings.is_agreed:
            due.append(rings)
    for rings in due:
        rings.offer(step)
    for rings in due:
        rings.attach(step)
    for rings in due:
        rings.confirm(step)


def _check_place(edges: LoopEdges, edge: int, place: RingPlace, size: int) -> None:
    if (
        edge not in edges.specs
        or place.counters % COUNTER_BYTES
        or not 0 < place.counters <= size - 2 * COUNTER_BYTES
        or place.start % COUNTER_BYTES
        or place.slots < MIN_SLOTS
        or not 0 < place.start <= size - place.slots * slot_bytes(edges.specs[edge])
    ):
        raise ProtocolError(f"worker {edges.worker} names a ring of edge {edge} that cannot be")
