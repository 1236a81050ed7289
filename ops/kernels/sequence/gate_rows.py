"""Loops over the gates of recurrent networks, between the matrix products of two steps."""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ops.kernels.codegen.control_flow import KernelWriter, lanes_of
from graphflow.ops.kernels.codegen.vector_writer import Floats


class GateRows:
    """Loops over rows of the batch, and over vectors of the H elements of each gate.

    Size 0 is H; a row of all gates has G·H elements. Elements beyond the last whole vector are
    computed under a mask.
    """

    def __init__(self, flow: KernelWriter, element: str, gates: str) -> None:
        self.flow, self.element, self.gates = flow, element, gates
        self.width = lanes_of(element)
        self.floats: Floats = flow.floats(self.width, element)
        self.size = flow.size(0)
        self.mask: str | None = None

    def place(self, base: str, row: str, j: str, gate: str | None = None) -> str:
        """Return the address of element j of a row of H elements, or of one gate among G·H."""
        flow = self.flow
        many = 1 if gate is None else len(self.gates)
        start = flow.mul(row, flow.mul(self.size, many))
        if gate is not None:
            start = flow.add(start, flow.mul(self.size, self.gates.index(gate)))
        return flow.gep(base, self.element, flow.add(start, j))

    def load(self, base: str, row: str, j: str, gate: str | None = None) -> str:
        return self.flow.load_vector(
            self.width, self.element, self.place(base, row, j, gate), self.mask
        )

    def store(self, value: str, base: str, row: str, j: str, gate: str | None = None) -> None:
        place = self.place(base, row, j, gate)
        self.flow.store_vector(self.width, self.element, value, place, self.mask)

    def run(self, body: Callable[[str, str], None]) -> None:
        """Write body(row, j) for all vectors of all rows."""
        flow = self.flow
        whole = flow.step("and", self.size, -self.width)
        left = flow.step("sub", self.size, whole)
        mask = flow.first_lanes(self.width, left)
        some = flow.step("icmp sgt", left, 0)

        def row(r: str) -> None:
            flow.loop("0", whole, (), lambda j: body(r, j), self.width)

            def rest() -> None:
                self.mask = mask
                body(r, whole)
                self.mask = None

            flow.when(some, (), rest)

        flow.loop("%start", "%stop", (), row)
