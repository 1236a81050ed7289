"""The gates of an LSTM as native loops: one pass over them between the products of two steps."""

from __future__ import annotations

from graphflow.ops.kernels.codegen.control_flow import KernelWriter
from graphflow.ops.kernels.codegen.vector_math import sigmoid, tanh
from graphflow.ops.kernels.sequence.gate_rows import GateRows


def forward(element: str, gates: str) -> tuple[str, str]:
    """Write the loop c' = f·c + i·g, h = o·tanh(c'), with gates of z + bias + recurrent.

    Pointers: z, recurrent, bias, c; then the results: activated gates, c', h.
    """
    flow = KernelWriter()
    z, past, bias, c, kept, c_out, h = (flow.pointer(i) for i in range(7))
    rows = GateRows(flow, element, gates)
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
    rows = GateRows(flow, element, gates)
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
