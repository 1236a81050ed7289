"""Resampling along one axis by a table: the inputs of each output, and their weights.

The coordinate and rounding rules are those of ONNX's Resize (opset 19). Antialiasing widens the
filter if the axis shrinks. The transpose of a table is a table, too, which gives the gradient.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.images.resample_text import resampled_columns, resampled_rows
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_ranges, run_parts
from graphflow.ops.kernels.sparse.scatter_rows import take_into

Array = np.ndarray[Any, Any]
_PART_ELEMENTS = 1 << 15  # elements of a part
_THREADING_TERMS = 1 << 13  # terms of sums from which handing a part to another thread pays
_MOST_BYTES = 1 << 31  # of a row whose elements have offsets of 32 bits
COORDINATES = (
    "half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric",
    "tf_crop_and_resize",
)  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
MODES = ("nearest", "linear", "cubic", "area")


class ResampleRule(NamedTuple):
    """The rule for an axis; plain data, so that it can be an attribute.

    Attributes:
        scale: outputs for each input; None: the quotient of the sizes.
        begin, end: the part, 0 to 1, that "tf_crop_and_resize" maps onto the axis.
    """

    mode: str
    coordinates: str = "half_pixel"
    scale: float | None = None
    rounding: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    begin: float = 0.0
    end: float = 1.0


class WeightTable(NamedTuple):
    """Inputs and weights, (outputs, entries): an output is the weighted sum of its inputs."""

    inputs: Array
    weights: Array


def source_coordinates(n: int, m: int, rule: ResampleRule) -> Array:
    """Return the coordinates of m outputs on the axis of n inputs."""
    out = np.arange(m, dtype=np.float64)
    width = float(m) if rule.scale is None else rule.scale * n
    # With given sizes, o·n/m is exact if it is whole.
    ratio = (n, m) if rule.scale is None else (1.0, rule.scale)
    half: Array = (out + 0.5) * ratio[0] / ratio[1] - 0.5
    if rule.coordinates == "asymmetric":
        return np.asarray(out * ratio[0] / ratio[1])
    if rule.coordinates == "align_corners":
        return np.zeros(m) if width == 1 else np.asarray(out * (n - 1) / (width - 1))
    if rule.coordinates == "pytorch_half_pixel":
        return np.full(m, -0.5) if width == 1 else half
    if rule.coordinates == "half_pixel_symmetric":
        return np.asarray(half + n / 2 * (1 - m / width))
    if rule.coordinates == "tf_crop_and_resize":
        extent = (rule.end - rule.begin) * (n - 1)
        inner = np.full(m, extent / 2) if width == 1 else out * extent / (width - 1)
        return np.asarray(inner + rule.begin * (n - 1))
    return half


def is_outside(n: int, m: int, rule: ResampleRule) -> Array:
    """Return which outputs lie beyond the axis, where "tf_crop_and_resize" extrapolates."""
    if rule.coordinates != "tf_crop_and_resize":
        return np.zeros(m, bool)
    x = source_coordinates(n, m, rule)
    return np.asarray((x < 0) | (x > n - 1))


@lru_cache(maxsize=256)
def weight_table(n: int, m: int, rule: ResampleRule) -> WeightTable:
    """Return the table from an axis of n elements to one of m."""
    if rule.mode == "area":
        return _area_table(n, m)
    x = source_coordinates(n, m, rule)
    if rule.mode == "nearest":
        index = np.clip(_round(x, rule.rounding), 0, n - 1).astype(np.int64)[:, None]
        weight = np.ones(index.shape)
    else:
        index, weight = _filter_weights(x, m / n if rule.scale is None else rule.scale, rule)
        if rule.exclude_outside:
            weight = np.where((index < 0) | (index >= n), 0.0, weight)
            total = weight.sum(axis=1, keepdims=True)
            weight = weight / np.where(total == 0, 1.0, total)
        index = np.clip(index, 0, n - 1)
    return WeightTable(index, np.where(is_outside(n, m, rule)[:, None], 0.0, weight))


def _round(x: Array, rounding: str) -> Array:
    if rounding == "round_prefer_floor":
        return np.asarray(np.ceil(x - 0.5))
    if rounding == "round_prefer_ceil":
        return np.asarray(np.floor(x + 0.5))
    return np.asarray(np.floor(x) if rounding == "floor" else np.ceil(x))


def _filter_weights(x: Array, scale: float, rule: ResampleRule) -> tuple[Array, Array]:
    """Return the inputs under the filter around each x, and the filter's values there."""
    shrink = min(scale, 1.0) if rule.antialias else 1.0
    radius = 1 if rule.mode == "linear" else 2
    first = int(np.floor(-radius / shrink)) + 1
    index = np.floor(x).astype(np.int64)[:, None] + np.arange(first, 2 - first)
    distance = np.abs(index - x[:, None]) * shrink
    if rule.mode == "linear":
        weight = np.clip(1 - distance, 0, 1)
    else:
        weight = _cubic_weights(distance, rule.cubic_a)
    if rule.antialias:
        weight = weight / weight.sum(axis=1, keepdims=True)
    return index, weight


def _cubic_weights(d: Array, a: float) -> Array:
    """Return Keys' cubic convolution kernel. Source: Keys, IEEE TASSP 29(6), 1981."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _area_table(n: int, m: int) -> WeightTable:
    """Return the table of means over the inputs that each output covers, even in part."""
    out = np.arange(m)
    begin, end = out * n // m, -(-(out + 1) * n // m)
    index = begin[:, None] + np.arange(int((end - begin).max(initial=1)))
    weight = np.where(index < end[:, None], 1.0 / (end - begin)[:, None], 0.0)
    return WeightTable(np.minimum(index, n - 1), weight)


@lru_cache(maxsize=256)
def transposed_table(n: int, m: int, rule: ResampleRule) -> WeightTable:
    """Return the transpose of `weight_table(n, m, rule)`: from m elements to n."""
    index, weight = weight_table(n, m, rule)
    used = weight.reshape(-1) != 0
    inputs = index.reshape(-1)[used]
    outputs = np.repeat(np.arange(m), index.shape[1])[used]
    order = np.argsort(inputs, kind="stable")
    inputs, outputs, values = inputs[order], outputs[order], weight.reshape(-1)[used][order]
    counts = np.bincount(inputs, minlength=n)
    starts = np.cumsum(counts) - counts
    entries = max(1, int(counts.max(initial=1)))
    at = starts[:, None] + np.minimum(np.arange(entries), np.maximum(counts, 1)[:, None] - 1)
    at = np.minimum(at, max(0, len(outputs) - 1))
    if not len(outputs):
        return WeightTable(np.zeros((n, 1), np.int64), np.zeros((n, 1)))
    return WeightTable(outputs[at], np.where(np.arange(entries) < counts[:, None], values[at], 0.0))


def table_for(n: int, m: int, rule: ResampleRule, transpose: bool) -> WeightTable:
    """Return the table from n elements to m: the rule's, or the transpose of the reverse one."""
    return transposed_table(m, n, rule) if transpose else weight_table(n, m, rule)


def input_range(rows: WeightTable, first: int, last: int) -> tuple[int, int]:
    """Return the range of inputs that outputs `first` to `last` see."""
    inputs, weights = (entries[first:last] for entries in rows)
    seen = inputs[weights != 0]
    if not len(seen):
        low = int(inputs.min(initial=0))
        return low, low + 1
    return int(seen.min()), int(seen.max()) + 1


def slice_table(rows: WeightTable, first: int, count: int, low: int, have: int) -> WeightTable:
    """Return the table for `have` inputs from `low` on and `count` outputs from `first` on."""
    inputs, weights = (entries[first : first + count] for entries in rows)
    there = (inputs >= low) & (inputs < low + have)
    return WeightTable(np.clip(inputs - low, 0, max(0, have - 1)), np.where(there, weights, 0.0))


def resample(xp: Any, out: Any, x: Any, axis: int, rows: WeightTable) -> None:
    """Write a table applied to an axis of x."""
    index, weight = rows
    lead = int(np.prod(x.shape[:axis], dtype=np.int64))
    after = int(np.prod(x.shape[axis + 1 :], dtype=np.int64))
    if not out.size:
        return
    # Outputs without inputs are 0, not 0 times an input that may be NaN.
    empty = np.flatnonzero(~weight.any(axis=1))
    native = xp is np and x.dtype == np.float32 and is_jit_enabled()
    if native and not len(empty) and x.shape[axis] * 4 < _MOST_BYTES:
        _resample_natively(out, x, lead, after, x.shape[axis], rows)
        return
    flat = x.reshape(lead, x.shape[axis], after)
    sums = out.reshape(lead, out.shape[axis], after)
    places = xp.asarray(index)
    plain = index.shape[1] == 1 and bool((weight == 1).all())
    factors = None if plain else xp.asarray(weight.astype(x.dtype))[:, :, None]
    each = lead
    if xp is np:
        each = max(1, _PART_ELEMENTS // max(1, after * max(flat.shape[1], sums.shape[1])))

    def part(i: int) -> None:
        rows = slice(i * each, (i + 1) * each)
        _apply_weights(xp, sums[rows], flat[rows], places, factors)
        if len(empty):
            sums[rows, xp.asarray(empty)] = 0

    if xp is np:
        run_parts(part, -(-lead // each))
    else:
        part(0)


def _resample_natively(out: Any, x: Any, lead: int, after: int, n: int, rows: WeightTable) -> None:
    """Write a table applied to the middle axis of x (lead, n, after), all float32."""
    index, weight = rows
    outputs, entries = index.shape
    x = as_contiguous(x)
    if after == 1:
        pitch = -(-outputs // vector_width()) * vector_width()
        offsets = np.zeros((entries, pitch), np.int32)
        weights = np.zeros((entries, pitch), np.float32)
        offsets[:, :outputs], weights[:, :outputs] = index.T * 4, weight.T
        function, sizes = resampled_columns(), (outputs, entries, pitch, n * 4)
    else:
        offsets = np.ascontiguousarray(index * (after * 4), np.int64)
        weights = np.ascontiguousarray(weight, np.float32)
        function, sizes = resampled_rows(), (outputs, entries, after, n * after * 4)
    places = [operand_place(array) for array in (x, offsets, weights, out)]
    terms = lead * outputs * after * entries
    run_native_ranges(
        partial(call_native, function, places, sizes), lead, terms // _THREADING_TERMS
    )


def _apply_weights(xp: Any, sums: Any, x: Any, places: Any, factors: Any) -> None:
    """Write Σ over entries of factors · x[:, places]; without factors, the one entry."""
    take_into(xp, sums, x, places[:, 0], 1)
    if factors is None:
        return
    xp.multiply(sums, factors[:, 0], out=sums)
    taken = scratch(xp, "taken", sums.shape, x.dtype)
    for entry in range(1, places.shape[1]):
        take_into(xp, taken, x, places[:, entry], 1)
        xp.multiply(taken, factors[:, entry], out=taken)
        xp.add(sums, taken, out=sums)
