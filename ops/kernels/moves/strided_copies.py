"""Native copies between layouts: windows and permutations of axes, and joined arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

from graphflow.ir.spec import Shape, TensorSpec
from graphflow.ops.kernels.codegen.control_flow import KernelWriter
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.moves.move_text import (
    copy_elements,
    copy_one,
    element_by_size,
    small_task,
)

_MOST_JOINED = 32
"""Arrays that one kernel joins."""


@cache
def strided_text(element: str, rank: int, contiguous: bool) -> tuple[str, str]:
    """Write a copy of an array of any strides to a contiguous one, for rows of the first axis.

    Pointers: source, target. Sizes: the first element of the source, the shape, the source's
    strides in elements.

    Args:
        contiguous: the last stride is 1.
    """
    flow = KernelWriter()
    source, target = (flow.pointer(i) for i in range(2))
    source = flow.gep(source, element, flow.size(0))
    shape = [flow.size(1 + i) for i in range(rank)]
    strides = [flow.size(1 + rank + i) for i in range(rank)]

    def axis(number: int, begin: str, at: str) -> None:
        """Copy what lies under an axis; `begin` is an element of the source, `at` a row."""
        if contiguous and number == rank - 1:
            to = flow.gep(target, element, flow.mul(at, shape[number]))
            copy_elements(flow, element, flow.gep(source, element, begin), to, shape[number])
        elif number == rank:
            copy_one(flow, element, flow.gep(source, element, begin), flow.gep(target, element, at))
        else:
            flow.loop(0, shape[number], (), lambda i: axis(
                number + 1, flow.add(begin, flow.mul(i, strides[number])),
                flow.add(flow.mul(at, shape[number]), i)))  # fmt: skip

    flow.loop("%start", "%stop", (), lambda i: axis(1, flow.mul(i, strides[0]), i))
    return flow.finish()


def strided_task(
    x: TensorSpec, first: int, shape: Shape, strides: Sequence[int]
) -> KernelTask | None:
    """Return the task that copies elements of x; None if numpy is as fast.

    Args:
        first: the number of the first element.
        shape: of the result.
        strides: in elements of x.
    """
    if 0 in shape:
        return None
    element, units = element_by_size(x)
    axes = [[int(n), int(s) * units] for n, s in zip(shape, strides, strict=True) if n != 1]
    if units > 1:
        axes.append([units, 1])
    merged: list[list[int]] = []
    for size, stride in axes:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    if len(merged) < 2:  # the first axis is that of the kernel's rows
        merged.insert(0, [1, 0])
    if len(merged) < 2:
        merged.append([1, 1])
    count = prod(size for size, _ in merged)
    contiguous = merged[-1][1] == 1
    sizes = [first * units, *(n for n, _ in merged), *(s for _, s in merged)]
    nanoseconds = 2.0 * count / merged[-1][0] + count * (0.2 if contiguous else 1.0)
    given = element, len(merged), contiguous
    return small_task(strided_text, given, sizes, merged[0][0], nanoseconds)


def row_major_strides(shape: Shape) -> list[int]:
    """Return the strides of a contiguous array, in elements."""
    return [int(prod(shape[i + 1 :])) for i in range(len(shape))]


@cache
def join_text(element: str, count: int) -> tuple[str, str]:
    """Write rows that consist of a row of each of some arrays.

    Pointers: the arrays, the result. Sizes: elements of a row of each.
    """
    flow = KernelWriter()
    arrays, out = [flow.pointer(i) for i in range(count)], flow.pointer(count)
    widths = [flow.size(i) for i in range(count)]
    ends = ["0"]
    for width in widths:
        ends.append(flow.add(ends[-1], width))

    def row(r: str) -> None:
        target = flow.gep(out, element, flow.mul(r, ends[-1]))
        for array, width, begin in zip(arrays, widths, ends, strict=False):
            source = flow.gep(array, element, flow.mul(r, width))
            copy_elements(flow, element, source, flow.gep(target, element, begin), width)

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


def join_task(*arrays: TensorSpec, axis: int) -> KernelTask | None:
    """Return the task of `concat`; None for many arrays, and if numpy is as fast."""
    if len(arrays) > _MOST_JOINED or len({a.dtype for a in arrays}) > 1:
        return None
    element, units = element_by_size(arrays[0])
    rows = int(prod(arrays[0].shape[:axis]))
    widths = [units * int(prod(a.shape[axis:])) for a in arrays]
    nanoseconds = rows * sum(2.0 + 0.2 * width for width in widths)
    return small_task(
        join_text, (element, len(arrays)), widths, rows if any(widths) else 0, nanoseconds
    )
