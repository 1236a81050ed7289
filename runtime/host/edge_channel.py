"""The channel of a program: the edges between its device and others.

Devices of one worker hand tensors over by reference. Between workers tensors go through shared
memory (`runtime/collectives/shared_memory_edges.py`), or as messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node
from graphflow.ir.spec import TensorSpec
from graphflow.ops.communication.send_recv import RECEIVING_OPS, edges_of
from graphflow.runtime.collectives.program_collectives import DeviceCollective, ProgramCollectives
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.collectives.ring_ends import LoopEdges, RingReceiver, RingSender
from graphflow.runtime.collectives.shared_memory_edges import (
    ShmEdgeReceiver,
    ShmEdgeSender,
    edges_that_fit,
)
from graphflow.runtime.collectives.shared_memory_rings import LoopRings
from graphflow.runtime.memory.backend import DeviceBackend
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import CREDIT_PREFIX, EDGE_BITS


class EdgeTransport(Protocol):
    """The means by which the devices of one session exchange tensors (`SessionState`)."""

    mail: TensorMailbox

    def send(
        self, step: int, edge: int, target: DeviceName, array: Any, backend: DeviceBackend
    ) -> None:
        """Send a tensor to a device: by reference, or as a message to its worker."""

    def send_signal(self, step: int, what: str, device: DeviceName) -> None:
        """Send a device a key that carries no tensor."""

    def send_shared(
        self, step: int, edge: int, passage: ShmEdgeSender | RingSender, array: Any
    ) -> bool:
        """Send a tensor through shared memory; return False if the edge cannot use it."""

    def receive_shared(self, step: int, edge: int, passage: ShmEdgeReceiver | RingReceiver) -> Any:
        """Return a tensor from shared memory; None if the edge does not use it."""


def exchanges_with_other_workers(partition: Partition) -> bool:
    """Return True if a device agrees with devices of other workers on how tensors travel.

    All such devices must keep, and drop, the compiled forms of a program alike.
    """
    here = _device(partition.device).worker
    return bool(partition.graph.of_op("collective_start")) or any(
        _device(end).worker != here
        for node in partition.graph.walk()
        for end in edges_of(node).values()
    )


@dataclass(frozen=True)
class CrossDeviceEdges:
    """The edges of one device that lead to other devices; implements `Channel`."""

    session: EdgeTransport
    backend: DeviceBackend
    incoming: Mapping[int, Awaited]  # the tensor of each edge, for errors
    sources: Mapping[int, DeviceName]  # its source device
    part: ProgramCollectives  # this device's part of the program's exchanges
    outward: Mapping[int, ShmEdgeSender]  # edges that may go through shared memory
    inward: Mapping[int, ShmEdgeReceiver]
    rings: LoopRings  # of the edges in loops

    @staticmethod
    def for_program(
        partition: Partition,
        bindings: Mapping[str, int],
        session: EdgeTransport,
        backend: DeviceBackend,
        part: ProgramCollectives,
    ) -> CrossDeviceEdges:
        """Return the edges of a partition, for some sizes."""
        recvs = [
            (node, edge, source)
            for node in partition.graph.walk()
            if node.op.name in RECEIVING_OPS
            for edge, source in edges_of(node).items()
        ]
        incoming = {edge: _describe_incoming(*each) for each in recvs for edge in [each[1]]}
        sources = {edge: _device(source) for _, edge, source in recvs}
        outward: dict[int, ShmEdgeSender] = {}
        inward: dict[int, ShmEdgeReceiver] = {}
        mine = _device(partition.device)
        for end, nodes in _cut_edge_nodes(partition).items():
            peer = _device(end)
            if (
                peer.worker is None
                or peer.worker == mine.worker
                or session.mail.on_transfer is None
            ):
                continue
            if peer.kind != "cpu" or mine.kind != "cpu":
                continue  # a GPU's tensors are in its own memory
            ragged = _ragged_edges(nodes)
            sent, received = (
                edges_that_fit(_edge_specs(nodes, op, bindings), ragged) for op in ("send", "recv")
            )
            waits = {edge: Awaited(f"room for edge {edge} at {end}", peer.worker) for edge in sent}
            outward |= part.edge_senders(end, peer.worker, waits, sent)
            inward |= part.edge_receivers(end, peer.worker, incoming, received)
        rings = part.loop_rings(*_loop_edges(partition, bindings, session, incoming))
        return CrossDeviceEdges(session, backend, incoming, sources, part, outward, inward, rings)

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        passage = self.outward.get(edge)
        if passage is None or not self.session.send_shared(step, edge, passage, array):
            self.session.send(step, edge, _device(target), array, self.backend)

    def recv(self, step: int, edge: int) -> Any:
        passage = self.inward.get(edge)
        array = None if passage is None else self.session.receive_shared(step, edge, passage)
        if array is None:
            awaited = self.incoming[edge & (2**EDGE_BITS - 1)]
            array = self.session.mail.take(step, edge, awaited)
        return array

    def grant_credit(self, step: int, edge: int, portion: int) -> None:
        self.session.send_signal(step, f"{CREDIT_PREFIX}{edge}/{portion}", self.sources[edge])

    def wait_for_credit(self, step: int, edge: int, portion: int, target: str) -> None:
        what = f"room on edge {edge} in a loop, of which {target} has not received enough,"
        awaited = Awaited(what, _device(target).worker)
        self.session.mail.take(step, f"{CREDIT_PREFIX}{edge}/{portion}", awaited)

    def join_collective(self, what: Collective, name: str) -> DeviceCollective:
        return self.part.join(what, name)

    def shared_memory(self, nbytes: int) -> Any:
        return self.part.shared_memory(nbytes)

    def register_buffers(self, segment: SharedMemorySegment) -> None:
        self.part.arena = segment

    def forget_agreements(self) -> None:
        self.part.forget_agreements()

    def close(self) -> None:
        self.part.close()

    def send_through(self, ring: RingSender, step: int, key: int, array: Any) -> None:
        self.session.send_shared(step, key, ring, array)

    def receive_through(self, ring: RingReceiver, step: int, key: int) -> Any:
        return self.session.receive_shared(step, key, ring)

    def wait_for_any(
        self, step: int, edges: Sequence[int], numbers: Sequence[int], first: int
    ) -> int:
        what = f"the first of {', '.join(self.incoming[edge].what for edge in edges)}"
        return self.rings.wait_for_any(step, edges, numbers, first, Awaited(what))

    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        self.session.mail.check_loop(step, loop, done, of)

    def cancel(self, step: int, reason: GraphflowError) -> None:
        self.session.mail.cancel(step, reason)


def _cut_edge_nodes(partition: Partition) -> dict[str, list[Node]]:
    """Return the send and receive nodes of each other device, except those inside bodies."""
    found: dict[str, list[Node]] = {}
    for node in partition.graph.nodes:
        if node.op.name in ("send", "recv"):
            end = node.attrs["target" if node.op.name == "send" else "source"]
            found.setdefault(end, []).append(node)
    return found


def _edge_specs(nodes: list[Node], op: str, bindings: Mapping[str, int]) -> dict[int, TensorSpec]:
    """Return the specs of the tensors on edges."""
    return {
        int(node.attrs["edge"]): (node.inputs or node.outputs)[0].spec.bind(bindings)
        for node in nodes
        if node.op.name == op
    }


def _ragged_edges(nodes: list[Node]) -> set[int]:
    """Return the edges of send and receive nodes on which only rows in use travel."""
    return {
        int(node.attrs["edge"])
        for node in nodes
        if len(node.inputs) > 1 or node.attrs.get("ragged", False)
    }


@cache
def _device(name: str) -> DeviceName:
    return DeviceName.parse(name)


def _describe_incoming(recv: Node, edge: int, source: str) -> Awaited:
    name = recv.name.removeprefix("recv/")
    what = f"edge {edge} from {source} ({name!r}, made at {recv.location})"
    return Awaited(what, _device(source).worker)


def _loop_edges(
    partition: Partition,
    bindings: Mapping[str, int],
    session: EdgeTransport,
    incoming: Mapping[int, Awaited],
) -> tuple[dict[str, LoopEdges], dict[str, LoopEdges], frozenset[int]]:
    """Return the edges in loops to, and from, each CPU of another worker.

    Also returns the edges from which several nodes receive.
    """
    mine = _device(partition.device)
    outside = set(partition.graph.nodes)
    receivers = [n for n in partition.graph.walk() if n.op.name in RECEIVING_OPS]
    counts = Counter(edge for node in receivers for edge in edges_of(node))
    copied = frozenset(edge for edge, count in counts.items() if count > 1)
    found: tuple[dict[str, LoopEdges], dict[str, LoopEdges]] = ({}, {})
    if session.mail.on_transfer is None or mine.kind != "cpu":
        return *found, copied
    for node in partition.graph.walk():
        for edge, end in edges_of(node).items() if node not in outside else ():
            peer = _device(end)
            if peer.worker in (None, mine.worker) or peer.kind != "cpu":
                continue
            receives = node.op.name in RECEIVING_OPS
            edges = found[receives].setdefault(end, LoopEdges(peer.worker or 0, {}, {}))
            tensor = node.outputs[0] if receives else node.inputs[0]
            edges.specs[edge] = tensor.spec.bind(bindings)
            edges.awaited[edge] = (
                incoming[edge]
                if receives
                else Awaited(f"room on edge {edge} at {end}", peer.worker)
            )
    return *found, copied
