"""Native loops that combine rows at computed places, in the order of the updates.

out[rows[j]] = out[rows[j]] ∘ updates[j]
"""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter
from graphflow.ops.kernels.codegen.vector_writer import VectorWriter
from graphflow.ops.kernels.jit.compiler import vector_width

FLOATS = ("float", "double")


def lanes_for(element: str, width: int) -> int:
    """Return how many elements of a row are combined at once: a power of two, at most its width."""
    lanes = 1
    most = vector_width() * 4 // max(4, BYTES[element])
    while lanes * 2 <= min(width, most):
        lanes *= 2
    return lanes


def combine(element: str, reduction: str, signed: bool, lanes: int) -> tuple[str, str]:
    """Write the loop over updates, for pieces `start` to `stop` of `PIECE` vectors of the rows.

    Pointers: out, rows, updates. Sizes: updates, elements of a row.
    """
    flow = KernelWriter()
    out, rows, updates = (flow.pointer(i) for i in range(3))
    count, width = flow.size(0), flow.size(1)
    piece = PIECE * lanes
    first = flow.mul("%start", piece)
    last = flow.minimum(flow.mul("%stop", piece), width)
    span = flow.step("sub", last, first)
    whole = flow.add(first, flow.step("and", span, -lanes))
    left = flow.step("sub", last, whole)
    some = flow.step("icmp sgt", left, 0)
    mask = flow.first_lanes(lanes, left)
    step = _combining_step(flow.lanes(lanes), element, reduction, signed)

    def update(j: str) -> None:
        target = flow.gep(out, element, flow.mul(flow.load_index(rows, "i64", j), width))
        source = flow.gep(updates, element, flow.mul(j, width))

        def vector(i: str, mask: str | None = None) -> None:
            place = flow.gep(target, element, i)
            old = flow.load_vector(lanes, element, place, mask)
            new = flow.load_vector(lanes, element, flow.gep(source, element, i), mask)
            flow.store_vector(lanes, element, step(old, new), place, mask)

        flow.loop(first, whole, (), vector, lanes)
        if lanes > 1:
            flow.when(some, (), lambda: vector(whole, mask))

    flow.loop("0", count, (), update)
    return flow.finish()


PIECE = 4
"""Vectors of a row for a thread, at least."""


def _combining_step(
    lanes: VectorWriter, element: str, reduction: str, signed: bool
) -> Callable[[str, str], str]:
    """Return a function that writes ∘ of two vectors; minimum and maximum are numpy's, NaN wins."""
    is_float = element in FLOATS
    if reduction in ("add", "mul"):
        instruction = ("f" if is_float else "") + reduction
        return lambda old, new: lanes.binary(instruction, element, old, new)
    way = {"min": "lt", "max": "gt"}[reduction]
    compare = f"fcmp o{way}" if is_float else f"icmp {'s' if signed else 'u'}{way}"

    def select(old: str, new: str) -> str:
        keeps = lanes.binary(compare, element, old, new)
        if is_float:
            keeps = lanes.binary("or", "i1", keeps, lanes.binary("fcmp uno", element, old, old))
        return lanes.select(keeps, element, old, new)

    return select
