"""Emission of a window: its first turn exchanges sums over the stale axis, later turns reuse them.

A sum of a later turn is found by the node that it repeats, and by its number among the partial
sums of that node: an op may be written as several.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from graphflow.errors import ShardingError
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.layouts import ShardedTensor
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.sharding.emission.emitter import EFFECT_OPS, Emitter
from graphflow.parallel.stale_sums.stale_resharder import StaleResharder
from graphflow.parallel.stale_sums.turns import Window, name_in_step


class StaleEmitter(Emitter):
    """Writes the nodes of a window for all places of a mesh.

    Args:
        resharder: converts between layouts.
        arguments, options: those of `Emitter`.
        window: the window.
        owned: variables that are whole along the stale axis and whose updates read stale sums. They
            belong to the first place; others have the value from before the window.
    """

    def __init__(
        self,
        resharder: StaleResharder,
        *arguments: Any,
        window: Window,
        owned: Set[Node],
        **options: Any,
    ) -> None:
        super().__init__(resharder, *arguments, **options)
        self._stale = resharder
        self._window = window
        self._owned = owned
        self._first_sums: dict[tuple[Node, int], ShardedTensor] = {}
        self._outer: Node | None = None
        self._sums_so_far = 0

    def emit_node(self, node: Node) -> None:
        """Write any node. Partial sums of later turns learn which sum of turn 0 they repeat."""
        if self._outer is not None:  # a node of an expansion
            super().emit_node(node)
            self._match_sums(node)
            return
        self._outer, self._sums_so_far = node, 0
        before = len(self._stale.records)
        if node in self._window.versions:
            self._emit_version(node)
        else:
            self._check_effect(node)
            super().emit_node(node)
            self._match_sums(node)
        self._outer = None
        self._check_exchanges(node, before)

    def _match_sums(self, node: Node) -> None:
        """Match the partial sums that a node made with those of turn 0."""
        for tensor in node.outputs:
            value = self.values[tensor]
            if self._stale.is_stale_sum(value):
                self._match_sum(tensor, value)

    def _match_sum(self, tensor: Tensor, value: ShardedTensor) -> None:
        """Match a partial sum with that of turn 0.

        Raises:
            ShardingError: turn 0 has no such sum.
        """
        assert self._outer is not None
        key = self._window.originals.get(self._outer, self._outer), self._sums_so_far
        self._sums_so_far += 1
        if self._outer not in self._window.turns:
            self._first_sums[key] = value
        first = self._first_sums.get(key)
        if first is None or first.layout != value.layout:
            name = name_in_step(user_name(tensor.node))
            raise ShardingError(
                f"{name!r} (made at {tensor.node.location}) is cut otherwise in later turns than "
                "in the first; give it a rule, or refresh=1"
            )
        self._stale.set_first(value, first)

    def _emit_version(self, node: Node) -> None:
        """Write a new value of a variable in the layout of the variable."""
        variable, turn = self._window.versions[node]
        self.reduce_inputs(node)
        old, (given,) = self.values[variable], node.inputs
        value = self._stale.convert(self.values[given], old.layout, node, user_name(given.node))
        if variable.node in self._owned:
            is_last = turn == self._window.count - 1
            name = user_name(variable.node)
            value = self._stale.keep_owned(value, old, is_last, node, name)
        self.values[node.outputs[0]] = value

    # Refusals -------------------------------------------------------------------------------------

    def _turn(self, node: Node) -> int:
        """Return the turn of a node of the window."""
        version = self._window.versions.get(node)
        return self._window.turns.get(node, 0) if version is None else version.turn

    def _check_effect(self, node: Node) -> None:
        """Refuse a print or a Python function that would run, and be sent, in each turn.

        Raises:
            ShardingError: the node is one of a later turn.
        """
        if node.op.name in EFFECT_OPS and self._turn(node):
            raise ShardingError(
                f"{user_name(self._window.originals[node])!r} (made at {node.location}) runs at "
                f"the first place only, so each of the {self._window.count} turns would wait for "
                "it; take it out of the training step, or refresh=1"
            )

    def _check_exchanges(self, node: Node, before: int) -> None:
        """Refuse an exchange over the stale axis in a later turn that is no sum.

        Raises:
            ShardingError: there is one.
        """
        if not self._turn(node):
            return
        axis = self._stale.stale_axis
        for move in self._stale.records[before:]:
            expected = any(move is each for each in self._stale.exchanged)
            if axis in move.axis.split("×") and not expected:
                raise ShardingError(
                    f"{name_in_step(move.cause)!r} (made at {move.location}) takes an {move.kind} "
                    f"of {name_in_step(move.tensor)!r} over {axis!r} in each turn: only sums can "
                    "be stale; cut its inputs along another axis, or refresh=1"
                )


__all__ = ["StaleEmitter"]
