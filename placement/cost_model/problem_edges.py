"""Edges of a placement problem: which node reads which tensor, and how many bytes travel for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from graphflow.ir.graph import bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import evaluate
from graphflow.ops.communication.collectives import groups_of, received_bytes
from graphflow.placement.cost_model.channel_bytes import expected_bytes
from graphflow.placement.cost_model.node_times import UNPLACED, NodeTimes
from graphflow.placement.cost_model.party_nodes import PartyNode, makers_of, operands_of, party_ends


class ProblemEdges:
    """The edges of a problem.

    Args:
        times: the nodes of the problem.
        parties: the problem's nodes after these.

    Attributes:
        tensors: tensor -> its id.
        shares: for tensors that only stand for what a collective moves: its node.
    """

    def __init__(self, times: NodeTimes, parties: tuple[PartyNode, ...]) -> None:
        self.tensors: dict[Tensor, int] = {}
        self.shares: dict[Tensor, Node] = {}
        self._times, self._parties = times, parties
        self._exchanged = frozenset(node for group in groups_of(times.nodes) for node in group)
        self._others: dict[Node, dict[int, int]] = {}  # node -> party -> number in the problem
        for i, each in enumerate(parties, start=times.count):
            self._others.setdefault(each.node, {}).update(dict.fromkeys(each.parties, i))
        self._ends = {node: party_ends(node, mine) for node, mine in self._others.items()}
        self._makers = {
            node: makers_of(node, mine, times.index[node]) for node, mine in self._others.items()
        }

    def edges(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Return producer and consumer, bytes, and tensor id of each edge.

        A collective's node reads its own rank's tensor. Of the others it gets what an exchange
        moves, if they are on other devices.
        """
        edges: list[tuple[int, int]] = []
        carried: list[Tensor] = []
        sizes: dict[Tensor, int] = {}
        maker = self._maker
        for i, node in enumerate(self._times.nodes):
            if node in self._exchanged:
                for tensor, size in self._shares_of(node):
                    edges.append((maker(tensor), i))
                    carried.append(tensor)
                    sizes[tensor] = size
                continue
            read = self._read_by(node) if node.op.name == "concurrent" else node.inputs
            for tensor in self._waited_for(read):
                if tensor.node.op.name not in UNPLACED:
                    edges.append((maker(tensor), i))
                    carried.append(tensor)
        for i, sink in enumerate(self._times.sinks, start=len(self._times.nodes)):
            for tensor in self._waited_for([sink]):
                edges.append((maker(tensor), i))
                carried.append(tensor)
        for i, party in enumerate(self._parties, start=self._times.count):
            for tensor in self._waited_for(operands_of(party.node, party.parties)):
                if tensor.node.op.name not in UNPLACED:
                    edges.append((maker(tensor), i))
                    carried.append(tensor)
        for tensor in carried:
            self.tensors.setdefault(tensor, len(self.tensors))
        moved = [sizes[t] if t in sizes else self._moved_bytes(t) for t in carried]
        return edges, moved, [self.tensors[t] for t in carried]

    def _waited_for(self, read: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that a node reads, and tokens of the parties that it waits for.

        The parties of a node end together, so whoever reads from one of them waits for all.
        """
        if self._ends:
            tokens = [t for node in {t.node for t in read} for t in self._ends.get(node, ())]
            read = [*read, *tokens]
        return read if len(read) < 2 else list(dict.fromkeys(read))

    def _maker(self, tensor: Tensor) -> int:
        known = self._makers.get(tensor.node)
        return self._times.index[tensor.node] if known is None else known[tensor.index]

    def _read_by(self, node: Node) -> list[Tensor]:
        """Return the operands of a `concurrent` node that its parties on its own device read."""
        away = self._others.get(node, {})
        return operands_of(node, [i for i in range(len(bodies(node))) if i not in away])

    def _moved_bytes(self, tensor: Tensor) -> int:
        return expected_bytes(tensor, self._times.nbytes(tensor), self._times.bindings)

    def _shares_of(self, node: Node) -> Iterator[tuple[Tensor, int]]:
        """Return what a collective's node receives from each rank, and its bytes."""
        specs = [self._times.specs[t] for t in node.inputs]
        for source, tensor in enumerate(node.inputs):
            if tensor.node.op.name in UNPLACED:
                continue
            if source == node.attrs["rank"]:
                yield tensor, self._times.nbytes(tensor)
                continue
            share = Tensor(tensor.node, tensor.index)
            self.shares[share] = node
            known = partial(evaluate, bindings=self._times.bindings)
            yield share, round(received_bytes(node, source, specs, known))
