"""Sizes of the rings of slots through which tensors of edges in loops travel.

`collectives/shared_memory_rings.py` says how a ring works.
"""

from __future__ import annotations

from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, align_up

MAX_SLOTS, MIN_SLOTS = 16, 2
"""Slots of a ring. The receiver reads one while the sender fills another."""
RING_BYTES = 4 << 20
"""Bytes of a ring that has more than `MIN_SLOTS` slots."""
ROWS_BYTES = ALIGNMENT
"""Bytes behind a tensor in its slot, which hold its number of rows."""


def slot_count(spec: TensorSpec) -> int:
    """Return the number of slots of an edge's ring."""
    return max(MIN_SLOTS, min(MAX_SLOTS, RING_BYTES // max(1, nbytes(spec))))


def slot_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a slot: those of a tensor, and its number of rows."""
    return align_up(nbytes(spec)) + ROWS_BYTES
