"""Unsplit nodes: each place gets a copy.

In data parallelism most nodes of a step are updates of variables that every place has whole.
Copying them needs no choice of a rule and no inference of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor, whole
from graphflow.parallel.resharding.resharder import Resharder


def copy_unsplit(
    resharder: Resharder,
    node: Node,
    values: Mapping[Tensor, ShardedTensor],
    preferred: Mapping[Tensor, Layout],
) -> list[ShardedTensor] | None:
    """Return a copy of an elementwise node at each place; None unless all inputs and outputs are
    whole.

    Args:
        resharder: knows names and devices.
        node: the node.
        values: what stands for its inputs.
        preferred: preferred layouts of its outputs.
    """
    if not node.op.elementwise or node.op.sharding is not None or not node.inputs:
        return None
    for tensor in node.outputs:
        target = preferred.get(tensor)
        if target is not None and not target.is_whole:
            return None
    given = []
    for tensor in node.inputs:
        value = values[tensor]
        if not value.layout.is_whole:
            return None
        spec = tensor.node.specs[tensor.index]
        for part in value.shards:
            own = part.node.specs[part.index]
            if own is not spec and own != spec:
                return None
        given.append(value.shards)
    made = copy_to_places(resharder, node, [*zip(*given, strict=True)], node.name)
    return [
        ShardedTensor(spec, whole(spec.rank), tuple([each.outputs[o] for each in made]))
        for o, spec in enumerate(node.specs)
    ]


def copy_to_places(
    resharder: Resharder, node: Node, inputs: Sequence[tuple[Tensor, ...]], name: str
) -> list[Node]:
    """Return a copy of a node at each place; one copy for places that share a device and inputs.

    Args:
        resharder: knows names and devices.
        node: the node.
        inputs: for each place, inputs with the specs of the node's own inputs.
        name: the name of the copies, behind the prefix of their place.
    """
    sites = resharder.sites(node)
    if not resharder.mesh.sequential:
        pairs = zip(sites, inputs, strict=True)
        return [node.copy_for(own, at + name, device, node) for (at, device), own in pairs]
    made: list[Node] = []
    known: dict[Any, Node] = {}
    for place, (at, device), own in zip(resharder.mesh.places, sites, inputs, strict=True):
        key = resharder.device_index(node, place), own
        if key not in known:
            known[key] = node.copy_for(own, at + name, device, node)
        made.append(known[key])
    return made


def have_spec_of(parts: Sequence[Tensor], tensor: Tensor) -> bool:
    """Return True if all shards have the spec of a tensor."""
    return have_specs(parts, (tensor,) * len(parts))


def have_specs(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if tensors have, one by one, the specs of others."""
    if len(tensors) != len(others):
        return False
    for tensor, other in zip(tensors, others, strict=True):
        have, want = tensor.node.specs[tensor.index], other.node.specs[other.index]
        if have is not want and have != want:
            return False
    return True


__all__ = ["have_spec_of", "copy_unsplit", "copy_to_places", "have_specs"]
