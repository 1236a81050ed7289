"""Native loops over the entries of CSR matrices, for one width of the dense side.

Each sum has an order that follows from the matrix alone. No place outside the matrix is read:
columns are checked or clamped, and an error flag tells the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter
from graphflow.ops.kernels.codegen.vector_writer import Floats
from graphflow.ops.kernels.jit.compiler import vector_width

_ROWS_AT_ONCE = 32  # rows whose columns are checked at once
_ERROR_FLAG = 5  # number of the pointer to the error flag
WIDE = 4
"""Vectors of the dense side that are summed at once, in registers."""


def lanes_of(element: str, width: int) -> int:
    """Return the lanes of a vector for this many columns: a power of two, at most a register."""
    most = vector_width() * 4 // max(4, BYTES[element])
    lanes = 1
    while lanes < width and lanes < most:
        lanes *= 2
    return lanes


class _Entries:
    """The arrays of the structure, and the check of its columns, which all loops share.

    Pointers from `first`: columns, offsets. Sizes: rows, columns.
    """

    def __init__(self, flow: KernelWriter, index: str, offset: str, first: int = 1) -> None:
        self.flow = flow
        self.kinds = index, offset
        self.columns, self.offsets = flow.pointer(first), flow.pointer(first + 1)
        self.wrong = flow.pointer(_ERROR_FLAG)
        self.last = flow.add(flow.size(1), -1)
        self.lanes = lanes_of(index, 1 << 10)
        narrow = self.last if index == "i64" else flow.write(f"trunc i64 {self.last} to {index}")
        self.lasts = flow.broadcast(self.lanes, index, narrow)

    def rows(self, first: str, last: str, body: Callable[[str, str, str], None]) -> None:
        """Write body(row, first entry, end of its entries) for rows `first` to `last`.

        The columns of some rows are checked at a time; rows with a bad one are left out.
        """
        flow = self.flow

        def some(r: str) -> None:
            behind = flow.minimum(flow.add(r, _ROWS_AT_ONCE), last)
            bad = self._outside(self.offset(r), self.offset(behind))
            limit = flow.write(f"select i1 {bad}, i64 {r}, i64 {behind}")
            flow.loop(r, limit, (), lambda row: body(row, *self.bounds(row)))

        flow.loop(first, last, (), some, _ROWS_AT_ONCE)

    def offset(self, row: str) -> str:
        return self.flow.load_index(self.offsets, self.kinds[1], row)

    def bounds(self, row: str) -> tuple[str, str]:
        """Return the first entry of a row, and the end of its entries, which were checked."""
        return self.offset(row), self.offset(self.flow.add(row, 1))

    def _outside(self, start: str, stop: str) -> str:
        """Write whether an entry has a column outside the matrix, and set the error flag."""
        flow, lanes, index = self.flow, self.lanes, self.kinds[0]
        vectors = flow.lanes(lanes)

        def some(e: str, worst: str, mask: str | None = None) -> list[str]:
            read = flow.load_vector(lanes, index, flow.gep(self.columns, index, e), mask)
            return [vectors.intrinsic("umax", index, worst, read)]

        whole, left = self.split_whole(start, stop)
        kind = f"<{lanes} x {index}>"
        (worst,) = flow.loop(start, whole, [(kind, "zeroinitializer")], some, lanes)
        mask = flow.first_lanes(lanes, left)
        (worst,) = some(whole, worst, mask)
        return self.report_outside(worst)

    def split_whole(self, start: str, stop: str) -> tuple[str, str]:
        """Return where the last whole vector of some entries ends, and how many are left."""
        flow = self.flow
        count = flow.step("sub", stop, start)
        whole = flow.add(start, flow.step("and", count, -self.lanes))
        return whole, flow.step("sub", stop, whole)

    def report_outside(self, worst: str) -> str:
        """Set the error flag if a lane is a column outside the matrix; returns whether one is."""
        flow, lanes = self.flow, self.lanes
        outside = flow.lanes(lanes).binary("icmp ugt", self.kinds[0], worst, self.lasts)
        bits = flow.write(f"bitcast <{lanes} x i1> {outside} to i{lanes}")
        bad = flow.write(f"icmp ne i{lanes} {bits}, 0")
        flow.when(bad, (), lambda: flow.store("i64", "1", self.wrong, 8))
        return bad

    def column(self, entry: str) -> str:
        return self.flow.load_index(self.columns, self.kinds[0], entry)


def _chunks(width: int, lanes: int) -> list[tuple[int, int]]:
    """Return (first vector, vectors) of the pieces of a row of the dense side."""
    vectors = -(-width // lanes)
    return [(v, min(WIDE, vectors - v)) for v in range(0, vectors, WIDE)]


class _RowVectors:
    """Some neighbouring vectors of a row of the dense side or the result."""

    def __init__(
        self, flow: KernelWriter, element: str, width: int, chunk: tuple[int, int]
    ) -> None:
        self.flow, self.element, self.width = flow, element, width
        self.lanes = lanes_of(element, width)
        self.first, self.count = chunk
        self.kind = f"<{self.lanes} x {element}>"

    def _mask(self, vector: int) -> str | None:
        left = self.width - (self.first + vector) * self.lanes
        if left >= self.lanes:
            return None
        bits = ", ".join(f"i1 {'true' if i < left else 'false'}" for i in range(self.lanes))
        return f"<{bits}>"

    def place(self, base: str, row: str) -> str:
        return self.flow.gep(base, self.element, self.flow.mul(row, self.width))

    def _vector(self, row: str, vector: int) -> str:
        return self.flow.gep(row, self.element, (self.first + vector) * self.lanes)

    def load(self, row: str) -> list[str]:
        return [
            self.flow.load_vector(self.lanes, self.element, self._vector(row, v), self._mask(v))
            for v in range(self.count)
        ]

    def store(self, row: str, values: Sequence[str]) -> None:
        for v, value in enumerate(values):
            place = self._vector(row, v)
            self.flow.store_vector(self.lanes, self.element, value, place, self._mask(v))


def multiply_add(flow: KernelWriter, lanes: int, element: str) -> Callable[[str, str, str], str]:
    """Return a function that writes a·b + c of vectors; of floats rounded once."""
    if element in ("float", "double"):
        return Floats(flow.lanes(lanes), element).fma
    vectors = flow.lanes(lanes)
    return lambda a, b, c: vectors.binary("add", element, vectors.binary("mul", element, a, b), c)


def sum_rows(element: str, index: str, offset: str, width: int) -> tuple[str, str]:
    """Write out[r] = Σ values[e]·dense[columns[e]] over the entries e of rows start to stop.

    Pointers: values, columns, offsets, dense, out, error flag.
    """
    if width == 1:
        return _sum_rows_of_vector(element, index, offset)
    flow = KernelWriter()
    values, dense, out = (flow.pointer(i) for i in (0, 3, 4))
    entries = _Entries(flow, index, offset)
    lanes = lanes_of(element, width)
    fma = multiply_add(flow, lanes, element)

    def piece(part: _RowVectors, r: str, start: str, stop: str) -> None:
        def entry(e: str, *sums: str) -> list[str]:
            terms = part.load(part.place(dense, entries.column(e)))
            value = flow.load(element, flow.gep(values, element, e), BYTES[element])
            many = flow.broadcast(lanes, element, value)
            return [fma(many, t, s) for t, s in zip(terms, sums, strict=True)]

        zeros = [(part.kind, "zeroinitializer")] * part.count
        part.store(part.place(out, r), flow.loop(start, stop, zeros, entry))

    def row(r: str, start: str, stop: str) -> None:
        for chunk in _chunks(width, lanes):
            piece(_RowVectors(flow, element, width, chunk), r, start, stop)

    entries.rows("%start", "%stop", row)
    return flow.finish()


def _sum_rows_of_vector(element: str, index: str, offset: str) -> tuple[str, str]:
    """Write `sum_rows` for one dense column: entries in vectors, dense elements gathered."""
    flow = KernelWriter()
    values, dense, out = (flow.pointer(i) for i in (0, 3, 4))
    entries = _Entries(flow, index, offset)
    lanes = entries.lanes
    fma = multiply_add(flow, lanes, element)
    vectors = flow.lanes(lanes)
    word = f"<{lanes} x {index}>"

    def some(e: str, worst: str, total: str, mask: str | None = None) -> list[str]:
        said = flow.load_vector(lanes, index, flow.gep(entries.columns, index, e), mask)
        worst = vectors.intrinsic("umax", index, worst, said)
        places = vectors.intrinsic("umin", index, said, entries.lasts)
        if index == "i64":
            places = vectors.convert("trunc", places, "i64", "i32")
        terms = flow.gather(lanes, element, dense, places, mask)
        given = flow.load_vector(lanes, element, flow.gep(values, element, e), mask)
        return [worst, fma(given, terms, total)]

    def row(r: str, worst: str) -> list[str]:
        start, stop = entries.bounds(r)
        whole, left = entries.split_whole(start, stop)
        kinds = [(word, worst), (f"<{lanes} x {element}>", "zeroinitializer")]
        state = flow.loop(start, whole, kinds, some, lanes)
        worst, total = flow.when(
            flow.step("icmp sgt", left, 0),
            [(kind, value) for (kind, _), value in zip(kinds, state, strict=True)],
            lambda: some(whole, state[0], state[1], flow.first_lanes(lanes, left)),
        )
        one = flow.reduce_lanes(lanes, element, total, _add_vectors)
        flow.store(element, one, flow.gep(out, element, r), BYTES[element])
        return [worst]

    (worst,) = flow.loop("%start", "%stop", [(word, "zeroinitializer")], row)
    entries.report_outside(worst)
    return flow.finish()


def _add_vectors(f: Floats, a: str, b: str) -> str:
    return (
        f.add(a, b) if f.element in ("float", "double") else f.lanes.binary("add", f.element, a, b)
    )


def add_columns(element: str, index: str, offset: str, width: int) -> tuple[str, str]:
    """Write out[columns[e]] += values[e]·dense[r] over the entries e of each row r, in order.

    For a wide dense side (`piece_count` above 1), start and stop are pieces of it, each for all
    rows. For a narrow one they are blocks of rows, each with sums of its own; sizes 2, 3, … are the
    rows at which blocks begin. Pointers as for `sum_rows`.
    """
    flow = KernelWriter()
    lanes = lanes_of(element, width)
    chunks = _chunks(width, lanes)
    dense, out = flow.pointer(3), flow.pointer(4)
    whole = _RowVectors(flow, element, width, chunks[0])
    adding = _ColumnAdder(flow, element, index, offset)
    if len(chunks) == 1:
        each = flow.mul(flow.size(1), width)

        def block(b: str) -> None:
            first, last = flow.size(flow.add(b, 2)), flow.size(flow.add(b, 3))
            adding.rows(whole, first, last, dense, flow.gep(out, element, flow.mul(b, each)))

        flow.loop("%start", "%stop", (), block)
        return flow.finish()
    full = len(chunks) - (chunks[-1][1] < WIDE or width % lanes > 0)
    rows = flow.size(0)

    def piece(p: str) -> None:
        shift = flow.mul(p, WIDE * lanes)
        adding.rows(
            whole, "0", rows, flow.gep(dense, element, shift), flow.gep(out, element, shift)
        )

    flow.loop("%start", flow.minimum("%stop", full), (), piece)
    if full < len(chunks):
        rest = _RowVectors(flow, element, width, chunks[-1])
        reached = flow.step("icmp sgt", "%stop", full)
        flow.when(reached, (), lambda: adding.rows(rest, "0", rows, dense, out))
    return flow.finish()


def piece_count(element: str, width: int) -> int:
    """Return how many pieces of the dense side `add_columns` computes independently."""
    return len(_chunks(width, lanes_of(element, width)))


class _ColumnAdder:
    """Adds rows of the dense side to the rows of their entries' columns."""

    def __init__(self, flow: KernelWriter, element: str, index: str, offset: str) -> None:
        self.flow, self.element = flow, element
        self.values = flow.pointer(0)
        self.entries = _Entries(flow, index, offset)

    def rows(self, part: _RowVectors, first: str, last: str, dense: str, out: str) -> None:
        flow, element = self.flow, self.element
        fma = multiply_add(flow, part.lanes, element)

        def row(r: str, start: str, stop: str) -> None:
            terms = part.load(part.place(dense, r))

            def entry(e: str) -> None:
                place = part.place(out, self.entries.column(e))
                value = flow.load(element, flow.gep(self.values, element, e), BYTES[element])
                many = flow.broadcast(part.lanes, element, value)
                sums = part.load(place)
                part.store(place, [fma(many, t, s) for t, s in zip(terms, sums, strict=True)])

            flow.loop(start, stop, (), entry)

        self.entries.rows(first, last, row)


def sample_entries(element: str, index: str, offset: str, width: int) -> tuple[str, str]:
    """Write out[e] = rows[r] · others[columns[e]], for the entries of rows start to stop.

    Pointers: columns, offsets, rows, others, out, error flag.
    """
    flow = KernelWriter()
    left, right, out = (flow.pointer(i) for i in (2, 3, 4))
    entries = _Entries(flow, index, offset, first=0)
    lanes = lanes_of(element, width)
    parts = [_RowVectors(flow, element, width, chunk) for chunk in _chunks(width, lanes)]
    fma = multiply_add(flow, lanes, element)

    def row(r: str, start: str, stop: str) -> None:
        mine = parts[0].load(parts[0].place(left, r)) if len(parts) == 1 else []

        def entry(e: str) -> None:
            column = entries.column(e)
            sums = ["zeroinitializer"] * parts[0].count
            for part in parts:
                own = mine or part.load(part.place(left, r))
                other = part.load(part.place(right, column))
                pairs = zip(own, other, sums, strict=False)
                sums[: part.count] = [fma(a, b, s) for a, b, s in pairs]
            total = sums[0]
            for more in sums[1:]:
                total = _add_vectors(flow.floats(lanes, element), total, more)
            one = flow.reduce_lanes(lanes, element, total, _add_vectors)
            flow.store(element, one, flow.gep(out, element, e), BYTES[element])

        flow.loop(start, stop, (), entry)

    entries.rows("%start", "%stop", row)
    return flow.finish()
