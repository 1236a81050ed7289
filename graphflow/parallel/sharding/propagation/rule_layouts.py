"""Layouts from a user's rules: which tensors a rule names, and how it splits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from graphflow.base.argument_checks import did_you_mean
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import show_shape
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.propagation.propagation import is_slot

Axis = str | Sequence[str] | None
"""What a rule says of one axis: a mesh axis, several, or None for whole."""


def layouts_of_rules(
    graph: Graph, rules: Mapping[Any, Sequence[Axis]], mesh: Mesh, strict: bool = True
) -> dict[Tensor, Layout]:
    """Return the layouts that rules give to tensors of a graph.

    Args:
        graph: the graph.
        rules: for each tensor, name or pattern, the mesh axes of its axes.
        mesh: the mesh.
        strict: refuse rules that name nothing in the graph, and sizes too small for their shards.

    Raises:
        ShardingError: a rule cannot be followed, or two rules of one kind differ.
    """
    named = {graph.names[node]: node.outputs[0] for node in (*graph.placeholders, *graph.variables)}
    given: dict[Tensor, Layout] = {}
    origins: dict[Tensor, tuple[Any, bool]] = {}
    for key, axes in rules.items():
        found = match_tensors(graph, key, named)
        if not found and strict:
            raise unknown_rule_error(key, named)
        exact = isinstance(key, Tensor) or key in named
        for name, tensor in found.items():
            layout = _rule_layout(name, tensor, axes, mesh, strict)
            before, was_exact = origins.get(tensor, (key, exact))
            if was_exact == exact and given.get(tensor, layout) != layout:
                raise ShardingError(
                    f"two rules for {name!r} (made at {tensor.node.location}) differ: {before!r} "
                    f"says {given[tensor]}, {key!r} says {layout}; leave out one, or give the "
                    "tensor a rule by its own name, which goes before patterns"
                )
            if exact or not was_exact:
                given[tensor], origins[tensor] = layout, (key, exact)
    return given


def match_tensors(graph: Graph, key: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a rule's key names, by name."""
    if isinstance(key, Tensor):
        return {graph.names[key.node]: key} if key.node in graph.names else {}
    if not isinstance(key, str):
        raise ShardingError(f"the key of a rule must be a tensor or a name, not {key!r}")
    if key in named:
        return {key: named[key]}
    return {
        name: t for name, t in named.items() if fnmatchcase(name, key) and _can_match_pattern(t)
    }


def _can_match_pattern(tensor: Tensor) -> bool:
    """Return True if a pattern may match a tensor. Slots follow their variables, and scalars have
    no axis."""
    return tensor.ndim > 0 and not is_slot(tensor.node)


def unknown_rule_error(key: Any, named: Mapping[str, Tensor]) -> ShardingError:
    """Return the error of a rule that names nothing, with a suggestion."""
    if isinstance(key, Tensor):
        return ShardingError(f"a rule is for {key!r}, on which nothing that is run depends")
    named = {name: t for name, t in named.items() if _can_match_pattern(t)}
    inside = [name for name in named if fnmatchcase(name, f"*/{key}")]  # the name without its scope
    hint = did_you_mean(key, named, 3, 0.5) or f"there are {', '.join(map(repr, named))}"
    if inside:
        hint = f"did you mean {' or '.join(map(repr, inside[:3]))}, or all such, '*/{key}'?"
    return ShardingError(
        f"a rule names {key!r}, but no variable or placeholder has that name; {hint}"
    )


def _rule_layout(name: str, tensor: Tensor, axes: Any, mesh: Mesh, strict: bool) -> Layout:
    """Return the layout that a rule gives to a tensor.

    Raises:
        ShardingError: the rule has no tuple, too many axes, an unknown or repeated mesh axis, or an
            axis that is too small.
    """
    where = f"rule {name!r}: {axes!r}"
    example = (mesh.names[0], *[None] * (tensor.ndim - 1))
    made = f"{name!r} is {tensor.spec} (made at {tensor.node.location})"
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise ShardingError(
            f"{where}: give an axis of the mesh or None for each axis, as a tuple: {example}"
        )
    if len(axes) > tensor.ndim:
        raise ShardingError(f"{where} is for {len(axes)} axes, but {made}: it has {tensor.ndim}")
    partitioner, used = SizePartitioner(mesh), set[str]()
    dims = []
    for d, entry in enumerate([*axes, *[None] * (tensor.ndim - len(axes))]):
        if not isinstance(entry, str | Sequence | None):
            raise ShardingError(
                f"{where}: give an axis of the mesh ({', '.join(mesh.names)}) or None for each "
                f"axis, not {entry!r}"
            )
        along = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in along:
            if axis not in mesh.sizes:
                raise ShardingError(
                    f"{where}: the mesh has no axis {axis!r}; it has {', '.join(mesh.sizes)}"
                )
            if axis in used:
                raise ShardingError(
                    f"{where} uses axis {axis!r} of the mesh twice, but it cuts one axis of a "
                    f"tensor, into {mesh.sizes[axis]}; leave out one, or give the mesh another axis"
                )
            used.add(axis)
        split = AxisSplit(along) if along else WHOLE
        if strict and not partitioner.can_split(tensor.shape[d], split):
            count = mesh.part_count(along)
            raise ShardingError(
                f"{where} cuts axis {d} into {count}, but {made}: "
                f"{show_shape(tensor.shape)}[{d}] is {tensor.shape[d]}, too small for {count} "
                "shards that are not empty; leave the axis whole or make the mesh smaller"
            )
        dims.append(split)
    return Layout(tuple(dims))
