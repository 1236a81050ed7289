"""Nodes of which nothing is cut: at each place, a copy of the node as it is.

Most of a step of training in data parallelism is updates of variables that every place has whole.
No rule has to be chosen for them, and no shape to be inferred.
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
    """A copy of an elementwise node at each place; None unless it reads whole tensors only, and
    its outputs are wished whole.

    Args:
        values: what stands for its inputs.
        wishes: layouts that its outputs would best have.
    """
    if not node.op.elementwise or node.op.sharding is not None or not node.inputs:
        return None
    for tensor in node.outputs:
        wish = preferred.get(tensor)
        if wish is not None and not wish.is_whole:
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
    """A node with the inputs of each place; one for places that share device and inputs.

    Args:
        inputs: for each place, of the specs that the node's have.
        name: of the copies, behind the prefix of their place.
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
    """Whether what stands for a tensor has its spec at each place."""
    return have_specs(parts, (tensor,) * len(parts))


def have_specs(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors have, one by one, the specs of others."""
    if len(tensors) != len(others):
        return False
    for tensor, other in zip(tensors, others, strict=True):
        have, want = tensor.node.specs[tensor.index], other.node.specs[other.index]
        if have is not want and have != want:
            return False
    return True


__all__ = ["have_spec_of", "copy_unsplit", "copy_to_places", "have_specs"]
