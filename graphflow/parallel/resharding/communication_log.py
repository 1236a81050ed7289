"""Notes of what travels: for each move its kind, its bytes, and who asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.ops.communication.collectives import crossing
from graphflow.parallel.mesh.layouts import Move, Sent, Value

if TYPE_CHECKING:
    from graphflow.parallel.resharding.resharder import Moves

BETWEEN = "moves/"
"""The scope of what is made for an op, and is none of the user's."""


@dataclass(frozen=True)
class Note:
    """Notes moves of one tensor for one node.

    Args:
        to: where, if not with the moves that were made.
    """

    moves: Moves
    cause: Node
    name: str
    to: list[Move] | None = None

    def __call__(self, kind: str, axes: Sequence[str], sent: Mapping[Sent, float]) -> None:
        """Parts were sent from place to place, along some axes of the mesh."""
        if not self.moves.mesh.local.issuperset(axes) and sent:
            made = self.moves.made if self.to is None else self.to
            cause, where = called(self.cause), self.cause.location
            axis = "×".join(axes)
            made.append(Move(kind, axis, self.name, round(sum(sent.values())), cause, where, sent))

    def exchange(self, kind: str, axes: Sequence[str], made: Value) -> None:
        """Groups of places made a value together."""
        sent: dict[Sent, float] = {}
        for part in made.parts:
            node = part.node
            while node.op.joint is None and node.inputs:
                node = node.inputs[0].node
            if node.op.joint is not None:
                sent[node.outputs[0], None] = self._received(node)
        self(kind, axes, sent)

    def _received(self, node: Node) -> float:
        """Bytes that the place of one node of a collective gets of others."""
        guess = self.moves.cuts.guess
        specs = [t.spec.with_shape(tuple(map(guess, t.shape))) for t in node.inputs]
        others = (i for i in range(len(specs)) if i != node.attrs["rank"])
        return sum(crossing(node, i, specs, guess) for i in others)


def called(node: Node) -> str:
    """What a node is called for the user: of what an op was expanded into, the op's name."""
    while node.name.startswith(BETWEEN) and node.origin is not None:
        node = node.origin
    return node.name


def is_gradient(node: Node) -> bool:
    """Whether a node was made by differentiating, or stands for one that was."""
    return "gradients/" in called(node)


__all__ = ["BETWEEN", "Note", "called", "is_gradient"]
