"""Small loops over float32 in scratch memory: zeros, and sums of two."""

from __future__ import annotations

from functools import cache

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value, call_native
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width


def clear_floats(place: int, count: int) -> None:
    """Fill so many numbers with zeros."""
    call_native(_loop("clear"), (place, place), (), 0, count)


def add_floats(target: int, source: int, count: int) -> None:
    """Add so many numbers to others."""
    call_native(_loop("add"), (target, source), (), 0, count)


@cache
def _loop(kind: str) -> NativeFunction:
    """Write target = 0, or target += source. Pointers: target, source."""
    nest = LoopNestWriter(vector_width(), 2, 0)
    target, source = nest.pointers

    def strip(first: Value, mask: str | None) -> None:
        moved = nest.mul(first, 4)
        there = nest.gep(target, moved)
        if kind == "clear":
            nest.store(nest.floats.const(0.0), there, mask)
        else:
            more = nest.load(nest.gep(source, moved), mask)
            nest.store(nest.floats.add(nest.load(there, mask), more), there, mask)

    nest.loop_vectors("%stop", strip)
    return compiler().function(*nest.source())
