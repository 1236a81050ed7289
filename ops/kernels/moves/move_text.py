"""Parts of kernels that move elements: the elements by their size, and copies of rows.

These kernels are for small arrays, where a call through Python costs more than the work. numpy is
as fast for large ones, so their tasks are None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter
from graphflow.ops.kernels.jit.compiler import KernelTask

MOST_NANOSECONDS = 20_000.0
"""Estimated work above which numpy's functions are used."""
_CHUNK_BYTES = 32
_ELEMENTS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


def element_by_size(spec: TensorSpec) -> tuple[str, int]:
    """Return the LLVM type of a tensor's units, and how many units an element has."""
    size = spec.dtype.itemsize
    return (_ELEMENTS[size], 1) if size in _ELEMENTS else ("i64", size // 8)


def small_task(
    write: Callable[..., tuple[str, str]],
    given: Sequence[object],
    sizes: Sequence[int],
    rows: int,
    nanoseconds: float,
) -> KernelTask | None:
    """Return the task of a kernel that `write(*given)` writes; None if it has too much work, or
    none."""
    if not rows or nanoseconds > MOST_NANOSECONDS:
        return None
    name, text = write(*given)
    return KernelTask(name, text, tuple(map(int, sizes)), int(rows), nanoseconds)


def copy_elements(flow: KernelWriter, element: str, source: str, target: str, count: str) -> None:
    """Write a copy of `count` consecutive elements."""
    lanes = _CHUNK_BYTES // BYTES[element]
    whole = flow.step("and", count, -lanes)

    def chunk(i: str) -> None:
        value = flow.load_vector(lanes, element, flow.gep(source, element, i))
        flow.store_vector(lanes, element, value, flow.gep(target, element, i))

    def one(i: str) -> None:
        copy_one(flow, element, flow.gep(source, element, i), flow.gep(target, element, i))

    flow.loop(0, whole, (), chunk, lanes)
    flow.loop(whole, count, (), one)


def copy_one(flow: KernelWriter, element: str, source: str, target: str) -> None:
    """Write a copy of one element."""
    flow.store(element, flow.load(element, source, BYTES[element]), target, BYTES[element])
