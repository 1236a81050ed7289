"""Rows of tables that several devices own: which rows a device asks for, and how they come back.

A table's rows lie in one piece after the other, and each piece belongs to a device. A device that
looks rows up asks each owner for distinct rows, by keys: 1 + the row's number in the owner's piece,
in ascending order. Zeros behind the keys are padding, because buffers have room for the most
distinct rows that there can be. Padding does not travel, nor is it computed (`used_rows` in
`communication/send_recv.py`).

    ids ─route_rows→ keys of each owner ─count_keys, read_rows→ rows ─place_rows→ a row for each id
    gradients of these rows ─split_row_sums→ sums for each owner ┐
    keys of all who asked ─merge_keys→ distinct rows of the piece ┴─merge_row_sums→ their gradient

`graphflow/parallel/tables` writes these ops into the graphs of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import Size, TensorSpec, as_dtype, equate, minimum, product, spec
from graphflow.ops.base.row_costs import ROW_FLOPS, touched_bytes
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.sparse.distinct_numbers import find_distinct
from graphflow.ops.kernels.sparse.scatter_rows import combine_rows, normalize_indices, take_into

I64 = "int64"
_INT = spec(I64)


def key_dtype(rows: int) -> str:
    """Return the dtype of keys of a piece with this number of rows."""
    return "int32" if rows < np.iinfo(np.int32).max else I64


def into_kernel(infer: Any, into: Any) -> Any:
    """Return a kernel that allocates its results and calls one that writes into them."""

    def kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
        made = infer(*(TensorSpec(a.shape, np.dtype(a.dtype)) for a in arrays), **attrs)
        specs = made if isinstance(made, tuple) else (made,)
        outs = tuple([xp.empty(s.shape, s.dtype) for s in specs])
        results = outs if len(outs) > 1 else outs[0]
        into(xp, results, *arrays, **attrs)
        return results

    return kernel


def _some_keys(like: Any, most: int) -> Any:
    """Return ascending keys of at most `most` rows for a sample, and one place of padding."""
    keys = 1 + np.arange(like.size) * most // like.size
    return np.append(keys[1:], 0).astype(like.dtype) if like.size else like


def _count_halves(inputs: int) -> dict[int, int]:
    """Return which input counts the rows of which, if numbers come first and then pieces."""
    pieces = inputs // 2
    return {i + pieces: i for i in range(1, pieces + 1)}


def fill_front(out: Any, part: Any) -> None:
    """Write some rows to the front of an array, and zeros behind them."""
    count = part.shape[0]
    out[:count] = part
    out[count:] = 0


# A device that looks rows up ---------------------------------------------------------------------


def _infer_route(
    ids: TensorSpec,
    *first: TensorSpec,
    starts: tuple[int, ...],
    sizes: tuple[Size, ...],
    width: int = 0,
) -> tuple[TensorSpec, ...]:
    require_kind(ids, "int")
    if len(starts) != len(sizes) + 1:
        raise ArgumentError(f"{len(starts)} starts of {len(sizes)} pieces; give one more")
    keys = [
        TensorSpec((size,), as_dtype(key_dtype(stop - start)))
        for size, (start, stop) in zip(sizes, pairwise(starts), strict=True)
    ]
    return (TensorSpec((ids.size,), as_dtype(I64)), *[_INT] * len(sizes), *keys)


def _route_into(
    xp: Any, outs: Any, ids: Any, *first: Any, starts: tuple[int, ...], sizes: tuple[int, ...],
    width: int = 0,
) -> None:  # fmt: skip
    count = len(sizes)
    inverse, numbers, keys = outs[0], outs[1 : count + 1], outs[count + 1 :]
    rows = normalize_indices(xp, ids.reshape(-1), starts[-1], 0)
    if first:
        ranges = rows // width
        rows = first[0][ranges] + (rows - ranges * width)  # faster than a remainder
    distinct, inverse[...] = find_distinct(xp, rows, starts[-1])
    bounds = xp.searchsorted(distinct, xp.asarray(starts)).tolist()
    for number, out, start, (low, high) in zip(
        numbers, keys, starts, pairwise(bounds), strict=False
    ):
        number[...] = high - low
        fill_front(out, distinct[low:high] - (start - 1))


# The distinct rows among ids, (k,) int64: the position of each id among them; for each piece the
# number of its rows; for each piece its keys, padded to `sizes`. Piece p has rows starts[p] to
# starts[p + 1]; these are positions, if the rows are stored in ranges of `width` rows whose first
# positions are a second input.
route_rows = register(
    Op(
        "route_rows",
        infer=_infer_route,
        kernel=into_kernel(_infer_route, _route_into),
        into=_route_into,
        cost=lambda ids, *first, starts, sizes, width=0: Cost(
            flops=ids.size * 16, bytes=ids.size * 64
        ),
        samples=(
            sample(
                spec(I64, (4,)),
                spec(I64, (2,)),
                starts=(0, 2, 3),
                sizes=(2, 1),
                width=2,
                make=lambda xs: [xs[0], np.array([1, 0])],
            ),
            sample(spec(I64, (5,)), starts=(0, 2, 3), sizes=(2, 1)),
            sample(spec("int32", (2, 3)), starts=(0, 1, 2, 4), sizes=(1, 1, 2)),
            sample(spec(I64, (0,)), starts=(0, 4), sizes=(0,)),
        ),
    )
)


def _infer_place(inverse: TensorSpec, *others: TensorSpec) -> TensorSpec:
    rows = others[len(others) // 2 :]
    if len(others) % 2 or not rows:
        raise ArgumentError(f"{len(others)} numbers and pieces; give as many of each, at least one")
    return rows[0].with_shape((inverse.shape[0], *rows[0].shape[1:]))


def _place_into(xp: Any, out: Any, inverse: Any, *others: Any) -> None:
    if not out.size:
        return
    count = len(others) // 2
    parts = [rows[: int(n)] for n, rows in zip(others[:count], others[count:], strict=True)]
    if count > 1:
        shape = (sum(part.shape[0] for part in parts), *out.shape[1:])
        every = scratch(xp, "rows", shape, out.dtype)
        xp.concatenate(parts, out=every)
    else:
        every = parts[0]
    take_into(xp, out, every, inverse, 0)


# A row for each id, (k, …), given their positions among the distinct rows, and for each piece the
# number of its rows, and these rows.
place_rows = register(
    Op(
        "place_rows",
        infer=_infer_place,
        kernel=into_kernel(_infer_place, _place_into),
        into=_place_into,
        counted=_count_halves,
        cost=lambda inverse, *others: Cost(
            flops=0,
            bytes=sum(rows.nbytes for rows in others) * 2
            + touched_bytes(inverse.size, others[-1])
            + _infer_place(inverse, *others).nbytes
            + inverse.nbytes,
        ),
        halves=True,
        samples=(
            sample(
                spec(I64, (5,)), _INT, _INT, *[spec("float32", (2, 3))] * 2,
                make=lambda xs: [xs[0] % 3, np.array(1), np.array(2), *xs[3:]],
            ),
        ),
    )
)  # fmt: skip


def _infer_split(
    g: TensorSpec, inverse: TensorSpec, *numbers: TensorSpec, sizes: tuple[Size, ...]
) -> tuple[TensorSpec, ...]:
    require_kind(g, "float", "complex")
    equate(g.shape[0], inverse.shape[0], f"rows of a gradient {g} and positions {inverse}")
    if len(numbers) != len(sizes):
        raise ArgumentError(f"{len(numbers)} numbers of rows for {len(sizes)} pieces")
    return tuple(g.with_shape((size, *g.shape[1:])) for size in sizes)


def _split_into(
    xp: Any, outs: Any, g: Any, inverse: Any, *numbers: Any, sizes: tuple[int, ...]
) -> None:
    outs = outs if isinstance(outs, tuple) else (outs,)
    counts = [int(n) for n in numbers]
    width = int(product(g.shape[1:]))
    total = scratch(xp, "rows", (sum(counts), width), g.dtype)
    total[...] = 0
    combine_rows(xp, total, inverse, g.reshape(g.shape[0], width), "add")
    at = 0
    for out, count in zip(outs, counts, strict=True):
        fill_front(out, total[at : at + count].reshape(count, *g.shape[1:]))
        at += count


# For each piece, the sums of the gradients of its distinct rows, padded to `sizes`, given the
# gradient of the row of each id, (k, …), and the positions and numbers of `route_rows`.
split_row_sums = register(
    Op(
        "split_row_sums",
        infer=_infer_split,
        kernel=into_kernel(_infer_split, _split_into),
        into=_split_into,
        leading=lambda sizes: (),
        cost=lambda g, inverse, *numbers, sizes: Cost(
            flops=g.size + inverse.size * ROW_FLOPS, bytes=g.nbytes * 6 + inverse.nbytes
        ),
        samples=(
            sample(
                spec("float32", (5, 3)), spec(I64, (5,)), _INT, _INT, sizes=(2, 2),
                make=lambda xs: [xs[0], xs[1] % 3, np.array(1), np.array(2)],
            ),
        ),
    )
)  # fmt: skip


# The owner of a piece -----------------------------------------------------------------------------


def _infer_count(keys: TensorSpec) -> TensorSpec:
    require_kind(keys, "int")
    return _INT


def _count_into(xp: Any, out: Any, keys: Any) -> None:
    out[...] = xp.count_nonzero(keys)


# How many keys are not padding.
count_keys = register(
    Op(
        "count_keys",
        infer=_infer_count,
        kernel=into_kernel(_infer_count, _count_into),
        into=_count_into,
        cost=lambda keys: Cost(flops=keys.size),
        samples=(sample(spec("int32", (5,)), make=lambda xs: [_some_keys(xs[0], 4)]),),
    )
)


def _infer_read(x: TensorSpec, keys: TensorSpec) -> TensorSpec:
    require_kind(keys, "int")
    return x.with_shape((keys.shape[0], *x.shape[1:]))


def _read_into(xp: Any, out: Any, x: Any, keys: Any) -> None:
    count = int(xp.count_nonzero(keys))
    if count:
        take_into(xp, out[:count], x, keys[:count] - 1, 0)
    out[count:] = 0


# The rows of a piece that keys ask for, with zeros for padding.
read_rows = register(
    Op(
        "read_rows",
        infer=_infer_read,
        kernel=into_kernel(_infer_read, _read_into),
        into=_read_into,
        cost=lambda x, keys: Cost(
            flops=0,
            bytes=touched_bytes(keys.size, x) + _infer_read(x, keys).nbytes + keys.nbytes,
            spread=x.nbytes,
        ),
        halves=True,
        leading=lambda: (1,),
        samples=(
            sample(spec("float32", (4, 3)), spec("int32", (5,)),
                   make=lambda xs: [xs[0], _some_keys(xs[1], len(xs[0]))]),
        ),
    )
)  # fmt: skip


def _infer_merge(*keys: TensorSpec, size: Size) -> tuple[TensorSpec, ...]:
    if not keys:
        raise ArgumentError("there are no keys; give those of one device at least")
    count: Size = 0
    for each in keys:
        require_kind(each, "int")
        count = count + each.shape[0]
    wide = as_dtype(I64)
    return TensorSpec((size,), wide), TensorSpec((count,), wide), _INT


def _merge_into(xp: Any, outs: Any, *keys: Any, size: int) -> None:
    rows, inverse, number = outs
    every = xp.concatenate(keys)
    (used,) = xp.nonzero(every)
    bound = int(every.max(initial=0)) + 1
    distinct, places = find_distinct(xp, every[used], bound)
    if distinct.shape[0] > size:
        raise ShapeError(f"{distinct.shape[0]} distinct rows, there is room for {size}")
    number[...] = distinct.shape[0]
    fill_front(rows, distinct - 1)
    inverse[...] = -1
    inverse[used] = places


# The distinct rows that all devices ask a piece for, ascending and padded to `size`; the position
# of each key among them, -1 for padding; and their number.
merge_keys = register(
    Op(
        "merge_keys",
        infer=_infer_merge,
        kernel=into_kernel(_infer_merge, _merge_into),
        into=_merge_into,
        cost=lambda *keys, size: Cost(
            flops=sum(k.size for k in keys) * 16, bytes=sum(k.size for k in keys) * 64
        ),
        samples=(
            sample(*[spec("int32", (3,))] * 2, size=4,
                   make=lambda xs: [_some_keys(xs[0], 3), _some_keys(xs[1], 4)]),
        ),
    )
)  # fmt: skip


def _infer_sums(
    inverse: TensorSpec, *others: TensorSpec, starts: tuple[Size, ...], size: Size
) -> TensorSpec:
    gradients = others[len(starts) :]
    if not starts or len(gradients) != len(starts):
        raise ArgumentError(
            f"{len(others)} numbers and gradients for {len(starts)} starts; give as many of each, "
            "at least one"
        )
    return gradients[0].with_shape((size, *gradients[0].shape[1:]))


def _sums_into(
    xp: Any, out: Any, inverse: Any, *others: Any, starts: tuple[int, ...], size: int
) -> None:
    out[...] = 0
    width = int(product(out.shape[1:]))
    total = out.reshape(out.shape[0], width)
    pieces = len(starts)
    for start, number, g in zip(starts, others[:pieces], others[pieces:], strict=True):
        places = inverse[start : start + min(int(number), g.shape[0])]
        places = places[places >= 0]
        count = places.shape[0]
        combine_rows(xp, total, places, g[:count].reshape(count, width), "add")


# The gradient of the distinct rows of a piece, (size, …): the sum of what devices send, in their
# order, given the number of rows of each, and these rows. The keys of each begin at one of `starts`
# among those of `merge_keys`.
merge_row_sums = register(
    Op(
        "merge_row_sums",
        infer=_infer_sums,
        kernel=into_kernel(_infer_sums, _sums_into),
        into=_sums_into,
        counted=_count_halves,
        leading=lambda starts, size: (),
        cost=lambda inverse, *others, starts, size: Cost(
            flops=sum(g.size + g.shape[0] * ROW_FLOPS for g in others[len(starts) :]),
            bytes=sum(g.nbytes for g in others) * 4,
        ),
        samples=(
            sample(
                spec(I64, (6,)), _INT, _INT, *[spec("float32", (3, 2))] * 2, starts=(0, 3), size=4,
                make=lambda xs: [
                    np.arange(len(xs[0])) * 3 % 5 - 1, *map(np.array, map(len, xs[3:])), *xs[3:]
                ],
            ),
        ),
    )
)  # fmt: skip


def piece_sizes(count: Size, starts: Sequence[int]) -> tuple[Size, ...]:
    """Return the most distinct rows of each piece among `count` ids."""
    return tuple(minimum(count, stop - start) for start, stop in pairwise(starts))


__all__ = [
    "count_keys", "key_dtype", "merge_keys", "merge_row_sums", "piece_sizes", "place_rows",
    "read_rows", "route_rows", "split_row_sums",
]  # fmt: skip
