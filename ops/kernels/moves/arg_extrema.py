"""Native positions of the largest and least elements along an axis."""

from __future__ import annotations

from functools import cache
from math import prod

from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter, element_of
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.moves.move_text import small_task


@cache
def position_text(element: str, kind: str, largest: bool) -> tuple[str, str]:
    """Write out[a, b] = the first i with the extreme x[a, i, b]; a NaN is extreme, as in numpy.

    Pointers: x, out. Sizes: elements along the axis, elements of a slice.

    Args:
        kind: of the dtype, "f", "i" or "u".
    """
    flow = KernelWriter()
    x, out = (flow.pointer(i) for i in range(2))
    count, width = (flow.size(i) for i in range(2))
    way = "gt" if largest else "lt"

    def value(begin: str, i: str) -> str:
        place = flow.gep(x, element, flow.add(begin, flow.mul(i, width)))
        return flow.load(element, place, BYTES[element])

    def row(r: str) -> None:
        before, after = flow.step("udiv", r, width), flow.step("urem", r, width)
        begin = flow.add(flow.mul(flow.mul(before, count), width), after)

        def one(i: str, best: str, at: str) -> list[str]:
            here = value(begin, i)
            if kind == "f":
                better = flow.write(f"fcmp u{way} {element} {here}, {best}")
                known = flow.write(f"fcmp ord {element} {best}, {best}")
                better = flow.step("and", better, known, kind="i1")
            else:
                sign = "s" if kind == "i" else "u"
                better = flow.write(f"icmp {sign}{way} {element} {here}, {best}")
            return [
                flow.write(f"select i1 {better}, {element} {here}, {element} {best}"),
                flow.write(f"select i1 {better}, i64 {i}, i64 {at}"),
            ]

        _, at = flow.loop(1, count, [(element, value(begin, "0")), ("i64", "0")], one)
        flow.store("i64", at, flow.gep(out, "i64", r), 8)

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


def position_task(
    x: TensorSpec, axis: int | None, keepdims: bool, largest: bool
) -> KernelTask | None:
    """Return the task of argmax and argmin; None for other dtypes, and if numpy is as fast."""
    if x.dtype.name not in ("float32", "float64") and x.dtype.kind not in "iu":
        return None
    shape = (int(x.size),) if axis is None else tuple(map(int, x.shape))
    at = axis or 0
    count, width = shape[at], int(prod(shape[at + 1 :]))
    rows = int(prod(shape[:at])) * width
    given = element_of(x.dtype), x.dtype.kind, largest
    nanoseconds = rows * (2 + 2.0 * count)
    return small_task(position_text, given, (count, width), rows if count else 0, nanoseconds)
