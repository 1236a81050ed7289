"""Discrete Fourier transforms as native loops, as many at once as a vector has lanes.

Passes of the self-sorting kind go back and forth between two work buffers. The first pass reads the
array, the last one writes it.

Source: Stockham, AFIPS Spring Joint Computer Conference, 1966; Swarztrauber, Parallel Computing 1,
1984.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter, lanes_of
from graphflow.ops.kernels.fft.dft_lanes import (
    ROWS,
    ArrayElements,
    ComplexVectors,
    Pair,
    WorkBuffers,
)


def radices(n: int) -> tuple[int, ...] | None:
    """Return n as a product of 4, 2, 3 and 5; None if it is not one, or n is 1."""
    found: list[int] = []
    for radix in (5, 3, 4, 2):
        while n % radix == 0:
            found.append(radix)
            n //= radix
    return tuple(found) if n == 1 and found else None


def twiddles(n: int, dtype: Any) -> Any:
    """Return the twiddle factors of each pass in the order of their use: w, w²… a group."""
    parts = []
    for radix in radices(n) or ():
        m = n // radix
        if m > 1:
            angles = -2 * np.pi / n * np.outer(np.arange(m), np.arange(1, radix))
            parts.append(np.stack([np.cos(angles), np.sin(angles)], -1).reshape(-1))
        n = m
    return np.concatenate([*parts, np.zeros(1)]).astype(dtype)


def _load_twiddle(flow: KernelWriter, element: str, base: str, i: int) -> Pair:
    """Load twiddle i from a base into all lanes."""
    lanes, item = lanes_of(element), BYTES[element]
    real, imaginary = (
        flow.broadcast(lanes, element, flow.load(element, flow.gep(base, element, 2 * i + x), item))
        for x in (0, 1)
    )
    return real, imaginary


@dataclass
class _RealTransform:
    """Transforms of 2·n real numbers by those of n complex ones: even elements plus i times odd
    ones.

    Args:
        factors: address of the twiddles; the roots of unity for this begin at index `base`.
    """

    flow: KernelWriter
    steps: ComplexVectors
    inside: WorkBuffers
    n: int
    factors: str
    base: int

    def split(self, here: str, there: str) -> None:
        """Turn the transform of even and odd elements into that of all."""
        flow, steps, f = self.flow, self.steps, self.steps.f
        read, keep = self.inside.load, self.inside.store
        half = f.const(0.5)
        begin = read(here, "0")
        keep(there, (f.add(*begin), f.const(0.0)), "0")
        keep(there, (f.sub(*begin), f.const(0.0)), str(self.n))

        def both(k: str) -> None:
            other = flow.step("sub", self.n, k)
            a, b = read(here, k), read(here, other)
            b = b[0], f.neg(b[1])
            even = steps.scale(steps.add(a, b), half)
            odd = steps.mul(steps.times_minus_i(steps.scale(steps.sub(a, b), half)), self._root(k))
            keep(there, steps.add(even, odd), k)
            last = steps.sub(even, odd)
            keep(there, (last[0], f.neg(last[1])), other)

        flow.loop("1", self.n // 2 + 1, (), both)

    def join(self, here: str, there: str) -> None:
        """Do the reverse, with real and imaginary parts swapped, since an inverse follows."""
        flow, steps, f = self.flow, self.steps, self.steps.f
        read, keep = self.inside.load, self.inside.store
        first, last = read(here, "0")[0], read(here, str(self.n))[0]
        keep(there, (f.sub(first, last), f.add(first, last)), "0")

        def both(k: str) -> None:
            other = flow.step("sub", self.n, k)
            a, b = read(here, k), read(here, other)
            b = b[0], f.neg(b[1])
            even, apart = steps.add(a, b), steps.sub(a, b)
            turn = self._root(k)
            odd = steps.mul(apart, (turn[0], f.neg(turn[1])))
            # even + i·odd here; at the mirrored frequency the conjugates of both
            keep(there, (f.add(even[1], odd[0]), f.sub(even[0], odd[1])), k)
            keep(there, (f.sub(odd[0], even[1]), f.add(even[0], odd[1])), other)

        flow.loop("1", self.n // 2 + 1, (), both)

    def _root(self, at: str) -> Pair:
        flow, element = self.flow, self.inside.element
        place = flow.gep(self.factors, element, flow.add(flow.mul(at, 2), self.base))
        return _load_twiddle(flow, element, place, 0)


@dataclass
class _Passes:
    """The passes of a transform, one for each of its radices.

    Args:
        source, target: the array elements that the first pass loads and the last one stores, unless
            whole rows are in work buffers (`by_rows`).
        step_in, step_out: bytes between elements of a transform in both.
        factors: address of the twiddles.
        scale: a factor for results; "" for none.
    """

    steps: ComplexVectors
    inside: WorkBuffers
    source: ArrayElements
    target: ArrayElements
    step_in: str
    step_out: str
    factors: str
    scale: str
    by_rows: bool
    radices: tuple[int, ...]

    def write(self, i: int, size: int, stride: int, factor: int) -> None:
        """Write the butterflies of transforms of `size` elements, `stride` of which interleave.

        Args:
            factor: index of the pass's twiddles.
        """
        radix, flow, element = self.radices[i], self.inside.flow, self.inside.element
        m = size // radix

        def group(p: str) -> None:
            at = flow.add(flow.mul(p, 2 * (radix - 1)), factor)
            base = flow.gep(self.factors, element, at)
            roots = [_load_twiddle(flow, element, base, j) for j in range(radix - 1)]
            self._butterflies(i, m, stride, p, roots)

        if m > 1:
            flow.loop("0", m, (), group)
        else:
            self._butterflies(i, m, stride, "0", [])

    def _butterflies(self, i: int, m: int, stride: int, p: str, roots: list[Pair]) -> None:
        """Write the butterflies of group p, of m."""
        radix, flow, steps = self.radices[i], self.inside.flow, self.steps
        first, last = i == 0 and not self.by_rows, i == len(self.radices) - 1
        here, there = self.inside.buffers[(i + 1) % 2], self.inside.buffers[i % 2]

        def one(q: str) -> None:
            start = flow.add(q, flow.mul(p, stride))
            places = [flow.add(start, stride * m * k) for k in range(radix)]
            given = [
                self.source.load(flow.mul(at, self.step_in))
                if first
                else self.inside.load(here, at)
                for at in places
            ]
            found = steps.butterfly(given)
            begin = flow.add(q, flow.mul(p, stride * radix))
            for j, value in enumerate(found):
                at = flow.add(begin, stride * j)
                if roots and j:
                    value = steps.mul(value, roots[j - 1])
                if last and self.scale:
                    value = steps.scale(value, self.scale)
                if not last or self.by_rows:
                    self.inside.store(there, value, at)
                else:
                    self.target.store(value, flow.mul(at, self.step_out))

        flow.loop("0", stride, (), one)


def transform(
    element: str, n: int, layout: str, inverse: bool, scaled: bool, real: str = ""
) -> tuple[str, str]:
    """Write transforms of n elements, in groups of as many as there are lanes, from start to stop.

    Pointers: source, target, byte offsets of the transforms in both (whole groups), twiddles, and
    scratch memory for two groups of n + 1 elements. Sizes: bytes between elements of a transform in
    both, transforms, bits of a float64 factor (`scaled`).

    Args:
        real: "half": rows of 2·n real numbers, as n complex ones, to n + 1 frequencies. "whole":
            the reverse, times 2. "": complex numbers.
    """
    flow = KernelWriter()
    source, target, offsets_in, offsets_out, factors, memory = (flow.pointer(i) for i in range(6))
    step_in, step_out, count = (flow.size(i) for i in range(3))
    lanes = lanes_of(element)
    steps = ComplexVectors(flow.floats(lanes, element))
    scale = ""
    if scaled:
        scale = flow.write(f"bitcast i64 {flow.size(3)} to double")
        if element == "float":
            scale = flow.write(f"fptrunc double {scale} to float")
        scale = flow.broadcast(lanes, element, scale)
    into = ArrayElements(flow, element, source, layout, inverse)
    out_of = ArrayElements(flow, element, target, layout, inverse or real == "whole")
    by_rows = layout == ROWS
    inside = WorkBuffers(flow, element, memory, n)
    buffers, sizes = inside.buffers, radices(n) or ()
    passes = _Passes(steps, inside, into, out_of, step_in, step_out, factors, scale, by_rows, sizes)
    halves = _RealTransform(flow, steps, inside, n, factors, len(twiddles(n, np.float64)) - 1)

    def transforms(g: str) -> None:
        left = flow.step("sub", count, flow.mul(g, lanes))
        mask = flow.first_lanes(lanes, flow.minimum(left, lanes))
        at = flow.mul(g, lanes)
        into.select_group(flow.gep(offsets_in, "i64", at), mask, left)
        out_of.select_group(flow.gep(offsets_out, "i64", at), mask, left)
        if real == "whole":
            into.load_rows(buffers[0], n)
            into.load_last(buffers[0], n)
            halves.join(buffers[0], buffers[1])
        elif by_rows:
            into.load_rows(buffers[1], n)
        size, stride, factor = n, 1, 0
        for i, radix in enumerate(sizes):
            passes.write(i, size, stride, factor)
            size, stride = size // radix, stride * radix
            factor += 2 * (radix - 1) * size if size > 1 else 0
        found = (len(sizes) - 1) % 2
        if real == "half":
            halves.split(buffers[found], buffers[1 - found])
            found = 1 - found
            out_of.store_last(buffers[found], n)
        if by_rows:
            out_of.store_rows(buffers[found], n)

    flow.loop("%start", "%stop", (), transforms)
    return flow.finish()
