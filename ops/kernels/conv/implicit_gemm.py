"""Convolutions of any stride, dilation and padding as products of gathered rows.

Nothing is copied for each tap: pixels are turned into rows of channels once, and a table says which
row each tap of each window sees, a row of zeros where it sees padding. The gradient in the input
is done for each remainder by the stride, whose elements share their taps. Sums run over blocks of
channels, taps, and the channels of a block, whatever is done together, so chunks and threads change
no bits. float32, on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product as pairs_of
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call
from graphflow.ops.kernels.conv.direct_text import copy
from graphflow.ops.kernels.conv.implicit_gemm_text import BLOCK, DEEP, product, sums
from graphflow.ops.kernels.conv.weight_layout import tap_rows
from graphflow.ops.kernels.conv.winograd_text import PANEL, ROW, pixels, planes
from graphflow.ops.kernels.conv.winograd_tiles import Memory, blocks_of, slots_of, width_of
from graphflow.ops.kernels.fusion.region_kernels import enabled
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_FEWEST = 12  # channels on both sides
_LARGEST = 1 << 13  # pixels of an image
_TOGETHER = 1024  # positions of a chunk
_GATHERED = 32 << 20  # bytes of rows at once


def fits(xp: Any, x: Any, outputs: int, windows: Windows, groups: int) -> bool:
    """Whether to compute a convolution of x, or its gradients, in this way."""
    return (
        xp is np
        and groups == 1
        and x.dtype == np.float32
        and math.prod(windows.kernel) > 1
        and min(x.shape[1], outputs) >= _FEWEST
        and max(math.prod(x.shape[2:]), math.prod(windows.out)) <= _LARGEST
        and enabled()
    )


# Tables -----------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Positions that share their taps: what they see, where they are, and these taps.

    Bytes from the first row of an image, as i32: `seen` (positions, taps), `places` (positions,).
    """

    seen: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]
    taps: np.ndarray[Any, Any]

    @property
    def addresses(self) -> Ints:
        return address(self.seen), address(self.places), address(self.taps)


class Seeing(NamedTuple):
    """How positions see pixels: the windows of `sizes` pixels, or, where it is `turned`, the
    elements that windows see, in which case the pixels are the windows' results."""

    sizes: Ints
    windows: Windows
    turned: bool

    @property
    def positions(self) -> Ints:
        return self.sizes if self.turned else self.windows.out

    @property
    def pixels(self) -> Ints:
        return self.windows.out if self.turned else self.sizes


@lru_cache(maxsize=64)
def _pieces(seeing: Seeing, images: int) -> tuple[Piece, ...]:
    """All positions of some images that stand one after the other."""
    kernel, stride = seeing.windows.kernel, seeing.windows.stride
    remainders = pairs_of(*(range(s if seeing.turned else 1) for s in stride))
    pieces = []
    for remainder in remainders:
        axes = [_axis(seeing, axis, r) for axis, r in enumerate(remainder)]
        positions = _joined([a[0] for a in axes], seeing.positions)
        taps = _joined([a[1] for a in axes], kernel)
        place, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
        for n, (_, _, index, valid) in zip(seeing.pixels, axes, strict=True):
            place = _outer(place * n, index, np.add)
            inside = _outer(inside, valid, np.logical_and)
        pieces.append(_of_images(seeing, images, positions, taps, place, inside))
    return tuple(pieces)


def _axis(seeing: Seeing, axis: int, remainder: int) -> tuple[Any, Any, Any, Any]:
    """On one axis: positions, taps, the pixel that each sees by each, and whether there is one."""
    kernel, stride, before, dilation, _ = (entry[axis] for entry in seeing.windows)
    pixel_count = seeing.pixels[axis]
    if not seeing.turned:
        positions, taps = np.arange(seeing.positions[axis]), np.arange(kernel)
        index = positions[:, None] * stride - before + taps * dilation
    else:
        positions = np.arange(remainder, seeing.positions[axis], stride)
        taps = np.arange(kernel)
        taps = taps[(remainder + before - taps * dilation) % stride == 0]
        index = (positions[:, None] + before - taps * dilation) // stride
    return positions, taps, index, (index >= 0) & (index < pixel_count)


def _joined(each: list[Any], sizes: Ints) -> Any:
    """Flat numbers of all combinations."""
    flat = np.zeros(1, np.int64)
    for n, some in zip(sizes, each, strict=True):
        flat = (flat[:, None] * n + some).reshape(-1)
    return flat


def _outer(a: Any, b: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All combinations of rows, and of columns, of two matrices."""
    both = combine(a[:, None, :, None], b[None, :, None, :])
    return both.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])


def _of_images(
    seeing: Seeing, images: int, positions: Any, taps: Any, place: Any, inside: Any
) -> Piece:
    slots, slots_out = (slots_of(math.prod(n)) for n in (seeing.pixels, seeing.positions))
    number = np.arange(images)
    seen = np.where(inside, place, slots - 1) + number[:, None, None] * slots
    places = positions + number[:, None] * slots_out
    return Piece(
        np.ascontiguousarray(seen.reshape(places.size, len(taps)) * ROW, np.int32),
        np.ascontiguousarray(places.reshape(-1) * ROW, np.int32),
        np.ascontiguousarray(taps, np.int32),
    )


@lru_cache(maxsize=64)
def _blocked(seeing: Seeing, images: int) -> tuple[tuple[int, Piece, Ints], ...]:
    """Pieces by blocks of positions: how many, and addresses; the last position fills the last."""
    result = []
    for piece in _pieces(seeing, images):
        count = len(piece.places)
        if not count:
            continue
        blocks = -(-count // BLOCK)
        chosen = np.minimum(np.arange(blocks * BLOCK), count - 1)
        seen = piece.seen[chosen].reshape(blocks, BLOCK, -1).swapaxes(1, 2)
        both = np.ascontiguousarray(seen), np.ascontiguousarray(piece.places[chosen])
        blocked = Piece(*both, piece.taps)
        result.append((blocks, blocked, blocked.addresses))
    return tuple(result)


@lru_cache(maxsize=64)
def _by_taps(seeing: Seeing, images: int) -> Piece:
    """The one piece of windows, with what is seen by tap."""
    (piece,) = _pieces(seeing, images)
    return piece._replace(seen=np.ascontiguousarray(piece.seen.T))


# Rows -------------------------------------------------------------------------------------------


class _Rows:
    """Rows of channels, in blocks of `PANEL`, of some images of an array."""

    def __init__(self, slot: str, array: Any, images: range) -> None:
        self.array, self.images = array, images
        self.count = math.prod(array.shape[2:])
        self.slots = slots_of(self.count)
        self.blocks = blocks_of(array.shape[1])
        self.memory = Memory(slot, self.blocks * len(images) * self.slots * ROW)

    def place(self, block: int, image: int) -> int:
        """Where an image's rows of a block are; `image` counts from the first of these."""
        return self.memory.place + (block * len(self.images) + image) * self.slots * ROW

    def sizes(self, block: int) -> tuple[int, ...]:
        channels = self.array.shape[1]
        return (
            self.count, width_of(channels, block), self.count * 4, channels * self.count * 4,
            self.slots * ROW,
        )  # fmt: skip

    def planes(self, block: int, image: int) -> int:
        channels: int = self.array.shape[1]
        first = (self.images.start + image) * channels + block * PANEL
        place: int = address(self.array) + first * self.count * 4
        return place

    def read(self, block: int, image: int, images: int) -> None:
        places = self.planes(block, image), self.place(block, image)
        call(pixels(), places, self.sizes(block), 0, images)

    def write(self, block: int, image: int, images: int, rows: int) -> None:
        """Put rows of some images where their planes are."""
        call(planes(), (rows, self.planes(block, image)), self.sizes(block), 0, images)


def _cuts(count: int, size: int) -> list[range]:
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def _passes(images: int, nbytes: int, positions: int) -> tuple[list[range], int]:
    """Images whose rows are there together, and how many of them are a chunk."""
    most = max(1, _GATHERED // max(1, nbytes))
    return _cuts(images, most), max(1, _TOGETHER // max(1, positions))


def _vector_blocks(columns: int) -> list[tuple[int, int]]:
    """(first vector, vectors) of the blocks that a kernel keeps in registers."""
    most = 4 if vector_width() == 16 else 2
    count = -(-columns // vector_width())
    return [(i, min(most, count - i)) for i in range(0, count, most)]


# Weights ----------------------------------------------------------------------------------------


class _Weights:
    """Weights by blocks: for each of columns and of rows (which are summed over), (taps, rows of
    the block, PANEL columns)."""

    def __init__(self, w: Any, turned: bool) -> None:
        self.w, self.turned = w, turned
        self.depth: int
        self.columns: int
        self.taps = math.prod(w.shape[2:])
        self.depth, self.columns = w.shape[:2] if turned else w.shape[1::-1]
        self.rows = blocks_of(self.depth)
        self.apart = self.taps * PANEL * ROW
        self._memory = Memory("gathered weights", blocks_of(self.columns) * self.rows * self.apart)

    def place(self, column: int, row: int) -> int:
        place: int = self._memory.place + (column * self.rows + row) * self.apart
        return place

    def prepare(self, column: int, row: int) -> None:
        count, wide = width_of(self.depth, row), width_of(self.columns, column)
        rows, between = tap_rows(
            address(self.w), self.w.shape[1], self.taps,
            (row * PANEL, count), (column * PANEL, wide), self.turned,
        )  # fmt: skip
        goal = self.place(column, row)
        moves = (between, ROW, 0, ROW, count * ROW, 0)
        call(copy("rows"), (rows.place, goal, goal), (self.taps, count, PANEL, *moves, 4, 0), 0, 1)


# Convolution ------------------------------------------------------------------------------------


def convolve(out: Any, x: Any, w: Any, windows: Windows, turned: bool = False) -> None:
    """out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation]; `turned`: the adjoint
    of that, from x[n, o, p] to out[n, c, …]."""
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    weights = _Weights(w, turned)
    columns = blocks_of(weights.columns)
    run_parts(lambda i: weights.prepare(*divmod(i, weights.rows)), columns * weights.rows)
    seeing = Seeing(out.shape[2:] if turned else x.shape[2:], windows, turned)
    nbytes = slots_of(math.prod(x.shape[2:])) * ROW * weights.rows
    passes, each = _passes(x.shape[0], nbytes, math.prod(seeing.positions))
    for images in passes:
        source = _Rows("gathered", x, images)
        cuts = _cuts(len(images), each)
        run_parts(
            lambda i, source=source, cuts=cuts: source.read(  # type: ignore[misc]
                i % weights.rows, cuts[i // weights.rows].start, len(cuts[i // weights.rows])
            ),
            len(cuts) * weights.rows,
        )

        def part(i: int, source: _Rows = source, cuts: list[range] = cuts) -> None:
            cut, column = cuts[i // columns], i % columns
            _multiply(out, source, weights, seeing, cut, column)

        run_parts(part, len(cuts) * columns)


def _multiply(
    out: Any, source: _Rows, weights: _Weights, seeing: Seeing, cut: range, column: int
) -> None:
    """A block of columns of some images."""
    slots = slots_of(math.prod(seeing.positions))
    rows = Memory("products", len(cut) * slots * ROW)
    pieces = _blocked(seeing, len(cut))
    if not all(len(piece.taps) for _, piece, _ in pieces):
        rows.clear()  # what no tap sees
    for row in range(weights.rows):
        count = width_of(weights.depth, row)
        here, right = source.place(row, cut.start), weights.place(column, row)
        for blocks, piece, tables in pieces:
            for first, vectors in _vector_blocks(width_of(weights.columns, column)):
                moved = first * vector_width() * 4
                pointers = (here, right + moved, rows.place + moved, *tables)
                sizes = (len(piece.taps), count, count * ROW, int(row > 0))
                call(product(vectors), pointers, sizes, 0, blocks)
    first_image = source.images.start + cut.start
    result = out[first_image : first_image + len(cut)]
    channels, plane = result.shape[1], math.prod(result.shape[2:])
    wide = width_of(channels, column)
    goal = address(result) + column * PANEL * plane * 4
    given = (plane, wide, plane * 4, channels * plane * 4, slots * ROW)
    call(planes(), (rows.place, goal), given, 0, len(cut))


# Its adjoint in w -------------------------------------------------------------------------------

_FEW_PAIRS = 8
_SHARES = 3  # that taps are cut into where there are few pairs of blocks


def convolve_weights(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation]."""
    x, g = np.ascontiguousarray(x), np.ascontiguousarray(g)
    taps, (outputs, inputs) = math.prod(windows.kernel), out.shape[:2]
    rows, columns = blocks_of(inputs), blocks_of(outputs)
    seeing = Seeing(x.shape[2:], windows, False)
    both = slots_of(math.prod(x.shape[2:])) * rows + slots_of(math.prod(windows.out)) * columns
    passes, each = _passes(x.shape[0], both * ROW, math.prod(windows.out))
    block = slots_of(PANEL * taps) * ROW
    totals = Memory("sums", rows * columns * block)
    shares = min(taps, _SHARES) if rows * columns < _FEW_PAIRS else 1

    for number, images in enumerate(passes):
        seen, given = _Rows("gathered", x, images), _Rows("gathered cotangents", g, images)
        cuts = _cuts(len(images), each)

        def prepare(i: int, pair: Any = (seen, given), cuts: list[range] = cuts) -> None:
            cut, which = cuts[i // (rows + columns)], i % (rows + columns)
            source = pair[which >= rows]
            source.read(which - rows if which >= rows else which, cut.start, len(cut))

        run_parts(prepare, len(cuts) * (rows + columns))

        def part(
            i: int, pair: Any = (seen, given), cuts: list[range] = cuts, number: int = number
        ) -> None:
            which, share = divmod(i, shares)
            row, column = divmod(which, columns)
            some = range(taps * share // shares, taps * (share + 1) // shares)
            for turn, cut in enumerate(cuts):
                places = (
                    pair[0].place(row, cut.start), pair[1].place(column, cut.start),
                    totals.place + which * block,
                )  # fmt: skip
                counts = width_of(inputs, row), width_of(outputs, column)
                _add(places, counts, _by_taps(seeing, len(cut)), some, number + turn > 0)

        run_parts(part, rows * columns * shares)

    def finish(which: int) -> None:
        row, column = divmod(which, columns)
        count, wide = width_of(inputs, row), width_of(outputs, column)
        goal = address(out) + (column * PANEL * inputs + row * PANEL) * taps * 4
        sizes = (taps * count, wide, inputs * taps * 4, 0, 0)
        call(planes(), (totals.place + which * block, goal), sizes, 0, 1)

    run_parts(finish, rows * columns)


def _add(places: Ints, counts: Ints, piece: Piece, taps: range, adds: bool) -> None:
    """Sums over the positions of a chunk, for some taps of a pair of blocks of channels."""
    x, g, totals = places
    apart = len(piece.taps) * ROW
    for first, vectors in _vector_blocks(counts[1]):
        moved = first * vector_width() * 4
        pointers = (
            x, g + moved, totals + moved, address(piece.seen), address(piece.places),
        )  # fmt: skip
        sizes = (-(-counts[0] // DEEP), len(piece.places), apart, int(adds))
        call(sums(vectors), pointers, sizes, taps.start, taps.stop)
