"""Rows of planes that are read in place: masks and a row of zeros take the place of padding.

Three kernels share this: the convolution and both gradients. Their vectors hold 16 floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows.window_arguments import Windows

LANES = 16


def zero_row_bytes(width: int) -> int:
    """Return the bytes of a row of zeros that stands for rows of so many elements."""
    return (width + 4 * LANES) * 4


def zero_row(width: int) -> int:
    """Return the address of scratch memory for the row of zeros, which the kernel clears."""
    return operand_place(scratch(np, "zeros", (zero_row_bytes(width),), np.uint8))


def write_units(
    nest: LoopNestWriter, zeros: str, width: Value, unit: Callable[[str], None]
) -> tuple[str, str]:
    """Write a kernel that clears the row of zeros and runs its units; return its name and text."""

    def clear(i: Value) -> None:
        nest.store(nest.floats.const(0.0), nest.gep(zeros, nest.mul(i, 4)))

    nest.loop(0, width, clear, step=nest.width)
    nest.loop("%start", "%stop", unit)
    return nest.source()


def row_or_zeros(
    nest: LoopNestWriter, plane: str, number: Value, height: Value, pitch: Value, blank: str
) -> str:
    """Write the address of a row of a plane, or that of zeros if the plane has no such row.

    Args:
        plane, blank: places in the first row and in the row of zeros.
        pitch: bytes between rows.
    """
    inside = nest.write(f"icmp ult i64 {number}, {height}")
    row = nest.gep(plane, nest.mul(number, pitch))
    return nest.write(f"select i1 {inside}, ptr {row}, ptr {blank}")


def spanned_vectors(windows: Windows) -> int:
    """Return how many vectors of x hold what the results of one vector see from a tap."""
    return -(-(min(windows.out[1], LANES) * windows.stride[1]) // LANES)


def load_spaced(nest: LoopNestWriter, row: str, start: int, step: int, masks: Sequence[str]) -> str:
    """Write a vector of every first or second element, from byte `start` of a row on.

    Args:
        masks: of each vector that is loaded; one of two may suffice for few elements.
    """
    parts = [
        nest.load(nest.gep(row, start + half * nest.nbytes), mask)
        for half, mask in enumerate(masks)
    ]
    if step == 1:
        return parts[0]
    last = parts[1] if len(parts) > 1 else nest.floats.const(0.0)
    return nest.even_elements(parts[0], last)
