"""New values of variables whose updates were made in shares: small ones are gathered together.

A share of an optimiser's state gives a share of the new value; each place needs all of it in the
next step. Nothing in this one waits for it, so the gathers go in buckets as gradients do.
"""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ir.op import Node
from graphflow.parallel.mesh.layouts import Layout, Value
from graphflow.parallel.resharding.communication_log import called
from graphflow.parallel.resharding.fused_collectives import gathered
from graphflow.parallel.resharding.gradient_buckets import SMALL
from graphflow.parallel.resharding.resharder import Moves

_Key = tuple[str, str, int]
"""The axis of the mesh, the dtype, and where the first place has it: a stage's are apart."""


class Updates:
    """New values on their way to variables, by the axis of the mesh and the dtype.

    Args:
        limit: bytes that are gathered at once; 0: nothing waits.
        assign: is called with an assignment and its value, as the variable lies.
    """

    def __init__(self, moves: Moves, limit: int, assign: Callable[[Node, Value], None]) -> None:
        self._moves = moves
        self._limit = limit
        self._assign = assign
        self._open: dict[_Key, list[tuple[Node, Value]]] = {}
        self._waiting: dict[_Key, int] = {}  # bytes

    def add(self, node: Node, value: Value, layout: Layout) -> None:
        """Assign a value, now or when its bucket is full.

        Args:
            layout: of the variable.
        """
        axis = self._gathered_along(value, layout)
        size = self._moves.nbytes(value.spec, layout)
        if axis is None or size * SMALL > self._limit:
            self._assign(node, self._moves.to(value, layout, node, called(node.inputs[1].node)))
            return
        home = self._moves.home(node, self._moves.mesh.places[0])
        key = (axis, value.spec.dtype.name, home)
        self._open.setdefault(key, []).append((node, value))
        self._waiting[key] = self._waiting.get(key, 0) + size
        if self._waiting[key] >= self._limit:
            self._close(key)

    def flush(self) -> None:
        """Assign all that wait."""
        for key in list(self._open):
            self._close(key)

    def _gathered_along(self, value: Value, layout: Layout) -> str | None:
        """The one axis of the mesh along which a value is to be gathered, and nothing else."""
        pairs = zip(value.layout.dims, layout.dims, strict=True)
        moved = [(have, want) for have, want in pairs if have != want]
        if len(moved) != 1 or value.layout.partial or layout.partial:
            return None
        ((have, want),) = moved
        if not have or have.without_last() != want or have.axes[-1] in self._moves.mesh.local:
            return None
        return have.axes[-1] if all(part.spec.is_concrete for part in value.parts) else None

    def _close(self, key: _Key) -> None:
        nodes, values = zip(*self._open.pop(key), strict=True)
        del self._waiting[key]
        if len(values) == 1:
            name, whole = called(nodes[0].inputs[1].node), values[0].layout
            d = next(d for d, split in enumerate(whole.dims) if key[0] in split.axes)
            whole = whole.with_dim(d, whole.dims[d].without_last())
            found = [self._moves.to(values[0], whole, nodes[0], name)]
        else:
            found = gathered(self._moves, values, key[0], nodes[-1])
        for node, value in zip(nodes, found, strict=True):
            self._assign(node, value)


__all__ = ["Updates"]
