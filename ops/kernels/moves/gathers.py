"""Native gathers along an axis: whole slices (`take`), and single elements (`take_along_axis`).

Programs check indices by a kernel of their own (`index_range.py`). Gathers read the first position
where an index is invalid, so that they stay inside of their operand until the check is looked at.
"""

from __future__ import annotations

from functools import cache
from math import prod

from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.codegen.control_flow import KernelWriter, element_of
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.moves.index_range import load_integer
from graphflow.ops.kernels.moves.move_text import (
    copy_elements,
    copy_one,
    element_by_size,
    small_task,
)


@cache
def take_text(element: str, index: str, signed: bool) -> tuple[str, str]:
    """Write out[a, j] = x[a, indices[j]], rows of elements, for rows a·count + j.

    Pointers: x, indices, out. Sizes: slices of x along the axis, indices, elements of a slice.
    """
    flow = KernelWriter()
    x, indices, out = (flow.pointer(i) for i in range(3))
    slices, count, width = (flow.size(i) for i in range(3))

    def row(r: str) -> None:
        before, j = flow.step("udiv", r, count), flow.step("urem", r, count)
        at = _position(flow, indices, index, signed, j, slices)
        start = flow.mul(flow.add(flow.mul(before, slices), at), width)
        target = flow.gep(out, element, flow.mul(r, width))
        copy_elements(flow, element, flow.gep(x, element, start), target, width)

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


@cache
def along_axis_text(element: str, index: str, signed: bool) -> tuple[str, str]:
    """Write out[a, j, b] = x[a, indices[a, j, b], b], for the elements of `out` by number.

    Pointers: x, indices, out. Sizes: slices of x and of `indices` along the axis, elements of a
    slice.
    """
    flow = KernelWriter()
    x, indices, out = (flow.pointer(i) for i in range(3))
    slices, count, width = (flow.size(i) for i in range(3))

    def one(e: str) -> None:
        before = flow.step("udiv", e, flow.mul(count, width))
        at = _position(flow, indices, index, signed, e, slices)
        row = flow.mul(flow.add(flow.mul(before, slices), at), width)
        source = flow.gep(x, element, flow.add(row, flow.step("urem", e, width)))
        copy_one(flow, element, source, flow.gep(out, element, e))

    flow.loop("%start", "%stop", (), one)
    return flow.finish()


def _position(
    flow: KernelWriter, indices: str, index: str, signed: bool, at: str, slices: str
) -> str:
    """Load an index, counted from the front; 0 if it is invalid."""
    given = load_integer(flow, indices, index, signed, at)
    if signed:
        below = flow.step("icmp slt", given, 0)
        given = flow.write(f"select i1 {below}, i64 {flow.add(given, slices)}, i64 {given}")
    valid = flow.step("icmp ult", given, slices)
    return flow.write(f"select i1 {valid}, i64 {given}, i64 0")


def take_task(x: TensorSpec, indices: TensorSpec, axis: int) -> KernelTask | None:
    """Return the task of `take`; None for an axis without elements, and if numpy is as fast."""
    slices, count = int(x.shape[axis]), int(prod(indices.shape))
    if not slices:
        return None
    element, units = element_by_size(x)
    width = units * int(prod(x.shape[axis + 1 :]))
    rows = int(prod(x.shape[:axis])) * count if width else 0
    signed = indices.dtype.kind == "i"
    nanoseconds = rows * (4 + 0.1 * width * x.dtype.itemsize / units)
    given = element, element_of(indices.dtype), signed
    return small_task(take_text, given, (slices, count, width), rows, nanoseconds)


def along_axis_task(x: TensorSpec, indices: TensorSpec, axis: int) -> KernelTask | None:
    """Return the task of `take_along_axis`; None as for `take_task`."""
    element, units = element_by_size(x)
    slices, count = int(x.shape[axis]), int(indices.shape[axis])
    if not slices or units > 1:
        return None
    width, rows = int(prod(x.shape[axis + 1 :])), int(prod(indices.shape))
    given = element, element_of(indices.dtype), indices.dtype.kind == "i"
    return small_task(along_axis_text, given, (slices, count, width), rows, 8.0 * rows)
