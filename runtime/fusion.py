"""Fusion: which elementwise nodes of a partition become one generated kernel.

A region is a set of elementwise nodes of one shape that run together, where the last of them
stands: nothing outside reads a value of theirs before that. A value that only the region reads
takes no memory. A single node is a region as well, and all kernels compute an op in the same way,
so a partition's cut into regions, which follows from where its nodes are placed, changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from math import prod

from graphflow.device import DeviceName
from graphflow.graph import bind_attrs, bodies
from graphflow.op import Node, Tensor
from graphflow.ops.kernels.emit import Applied, Attributes, Operand, Region, attributes
from graphflow.ops.kernels.regions import collapsed, enabled, traced
from graphflow.runtime.partition import Partition
from graphflow.spec import Shape, TensorSpec

_MOST_NODES = 64
_MOST_OPERANDS = 32
_MOST_AXES = 4
_Shapes = Callable[[Tensor], tuple[int, ...]]


@dataclass(frozen=True)
class Fused:
    """A region of a partition.

    Attributes:
        nodes: its members, in order; it runs where the last one stands.
        region: what they compute, up to names and sizes.
        sizes: of its collapsed axes.
        operands: what it reads of others.
        results: what others read of it.
    """

    nodes: tuple[Node, ...]
    region: Region
    sizes: tuple[int, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @property
    def last(self) -> Node:
        return self.nodes[-1]


class _Group:
    """A region while it grows. It is closed when something else has read a value of it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.nodes: list[Node] = []
        self.operands: dict[Tensor, None] = {}
        self.closed = False

    def fits(self, nodes: int, operands: Iterable[Tensor], shapes: _Shapes) -> bool:
        """Whether so many nodes that read these operands may come in."""
        new = [t for t in operands if t not in self.operands]
        if len(self.nodes) + nodes > _MOST_NODES or len(self.operands) + len(new) > _MOST_OPERANDS:
            return False
        if all(shapes(t) == self.shape or prod(shapes(t)) == 1 for t in new):
            return True  # no operand of these parts the axes any further
        form = collapsed(self.shape, [shapes(t) for t in (*self.operands, *new)])
        return len(form.sizes) <= _MOST_AXES


class _Regions:
    """The groups of a partition, while its nodes are looked at in order."""

    def __init__(self, shapes: _Shapes, roots: Mapping[Tensor, Tensor]) -> None:
        self.shapes = shapes
        self.roots = roots
        self.of: dict[Node, _Group] = {}
        self.position: dict[Node, int] = {}

    def add(self, node: Node, generated: bool) -> None:
        """The next node: into the groups that it reads, if it may; it closes the others."""
        shape = self.shapes(node.outputs[0]) if generated else None
        joined: list[_Group] = []
        for tensor in node.inputs:
            group = self.of.get(self.roots[tensor].node)
            if group is None:
                continue
            if group.shape == shape and self.of.get(tensor.node) is group:
                joined.append(group)
            elif _reads(node):
                group.closed = True  # another shape, or by way of an alias
        if shape is None:
            return
        home = _Group(shape)
        for group in dict.fromkeys(joined):
            if not group.closed:
                home = self._joined(home, group, node)
        home.nodes.append(node)
        self.of[node] = home
        self.position[node] = len(self.position)
        for tensor in node.inputs:
            if self.of.get(tensor.node) is not home:
                home.operands[tensor] = None

    def _joined(self, home: _Group, group: _Group, node: Node) -> _Group:
        """Two groups as one, to which a node comes; the first alone if that is too much."""
        if not home.nodes:
            if group.fits(1, node.inputs, self.shapes):
                return group
        elif home.fits(len(group.nodes) + 1, {**group.operands, **dict.fromkeys(node.inputs)},
                       self.shapes):  # fmt: skip
            home.operands.update(group.operands)
            home.nodes = sorted((*home.nodes, *group.nodes), key=self.position.__getitem__)
            for each in group.nodes:
                self.of[each] = home
            return home
        group.closed = True
        return home


def plan_regions(
    partition: Partition,
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    roots: Mapping[Tensor, Tensor],
) -> dict[Node, Fused]:
    """The region of each node that is in one. One look at each node, in order.

    Args:
        specs: concrete spec of each tensor.
        roots: the tensor whose memory each tensor shares.
    """
    if not enabled() or DeviceName.parse(partition.device).kind != "cpu":
        return {}
    regions = _Regions(lambda t: _sizes(specs[t].shape), roots)
    items: dict[Node, Attributes] = {}
    for node in partition.graph.nodes:
        found = _generated(node, specs, bindings)
        if found is not None:
            items[node] = found
        regions.add(node, found is not None)
    distinct = {id(group): group for group in regions.of.values()}
    wanted = {*partition.graph.outputs, *partition.fetches.values()}
    return {
        node: fused
        for group in distinct.values()
        for fused in [_fused(group, partition, specs, items, wanted)]
        for node in group.nodes
    }


def _generated(
    node: Node, specs: Mapping[Tensor, TensorSpec], bindings: Mapping[str, int]
) -> Attributes | None:
    """The attributes of a node that a kernel can be generated for."""
    if not node.op.elementwise or node.op.expr is None or bodies(node):
        return None
    attrs = bind_attrs(node.attrs, bindings)
    found = traced(node.op, [t.dtype for t in node.inputs], attrs)
    if found is None or found.dtype != node.outputs[0].dtype:
        return None
    if len(specs[node.outputs[0]].shape) > _MOST_AXES and not _is_even(node, specs):
        return None
    return attributes(attrs)


def _is_even(node: Node, specs: Mapping[Tensor, TensorSpec]) -> bool:
    shape = specs[node.outputs[0]].shape
    form = collapsed(_sizes(shape), [_sizes(specs[t].shape) for t in node.inputs])
    return len(form.sizes) <= _MOST_AXES


def _reads(node: Node) -> bool:
    """Whether a node reads its inputs where it stands. Aliases and groups do not read at all; what
    an assign takes is read when the step commits, or staged, which comes after all else."""
    return not (node.op.alias or node.op.name in ("assign", "group"))


def _fused(
    group: _Group,
    partition: Partition,
    specs: Mapping[Tensor, TensorSpec],
    items: Mapping[Node, Attributes],
    wanted: Set[Tensor],
) -> Fused:
    graph = partition.graph
    number = {t: i for i, t in enumerate(group.operands)}
    place = {node: i for i, node in enumerate(group.nodes)}
    results = [
        i
        for i, node in enumerate(group.nodes)
        if node.outputs[0] in wanted or any(c not in place for c in graph.consumers[node])
    ]
    form = collapsed(group.shape, [_sizes(specs[t].shape) for t in group.operands])
    region = Region(
        len(form.sizes),
        tuple(
            Operand(t.dtype.name, axes) for t, axes in zip(group.operands, form.axes, strict=True)
        ),
        tuple(
            Applied(
                node.op,
                items[node],
                tuple(
                    (True, place[t.node]) if t.node in place else (False, number[t])
                    for t in node.inputs
                ),
            )
            for node in group.nodes
        ),
        tuple(results),
    )
    outputs = tuple(group.nodes[i].outputs[0] for i in results)
    return Fused(tuple(group.nodes), region, form.sizes, tuple(group.operands), outputs)


def _sizes(shape: Shape) -> tuple[int, ...]:
    """A concrete shape."""
    return shape  # type: ignore[return-value]
