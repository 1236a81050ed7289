"""Kinds of nodes that share observations: the same op on the same kind of device, of about one
size.
"""

from __future__ import annotations

import math

from graphflow.base.lazy_dataclass import dataclass

TRANSPOSED_MARK = "·"
"""Stands between an op's name and the operands that a product reads transposed."""

TURN = "turn"
"""The class of the turns of a window's parties."""


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """Nodes that share observations.

    Args:
        device: The kind of device, by machine and threads: "|cpu|1".
        busy: Its neighbours compute, too.
        kind: The op's class, see `roofline.op_class`.
        op: The op; of a product, with its `TRANSPOSED_MARK`.
        dtype: Of its first output.
        flops, bytes: Of a node, in half octaves. For a node with bodies, their predicted time in ns
            stands for its flops.
    """

    device: str
    busy: bool
    kind: str
    op: str
    dtype: str
    flops: int
    bytes: int


def half_octaves(amount: float) -> int:
    """Return a size in half octaves: amounts within a factor of 1.41 are alike."""
    return round(2 * math.log2(1.0 + max(0.0, amount)))


def bottleneck_of(bucket: Bucket) -> str:
    """Return what limits such nodes: products, random numbers, aliases, turns, or else memory."""
    return bucket.kind if bucket.kind in ("matmul", "random", "alias", TURN) else "memory"


def op_name_of(bucket: Bucket) -> str:
    """Return the op's name without the flags that say how it reads its operands."""
    return bucket.op.partition(TRANSPOSED_MARK)[0]


def distance_between(wanted: Bucket, other: Bucket) -> int:
    """Return how different two buckets are."""
    apart = abs(wanted.flops - other.flops) + abs(wanted.bytes - other.bytes)
    apart += 2 * (wanted.op != other.op and op_name_of(wanted) == op_name_of(other))
    return apart + 4 * (wanted.dtype != other.dtype) + (wanted.busy != other.busy)
