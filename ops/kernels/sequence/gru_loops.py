"""The gates of a GRU as native loops, which run between the products of two steps."""

from __future__ import annotations

from graphflow.ops.kernels.codegen.control_flow import KernelWriter
from graphflow.ops.kernels.codegen.vector_math import sigmoid, tanh
from graphflow.ops.kernels.sequence.gate_rows import GateRows


class _GruRows(GateRows):
    """Rows of a GRU, whose gates are z, r and n in some order."""

    def total(self, parts: tuple[str, str], bias: str, r: str, j: str, gate: str) -> str:
        """Return the sum of a gate's parts and its bias."""
        f, (z, past) = self.floats, parts
        own = f.add(self.load(past, r, j, gate), self.load(bias, "0", j, gate))
        return f.add(self.load(z, r, j, gate), own)

    def slope(self, value: str) -> str:
        """Return the derivative of a sigmoid from its value."""
        return self.floats.mul(value, self.floats.sub(self.floats.const(1.0), value))

    def mix(self, keep: str, new: str, old: str) -> str:
        """Return (1 - keep)·new + keep·old."""
        f = self.floats
        return f.fma(keep, f.sub(old, new), new)


def forward(element: str, gates: str) -> tuple[str, str]:
    """Write a step whose gate r multiplies the candidates' product: n = tanh(zₙ + r·(Rₙ·h + bₙ)).

    Pointers: z, products, bias, h; then the results: gates, Rₙ·h + bₙ, the next h.
    """
    flow = KernelWriter()
    z, past, bias, h, kept, inner, h_out = (flow.pointer(i) for i in range(7))
    rows = _GruRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        keep, reset = (sigmoid(f, rows.total((z, past), bias, r, j, gate)) for gate in "zr")
        own = f.add(rows.load(past, r, j, "n"), rows.load(bias, "0", j, "n"))
        new = tanh(f, f.fma(reset, own, rows.load(z, r, j, "n")))
        for gate, value in zip("zrn", (keep, reset, new), strict=True):
            rows.store(value, kept, r, j, gate)
        rows.store(own, inner, r, j)
        rows.store(rows.mix(keep, new, rows.load(h, r, j)), h_out, r, j)

    rows.run(step)
    return flow.finish()


def forward_gates(element: str, gates: str) -> tuple[str, str]:
    """Write the first half of a step whose gate r multiplies h: the gates z and r, and r·h.

    Pointers: z, products, bias, h; then the results: gates, r·h.
    """
    flow = KernelWriter()
    z, past, bias, h, kept, inner = (flow.pointer(i) for i in range(6))
    rows = _GruRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        keep, reset = (sigmoid(f, rows.total((z, past), bias, r, j, gate)) for gate in "zr")
        rows.store(keep, kept, r, j, "z")
        rows.store(reset, kept, r, j, "r")
        rows.store(f.mul(reset, rows.load(h, r, j)), inner, r, j)

    rows.run(step)
    return flow.finish()


def forward_candidates(element: str, gates: str) -> tuple[str, str]:
    """Write the second half of a step whose gate r multiplies h: the candidates n and the next h.

    Pointers: z, products, bias, h; then the results: gates, the next h.
    """
    flow = KernelWriter()
    z, past, bias, h, kept, h_out = (flow.pointer(i) for i in range(6))
    rows = _GruRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        new = tanh(f, rows.total((z, past), bias, r, j, "n"))
        rows.store(new, kept, r, j, "n")
        old = rows.load(h, r, j)
        rows.store(rows.mix(rows.load(kept, r, j, "z"), new, old), h_out, r, j)

    rows.run(step)
    return flow.finish()


def backward(element: str, gates: str, linear_before_reset: bool) -> tuple[str, str]:
    """Write the loop from cotangents of h to those of the gates' sums.

    The cotangent of h has two parts: those of products with R, and the rest. Where r multiplies h,
    the cotangent of its sum follows in `backward_reset`.

    Pointers: cotangents of y and of both parts, gates, Rₙ·h + bₙ, h before; then the results:
    cotangents of the gates' sums, of the candidates' product, of all products (without
    `linear_before_reset` unused), and the second part.
    """
    flow = KernelWriter()
    from_y, from_products, kept, inner, h, dz, dn, products, dh = (
        flow.pointer(i) for i in range(9)
    )
    rows = _GruRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        keep, reset, new = (rows.load(kept, r, j, gate) for gate in "zrn")
        later = f.add(rows.load(from_products, r, j), rows.load(dh, r, j))
        total = f.add(rows.load(from_y, r, j), later)
        rest = f.sub(f.const(1.0), keep)
        sums = {
            "z": f.mul(f.mul(total, f.sub(rows.load(h, r, j), new)), f.mul(keep, rest)),
            "n": f.mul(f.mul(total, rest), f.sub(f.const(1.0), f.mul(new, new))),
        }
        own = sums["n"]
        if linear_before_reset:
            sums["r"] = f.mul(f.mul(own, rows.load(inner, r, j)), rows.slope(reset))
            own = f.mul(own, reset)
            for gate, value in (sums | {"n": own}).items():
                rows.store(value, products, r, j, gate)
        for gate, value in sums.items():
            rows.store(value, dz, r, j, gate)
        rows.store(own, dn, r, j)
        rows.store(f.mul(total, keep), dh, r, j)

    rows.run(step)
    return flow.finish()


def backward_reset(element: str, gates: str) -> tuple[str, str]:
    """Write the loop from the cotangent of r·h to that of the sum of r, and to a part of h's.

    Pointers: the cotangent, gates, h before; then the results: cotangents of the gates' sums, and
    the part, to which it is added.
    """
    flow = KernelWriter()
    cotangent, kept, h, dz, dh = (flow.pointer(i) for i in range(5))
    rows = _GruRows(flow, element, gates)
    f = rows.floats

    def step(r: str, j: str) -> None:
        given, reset = rows.load(cotangent, r, j), rows.load(kept, r, j, "r")
        rows.store(f.mul(f.mul(given, rows.load(h, r, j)), rows.slope(reset)), dz, r, j, "r")
        rows.store(f.fma(given, reset, rows.load(dh, r, j)), dh, r, j)

    rows.run(step)
    return flow.finish()
