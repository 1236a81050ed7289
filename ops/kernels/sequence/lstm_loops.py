"""The gates of an LSTM as native loops: one pass over them between the products of two steps."""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ops.kernels.codegen.control_flow import KernelWriter, lanes_of
from graphflow.ops.kernels.codegen.vector_math import sigmoid, tanh
from graphflow.ops.kernels.codegen.vector_writer import Floats


class _GateRows:
    """Loops over rows of the batch, and over vectors of the H elements of each gate.

    Size 0 is H; a row of all gates has 4·H elements. Elements beyond the last whole vector are
    computed under a mask.
    """

    def __init__(self, flow: KernelWriter, element: str, gates: str) -> None:
        self.flow, self.element, self.gates = flow, element, gates
        self.width = lanes_of(element)
        self.floats: Floats = flow.floats(self.width, element)
        self.size = flow.size(0)
        self.mask: str | None = None

    def place(self, base: str, row: str, j: str, gate: str | None = None) -> str:
        """Return the address of element j of a row of H elements, or of one gate among 4·H."""
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


def forward(element: str, gates: str) -> tuple[str, str]:
    """Write the loop c' = f·c + i·g, h = o·tanh(c'), with gates of z + bias + recurrent.

    Pointers: z, recurrent, bias, c; then the results: activated gates, c', h.
    """
    flow = KernelWriter()
    z, past, bias, c, kept, c_out, h = (flow.pointer(i) for i in range(7))
    rows = _GateRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        value = {}
        for gate in "ifgo":
            total = f.add(rows.load(z, r, j, gate), rows.load(bias, "0", j, gate))
            total = f.add(total, rows.load(past, r, j, gate))
            value[gate] = tanh(f, total) if gate == "g" else sigmoid(f, total)
            rows.store(value[gate], kept, r, j, gate)
        state = f.fma(value["f"], rows.load(c, r, j), f.mul(value["i"], value["g"]))
        rows.store(state, c_out, r, j)
        rows.store(f.mul(value["o"], tanh(f, state)), h, r, j)

    rows.run(step)
    return flow.finish()


def backward(element: str, gates: str) -> tuple[str, str]:
    """Write the loop that turns cotangents of h and c' into those of the gates' sums and of c.

    Pointers: cotangents of y at this step and of h from later steps, activated gates, c', c; then
    the results: cotangents of the gates' sums, and that of c', which becomes that of c.
    """
    flow = KernelWriter()
    from_y, from_h, kept, c_out, c, dz, dc = (flow.pointer(i) for i in range(7))
    rows = _GateRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        one = f.const(1.0)
        value = {gate: rows.load(kept, r, j, gate) for gate in "ifgo"}
        dh = f.add(rows.load(from_y, r, j), rows.load(from_h, r, j))
        level = tanh(f, rows.load(c_out, r, j))
        flat = f.sub(one, f.mul(level, level))
        dstate = f.fma(f.mul(dh, value["o"]), flat, rows.load(dc, r, j))

        def slope(gate: str) -> str:
            return f.mul(value[gate], f.sub(one, value[gate]))

        sums = {
            "i": f.mul(f.mul(dstate, value["g"]), slope("i")),
            "f": f.mul(f.mul(dstate, rows.load(c, r, j)), slope("f")),
            "g": f.mul(f.mul(dstate, value["i"]), f.sub(one, f.mul(value["g"], value["g"]))),
            "o": f.mul(f.mul(dh, level), slope("o")),
        }
        for gate, total in sums.items():
            rows.store(total, dz, r, j, gate)
        rows.store(f.mul(dstate, value["f"]), dc, r, j)

    rows.run(step)
    return flow.finish()
