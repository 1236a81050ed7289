"""Running sums by native loops: one addition an element, in order, in float64.

The bits are numpy's for the same dtypes. numpy goes down columns one after the other, and converts
float32 in pieces.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import KernelWriter, element_of, lanes_of
from graphflow.ops.kernels.fusion.parallel_call import call_parallel, native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.scratch_memory import scratch

_LEAST_ELEMENTS = 4096
"""Elements below which numpy is as fast."""
_STRIP_COLUMNS = 1024
"""Columns whose sums the first cache holds beside a row of each array."""
_PADDED_LANES = 16
"""A multiple of the lanes of any register, to which sums of fewer columns are padded."""


def along_rows(element: str) -> tuple[str, str]:
    """Write out[u, i] = x[u, 0] + … + x[u, i] for rows u.

    Pointers: x, out. Sizes: elements of a row, the first element, and 1 or -1 for the direction.
    """
    flow = KernelWriter()
    x, out = (flow.pointer(i) for i in range(2))
    count, first, step = (flow.size(i) for i in range(3))

    def row(u: str) -> None:
        start = flow.add(flow.mul(u, count), first)

        def one(i: str, total: str) -> list[str]:
            at = flow.add(start, flow.mul(i, step))
            given = flow.load(element, flow.gep(x, element, at), 4)
            total = flow.write(f"fadd double {total}, {_to_double(flow, given, element)}")
            flow.store(element, _from_double(flow, total, element), flow.gep(out, element, at), 4)
            return [total]

        flow.loop(0, count, [("double", "-0.0")], one)  # -0.0, so that a first -0.0 stays negative

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


def down_columns(element: str) -> tuple[str, str]:
    """Write running sums down columns, for units of `_STRIP_COLUMNS` columns of matrices.

    Pointers: x, out, and memory for the sums. Sizes: rows, columns, units of a matrix; the first
    row and the step between rows, in elements; the sums of a unit.
    """
    flow = KernelWriter()
    x, out, memory = (flow.pointer(i) for i in range(3))
    rows, columns, strips, first, step, reach = (flow.size(i) for i in range(6))
    lanes = lanes_of("double")

    def unit(u: str) -> None:
        matrix, strip = (flow.step(how, u, strips) for how in ("udiv", "urem"))
        begin = flow.mul(strip, _STRIP_COLUMNS)
        width = flow.minimum(flow.step("sub", columns, begin), _STRIP_COLUMNS)
        start = flow.add(flow.add(flow.mul(matrix, flow.mul(rows, columns)), first), begin)
        sums = flow.gep(memory, "double", flow.mul(u, reach))
        whole = flow.step("and", width, -lanes)
        left = flow.step("sub", width, whole)
        some, mask = flow.step("icmp sgt", left, 0), flow.first_lanes(lanes, left)
        none = "splat (double -0.0)"
        flow.loop(0, width, (), lambda j: flow.store_vector(
            lanes, "double", none, flow.gep(sums, "double", j)), lanes)  # fmt: skip

        def row(i: str) -> None:
            line = flow.add(start, flow.mul(i, step))

            def vector(j: str, mask: str | None = None) -> None:
                at, place = flow.add(line, j), flow.gep(sums, "double", j)
                given = flow.load_vector(lanes, element, flow.gep(x, element, at), mask)
                total = flow.load_vector(lanes, "double", place)
                total = flow.floats(lanes, "double").add(
                    total, _to_double(flow, given, element, lanes)
                )
                flow.store_vector(lanes, "double", total, place)
                narrow = _from_double(flow, total, element, lanes)
                flow.store_vector(lanes, element, narrow, flow.gep(out, element, at), mask)

            flow.loop(0, whole, (), vector, lanes)
            flow.when(some, (), lambda: vector(whole, mask))

        flow.loop(0, rows, (), row)

    flow.loop("%start", "%stop", (), unit)
    return flow.finish()


def _to_double(flow: KernelWriter, value: str, element: str, lanes: int = 0) -> str:
    return _convert_float(flow, "fpext", value, element, "double", lanes)


def _from_double(flow: KernelWriter, value: str, element: str, lanes: int = 0) -> str:
    return _convert_float(flow, "fptrunc", value, "double", element, lanes)


def _convert_float(
    flow: KernelWriter, how: str, value: str, source: str, target: str, lanes: int
) -> str:
    if source == target:
        return value
    source, target = (f"<{lanes} x {kind}>" if lanes else kind for kind in (source, target))
    return flow.write(f"{how} {source} {value} to {target}")


def try_running_sum(out: Any, x: Any, axis: int, reverse: bool) -> bool:
    """Write running sums of contiguous arrays; returns False if there are no loops for them.

    That follows from shapes and dtypes.
    """
    fits = x.dtype == out.dtype and x.dtype.name in ("float32", "float64")
    if not fits or x.size < _LEAST_ELEMENTS or not is_jit_enabled() or vector_width() < 8:
        return False
    element, count, inner = element_of(x.dtype), x.shape[axis], prod(x.shape[axis + 1 :])
    x, outer = np.ascontiguousarray(x), prod(x.shape[:axis])
    way, start = (-1, count - 1) if reverse else (1, 0)
    if inner == 1:
        call_parallel(
            native_function(along_rows, element), [x, out], [count, start, way], outer, 1.2 * x.size
        )
        return True
    strips = -(-inner // _STRIP_COLUMNS)
    reach = min(_STRIP_COLUMNS, -(-inner // _PADDED_LANES) * _PADDED_LANES)
    memory = scratch(np, "sums", (outer * strips, reach), np.float64)
    sizes = [count, inner, strips, start * inner, way * inner, reach]
    call_parallel(
        native_function(down_columns, element),
        [x, out, memory],
        sizes,
        outer * strips,
        0.5 * x.size,
    )
    return True
