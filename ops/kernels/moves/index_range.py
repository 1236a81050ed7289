"""A native check that all integers of an array lie in a range, such as indices or class labels.

The check does not stop the kernels after it. It notes what it found, and the program looks at that
once its native calls return.
"""

from __future__ import annotations

from functools import cache

from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter, element_of
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.moves.move_text import small_task

_LARGEST, _SMALLEST = 2**63 - 1, -(2**63)


def load_integer(flow: KernelWriter, base: str, element: str, signed: bool, at: str) -> str:
    """Load an integer of an array as an i64."""
    value = flow.load(element, flow.gep(base, element, at), BYTES[element])
    if element == "i64":
        return value
    return flow.write(f"{'sext' if signed else 'zext'} {element} {value} to i64")


@cache
def range_text(element: str, signed: bool) -> tuple[str, str]:
    """Write the check whether low ≤ x[i] < high.

    Pointers: x, three words for what was found, and a word that all checks of a program share.
    Sizes: elements, low, high. If an integer is outside, the words become 1, the least and the
    largest of x, and the shared one 1.
    """
    flow = KernelWriter()
    x, found, shared = (flow.pointer(i) for i in range(3))
    count, low, high = (flow.size(i) for i in range(3))

    def one(i: str, least: str, most: str) -> list[str]:
        value = load_integer(flow, x, element, signed, i)
        return [flow.minimum(value, least), flow.maximum(value, most)]

    begin = [("i64", str(_LARGEST)), ("i64", str(_SMALLEST))]
    least, most = flow.loop(0, count, begin, one)

    def note() -> None:
        for at, value in enumerate(("1", least, most)):
            flow.store("i64", value, flow.gep(found, "i64", at), 8)
        flow.store("i64", "1", shared, 8)

    outside = flow.step("icmp slt", least, low), flow.step("icmp sge", most, high)
    flow.when(flow.step("or", *outside, kind="i1"), (), note)
    return flow.finish()


def range_task(x: TensorSpec, low: int, high: int) -> KernelTask | None:
    """Return the task that checks integers; None if there are none, or so many that numpy is as
    fast."""
    signed, count = x.dtype.kind == "i", int(x.size)
    sizes = (count, low if signed else 0, high)
    given = element_of(x.dtype), signed
    return small_task(range_text, given, sizes, int(count > 0), 1.0 * count)
