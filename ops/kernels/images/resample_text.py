"""The generated functions of resampling: each output is a weighted sum of inputs of its axis.

Sums go through a table's entries in order, by a product and an addition each, as numpy's do.
"""

from __future__ import annotations

from functools import cache

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width


@cache
def resampled_rows() -> NativeFunction:
    """Write sums of rows: vectors lie along the axes after the resampled one.

    Pointers: x, offsets in bytes (outputs, entries) i64, weights (outputs, entries), out. Sizes:
    outputs, entries and elements of a row; bytes of x for each slice of the axes before.
    """
    nest = LoopNestWriter(vector_width(), 4, 4)
    x, offsets, weights, out = nest.pointers
    outputs, entries, count, slice_bytes = nest.sizes
    row_bytes = nest.mul(count, 4)

    def one_slice(number: str) -> None:
        source = nest.gep(x, nest.mul(number, slice_bytes))
        target = nest.gep(out, nest.mul(nest.mul(number, outputs), row_bytes))

        def one_output(place: str) -> None:
            first = nest.mul(place, entries)
            here, there = (
                nest.gep(offsets, nest.mul(first, 8)),
                nest.gep(weights, nest.mul(first, 4)),
            )

            def term(entry: Value, start: Value, mask: str | None) -> str:
                offset = nest.write(f"load i64, ptr {nest.gep(here, nest.mul(entry, 8))}, align 8")
                value = nest.load(nest.gep(source, offset, nest.mul(start, 4)), mask)
                weight = nest.broadcast(nest.gep(there, nest.mul(entry, 4)))
                return nest.floats.mul(value, weight)

            def strip(start: Value, mask: str | None) -> None:
                (total,) = nest.loop(
                    1,
                    entries,
                    lambda entry, total: [nest.floats.add(total, term(entry, start, mask))],
                    [(nest.kind, term(0, start, mask))],
                )
                goal = nest.gep(target, nest.mul(place, row_bytes), nest.mul(start, 4))
                nest.store(total, goal, mask)

            nest.loop_vectors(count, strip)

        nest.loop(0, outputs, one_output)

    nest.loop("%start", "%stop", one_slice)
    return compiler().function(*nest.source())


@cache
def resampled_columns() -> NativeFunction:
    """Write sums of single elements: vectors lie along the resampled axis, the last one.

    Pointers: x, offsets in bytes (entries, pitch) i32, weights (entries, pitch), out. Sizes:
    outputs, entries, pitch (whole vectors), bytes of a row of x.
    """
    nest = LoopNestWriter(vector_width(), 4, 4)
    x, offsets, weights, out = nest.pointers
    outputs, entries, pitch, row_bytes = nest.sizes
    indices = nest.lanes.vector("i32")

    def row(number: str) -> None:
        source = nest.gep(x, nest.mul(number, row_bytes))
        target = nest.gep(out, nest.mul(nest.mul(number, outputs), 4))

        def term(entry: Value, start: Value) -> str:
            place = nest.mul(nest.add(nest.mul(entry, pitch), start), 4)
            found = nest.write(f"load {indices}, ptr {nest.gep(offsets, place)}, align 4")
            value = nest.gather_at(source, found, None)
            return nest.floats.mul(value, nest.load(nest.gep(weights, place)))

        def strip(start: Value, mask: str | None) -> None:
            (total,) = nest.loop(
                1,
                entries,
                lambda entry, total: [nest.floats.add(total, term(entry, start))],
                [(nest.kind, term(0, start))],
            )
            nest.store(total, nest.gep(target, nest.mul(start, 4)), mask)

        nest.loop_vectors(outputs, strip)

    nest.loop("%start", "%stop", row)
    return compiler().function(*nest.source())
