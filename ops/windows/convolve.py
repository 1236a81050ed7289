"""`gf.convolve`: numpy's convolution of two lines of numbers."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, error_location, function, promote_inputs
from graphflow.ir.spec import show_shape
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.tensors.slicing import flip
from graphflow.ops.windows.conv import conv1d

_MODES = ("full", "same", "valid")


@function
def convolve(a: Any, v: Any, mode: str = "full") -> Tensor:
    """Convolve two lines of numbers: the result at k is the sum over i of a[i]·v[k - i].

    Args:
        a, v: (n,) and (m,) floats, not empty.
        mode: "full": (n + m - 1,), all that overlaps; "same": (max(n, m),), its middle; "valid":
            (max(n, m) - min(n, m) + 1,), where they overlap as a whole.

    Raises:
        DTypeError: they are no floats.
        ShapeError: one is no line, or empty.
        ArgumentError: an unknown mode.
    """
    a, v = promote_inputs("convolve", (a, v))
    require_kind(a.spec, "float")
    with error_location("convolve"):
        if mode not in _MODES:
            raise ArgumentError(f"mode is one of {', '.join(_MODES)}, not {mode!r}")
        sizes = [each.shape[0] if each.ndim == 1 else 0 for each in (a, v)]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ShapeError(
                "expected two lines of known sizes, not empty, got "
                f"{show_shape(a.shape)} and {show_shape(v.shape)}"
            )
    if sizes[0] < sizes[1]:  # the result is the same either way
        a, v = v, a
    shorter = min(sizes)
    before, after = {
        "full": (shorter - 1, shorter - 1), "same": ((shorter - 1) // 2, shorter // 2),
        "valid": (0, 0),
    }[mode]  # fmt: skip
    if mode == "same":  # numpy's middle begins at (m - 1) // 2 of the full result
        before, after = shorter - 1 - (shorter - 1) // 2, (shorter - 1) // 2
    line, kernel = reshape(a, (1, 1, -1)), reshape(flip(v, 0), (1, 1, -1))
    result: Tensor = reshape(conv1d(line, kernel, padding=[(before, after)]), (-1,))
    return result


__all__ = ["convolve"]
