"""One node for each place: the op with attributes of the local sizes, on local inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphflow.errors import GraphflowError
from graphflow.ir.op import (
    Node,
    Tensor,
    current_prefix,
    make_node,
    prefix_of,
    prefix_scope,
)
from graphflow.ir.spec import Shape
from graphflow.ops.sharding import rules
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit, ShardExtent
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.emission.input_conversion import LocalInputs, Ranges
from graphflow.parallel.sharding.emission.whole_nodes import have_specs
from graphflow.parallel.sharding.rules.node_rule import ShardingRule
from graphflow.parallel.sharding.rules.rule_selection import SplitChoice


def emit_local(
    resharder: Resharder,
    node: Node,
    choice: SplitChoice,
    inputs: LocalInputs,
) -> list[tuple[Tensor, ...]]:
    """Write a node at each place; once for places that share a device and inputs.

    If a node with the same choice was written before, places copy that one: inferring shapes again
    would dominate the time that partitioning takes.
    """
    rule, splits = choice.rule, choice.splits
    found: list[tuple[Tensor, ...]] = []
    known: dict[Any, tuple[Tensor, ...]] = {}
    wanted = rule.sizes if resharder.mesh.sequential or rule.sharding.build is not None else {}
    for number, place in enumerate(resharder.mesh.places):
        own = tuple([parts[number] for parts in inputs.shards])
        pieces = {
            letter: resharder.partitioner.piece(size, splits.get(letter, WHOLE), place)
            for letter, size in wanted.items()
        }
        home = resharder.device_index(node, place)
        key = (home, own, tuple(pieces.items())) if resharder.mesh.sequential else number
        if key not in known:
            pattern = choice.templates.get(number)
            if pattern is not None and have_specs(own, pattern.inputs):
                copy = _copy_template(resharder, pattern, own, node, place)
                known[key] = copy.outputs
            else:
                with resharder.on_device(place, node):
                    known[key] = _build_local(
                        resharder, node, rule, own, pieces, splits, place, inputs.ranges[number]
                    )
                if rule.sharding.build is None:  # else the shard consists of other nodes
                    choice.templates[number] = known[key][0].node
        found.append(known[key])
    return found


def _copy_template(
    resharder: Resharder, pattern: Node, inputs: tuple[Tensor, ...], node: Node, place: Place
) -> Node:
    """Copy a node that was written at the same place for a like node."""
    at, device = resharder.sites(node)[resharder.mesh.index_of(place)]
    return pattern.copy_for(inputs, at + node.name, device, node)


def _build_local(
    resharder: Resharder,
    node: Node,
    rule: ShardingRule,
    inputs: tuple[Tensor, ...],
    pieces: Mapping[str, ShardExtent],
    splits: Mapping[str, AxisSplit],
    place: Place,
    ranges: Ranges,
) -> tuple[Tensor, ...]:
    """Build the op at a place, with local sizes; by the rule's own function, if it has one.

    Raises:
        GraphflowError: the op refuses its local inputs. The message names the shard and the user's
            line.
    """
    attrs = dict(node.attrs)
    try:
        if rule.sharding.build is not None and (ranges or any(s for s in splits.values())):
            every = {**rule.unsplit_extents, **pieces}
            cut = rules.ShardView(
                {letter: p.start for letter, p in every.items()},
                {letter: p.size for letter, p in every.items()},
                {letter: p.total for letter, p in every.items()},
                _local_shapes(resharder, node, rule, splits, place),
                ranges,
            )
            with prefix_scope(current_prefix() + prefix_of(node)):
                made = rule.sharding.build(node.op, cut, *inputs, **attrs)
            return made if isinstance(made, tuple) else (made,)
        if rule.sharding.sizes is not None:
            attrs[rule.sharding.sizes] = _local_shapes(resharder, node, rule, splits, place)[0]
        return make_node(node.op, inputs, attrs, node.name).outputs
    except GraphflowError as error:
        raise type(error)(
            f"shard {resharder.mesh.tag(place)[1:]} of {node.name!r} at {node.location}: {error}"
        ) from error


def _local_shapes(
    resharder: Resharder,
    node: Node,
    rule: ShardingRule,
    splits: Mapping[str, AxisSplit],
    place: Place,
) -> tuple[Shape, ...]:
    """Return the shapes of a node's outputs at a place."""
    first = len(node.inputs)
    return tuple(
        tuple(
            resharder.partitioner.piece(
                size, rule.split(splits.get(letter, WHOLE), first + o, axis), place
            ).size
            for axis, (size, letter) in enumerate(zip(spec.shape, names, strict=True))
        )
        for o, (names, spec) in enumerate(zip(rule.outputs, node.specs, strict=True))
    )


__all__ = ["emit_local"]
