"""The initial values of a variable's shards: the numbers that the whole would have there."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from graphflow.frontend.initial_shards import SharedInitial
from graphflow.init import Initializer, ReplicaRows
from graphflow.ir.op import Node
from graphflow.ir.spec import Span


def initial_part(
    node: Node,
    shape: tuple[int, ...],
    spans: tuple[Span, ...],
    shared: MutableMapping[Node, SharedInitial],
) -> Any:
    """Return a part of the initial value of a variable.

    Args:
        node: the variable.
        shape: the shape of the part.
        spans: which part it is, axis by axis.
        shared: the initial values that shards share; gets that of this variable.
    """
    initial = node.attrs["initial"]
    if isinstance(initial, Initializer) and initial.kind in ("constant", "hashed"):
        return replace(initial, shape=shape)
    if isinstance(initial, ReplicaRows):
        return initial.first_rows(shape[0])
    if isinstance(initial, Initializer) and initial.is_large:
        return initial.part(spans)
    if node not in shared:
        shared[node] = SharedInitial(initial)
    return shared[node].add_shard(spans, shape, node.attrs["dtype"])


__all__ = ["initial_part"]
