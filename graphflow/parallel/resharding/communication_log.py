"""Records of communication: for each exchange its kind, its bytes, and the user's node that needed
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.ops.communication.collectives import received_bytes
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor, ShardedTensor
from graphflow.parallel.resharding.shard_builder import CROSS_DEVICE_SCOPE, ShardBuilder


@dataclass(frozen=True)
class CommunicationLog:
    """Records the exchanges of one tensor for one node.

    Args:
        builder: knows the mesh and keeps the records.
        cause: the node that needs the tensor.
        name: the name of the tensor.
        to: the list that records are appended to; default: the builder's.
    """

    builder: ShardBuilder
    cause: Node
    name: str
    to: list[CommunicationRecord] | None = None

    def __call__(self, kind: str, axes: Sequence[str], sent: Mapping[SentTensor, float]) -> None:
        """Record that parts were sent from place to place along some mesh axes."""
        if not self.builder.mesh.sequential.issuperset(axes) and sent:
            made = self.builder.records if self.to is None else self.to
            cause, where = user_name(self.cause), self.cause.location
            axis = "×".join(axes)
            made.append(
                CommunicationRecord(
                    kind, axis, self.name, round(sum(sent.values())), cause, where, sent
                )
            )

    def exchange(self, kind: str, axes: Sequence[str], made: ShardedTensor) -> None:
        """Record a collective along some mesh axes, by what each place receives in it."""
        sent: dict[SentTensor, float] = {}
        for part in made.shards:
            node = part.node
            while node.op.joint is None and node.inputs:
                node = node.inputs[0].node
            if node.op.joint is not None:
                sent[node.outputs[0], None] = self._received_bytes(node)
        self(kind, axes, sent)

    def _received_bytes(self, node: Node) -> float:
        """Return the bytes that the place of one node of a collective receives from other ranks."""
        guess = self.builder.partitioner.guess
        specs = [t.spec.with_shape(tuple(map(guess, t.shape))) for t in node.inputs]
        others = (i for i in range(len(specs)) if i != node.attrs["rank"])
        return sum(received_bytes(node, i, specs, guess) for i in others)


def user_name(node: Node) -> str:
    """Return the name of the user's node that a node stands for. A node of an expansion has the
    op's name."""
    while node.name.startswith(CROSS_DEVICE_SCOPE) and node.origin is not None:
        node = node.origin
    return node.name


def is_gradient(node: Node) -> bool:
    """Return True if a node was made by differentiation, or stands for one that was."""
    return "gradients/" in user_name(node)


__all__ = ["CommunicationLog", "user_name", "is_gradient"]
