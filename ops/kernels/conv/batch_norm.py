"""Batch normalisation and sums, channel by channel, while a channel is in the cache.

One thread sums a channel in a fixed order: vectors of float32 along a plane, and planes in float64.
So neither threads nor the number of planes change bits or degrade the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value, call_native
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_ranges

_THREADING_ELEMENTS = 1 << 14  # elements from which handing a part to another thread pays


def is_supported(xp: Any, x: Any, channel: int) -> bool:
    """Return whether there is a kernel for x, whose axis `channel` holds the channels."""
    inner = _plane_size(x, channel)
    return xp is np and x.dtype == np.float32 and inner >= vector_width() // 2 and is_jit_enabled()


def _plane_size(x: Any, channel: int) -> int:
    """Return the elements of a plane."""
    size = 1
    for n in x.shape[channel + 1 :]:
        size *= n
    return size


def normalize(
    y: Any, mean: Any, variance: Any, x: Any, scale: Any, bias: Any, channel: int, epsilon: float,
    correction: float = 1.0,
) -> None:  # fmt: skip
    """Write y = scale·(x - mean)/√(variance + epsilon) + bias, and the moments.

    Args:
        correction: factor of the variance that is written.
    """
    _run(_forward(), x, channel, (epsilon, correction), (x, scale, bias), (y, mean, variance))


def normalize_gradients(
    dx: Any, dscale: Any, dbias: Any, g: Any, x: Any, scale: Any, channel: int, epsilon: float
) -> None:
    """Write the gradients of `normalize` for a cotangent g of y."""
    _run(_backward(), x, channel, (epsilon, 1.0), (g, x, scale), (dx, dscale, dbias))


def scale_and_shift(y: Any, x: Any, factor: Any, shift: Any, channel: int) -> None:
    """Write y = factor·x + shift, with one factor and shift for each channel."""
    _run(_affine(), x, channel, (0.0, 1.0), (x, factor, shift), (y,))


def sum_channels(out: Any, x: Any, channel: int) -> None:
    """Write the sum of each channel."""
    _run(_sums(), x, channel, (0.0, 1.0), (x,), (out,))


def _run(
    function: NativeFunction,
    x: Any,
    channel: int,
    given: tuple[float, float],
    operands: tuple[Any, ...],
    results: tuple[Any, ...],
) -> None:
    arrays = [as_contiguous(a) for a in operands]
    channels, inner = x.shape[channel], _plane_size(x, channel)
    images = x.size // max(1, channels * inner)
    number = np.array([given[0], 1.0 / max(1, images * inner), given[1]])
    places = [operand_place(a) for a in (*arrays, *results, number)]
    sizes = (images, inner, channels * inner * 4, inner * 4)
    run_native_ranges(
        partial(call_native, function, places, sizes), channels, x.size // _THREADING_ELEMENTS
    )


class _ChannelWriter:
    """Writes loops over the planes of a channel, which all kernels here share.

    Sizes: images, elements of a plane, bytes between images, bytes between channels.
    """

    def __init__(self, pointers: int) -> None:
        self.nest = LoopNestWriter(vector_width(), pointers, 4)
        self.double = self.nest.lanes.vector("double")
        numbers = self.nest.pointers[-1]
        self.epsilon = self.nest.write(f"load double, ptr {numbers}, align 8")
        self.share = self.nest.write(f"load double, ptr {self.nest.gep(numbers, 8)}, align 8")

    def sum_elements(
        self, c: str, inputs: list[str], terms: Callable[..., list[str]], count: int
    ) -> list[str]:
        """Write Σ terms(*vectors), as doubles, over the elements of a channel of some inputs."""
        nest = self.nest
        zero = f"{nest.floats.const(0.0)}"

        def plane(n: str, *totals: str) -> list[str]:
            starts = [self.plane_address(p, n, c) for p in inputs]

            def strip(first: Value, mask: str | None, *so_far: str) -> list[str]:
                vectors = [nest.load(nest.gep(s, nest.mul(first, 4)), mask) for s in starts]
                parts = terms(*vectors)
                if mask is not None:
                    parts = [nest.floats.select(mask, p, zero) for p in parts]
                return [nest.floats.add(a, b) for a, b in zip(so_far, parts, strict=True)]

            found = nest.loop_vectors_carrying(nest.sizes[1], strip, [zero] * count)
            wide = [nest.lanes.convert("fpext", v, "float", "double") for v in found]
            return [
                nest.lanes.binary("fadd", "double", t, v) for t, v in zip(totals, wide, strict=True)
            ]

        nothing = nest.lanes.constant(0.0, "double")
        carried = [(self.double, nothing)] * count
        return [self.reduce_doubles(t) for t in nest.loop(0, nest.sizes[0], plane, carried)]

    def reduce_doubles(self, vector: str) -> str:
        name = f"@llvm.vector.reduce.fadd.v{self.nest.width}f64"
        self.nest.module.declared[name] = f"declare double {name}(double, {self.double})"
        return self.nest.write(f"call double {name}(double 0.0, {self.double} {vector})")

    def plane_address(self, pointer: str, n: str, c: str) -> str:
        nest = self.nest
        return nest.gep(pointer, nest.mul(n, nest.sizes[2]), nest.mul(c, nest.sizes[3]))

    def map_elements(
        self, c: str, inputs: list[str], output: str, value: Callable[..., str]
    ) -> None:
        """Write output = value(*vectors) for all elements of a channel."""
        nest = self.nest

        def plane(n: str) -> None:
            starts = [self.plane_address(p, n, c) for p in inputs]
            goal = self.plane_address(output, n, c)

            def strip(first: Value, mask: str | None) -> None:
                moved = nest.mul(first, 4)
                vectors = [nest.load(nest.gep(s, moved), mask) for s in starts]
                nest.store(value(*vectors), nest.gep(goal, moved), mask)

            nest.loop_vectors(nest.sizes[1], strip)

        nest.loop(0, nest.sizes[0], plane)

    def load_scalar(self, pointer: str, c: str) -> str:
        return self.nest.write(
            f"load float, ptr {self.nest.gep(pointer, self.nest.mul(c, 4))}, align 4"
        )

    def store_scalar(self, pointer: str, c: str, value: str) -> None:
        place = self.nest.gep(pointer, self.nest.mul(c, 4))
        self.nest.lines.append(f"  store float {value}, ptr {place}, align 4")

    def write(self, text: str) -> str:
        return self.nest.write(text)

    def to_float(self, value: str) -> str:
        return self.nest.write(f"fptrunc double {value} to float")

    def moments(self, c: str, x: str) -> tuple[str, str, str]:
        """Write the mean as a float, and the variance and reciprocal deviation as doubles."""
        f = self.nest.floats
        (total,) = self.sum_elements(c, [x], lambda v: [v], 1)
        centre = self.to_float(self.write(f"fmul double {total}, {self.share}"))
        middle = self.nest.splat(centre)

        def square(v: str) -> list[str]:
            about = f.sub(v, middle)
            return [f.mul(about, about)]

        (squares,) = self.sum_elements(c, [x], square, 1)
        variance = self.write(f"fmul double {squares}, {self.share}")
        self.nest.module.declared["sqrt"] = "declare double @llvm.sqrt.f64(double)"
        more = self.write(f"fadd double {variance}, {self.epsilon}")
        root = self.write(f"call double @llvm.sqrt.f64(double {more})")
        return centre, variance, self.write(f"fdiv double 1.0, {root}")


@cache
def _forward() -> NativeFunction:
    """Write the forward kernel.

    Pointers: x, scale, bias, y, mean, variance, (epsilon, 1 / elements of a channel, correction of
    the variance).
    """
    planes = _ChannelWriter(7)
    nest = planes.nest
    x, scale, bias, y, mean, variance, numbers = nest.pointers
    factor = nest.write(f"load double, ptr {nest.gep(numbers, 16)}, align 8")
    correction = planes.to_float(factor)

    def channel(c: str) -> None:
        centre, spread, per_deviation = planes.moments(c, x)
        planes.store_scalar(mean, c, centre)
        planes.store_scalar(
            variance, c, nest.write(f"fmul float {planes.to_float(spread)}, {correction}")
        )
        wide = nest.write(f"fpext float {planes.load_scalar(scale, c)} to double")
        factor = nest.splat(planes.to_float(planes.write(f"fmul double {wide}, {per_deviation}")))
        middle, shift = nest.splat(centre), nest.splat(planes.load_scalar(bias, c))
        f = nest.floats
        planes.map_elements(c, [x], y, lambda v: f.fma(f.sub(v, middle), factor, shift))

    nest.loop("%start", "%stop", channel)
    return compiler().function(*nest.source())


@cache
def _sums() -> NativeFunction:
    """Write the kernel of `sum_channels`. Pointers: x, sums, (unused)."""
    planes = _ChannelWriter(3)
    x, sums, _ = planes.nest.pointers

    def channel(c: str) -> None:
        (total,) = planes.sum_elements(c, [x], lambda v: [v], 1)
        planes.store_scalar(sums, c, planes.to_float(total))

    planes.nest.loop("%start", "%stop", channel)
    return compiler().function(*planes.nest.source())


@cache
def _affine() -> NativeFunction:
    """Write the kernel of `scale_and_shift`. Pointers: x, factor, shift, y, (unused)."""
    planes = _ChannelWriter(5)
    nest = planes.nest
    x, factor, shift, y, _ = nest.pointers
    f = nest.floats

    def channel(c: str) -> None:
        a, b = (nest.splat(planes.load_scalar(p, c)) for p in (factor, shift))
        planes.map_elements(c, [x], y, lambda v: f.add(f.mul(v, a), b))

    nest.loop("%start", "%stop", channel)
    return compiler().function(*nest.source())


@cache
def _backward() -> NativeFunction:
    """Write the kernel of the gradients.

    With x̂ = (x - mean)·r: dbias = Σ g, dscale = Σ g·x̂, dx = scale·r·(g - dbias/n - x̂·dscale/n).

    Pointers: g, x, scale, dx, dscale, dbias, (epsilon, 1 / elements of a channel).
    """
    planes = _ChannelWriter(7)
    nest = planes.nest
    g, x, scale, dx, dscale, dbias, _ = nest.pointers
    f = nest.floats

    def channel(c: str) -> None:
        centre, _, per_deviation = planes.moments(c, x)
        middle = nest.splat(centre)
        both = planes.sum_elements(c, [g, x], lambda u, v: [u, f.mul(u, f.sub(v, middle))], 2)
        along = planes.write(f"fmul double {both[1]}, {per_deviation}")
        planes.store_scalar(dbias, c, planes.to_float(both[0]))
        planes.store_scalar(dscale, c, planes.to_float(along))
        wide = nest.write(f"fpext float {planes.load_scalar(scale, c)} to double")
        factor = planes.write(f"fmul double {wide}, {per_deviation}")
        # dx = factor·g - slope·(x - mean) - offset
        level = planes.write(f"fmul double {both[0]}, {planes.share}")
        offset = planes.write(f"fmul double {factor}, {level}")
        tilt = planes.write(f"fmul double {along}, {planes.share}")
        scaled = planes.write(f"fmul double {tilt}, {per_deviation}")
        slope = planes.write(f"fmul double {factor}, {scaled}")
        a, b, d = (nest.splat(planes.to_float(v)) for v in (factor, slope, offset))

        def value(u: str, v: str) -> str:
            rest = f.fma(f.sub(v, middle), b, d)
            return f.fma(a, u, f.neg(rest))

        planes.map_elements(c, [g, x], dx, value)

    nest.loop("%start", "%stop", channel)
    return compiler().function(*nest.source())
