"""Copies of planes that convolutions need, as native calls: turned, interleaved, or every n-th
element.

All are float32 and end in scratch memory, unless they say otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct.direct_text import copy_rows
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts, run_native_ranges
from graphflow.ops.windows.window_arguments import Ints, Windows

_PART_ELEMENTS = 1 << 13  # elements from which handing a part to another thread pays


def flip_weights(w: Any, groups: int) -> Any:
    """Return the weight with its windows turned round, and inputs for outputs.

    A convolution of stride 1 by it gives the gradient in the input. It is in scratch memory.
    """
    w = as_contiguous(w)
    outputs, inputs, *kernel = w.shape
    each, taps = outputs // groups, math.prod(kernel)
    flipped = scratch(np, "flipped", (groups * inputs, each, *kernel), w.dtype)
    target = operand_place(flipped)
    sizes = (
        inputs, each, taps, inputs * taps * 4, taps * 4, each * inputs * taps * 4,
        taps * 4, each * taps * 4, inputs * each * taps * 4, -4, 0,
    )  # fmt: skip
    source = operand_place(w) + (taps - 1) * 4
    call_native(copy_rows("gather"), (source, target, target), sizes, 0, groups)
    return flipped


def interleave_images(array: Any, slot: str) -> Any:
    """Return (1, channels, rows, columns·images), in scratch memory.

    Args:
        array: (images, channels, rows, columns), float32.
        slot: name of the scratch memory.
    """
    array = as_contiguous(array)
    images, channels, height, width = array.shape
    result = scratch(np, slot, (1, channels, height, width * images), array.dtype)
    size, target = channels * height * width, operand_place(result)

    def part(start: int, stop: int) -> None:
        sizes = (1, stop - start, images, 4, 0, 0, images * 4, 0, 0, size * 4, 0)
        goal = target + start * images * 4
        places = operand_place(array) + start * 4, goal, goal
        call_native(copy_rows("gather"), places, sizes, 0, 1)

    run_native_ranges(part, size, array.size // _PART_ELEMENTS)
    return result


def copies_natively(array: Any) -> bool:
    """Return True if `gather_positions` and `scatter_positions` take an array."""
    return array.dtype == np.float32 and array.ndim in (3, 4)


def _rows_and_columns(sizes: Ints) -> Ints:
    return (1, *sizes)[-2:]


def gather_positions(x: Any, windows: Windows) -> Any:
    """Return the elements that windows of one element see, in scratch memory."""
    x = as_contiguous(x)
    result = scratch(np, "pointwise", (*x.shape[:2], *windows.out), x.dtype)
    (rows, columns), (down, right) = map(_rows_and_columns, (windows.out, windows.stride))
    width, plane, seen = x.shape[-1] * 4, math.prod(x.shape[2:]) * 4, rows * columns * 4
    channels = x.shape[1]
    sizes = (
        channels, rows, columns, down * width, plane, channels * plane,
        columns * 4, seen, channels * seen, right * 4, 0,
    )  # fmt: skip
    places = operand_place(x), operand_place(result), operand_place(result)
    copy = copy_rows("gather" if right > 1 else "rows")
    run_native_parts(lambda n: call_native(copy, places, sizes, n, n + 1), len(x))
    return result


def scatter_positions(out: Any, some: Any, windows: Windows) -> None:
    """Write taps (images, channels, *kernel, *positions) to their elements, and zeros elsewhere."""
    (rows, columns), (down, right) = map(_rows_and_columns, (windows.out, windows.stride))
    width, plane, seen = out.shape[-1] * 4, math.prod(out.shape[2:]) * 4, rows * columns * 4
    channels, taps = out.shape[1], math.prod(windows.kernel)
    copy = copy_rows("scatter" if right > 1 else "rows")
    source, target = operand_place(some), operand_place(out)

    def part(n: int) -> None:
        for number, tap in enumerate(np.ndindex(*windows.kernel)):
            y, x = _rows_and_columns(tap) if len(tap) > 1 else (0, *tap)
            cleared = 0 if number or windows.kernel == windows.stride else plane // 4
            sizes = (
                channels, rows, columns, columns * 4, taps * seen, channels * taps * seen,
                down * width, plane, channels * plane, right * 4, cleared,
            )  # fmt: skip
            places = source + number * seen, target + y * width + x * 4, target
            call_native(copy, places, sizes, n, n + 1)

    run_native_parts(part, len(out))
