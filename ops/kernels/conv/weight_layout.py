"""Weights as rows of channels, the way that products read them."""

from __future__ import annotations

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.winograd_text import ROW, pack_pixels, pack_short_planes
from graphflow.ops.kernels.conv.winograd_tiles import ScratchBytes, row_slots
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.windows.window_arguments import Ints


def pack_tap_rows(
    place: int, inputs: int, taps: int, terms: Ints, columns: Ints, turned: bool
) -> tuple[ScratchBytes, int]:
    """Rows (term, tap) of columns, from weights (outputs, inputs, taps) at an address; and how many
    bytes it is from term to term.

    Args:
        terms, columns: first and how many (columns: up to a panel); inputs and outputs, or the
            other way round if `turned`.
    """
    (first, count), (start, wide) = terms, columns
    if not turned:
        rows = ScratchBytes("taps", row_slots(taps * count) * ROW)
        source = place + (start * inputs + first) * taps * 4
        call_native(
            pack_pixels(), (source, rows.place), (taps * count, wide, inputs * taps * 4, 0, 0), 0, 1
        )
        return rows, taps * ROW
    slots = row_slots(taps)
    rows = ScratchBytes("taps", count * slots * ROW)
    source = place + (first * inputs + start) * taps * 4
    apart = inputs * taps * 4, slots * ROW
    if taps <= vector_width() and wide % vector_width() == 0:
        call_native(pack_short_planes(taps), (source, rows.place), (wide, *apart), 0, count)
    else:
        call_native(pack_pixels(), (source, rows.place), (taps, wide, taps * 4, *apart), 0, count)
    return rows, slots * ROW
