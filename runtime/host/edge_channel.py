"""The channel of a program: where the edges lead that were cut between its device and others.

Devices of one worker hand tensors over by reference. Between workers they go through memory that
both see (`runtime/collectives/shared_memory_edges.py`), or as messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.collectives.exchanges import DeviceCollective, ProgramCollectives
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.collectives.shared_memory_edges import ShmEdgeReceiver, ShmEdgeSender
from graphflow.runtime.memory.backend import DeviceBackend
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited
from graphflow.runtime.wire.messages import CREDIT_PREFIX, EDGE_BITS

if TYPE_CHECKING:
    from graphflow.runtime.host.session_state import SessionState


def exchanges_with_other_workers(partition: Partition) -> bool:
    """Whether a device agrees with those of other workers on ways, so that all of them keep and
    let go of a program's forms alike."""
    here = _device(partition.device).worker
    return bool(partition.graph.of_op("collective_start")) or any(
        _device(end).worker != here for end in _cut_edge_nodes(partition)
    )


@dataclass(frozen=True)
class CrossDeviceEdges:
    """Where the cut edges of one device lead: a `Channel`."""

    session: SessionState
    backend: DeviceBackend
    incoming: Mapping[int, Awaited]  # what each edge brings
    sources: Mapping[int, DeviceName]  # where it comes from
    part: ProgramCollectives  # in exchanges
    outward: Mapping[int, ShmEdgeSender]  # of edges that may go through memory that both ends see
    inward: Mapping[int, ShmEdgeReceiver]

    @staticmethod
    def for_program(
        partition: Partition,
        bindings: Mapping[str, int],
        session: SessionState,
        backend: DeviceBackend,
        part: ProgramCollectives,
    ) -> CrossDeviceEdges:
        """Those of a program, for some sizes."""
        recvs = [n for n in partition.graph.walk() if n.op.name == "recv"]
        incoming = {n.attrs["edge"]: _describe_incoming(n) for n in recvs}
        sources = {n.attrs["edge"]: _device(n.attrs["source"]) for n in recvs}
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
                continue  # a GPU's tensors come through memory of its own
            sent, received = (
                _edge_specs(nodes, "send", bindings),
                _edge_specs(nodes, "recv", bindings),
            )
            told = {edge: Awaited(f"room for edge {edge} at {end}", peer.worker) for edge in sent}
            outward |= part.edge_senders(end, peer.worker, told, sent)
            inward |= part.edge_receivers(end, peer.worker, incoming, received)
        return CrossDeviceEdges(session, backend, incoming, sources, part, outward, inward)

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

    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        self.session.mail.check_loop(step, loop, done, of)


def _cut_edge_nodes(partition: Partition) -> dict[str, list[Node]]:
    """The nodes that send to and receive from each other device, but for those in bodies."""
    found: dict[str, list[Node]] = {}
    for node in partition.graph.nodes:
        if node.op.name in ("send", "recv"):
            end = node.attrs["target" if node.op.name == "send" else "source"]
            found.setdefault(end, []).append(node)
    return found


def _edge_specs(nodes: list[Node], op: str, bindings: Mapping[str, int]) -> dict[int, TensorSpec]:
    """What edges carry."""
    return {
        int(node.attrs["edge"]): (node.inputs or node.outputs)[0].spec.bind(bindings)
        for node in nodes
        if node.op.name == op
    }


@cache
def _device(name: str) -> DeviceName:
    return DeviceName.parse(name)


def _describe_incoming(recv: Node) -> Awaited:
    source = recv.attrs["source"]
    name = recv.name.removeprefix("recv/")
    what = f"edge {recv.attrs['edge']} from {source} ({name!r}, made at {recv.location})"
    return Awaited(what, _device(source).worker)
