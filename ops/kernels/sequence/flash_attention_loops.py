"""What attention does to a block of scores between its products, as native loops.

A row of scores has some keys, and lies in memory as whole vectors; which of the keys its query sees
is a range, and what a mask says. Beyond them the results are 0, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

from graphflow.ops.kernels.codegen.control_flow import BYTES, Flow, lanes_of
from graphflow.ops.kernels.codegen.vector_math import exp, log
from graphflow.ops.kernels.codegen.vector_writer import Floats


class Size(IntEnum):
    """Places among the sizes of a loop."""

    KEYS = 0
    ROW = auto()  # elements from a row of scores to the next
    WIDTH = auto()  # of a row of the result
    FIRST = auto()  # row r sees keys from r + this, …
    END = auto()  # … to r + this, the last excluded
    MASK_ROW = auto()  # bytes from a row of the mask to the next
    SCALE = auto()  # the bits of a float64


class _Scores:
    """Rows of scores, vector by vector.

    Args:
        mask: "none", "bool" or "float"; with "1" behind where all keys share an element.
    """

    def __init__(self, flow: Flow, element: str, mask: str, base: str, mask_base: str) -> None:
        self.flow, self.element, self.mask = flow, element, mask
        self.width = lanes_of(element)
        self.kind = f"<{self.width} x {element}>"
        self.floats: Floats = flow.floats(self.width, element)
        self.base, self.mask_base = base, mask_base
        self.keys, self.row = flow.size(Size.KEYS), flow.size(Size.ROW)
        self.first, self.end = flow.size(Size.FIRST), flow.size(Size.END)
        self.mask_row = flow.size(Size.MASK_ROW)
        bits = flow.size(Size.SCALE)
        scale = flow.write(f"bitcast i64 {bits} to double")
        if element == "float":
            scale = flow.write(f"fptrunc double {scale} to float")
        self.scale = flow.spread(self.width, element, scale)

    def place(self, base: str, row: str, key: str) -> str:
        return self.flow.at(base, self.element, self.flow.add(self.flow.mul(row, self.row), key))

    def seen(self, row: str) -> _Seen:
        flow = self.flow
        first, last = (self._inside(flow.add(row, x)) for x in (self.first, self.end))
        spread = [
            flow.spread(self.width, "i32", flow.write(f"trunc i64 {x} to i32"))
            for x in (first, last)
        ]
        return _Seen(self._down(first), self._up(first), self._down(last), self._up(last), *spread)

    def _inside(self, key: str) -> str:
        """The nearest number in 0 to the number of keys."""
        return self.flow.least(self.flow.most(key, 0), self.keys)

    def _down(self, key: str) -> str:
        return self.flow.step("and", key, -self.width)

    def _up(self, key: str) -> str:
        return self._down(self.flow.add(key, self.width - 1))

    def lanes_seen(self, key: str, seen: _Seen) -> str:
        """Which lanes of the vector from a key on are seen."""
        flow, lanes = self.flow, self.floats.lanes
        index = ", ".join(f"i32 {i}" for i in range(self.width))
        start = flow.spread(self.width, "i32", flow.write(f"trunc i64 {key} to i32"))
        here = flow.write(f"add <{self.width} x i32> {start}, <{index}>")
        after = lanes.two("icmp sge", "i32", here, seen.first)
        return lanes.two("and", "i1", after, lanes.two("icmp slt", "i32", here, seen.last))

    def masked(self, z: str, row: str, key: str, seen: str | None) -> tuple[str, str | None]:
        """Scaled scores with the mask, and which are seen; None: all."""
        f, flow = self.floats, self.flow
        z = f.mul(z, self.scale)
        if self.mask == "none":
            return z, seen
        lanes, shared = f.lanes, self.mask.endswith("1")
        element = "i8" if self.mask.startswith("bool") else self.element
        line = flow.at(self.mask_base, "i8", flow.mul(row, self.mask_row))
        if shared:
            given = flow.spread(self.width, element, flow.load(element, line, BYTES[element]))
        else:
            given = flow.read(self.width, element, flow.at(line, element, key), seen)
        if element == "i8":
            let = lanes.two("icmp ne", "i8", given, "zeroinitializer")
            return z, let if seen is None else lanes.two("and", "i1", seen, let)
        return f.add(z, given), seen

    def only(self, seen: str | None, value: str, otherwise: str) -> str:
        return value if seen is None else self.floats.select(seen, value, otherwise)

    def over(
        self, seen: _Seen, carried: Sequence[tuple[str, str]],
        body: Callable[..., Sequence[str] | None],
    ) -> list[str]:  # fmt: skip
        """body(key, which lanes are seen or None for all, *values) for each vector of which some
        are: those that are seen in part come before and after those that are as a whole."""
        kinds = [kind for kind, _ in carried]

        def some(key: str, *values: str) -> Sequence[str] | None:
            return body(key, self.lanes_seen(key, seen), *values)

        def whole(key: str, *values: str) -> Sequence[str] | None:
            return body(key, None, *values)

        flow = self.flow
        values = [value for _, value in carried]
        for start, stop, part in (
            (seen.start, flow.least(seen.whole, seen.stop), some),
            (seen.whole, seen.rest, whole),
            (flow.most(seen.whole, seen.rest), seen.stop, some),
        ):
            given = list(zip(kinds, values, strict=True))
            values = flow.loop(start, stop, given, part, self.width)
        return values

    def clear(self, seen: _Seen, *rows: str) -> None:
        """Zeros in rows of scores where no lane of a vector is seen."""

        def vector(key: str) -> None:
            for row in rows:
                place = self.flow.at(row, self.element, key)
                self.flow.store(self.kind, "zeroinitializer", place, BYTES[self.element])

        self.flow.loop("0", seen.start, (), vector, self.width)
        self.flow.loop(seen.stop, self.keys, (), vector, self.width)


class _Seen(NamedTuple):
    """The keys that a row sees, by the first keys of vectors: from `start` some are seen, from
    `whole` all are, from `rest` some, and from `stop` none; and first and last, the last excluded,
    in all lanes."""

    start: str
    whole: str
    rest: str
    stop: str
    first: str
    last: str


def _larger(f: Floats, a: str, b: str) -> str:
    """The larger of two numbers; b where a is NaN, which shows again in its exponential."""
    return f.select(f.compare("ogt", a, b), a, b)


def _exp(f: Floats, x: str) -> str:
    """exp, and 0 for what is below the normal numbers: a processor takes long for these."""
    low = f.compare("olt", x, f.const(-87.0 if f.is_single else -708.0))
    zero = f.const(0.0)
    return f.select(low, zero, exp(f, f.select(low, zero, x)))


def soften(element: str, mask: str, more: bool) -> tuple[str, str]:
    """Scores become their exponentials over the largest one so far, which are summed; `more`: what
    was summed before fades where there is a larger one now.

    Pointers: scores, the largest of each row, the sum of each row, the result so far, the mask.
    """
    flow = Flow()
    scores, tops, totals, result, of_mask = (flow.pointer(i) for i in range(5))
    rows = _Scores(flow, element, mask, scores, of_mask)
    f, kind = rows.floats, rows.kind
    item = BYTES[element]
    least = f.const(float("-inf"))
    result_width = flow.size(Size.WIDTH)

    def row(r: str) -> None:
        seen = rows.seen(r)
        line = rows.place(scores, r, "0")

        def highest(key: str, lanes: str | None, top: str) -> list[str]:
            place = flow.at(line, element, key)
            z, lanes = rows.masked(flow.load(kind, place, item), r, key, lanes)
            z = rows.only(lanes, z, least)
            flow.store(kind, z, place, item)
            return [_larger(f, z, top)]

        top_place, total_place = flow.at(tops, element, r), flow.at(totals, element, r)
        start = (
            flow.spread(rows.width, element, flow.load(element, top_place, item)) if more else least
        )
        (top,) = rows.over(seen, [(kind, start)], highest)
        one = flow.folded(rows.width, element, top, _larger)
        flow.store(element, one, top_place, item)
        top = flow.spread(rows.width, element, one)
        level = f.select(f.compare("oeq", top, least), f.const(0.0), top)

        def exponentials(key: str, total: str) -> list[str]:
            place = flow.at(line, element, key)
            p = _exp(f, f.sub(flow.load(kind, place, item), level))
            flow.store(kind, p, place, item)
            return [f.add(total, p)]

        started = [(kind, "zeroinitializer")]
        (total,) = flow.loop(seen.start, seen.stop, started, exponentials, rows.width)
        rows.clear(seen, line)
        sum_ = flow.folded(rows.width, element, total, lambda g, a, b: g.add(a, b))
        if more:
            fading = _exp(f, f.sub(start, level))
            fade = flow.write(f"extractelement {kind} {fading}, i64 0")
            faded = flow.write(f"fmul {element} {flow.load(element, total_place, item)}, {fade}")
            sum_ = flow.write(f"fadd {element} {faded}, {sum_}")

            def fade_result(j: str) -> None:
                place = flow.at(result, element, flow.add(flow.mul(r, result_width), j))
                flow.store(kind, f.mul(flow.load(kind, place, item), fading), place, item)

            flow.loop("0", result_width, (), fade_result, rows.width)
        flow.store(element, sum_, total_place, item)

    flow.loop("%start", "%stop", (), row)
    return flow.function()


def finish(element: str) -> tuple[str, str]:
    """y = result / total, and the logarithms of the sums of exponentials; 0 and -inf where nothing
    was seen.

    Pointers: result, largest, totals, y, logarithms. Sizes: elements of a row of y, from a row of
    the result to the next, from a row of y to the next.
    """
    flow = Flow()
    result, tops, totals, y, logs = (flow.pointer(i) for i in range(5))
    count, from_row, to_row = (flow.size(i) for i in range(3))
    width = lanes_of(element)
    f = flow.floats(width, element)
    kind, item = f"<{width} x {element}>", BYTES[element]
    whole = flow.step("and", count, -width)
    left = flow.step("sub", count, whole)
    some, mask = flow.step("icmp sgt", left, 0), flow.first_lanes(width, left)

    def row(r: str) -> None:
        given = flow.load(element, flow.at(totals, element, r), item)
        total = flow.spread(width, element, given)
        total = f.select(f.compare("oeq", total, f.const(0.0)), f.const(1.0), total)
        top = flow.spread(width, element, flow.load(element, flow.at(tops, element, r), item))
        level = f.add(top, log(f, total))
        one = flow.write(f"extractelement {kind} {level}, i64 0")
        flow.store(element, one, flow.at(logs, element, r), item)
        share = f.div(f.const(1.0), total)
        source = flow.at(result, element, flow.mul(r, from_row))
        target = flow.at(y, element, flow.mul(r, to_row))

        def vector(j: str, mask: str | None = None) -> None:
            value = f.mul(flow.load(kind, flow.at(source, element, j), item), share)
            flow.keep(width, element, value, flow.at(target, element, j), mask)

        flow.loop("0", whole, (), vector, width)
        flow.when(some, (), lambda: vector(whole, mask))

    flow.loop("%start", "%stop", (), row)
    return flow.function()


def slopes(element: str, mask: str) -> tuple[str, str]:
    """Scores become probabilities, p = exp(score - logarithm), and what reaches them from these
    becomes what reaches the product of queries and keys: p·(d - delta)·scale.

    Pointers: scores, d, logarithms and delta of each row, the mask.
    """
    flow = Flow()
    scores, reach, logs, deltas, of_mask = (flow.pointer(i) for i in range(5))
    rows = _Scores(flow, element, mask, scores, of_mask)
    f, kind = rows.floats, rows.kind
    item = BYTES[element]
    least, zero = f.const(float("-inf")), f.const(0.0)

    def row(r: str) -> None:
        seen = rows.seen(r)
        lines = [rows.place(base, r, "0") for base in (scores, reach)]
        level = flow.spread(
            rows.width, element, flow.load(element, flow.at(logs, element, r), item)
        )
        level = f.select(f.compare("oeq", level, least), zero, level)
        delta = flow.spread(
            rows.width, element, flow.load(element, flow.at(deltas, element, r), item)
        )

        def vector(key: str, lanes: str | None) -> None:
            place, other = (flow.at(line, element, key) for line in lines)
            z, lanes = rows.masked(flow.load(kind, place, item), r, key, lanes)
            p = rows.only(lanes, _exp(f, f.sub(z, level)), zero)
            flow.store(kind, p, place, item)
            d = f.mul(f.mul(p, f.sub(flow.load(kind, other, item), delta)), rows.scale)
            flow.store(kind, rows.only(lanes, d, zero), other, item)

        rows.over(seen, (), vector)
        rows.clear(seen, *lines)

    flow.loop("%start", "%stop", (), row)
    return flow.function()


def dots(element: str) -> tuple[str, str]:
    """out[r] = Σ a[r, j]·b[r, j]. Pointers: a, b, out. Sizes: elements of a row, from a row of a to
    the next, of b, of out."""
    flow = Flow()
    a, b, out = (flow.pointer(i) for i in range(3))
    count, a_row, b_row, out_row = (flow.size(i) for i in range(4))
    width = lanes_of(element)
    f = flow.floats(width, element)
    kind = f"<{width} x {element}>"
    whole = flow.step("and", count, -width)
    left = flow.step("sub", count, whole)
    some, mask = flow.step("icmp sgt", left, 0), flow.first_lanes(width, left)

    def row(r: str) -> None:
        lines = [flow.at(x, element, flow.mul(r, step)) for x, step in ((a, a_row), (b, b_row))]

        def vector(j: str, total: str, mask: str | None = None) -> list[str]:
            x, y = (flow.read(width, element, flow.at(line, element, j), mask) for line in lines)
            return [f.fma(x, y, total)]

        (total,) = flow.loop("0", whole, [(kind, "zeroinitializer")], vector, width)
        (total,) = flow.when(some, [(kind, total)], lambda: vector(whole, total, mask))
        one = flow.folded(width, element, total, lambda g, a, b: g.add(a, b))
        flow.store(element, one, flow.at(out, element, flow.mul(r, out_row)), BYTES[element])

    flow.loop("%start", "%stop", (), row)
    return flow.function()
