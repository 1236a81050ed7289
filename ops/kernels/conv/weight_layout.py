"""Weights as rows of channels, which products of tiles and of gathered rows read."""

from __future__ import annotations

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.winograd_text import ROW, pack_pixels, pack_short_planes
from graphflow.ops.kernels.conv.winograd_tiles import ScratchBytes, row_slots
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.windows.window_arguments import Ints


def pack_tap_rows(
    place: int, inputs: int, taps: int, terms: Ints, columns: Ints, transposed: bool
) -> tuple[ScratchBytes, int]:
    """Return rows (term, tap) of columns from weights (outputs, inputs, taps), and bytes between
    terms.

    Args:
        place: address of the weights.
        terms, columns: (first, count) of inputs and outputs, or the reverse if `transposed`; at
            most a panel of columns.
    """
    (first, count), (start, wide) = terms, columns
    if not transposed:
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
