"""The generated functions of Winograd's convolution.

They transform tiles, multiply transformed tiles, and turn planes of pixels into rows of channels
and back. Between planes, `PANEL` channels lie side by side: an element (a pixel, or one of the 36
numbers of a transformed tile) is a row of that many. The interpolation points are 0, ±5/8, ±3/2 and
∞. Their error in float32, about 1e-6 of the results' scale, is a fifth of that of the usual 0, ±1,
±2, ∞.

Source: Lavin & Gray, CVPR 2016; on points, Barabasz, Anderson, Soodhalter & Gregg, ACM TOMS 46(4),
2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value
from graphflow.ops.kernels.codegen.vector_writer import Floats
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width

PANEL = 64
ROW = PANEL * 4  # bytes
_A, _B = 0.625, 1.5  # interpolation points
_A2, _B2 = _A * _A, _B * _B
_NA, _NB = 2 * _A2 * (_A2 - _B2), 2 * _B2 * (_B2 - _A2)

Rows = Sequence[str]

# One axis of a transform ------------------------------------------------------------------------


def _input_transform(f: Floats, x: Rows) -> list[str]:
    """Transform 6 pixels to 6 numbers, by Bᵀ."""

    def ends(x0: str, x2: str, x4: str) -> str:
        return f.fma(f.const(_A2 * _B2), x0, f.fma(f.const(-(_A2 + _B2)), x2, x4))

    def pair(point: float, other: float) -> tuple[str, str]:
        even = f.fma(f.const(-other), x[2], x[4])
        odd = f.fma(f.const(-other), x[1], x[3])
        return f.fma(f.const(point), odd, even), f.fma(f.const(-point), odd, even)

    return [
        ends(x[0], x[2], x[4]), *pair(_A, _B2), *pair(_B, _A2), ends(x[1], x[3], x[5]),
    ]  # fmt: skip


def _output_transform(f: Floats, m: Rows) -> list[str]:
    """Transform 6 numbers to 4 pixels, by Aᵀ."""
    s, d = f.add(m[1], m[2]), f.sub(m[1], m[2])
    t, e = f.add(m[3], m[4]), f.sub(m[3], m[4])

    def both(a: float, left: str, b: float, right: str) -> str:
        return f.fma(f.const(a), left, f.mul(f.const(b), right))

    return [
        f.add(f.add(m[0], s), t),
        both(_A, d, _B, e),
        both(_A2, s, _B2, t),
        f.add(both(_A * _A2, d, _B * _B2, e), m[5]),
    ]


def _cotangent_transform(f: Floats, g: Rows) -> list[str]:
    """Transform 4 cotangents to 6 numbers, by A."""

    def pair(point: float) -> tuple[str, str]:
        square = point * point
        even = f.fma(f.const(square), g[2], g[0])
        odd = f.fma(f.const(square * point), g[3], f.mul(f.const(point), g[1]))
        return f.add(even, odd), f.sub(even, odd)

    return [g[0], *pair(_A), *pair(_B), g[3]]


def _filter_transform(f: Floats, g: Rows) -> list[str]:
    """Transform 3 weights to 6 numbers, by G."""

    def pair(point: float, scale: float) -> tuple[str, str]:
        even = f.fma(f.const(point * point / scale), g[2], f.mul(f.const(1 / scale), g[0]))
        odd = f.mul(f.const(point / scale), g[1])
        return f.add(even, odd), f.sub(even, odd)

    return [f.mul(f.const(1 / (_A2 * _B2)), g[0]), *pair(_A, _NA), *pair(_B, _NB), g[2]]


def _weight_gradient_transform(f: Floats, u: Rows) -> list[str]:
    """Transform 6 numbers to 3 weights, by Gᵀ."""
    s, d = f.add(u[1], u[2]), f.sub(u[1], u[2])
    t, e = f.add(u[3], u[4]), f.sub(u[3], u[4])

    def both(a: float, left: str, b: float, right: str) -> str:
        return f.fma(f.const(a), left, f.mul(f.const(b), right))

    return [
        f.fma(f.const(1 / (_A2 * _B2)), u[0], both(1 / _NA, s, 1 / _NB, t)),
        both(_A / _NA, d, _B / _NB, e),
        f.add(both(_A2 / _NA, s, _B2 / _NB, t), u[5]),
    ]


_Axis = Callable[[Floats, Rows], list[str]]
_TRANSFORMS: dict[
    str, tuple[_Axis, int, bool, bool]
] = {  # axis transform, elements read, whether source and target are placed by a table
    "input": (_input_transform, 6, True, False),
    "output": (_output_transform, 6, False, True),
    "spread": (_cotangent_transform, 4, True, False),
    "filter": (_filter_transform, 3, False, False),
    "gather": (_weight_gradient_transform, 6, False, False),
}

# Kernels ----------------------------------------------------------------------------------------


@cache
def transform(name: str) -> NativeFunction:
    """Write the transform of tiles on both axes.

    Pointers: source, target, table (i32 bytes from the base, for each tile and element, on the side
    that is placed by a table). Sizes: tiles, vectors; then for source and target: bytes between
    outer ranges, between tiles, between elements.
    """
    axis, reads, table_in, table_out = _TRANSFORMS[name]
    nest = LoopNestWriter(vector_width(), 3, 8)
    source, target, table = nest.pointers
    tiles, vectors, *strides = nest.sizes

    def places(pointer: str, tile: str, count: int, side: int, by_table: bool) -> Rows:
        """Return the places of a tile's elements."""
        if not by_table:
            return [nest.gep(pointer, nest.mul(strides[4 + side], i)) for i in range(count)]
        entries = nest.gep(table, nest.mul(tile, 4 * count))
        offsets = [
            nest.write(f"load i32, ptr {nest.gep(entries, 4 * i)}, align 4") for i in range(count)
        ]
        return [nest.gep(pointer, nest.write(f"sext i32 {o} to i64")) for o in offsets]

    def vector(n: str, tile: str, v: str) -> None:
        moved = nest.mul(v, nest.nbytes)
        here, there = (
            nest.gep(p, nest.mul(n, strides[side]), nest.mul(tile, strides[2 + side]), moved)
            for side, p in enumerate((source, target))
        )
        found = places(here, tile, reads * reads, 0, table_in)
        columns = [
            axis(nest.floats, [nest.load(found[i * reads + j]) for i in range(reads)])
            for j in range(reads)
        ]
        writes = len(columns[0])
        results = [axis(nest.floats, [c[i] for c in columns]) for i in range(writes)]
        goals = places(there, tile, writes * writes, 1, table_out)
        for place, value in zip(goals, (v for row in results for v in row), strict=True):
            nest.store(value, place)

    def tile_loop(n: str) -> None:
        nest.loop(0, tiles, lambda t: nest.loop(0, vectors, lambda v: vector(n, t, v)))

    nest.loop("%start", "%stop", tile_loop)
    return compiler().function(*nest.source())


def register_block() -> tuple[int, int]:
    """Return the rows and vectors of a product that are kept in registers."""
    return (6, 4) if vector_width() == 16 else (6, 2)


@cache
def product(rows: int, vectors: int, transposed: bool) -> NativeFunction:
    """Write C[r] (+)= Σ A[r, k]·B[k] for each of the 36 numbers; A[k, r] if transposed.

    Rows of all three are `ROW` bytes apart. Pointers: A, B, C. Sizes: turns of `rows` rows, k,
    whether to add to C, and bytes between numbers of A, B, C.
    """
    nest = LoopNestWriter(vector_width(), 3, 6)
    times, depth, adds, *strides = nest.sizes
    adding = nest.write(f"icmp ne i64 {adds}, 0")
    across, along = (4, ROW) if transposed else (ROW, 4)
    f = nest.floats
    zero = f.const(0.0)

    def rows_loop(number: str) -> None:
        a, b, c = (
            nest.gep(p, nest.mul(number, s)) for p, s in zip(nest.pointers, strides, strict=True)
        )
        nest.loop(0, times, lambda i: one(i, a, b, c))

    def one(i: str, a: str, b: str, c: str) -> None:
        left = nest.gep(a, nest.mul(i, rows * across))
        result = nest.gep(c, nest.mul(i, rows * ROW))
        places = [
            nest.gep(result, r * ROW + v * nest.nbytes) for r in range(rows) for v in range(vectors)
        ]
        kind = nest.kind
        begun = [
            nest.write(f"select i1 {adding}, {kind} {nest.load(p)}, {kind} {zero}") for p in places
        ]

        def step(_: str, left: str, right: str, *sums: str) -> list[str]:
            given = [nest.load(nest.gep(right, v * nest.nbytes)) for v in range(vectors)]
            new = []
            for r in range(rows):
                factor = nest.broadcast(nest.gep(left, r * across))
                new += [f.fma(factor, given[v], sums[r * vectors + v]) for v in range(vectors)]
            return [nest.gep(left, along), nest.gep(right, ROW), *new]

        carried = [("ptr", left), ("ptr", b), *((kind, s) for s in begun)]
        for place, value in zip(places, nest.loop(0, depth, step, carried)[2:], strict=True):
            nest.store(value, place)

    nest.loop("%start", "%stop", rows_loop)
    return compiler().function(*nest.source())


@cache
def pack_pixels(pitch: int = ROW) -> NativeFunction:
    """Write planes, one for each channel, as rows of channels, and a row of zeros behind them.

    Rows are `pitch` bytes apart.

    The row of zeros begins where a further vector of pixels would. Pointers: planes, rows. Sizes:
    elements of a plane, channels (up to `PANEL`), bytes between planes, and between outer ranges of
    planes and rows.
    """
    nest = LoopNestWriter(vector_width(), 2, 5)
    count, channels = nest.sizes[:2]

    def strip(planes: Rows, target: str, first: Value, mask: str | None) -> None:
        found = [nest.load(nest.gep(p, nest.mul(first, 4)), mask) for p in planes]
        start = nest.gep(target, nest.mul(first, pitch))
        for i, row in enumerate(nest.transpose(found)):
            nest.store(row, nest.gep(start, i * pitch))

    def vector(planes: Rows, target: str) -> None:
        nest.loop_vectors(count, lambda first, mask: strip(planes, target, first, mask))
        end = nest.mul(nest.mul(nest.vector_count(count), nest.width), pitch)
        nest.store(nest.floats.const(0.0), nest.gep(target, end))

    _loop_planes(nest, channels, vector, planes_first=True)
    return compiler().function(*nest.source())


@cache
def pack_short_planes(count: int) -> NativeFunction:
    """Write contiguous planes of at most a vector's elements as rows of channels.

    Like `pack_pixels`, for whole vectors of channels and without a row of zeros. Pointers: planes,
    rows. Sizes: channels, bytes between outer ranges of planes and rows.
    """
    nest = LoopNestWriter(vector_width(), 2, 3)
    source, target = nest.pointers
    channels, outer, outer_rows = nest.sizes

    def vector(c: str, here: str, there: str) -> None:
        start = nest.gep(here, nest.mul(c, 4 * count))
        mask = nest.first_lanes(count)
        found = [nest.load(nest.gep(start, 4 * count * i), mask) for i in range(nest.width)]
        goal = nest.gep(there, nest.mul(c, 4))
        for i, row in enumerate(nest.transpose(found)[:count]):
            nest.store(row, nest.gep(goal, i * ROW))

    def one(n: str) -> None:
        here, there = (
            nest.gep(source, nest.mul(n, outer)),
            nest.gep(target, nest.mul(n, outer_rows)),
        )
        nest.loop(0, channels, lambda c: vector(c, here, there), step=nest.width)

    nest.loop("%start", "%stop", one)
    return compiler().function(*nest.source())


@cache
def unpack_planes(pitch: int = ROW) -> NativeFunction:
    """Write rows of channels, `pitch` bytes apart, back as planes.

    Pointers: rows, planes. Sizes: elements of a plane, channels, bytes between planes, and between
    outer ranges of planes and rows.
    """
    nest = LoopNestWriter(vector_width(), 2, 5)
    count, channels = nest.sizes[:2]

    def strip(planes: Rows, source: str, first: Value, mask: str | None) -> None:
        start = nest.gep(source, nest.mul(first, pitch))
        found = nest.transpose([nest.load(nest.gep(start, i * pitch)) for i in range(nest.width)])
        # In reverse: lanes beyond the last channel write to its plane, and must be overwritten.
        for plane, row in reversed(list(zip(planes, found, strict=True))):
            nest.store(row, nest.gep(plane, nest.mul(first, 4)), mask)

    def vector(planes: Rows, source: str) -> None:
        nest.loop_vectors(count, lambda first, mask: strip(planes, source, first, mask))

    _loop_planes(nest, channels, vector, planes_first=False)
    return compiler().function(*nest.source())


def _loop_planes(
    nest: LoopNestWriter, channels: str, vector: Callable[[Rows, str], None], planes_first: bool
) -> None:
    """Write vector(planes, rows) for each vector of channels, in each outer range."""
    base, other = nest.pointers if planes_first else reversed(nest.pointers)
    between, outer, outer_rows = nest.sizes[2:]
    last = nest.sub(channels, 1)

    def channel(n: str, v: str) -> None:
        start = nest.gep(base, nest.mul(n, outer))
        first = nest.mul(v, nest.width)
        found = [
            nest.gep(start, nest.mul(nest.minimum(nest.add(first, r), last), between))
            for r in range(nest.width)
        ]
        vector(found, nest.gep(other, nest.mul(n, outer_rows), nest.mul(v, nest.nbytes)))

    vectors = nest.vector_count(channels)
    nest.loop("%start", "%stop", lambda n: nest.loop(0, vectors, lambda v: channel(n, v)))
