"""Attention by native calls: blocks of queries against blocks of keys, for each head.

The work of a call follows from shapes, strides and the pattern: a list of matrix products and of
the loops of `flash_attention_loops`, over places in arrays (`call_list.py`). Threads share its
units: forward the blocks of queries of a head, backward whole heads.

Source: Dao et al., NeurIPS 2022.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import element_of, lanes_of
from graphflow.ops.kernels.fusion.parallel_call import native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm.gemm import MatrixProduct, is_supported, plan_product
from graphflow.ops.kernels.sequence import flash_attention_loops
from graphflow.ops.kernels.sequence.attention_layouts import (
    KEYS,
    BandPattern,
    HeadsLayout,
    MaskLayout,
    heads_layout,
    optional_mask_layout,
)
from graphflow.ops.kernels.sequence.call_list import (
    LINE_BYTES,
    THREAD_MEMORY,
    CallList,
    MatrixPlace,
    Place,
    ThreadMemory,
)
from graphflow.ops.kernels.sequence.flash_attention_loops import ScoreSize

# Lists of calls -------------------------------------------------------------------------------


class _CallListWriter:
    """Writes products and loops over blocks into a call list."""

    def __init__(self, dtype: str, mask: MaskLayout, ahead: Sequence[Any]) -> None:
        own = np.zeros_like(ahead[0])
        self.calls, self.memory = CallList(np.stack([own, *ahead], axis=1)), ThreadMemory()
        self.dtype, self.item = dtype, np.dtype(dtype).itemsize
        self.element = element_of(dtype)
        self.lanes = lanes_of(self.element)
        self.mask = mask
        self._scratch = 0

    def pad_to_vectors(self, count: int) -> int:
        """Return the elements of a row of whole vectors that holds `count` elements."""
        return -(-count // self.lanes) * self.lanes

    def product(
        self,
        m: int,
        k: int,
        n: int,
        a: MatrixPlace,
        b: MatrixPlace,
        out: MatrixPlace,
        add: bool = False,
    ) -> None:
        """Append out = a @ b, or out += a @ b."""
        product = _product(
            m, k, n, self.dtype, (out.row, out.column), (a.row, a.column), (b.row, b.column), add
        )
        x, y = (b, a) if product.swapped else (a, b)
        self._scratch = max(self._scratch, product.scratch)
        places = [
            x.place,
            y.place,
            out.place,
            (THREAD_MEMORY, -1),
        ]  # -1: scratch memory, placed last
        self.calls.add(product.function, places, product.sizes, product.units)
        self.calls.nanoseconds += product.nanoseconds

    def loop(
        self, write: Callable[..., tuple[str, str]], variant: Sequence[Any],
        places: Sequence[Place], sizes: Sequence[int], rows: int,
    ) -> None:  # fmt: skip
        self.calls.add(native_function(write, self.element, *variant), places, sizes, rows)

    def block_sizes(
        self, pattern: BandPattern, t: range, s: range, row: int, width: int
    ) -> tuple[int, ...]:
        first, end = pattern.row_limits(t.start, s.start)
        sizes = {
            ScoreSize.KEYS: len(s),
            ScoreSize.ROW: row,
            ScoreSize.WIDTH: width,
            ScoreSize.FIRST: first,
            ScoreSize.END: end,
            ScoreSize.MASK_ROW: self.mask.row,
            ScoreSize.SCALE: _bits(pattern.scale),
        }
        return tuple(sizes[name] for name in ScoreSize)

    def finalize(self) -> CallList:
        self.calls.own = self.memory.nbytes + self._scratch + LINE_BYTES
        return self.calls.finalize(self.memory.nbytes)


@lru_cache(maxsize=4096)
def _product(
    m: int, k: int, n: int, dtype: str, out: tuple[int, int], a: tuple[int, int],
    b: tuple[int, int], add: bool,
) -> MatrixProduct:  # fmt: skip
    product = plan_product((), m, k, n, dtype, out, a, b, add)
    assert product is not None
    return product


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def blocks(first: int, last: int, step: int) -> Iterator[range]:
    """Yield ranges of at most `step` that begin at its multiples, or at `first`."""
    for start in range(first - first % step, last, step):
        yield range(max(first, start), min(last, start + step))


# Forward --------------------------------------------------------------------------------------

_Q, _K, _V, _Y, _LOGS, _MASK = range(1, 7)


def _row_offsets(shape: Sequence[int], item: int) -> Any:
    """Return the bytes at which each head's rows begin in an array (lead, heads, T)."""
    return np.arange(shape[0] * shape[1]) * (shape[2] * item)


def _mask_offsets(mask: MaskLayout, shape: Sequence[int]) -> Any:
    return np.array(mask.heads or [0] * (shape[0] * shape[1]), np.int64)


@lru_cache(maxsize=64)
def plan_forward(
    q: HeadsLayout,
    k: HeadsLayout,
    v: HeadsLayout,
    y: HeadsLayout,
    dtype: str,
    mask: MaskLayout,
    pattern: BandPattern,
) -> CallList:
    """List the calls that compute y and the log-sum-exps, a contiguous (lead, heads, T)."""
    _, heads, rows, d = q.shape
    group, number, e = heads // k.shape[1], k.shape[2], v.shape[3]
    item = np.dtype(dtype).itemsize
    ahead = [
        q.head_offsets(),
        k.head_offsets(group),
        v.head_offsets(group),
        y.head_offsets(),
        _row_offsets(q.shape, item),
    ]
    w = _CallListWriter(dtype, mask, [*ahead, _mask_offsets(mask, q.shape)])
    most, width, queries = (
        w.pad_to_vectors(min(KEYS, number)),
        w.pad_to_vectors(e),
        pattern.query_block(number),
    )
    scores, result = w.memory.take(queries * most * item), w.memory.take(queries * width * item)
    tops, totals = (w.memory.take(queries * item) for _ in range(2))
    into, block = MatrixPlace(result, width * item, item), MatrixPlace(scores, most * item, item)
    for t in blocks(0, rows, queries):
        start, stop = pattern.visible_keys(t.start, t.stop, number)
        of_q = MatrixPlace((_Q, t.start * q.strides[2]), q.strides[2], item)
        for i, s in enumerate(blocks(start, stop, KEYS) if start < stop else [range(1)]):
            of_k = MatrixPlace((_K, s.start * k.strides[2]), k.strides[2], item)
            of_v = MatrixPlace((_V, s.start * v.strides[2]), v.strides[2], item)
            w.product(len(t), d, len(s), of_q, of_k.T, block)
            places = [scores, tops, totals, result, mask.place(_MASK, t.start, s.start)]
            sizes = w.block_sizes(pattern, t, s, most, width)
            w.loop(flash_attention_loops.online_softmax, (mask.kind, i > 0), places, sizes, len(t))
            w.product(len(t), len(s), e, block, of_v, into, add=i > 0)
            w.calls.nanoseconds += len(t) * len(s)
        places = [result, tops, totals, (_Y, t.start * y.strides[2]), (_LOGS, t.start * item)]
        w.loop(
            flash_attention_loops.normalize_rows,
            (),
            places,
            [e, width, y.strides[2] // item],
            len(t),
        )
        w.calls.end_unit()
    return w.finalize()


# Backward -------------------------------------------------------------------------------------

_G, _DELTA, _DQ, _DK, _DV = range(7, 12)  # array 4 is y


@lru_cache(maxsize=64)
def plan_backward(
    q: HeadsLayout,
    k: HeadsLayout,
    v: HeadsLayout,
    g: HeadsLayout,
    dq: HeadsLayout,
    dk: HeadsLayout,
    dv: HeadsLayout,
    dtype: str,
    mask: MaskLayout,
    pattern: BandPattern,
    y: HeadsLayout | None = None,
) -> CallList:
    """List the calls that compute the gradients, for each group of heads that share keys.

    If `needs_zeroed_sums`, dk and dv must be 0 before.

    Args:
        y: the result's layout if delta = Σ g·y of each row is computed first; None: it is given.
    """
    _, heads, rows, d = q.shape
    shared, number, e = k.shape[1], k.shape[2], v.shape[3]
    group = heads // shared
    item = np.dtype(dtype).itemsize
    lines, of_masks = _row_offsets(q.shape, item), _mask_offsets(mask, q.shape)
    first = slice(None, None, group)
    ahead = [
        q.head_offsets()[first],
        k.head_offsets(),
        v.head_offsets(),
        (y or q).head_offsets()[first],
        lines[first],
        of_masks[first],
        g.head_offsets()[first],
        lines[first],
        dq.head_offsets()[first],
        dk.head_offsets(),
        dv.head_offsets(),
    ]
    w = _CallListWriter(dtype, mask, ahead)
    most, queries = w.pad_to_vectors(min(KEYS, number)), pattern.query_block(number)
    probabilities, reach = (w.memory.take(queries * most * item) for _ in range(2))
    p, z = (MatrixPlace(place, most * item, item) for place in (probabilities, reach))
    order = list(blocks(0, rows, queries))
    if pattern.right is not None:
        # The last block of a causal mask sees all keys, so that it can store instead of add.
        order.reverse()
    covered = _KeyCoverage(number)
    head_mask = 0 if mask.kind == "none" or group == 1 else int(of_masks[1] - of_masks[0])
    for head in range(group):
        if y is not None:
            places = [(n, head * x.strides[1]) for n, x in ((_G, g), (_Y, y))]
            steps = [e, g.strides[2] // item, y.strides[2] // item, 1]
            w.loop(
                flash_attention_loops.row_dots,
                (),
                [*places, (_DELTA, head * rows * item)],
                steps,
                rows,
            )
        for t in order:
            start, stop = pattern.visible_keys(t.start, t.stop, number)
            of_q, of_g, to_q = (
                MatrixPlace((n, head * x.strides[1] + t.start * x.strides[2]), x.strides[2], item)
                for n, x in ((_Q, q), (_G, g), (_DQ, dq))
            )
            line = (head * rows + t.start) * item
            for i, s in enumerate(blocks(start, stop, KEYS) if start < stop else [range(1)]):
                of_k, of_v, to_k, to_v = (
                    MatrixPlace((n, s.start * x.strides[2]), x.strides[2], item)
                    for n, x in ((_K, k), (_V, v), (_DK, dk), (_DV, dv))
                )
                w.product(len(t), d, len(s), of_q, of_k.T, p)
                w.product(len(t), e, len(s), of_g, of_v.T, z)
                base, more = mask.place(_MASK, t.start, s.start)
                of_mask = (base, more + (head * head_mask if base else 0))
                places = [probabilities, reach, (_LOGS, line), (_DELTA, line), of_mask]
                sizes = w.block_sizes(pattern, t, s, most, 0)
                w.loop(flash_attention_loops.score_gradients, (mask.kind,), places, sizes, len(t))
                add = covered.adds(s)
                w.product(len(s), len(t), e, p.T, of_g, to_v, add)
                w.product(len(s), len(t), d, z.T, of_q, to_k, add)
                w.product(len(t), len(s), d, z, of_k, to_q, add=i > 0)
                w.calls.nanoseconds += len(t) * len(s)
    w.calls.end_unit()
    w.calls.needs_zeroed_sums = covered.needs_zeroed_sums
    return w.finalize()


class _KeyCoverage:
    """The keys whose sums have begun: if none of a block have, its product is stored, not added.

    Attributes:
        needs_zeroed_sums: whether the sums must be 0 before, since some are added to before they
            have begun, or never begin.
    """

    def __init__(self, number: int) -> None:
        self._left = set(range(number))
        self._early = False

    @property
    def needs_zeroed_sums(self) -> bool:
        return self._early or bool(self._left)

    def adds(self, s: range) -> bool:
        """Return whether a block's products are added; marks its keys as begun."""
        new = len(self._left.intersection(s))
        self._left.difference_update(s)
        self._early |= 0 < new < len(s)
        return new < len(s)


# Arrays ---------------------------------------------------------------------------------------


def is_native(xp: Any, q: Any, k: Any, v: Any, softcap: Any) -> bool:
    """Return whether native kernels compute attention of these arrays."""
    some = all(x.size for x in (q, k, v))
    return xp is np and is_jit_enabled() and is_supported(q.dtype.name) and softcap is None and some


def forward(
    y: Any, logs: Any, q: Any, k: Any, v: Any, mask: Sequence[Any], pattern: BandPattern
) -> None:
    """Write y (…, heads, T, e) and the contiguous log-sum-exps (…, heads, T) of q, k and v."""
    forms = (heads_layout(x) for x in (q, k, v, y))
    calls = plan_forward(*forms, q.dtype.name, optional_mask_layout(mask, q, k), pattern)
    calls.run([q, k, v, y, logs, mask[0] if mask else q])


def backward(
    out: Sequence[Any], g: Any, delta: Any, q: Any, k: Any, v: Any, logs: Any, mask: Sequence[Any],
    pattern: BandPattern, y: Any = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v for the cotangent g of y.

    Args:
        logs, delta: (…, heads, T), contiguous.
        y: the result; if it is given, delta is written first, as Σ g·y of each row.
    """
    dq, dk, dv = out
    forms = (heads_layout(x) for x in (q, k, v, g, dq, dk, dv))
    of_y = None if y is None else heads_layout(y)
    calls = plan_backward(*forms, q.dtype.name, optional_mask_layout(mask, q, k), pattern, of_y)
    if calls.needs_zeroed_sums:
        dk[...] = 0
        dv[...] = 0
    of_mask = mask[0] if mask else q
    calls.run([q, k, v, q if y is None else y, logs, of_mask, g, delta, dq, dk, dv])
