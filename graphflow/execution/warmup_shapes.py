"""The sizes for which a session prepares steps before they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.errors import FeedError
from graphflow.frontend.feeds import as_placeholder
from graphflow.frontend.pytree import accepts_feed, depends_on_placeholder
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, user_location

Sizes = tuple[int, ...]


def shape_signatures(graph: Graph, shapes: Mapping[Tensor, Any] | None) -> list[dict[Node, Sizes]]:
    """Return the shapes of the placeholders that a graph reads, once for each step to prepare.

    Args:
        shapes: for each placeholder a shape, an array whose shape is meant, or a list of these:
            the first step takes the first of each list, and so on. Placeholders of static shape
            may be left out.

    Raises:
        FeedError: not a placeholder of this graph, not a shape, or lists of different lengths.
    """
    wanted: dict[Node, list[Sizes]] = {}
    single: set[Node] = set()
    for node, given in by_placeholder(shapes).items():
        if not accepts_feed(graph, node):
            raise FeedError(
                f"shape for {node.name!r} (made at {node.location}): nothing fetched depends on "
                "it; leave it out"
            )
        if not depends_on_placeholder(graph, node):
            continue
        if isinstance(given, list) and not given and node.specs[0].shape:
            raise FeedError(
                f"{node.name!r} (made at {node.location}) is given an empty list of shapes; give "
                "it a shape for each step to prepare"
            )
        if isinstance(given, list) and not all(_is_size(each) for each in given):
            wanted[node] = [as_shape(node, each) for each in given]
        else:
            wanted[node] = [as_shape(node, given)]
            single.add(node)
    for node in graph.placeholders:
        if node not in wanted and node.specs[0].is_concrete:
            wanted[node] = [_static_shape(node)]
            single.add(node)
    return _zip_shapes(wanted, single)


def by_placeholder(shapes: Mapping[Tensor, Any] | None) -> dict[Node, Any]:
    """Return the given shapes by placeholder node.

    Raises:
        FeedError: not a dict of placeholders.
    """
    if shapes is not None and not isinstance(shapes, Mapping):
        raise FeedError(
            f"shapes at {user_location()} must be a dict from placeholders to shapes, "
            f"not {format_value(shapes)}"
        )
    return {as_placeholder(tensor): given for tensor, given in (shapes or {}).items()}


def _zip_shapes(wanted: Mapping[Node, list[Sizes]], single: set[Node]) -> list[dict[Node, Sizes]]:
    """Return one dict for each position in the lists; a single shape counts for all positions."""
    lists = {node: len(each) for node, each in wanted.items() if node not in single}
    if len(set(lists.values())) > 1:
        lengths = ", ".join(
            f"{node.name!r} (made at {node.location}) has {n}" for node, n in lists.items()
        )
        raise FeedError(f"lists of shapes must be of one length, a shape for each step: {lengths}")
    count = next(iter(lists.values()), 1)
    return [
        {node: each[0 if node in single else i] for node, each in wanted.items()}
        for i in range(count)
    ]


def as_shape(node: Node, given: Any) -> Sizes:
    """Return a shape, given as such or as an array of that shape.

    Raises:
        FeedError: neither.
    """
    if isinstance(given, Tensor):
        raise FeedError(
            f"{node.name!r} (made at {node.location}) is given the symbolic tensor {given.name!r}; "
            "give a shape or an array"
        )
    shape = given if isinstance(given, tuple | list) else getattr(given, "shape", None)
    if shape is None or not all(_is_size(size) for size in shape):
        raise FeedError(
            f"{node.name!r} (made at {node.location}) takes {node.specs[0]}; a shape for it is a "
            f"tuple of sizes, an array, or a list of these, not {format_value(given)}"
        )
    return tuple(int(size) for size in shape)


def _is_size(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 0)


def _static_shape(node: Node) -> Sizes:
    return tuple(int(size) for size in node.specs[0].shape)
