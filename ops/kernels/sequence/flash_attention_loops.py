"""Native loops over blocks of attention's scores, between matrix products.

A row of scores lies in memory as whole vectors. A query sees a range of its keys, less those that a
mask hides; elsewhere results are 0 and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter, lanes_of
from graphflow.ops.kernels.codegen.vector_math import exp, log
from graphflow.ops.kernels.codegen.vector_writer import Floats


class ScoreSize(IntEnum):
    """Indices into the sizes of a loop."""

    KEYS = 0
    ROW = auto()  # elements between rows of scores
    WIDTH = auto()  # of a row of the result
    FIRST = auto()  # row r sees keys from r + FIRST
    END = auto()  # to r + END, exclusive
    MASK_ROW = auto()  # bytes between rows of the mask
    SCALE = auto()  # the bits of a float64


class _ScoreRows:
    """Writes loops over rows of scores, vector by vector.

    Args:
        mask: "none", "bool" or "float"; "bool1" and "float1" if all keys of a row share one
            element.
    """

    def __init__(
        self, flow: KernelWriter, element: str, mask: str, base: str, mask_base: str
    ) -> None:
        self.flow, self.element, self.mask = flow, element, mask
        self.width = lanes_of(element)
        self.kind = f"<{self.width} x {element}>"
        self.floats: Floats = flow.floats(self.width, element)
        self.base, self.mask_base = base, mask_base
        self.keys, self.row = flow.size(ScoreSize.KEYS), flow.size(ScoreSize.ROW)
        self.first, self.end = flow.size(ScoreSize.FIRST), flow.size(ScoreSize.END)
        self.mask_row = flow.size(ScoreSize.MASK_ROW)
        bits = flow.size(ScoreSize.SCALE)
        scale = flow.write(f"bitcast i64 {bits} to double")
        if element == "float":
            scale = flow.write(f"fptrunc double {scale} to float")
        self.scale = flow.broadcast(self.width, element, scale)

    def place(self, base: str, row: str, key: str) -> str:
        return self.flow.gep(base, self.element, self.flow.add(self.flow.mul(row, self.row), key))

    def visible_range(self, row: str) -> _VisibleRange:
        """Return the range of keys that a row sees."""
        flow = self.flow
        first, last = (self._clip_to_keys(flow.add(row, x)) for x in (self.first, self.end))
        spread = [
            flow.broadcast(self.width, "i32", flow.write(f"trunc i64 {x} to i32"))
            for x in (first, last)
        ]
        return _VisibleRange(
            self._round_down(first),
            self._round_up(first),
            self._round_down(last),
            self._round_up(last),
            *spread,
        )

    def _clip_to_keys(self, key: str) -> str:
        """Clip a key's number to 0 … the number of keys."""
        return self.flow.minimum(self.flow.maximum(key, 0), self.keys)

    def _round_down(self, key: str) -> str:
        return self.flow.step("and", key, -self.width)

    def _round_up(self, key: str) -> str:
        return self._round_down(self.flow.add(key, self.width - 1))

    def visible_lanes(self, key: str, seen: _VisibleRange) -> str:
        """Return a mask of the lanes that are seen, for the vector that begins at a key."""
        flow, lanes = self.flow, self.floats.lanes
        index = ", ".join(f"i32 {i}" for i in range(self.width))
        start = flow.broadcast(self.width, "i32", flow.write(f"trunc i64 {key} to i32"))
        here = flow.write(f"add <{self.width} x i32> {start}, <{index}>")
        after = lanes.binary("icmp sge", "i32", here, seen.first)
        return lanes.binary("and", "i1", after, lanes.binary("icmp slt", "i32", here, seen.last))

    def apply_mask(self, z: str, row: str, key: str, seen: str | None) -> tuple[str, str | None]:
        """Return scaled and masked scores, and a mask of the lanes that are seen; None: all."""
        f, flow = self.floats, self.flow
        z = f.mul(z, self.scale)
        if self.mask == "none":
            return z, seen
        lanes, shared = f.lanes, self.mask.endswith("1")
        element = "i8" if self.mask.startswith("bool") else self.element
        line = flow.gep(self.mask_base, "i8", flow.mul(row, self.mask_row))
        if shared:
            given = flow.broadcast(self.width, element, flow.load(element, line, BYTES[element]))
        else:
            given = flow.load_vector(self.width, element, flow.gep(line, element, key), seen)
        if element == "i8":
            let = lanes.binary("icmp ne", "i8", given, "zeroinitializer")
            return z, let if seen is None else lanes.binary("and", "i1", seen, let)
        return f.add(z, given), seen

    def select_visible(self, seen: str | None, value: str, otherwise: str) -> str:
        """Select `value` in the lanes that are seen."""
        return value if seen is None else self.floats.select(seen, value, otherwise)

    def loop_visible(
        self, seen: _VisibleRange, carried: Sequence[tuple[str, str]],
        body: Callable[..., Sequence[str] | None],
    ) -> list[str]:  # fmt: skip
        """Loop body(key, lanes, *values) over the vectors of which some lanes are seen.

        `lanes` masks a vector at the edge of the range and is None inside, so that most vectors
        need no mask.
        """
        kinds = [kind for kind, _ in carried]

        def some(key: str, *values: str) -> Sequence[str] | None:
            return body(key, self.visible_lanes(key, seen), *values)

        def whole(key: str, *values: str) -> Sequence[str] | None:
            return body(key, None, *values)

        flow = self.flow
        values = [value for _, value in carried]
        for start, stop, part in (
            (seen.start, flow.minimum(seen.whole, seen.stop), some),
            (seen.whole, seen.rest, whole),
            (flow.maximum(seen.whole, seen.rest), seen.stop, some),
        ):
            given = list(zip(kinds, values, strict=True))
            values = flow.loop(start, stop, given, part, self.width)
        return values

    def clear(self, seen: _VisibleRange, *rows: str) -> None:
        """Write zeros to the vectors of rows of which no lane is seen."""

        def vector(key: str) -> None:
            for row in rows:
                place = self.flow.gep(row, self.element, key)
                self.flow.store(self.kind, "zeroinitializer", place, BYTES[self.element])

        self.flow.loop("0", seen.start, (), vector, self.width)
        self.flow.loop(seen.stop, self.keys, (), vector, self.width)


class _VisibleRange(NamedTuple):
    """The keys that a row sees, by the first keys of vectors.

    Attributes:
        start: from here on some lanes are seen.
        whole: from here on all are.
        rest: from here on some are again.
        stop: from here on none are.
        first, last: the exact range, last excluded, in all lanes.
    """

    start: str
    whole: str
    rest: str
    stop: str
    first: str
    last: str


def _larger(f: Floats, a: str, b: str) -> str:
    """Return the larger of two vectors; b if a is NaN, which shows again in its exponential."""
    return f.select(f.compare("ogt", a, b), a, b)


def _exp(f: Floats, x: str) -> str:
    """Return exp(x), or 0 below the normal numbers, on which processors are slow."""
    low = f.compare("olt", x, f.const(-87.0 if f.is_single else -708.0))
    zero = f.const(0.0)
    return f.select(low, zero, exp(f, f.select(low, zero, x)))


def online_softmax(element: str, mask: str, more: bool) -> tuple[str, str]:
    """Write the loop that turns scores into exponentials and updates the running softmax.

    Exponentials are relative to the largest score so far. If a larger one comes, the sum and the
    result so far are scaled down.

    Pointers: scores, the largest of each row, the sum of each row, the result so far, the mask.

    Args:
        more: whether earlier blocks have left a sum and a result.
    """
    flow = KernelWriter()
    scores, tops, totals, result, of_mask = (flow.pointer(i) for i in range(5))
    rows = _ScoreRows(flow, element, mask, scores, of_mask)
    f, kind = rows.floats, rows.kind
    item = BYTES[element]
    least = f.const(float("-inf"))
    result_width = flow.size(ScoreSize.WIDTH)

    def row(r: str) -> None:
        seen = rows.visible_range(r)
        line = rows.place(scores, r, "0")

        def highest(key: str, lanes: str | None, top: str) -> list[str]:
            place = flow.gep(line, element, key)
            z = flow.load_vector(rows.width, element, place, lanes)
            z, lanes = rows.apply_mask(z, r, key, lanes)
            z = rows.select_visible(lanes, z, least)
            flow.store(kind, z, place, item)
            return [_larger(f, z, top)]

        top_place, total_place = flow.gep(tops, element, r), flow.gep(totals, element, r)
        start = (
            flow.broadcast(rows.width, element, flow.load(element, top_place, item))
            if more
            else least
        )
        (top,) = rows.loop_visible(seen, [(kind, start)], highest)
        one = flow.reduce_lanes(rows.width, element, top, _larger)
        flow.store(element, one, top_place, item)
        top = flow.broadcast(rows.width, element, one)
        level = f.select(f.compare("oeq", top, least), f.const(0.0), top)

        def exponentials(key: str, total: str) -> list[str]:
            place = flow.gep(line, element, key)
            p = _exp(f, f.sub(flow.load(kind, place, item), level))
            flow.store(kind, p, place, item)
            return [f.add(total, p)]

        started = [(kind, "zeroinitializer")]
        (total,) = flow.loop(seen.start, seen.stop, started, exponentials, rows.width)
        rows.clear(seen, line)
        sum_ = flow.reduce_lanes(rows.width, element, total, lambda g, a, b: g.add(a, b))
        if more:
            fading = _exp(f, f.sub(start, level))
            fade = flow.write(f"extractelement {kind} {fading}, i64 0")
            faded = flow.write(f"fmul {element} {flow.load(element, total_place, item)}, {fade}")
            sum_ = flow.write(f"fadd {element} {faded}, {sum_}")

            def fade_result(j: str) -> None:
                place = flow.gep(result, element, flow.add(flow.mul(r, result_width), j))
                flow.store(kind, f.mul(flow.load(kind, place, item), fading), place, item)

            flow.loop("0", result_width, (), fade_result, rows.width)
        flow.store(element, sum_, total_place, item)

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


def normalize_rows(element: str) -> tuple[str, str]:
    """Write the loop y = result / total, with the log-sum-exps.

    A row that saw no key gives 0 and -inf.

    Pointers: result, largest, totals, y, log-sum-exps. Sizes: elements of a row of y, between rows
    of the result, between rows of y.
    """
    flow = KernelWriter()
    result, tops, totals, y, logs = (flow.pointer(i) for i in range(5))
    count, from_row, to_row = (flow.size(i) for i in range(3))
    width = lanes_of(element)
    f = flow.floats(width, element)
    kind, item = f"<{width} x {element}>", BYTES[element]
    whole = flow.step("and", count, -width)
    left = flow.step("sub", count, whole)
    some, mask = flow.step("icmp sgt", left, 0), flow.first_lanes(width, left)

    def row(r: str) -> None:
        given = flow.load(element, flow.gep(totals, element, r), item)
        total = flow.broadcast(width, element, given)
        total = f.select(f.compare("oeq", total, f.const(0.0)), f.const(1.0), total)
        top = flow.broadcast(width, element, flow.load(element, flow.gep(tops, element, r), item))
        level = f.add(top, log(f, total))
        one = flow.write(f"extractelement {kind} {level}, i64 0")
        flow.store(element, one, flow.gep(logs, element, r), item)
        share = f.div(f.const(1.0), total)
        source = flow.gep(result, element, flow.mul(r, from_row))
        target = flow.gep(y, element, flow.mul(r, to_row))

        def vector(j: str, mask: str | None = None) -> None:
            given = flow.load_vector(width, element, flow.gep(source, element, j), mask)
            value = f.mul(given, share)
            flow.store_vector(width, element, value, flow.gep(target, element, j), mask)

        flow.loop("0", whole, (), vector, width)
        flow.when(some, (), lambda: vector(whole, mask))

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


def score_gradients(element: str, mask: str) -> tuple[str, str]:
    """Write the loop that turns scores into probabilities and their cotangents.

    With p = exp(score - log-sum-exp), the cotangent d of the probabilities becomes that of the
    product of queries and keys: p·(d - delta)·scale.

    Pointers: scores, d, log-sum-exp and delta of each row, the mask.
    """
    flow = KernelWriter()
    scores, reach, logs, deltas, of_mask = (flow.pointer(i) for i in range(5))
    rows = _ScoreRows(flow, element, mask, scores, of_mask)
    f, kind = rows.floats, rows.kind
    item = BYTES[element]
    least, zero = f.const(float("-inf")), f.const(0.0)

    def row(r: str) -> None:
        seen = rows.visible_range(r)
        lines = [rows.place(base, r, "0") for base in (scores, reach)]
        level = flow.broadcast(
            rows.width, element, flow.load(element, flow.gep(logs, element, r), item)
        )
        level = f.select(f.compare("oeq", level, least), zero, level)
        delta = flow.broadcast(
            rows.width, element, flow.load(element, flow.gep(deltas, element, r), item)
        )

        def vector(key: str, lanes: str | None) -> None:
            place, other = (flow.gep(line, element, key) for line in lines)
            z, given = (flow.load_vector(rows.width, element, x, lanes) for x in (place, other))
            z, lanes = rows.apply_mask(z, r, key, lanes)
            p = rows.select_visible(lanes, _exp(f, f.sub(z, level)), zero)
            flow.store(kind, p, place, item)
            d = f.mul(f.mul(p, f.sub(given, delta)), rows.scale)
            flow.store(kind, rows.select_visible(lanes, d, zero), other, item)

        rows.loop_visible(seen, (), vector)
        rows.clear(seen, *lines)

    flow.loop("%start", "%stop", (), row)
    return flow.finish()


def row_dots(element: str) -> tuple[str, str]:
    """Write the loop out[r] = Σ a[r, j]·b[r, j].

    Pointers: a, b, out. Sizes: elements of a row, then elements between rows of a, of b, of out.
    """
    flow = KernelWriter()
    a, b, out = (flow.pointer(i) for i in range(3))
    count, a_row, b_row, out_row = (flow.size(i) for i in range(4))
    width = lanes_of(element)
    f = flow.floats(width, element)
    kind = f"<{width} x {element}>"
    whole = flow.step("and", count, -width)
    left = flow.step("sub", count, whole)
    some, mask = flow.step("icmp sgt", left, 0), flow.first_lanes(width, left)

    def row(r: str) -> None:
        lines = [flow.gep(x, element, flow.mul(r, step)) for x, step in ((a, a_row), (b, b_row))]

        def vector(j: str, total: str, mask: str | None = None) -> list[str]:
            x, y = (
                flow.load_vector(width, element, flow.gep(line, element, j), mask) for line in lines
            )
            return [f.fma(x, y, total)]

        (total,) = flow.loop("0", whole, [(kind, "zeroinitializer")], vector, width)
        (total,) = flow.when(some, [(kind, total)], lambda: vector(whole, total, mask))
        one = flow.reduce_lanes(width, element, total, lambda g, a, b: g.add(a, b))
        flow.store(element, one, flow.gep(out, element, flow.mul(r, out_row)), BYTES[element])

    flow.loop("%start", "%stop", (), row)
    return flow.finish()
