"""Emits the lines of results that a body computes in slots of shared memory (`slot_results.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import Node
from graphflow.runtime.program.bodies.slot_results import SlotResult
from graphflow.runtime.program.operand_table import OperandTable


class SlotEmitter:
    """Adds lines that ask for slots, and that copy results from there.

    Args:
        results: the results.
        operands: addresses and names of the program's tensors.
        scope: global names of the generated functions.
        line: emits a line of a node.
    """

    def __init__(
        self,
        results: Sequence[SlotResult],
        operands: OperandTable,
        scope: dict[str, Any],
        line: Callable[[Node, str], None],
    ) -> None:
        self._results = results
        self._operands = operands
        self._scope = scope
        self._line = line

    def emit_after(self, node: Node | None) -> None:
        """Emit the lines that ask for slots after a node; None: before all nodes."""
        for tensor, edges, after, _ in self._results:
            if after is node:
                buffer = self._operands.move(tensor)
                name = self._operands.names[tensor]
                self._scope |= {f"s{name}": self._operands.feeds[tensor], f"e{name}": edges}
                call = f"free_slot(step, e{name}, {buffer})"
                self._line(tensor.node, f"{name} = s{name}({call})")

    def emit_copies(self) -> None:
        """Emit the lines that copy results from slots to the buffers of the body's results."""
        for tensor, _, _, is_result in self._results:
            if is_result:
                name = self._operands.names[tensor]
                self._line(tensor.node, f"copy_slot(h{name}, {name})")
