"""Growing regions: which nodes of a program may run as one generated kernel.

Nodes are looked at in order. A node extends the open regions that it reads, joins them, or starts
one; a region closes when another node has read a value of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ops.kernels.codegen.region import (
    Attributes,
)
from graphflow.ops.kernels.fusion.row_ops import (
    MOST_AXES,
    CollapsedShape,
    collapse_axes,
    orientation,
)

_MOST_NODES = 64
_MOST_OPERANDS = 32
_GROWTH = 1
"""How often a large sum may grow within a region by values that are made later."""
_LARGE_BYTES = 16384
"""Bytes from which a tensor counts as large."""
_NEARBY_NODES = 2
"""Nodes after which a value a row no longer joins a region that keeps a large tensor alive."""
_STEP_LONG_OPS = ("variable", "placeholder", "constant")
"""Ops whose values are alive throughout a step."""
Sizes = tuple[int, ...]
View = tuple[Tensor, Sizes]
"""A tensor, and the shape in which a region reads it, of the rank of the region's."""
Placement = tuple[bool, tuple[Sizes, ...]]
"""Whether a node has a value for each element of a region (else for each row), and the shapes in
which it sees its inputs."""


@dataclass(frozen=True, eq=False)
class NodeForm:
    """The form of a node's kernel; nodes that are alike share one.

    Attributes:
        shape: the shape that it goes over.
        axes: axes that it reduces; None: it is elementwise.
        views: the shape in which it sees each input.
        result: the shape of its value.
    """

    attrs: Attributes
    shape: Sizes
    axes: Sizes | None
    views: tuple[Sizes, ...]
    result: Sizes


class GrowingRegion:
    """A region while it grows."""

    def __init__(self, shape: Sizes, axes: Sizes | None, known: _PlacementCache) -> None:
        self.shape = shape
        self.axes = axes
        self._known = known
        self.nodes: list[Node] = []
        self.operands: dict[View, None] = {}
        self.rows: set[Node] = set()  # members with one value a row
        self.closed = False

    @property
    def reduces_columns(self) -> bool:
        """Whether it reduces columns."""
        return self.axes is not None and orientation(self.shape, self.axes) == "columns"

    @property
    def row(self) -> Sizes | None:
        """The shape of a value a row, with the reduced axes as 1; None if none is reduced."""
        if self.axes is None:
            return None
        return tuple(1 if a in self.axes else n for a, n in enumerate(self.shape))

    def place(self, node_form: NodeForm) -> Placement | None:
        """Return how a node lies in this region; None if it does not fit."""
        key = (node_form, self.shape, self.axes)
        if key not in self._known:
            self._known[key] = self._place(node_form)
        return self._known[key]

    def _place(self, node_form: NodeForm) -> Placement | None:
        if node_form.axes is not None:
            if node_form.shape != self.shape or self.axes not in (None, node_form.axes):
                return None
            return True, tuple(_pad_shape(v, len(self.shape)) for v in node_form.views)
        if node_form.shape == self.shape:
            return True, tuple(_pad_shape(v, len(self.shape)) for v in node_form.views)
        if self.axes is None:
            return None
        if node_form.shape == self.row:
            return False, tuple(_pad_shape(v, len(self.shape)) for v in node_form.views)
        left = [a for a in range(len(self.shape)) if a not in self.axes]
        if node_form.shape != tuple(self.shape[a] for a in left):
            return None
        return False, tuple(_insert_axes(v, left, len(self.shape)) for v in node_form.views)

    def holds(self, tensor: Tensor, root: Tensor, view: Sizes) -> bool:
        """Return whether a member's value, or an alias of it, is seen here in its own shape."""
        if root.node in self.rows:
            return view == self.row
        return tensor is root and view == self.shape

    def fits(self, nodes: int, operands: Iterable[View], axes: Sizes | None) -> bool:
        """Return whether this many nodes, with these operands and reduced axes, may come in."""
        new = [view for view in operands if view not in self.operands]
        if len(self.nodes) + nodes > _MOST_NODES or len(self.operands) + len(new) > _MOST_OPERANDS:
            return False
        if axes == self.axes:
            whole = self.shape
            further = [v for _, v in new if v != whole and prod(v) != 1]
            if not further or all(v == self.row for v in further):
                return True  # no new operand splits the collapsed axes further
        form = collapse_form(self.shape, axes, (*self.operands, *new))
        return form is not None


_PlacementCache = dict[tuple[NodeForm, Sizes, Sizes | None], Placement | None]
"""How nodes lie in regions of a shape that reduce some axes."""


def collapse_form(
    shape: Sizes, axes: Sizes | None, operands: Iterable[View]
) -> CollapsedShape | None:
    form = collapse_axes(shape, [view for _, view in operands], axes)
    return None if form is None or len(form.sizes) > MOST_AXES else form


def _pad_shape(shape: Sizes, rank: int) -> Sizes:
    return (1,) * (rank - len(shape)) + shape


def _insert_axes(shape: Sizes, left: Sequence[int], rank: int) -> Sizes:
    """Return a shape that lacks the reduced axes with these as 1."""
    view = [1] * rank
    for axis, size in zip(left, _pad_shape(shape, len(left)), strict=True):
        view[axis] = size
    return tuple(view)


class RegionBuilder:
    """The regions of a program, while its nodes are looked at in order."""

    def __init__(self, graph: Graph, wanted: Set[Tensor], roots: Mapping[Tensor, Tensor]) -> None:
        self.consumers = graph.consumers
        self.wanted = wanted
        self.roots = roots
        self.known: _PlacementCache = {}
        self.of: dict[Node, GrowingRegion] = {}
        self.position: dict[Node, int] = {}
        self.readers: dict[
            Tensor, GrowingRegion
        ] = {}  # reducing regions, by the tensors that they read
        self.seen: dict[Node, int] = {}
        self.grown: dict[Node, int] = {}
        self.last_read = {  # the last node that reads each root's memory
            roots[t]: i for i, n in enumerate(graph.nodes) if not n.op.alias for t in n.inputs
        }

    def add(self, node: Node, node_form: NodeForm | None) -> None:
        """Add the next node to the regions that it reads, if it may join; close the others."""
        self.seen[node] = len(self.seen)
        read = self._groups_read(node)
        if node_form is not None and len(read) == 1 and self._try_extend(read[0], node, node_form):
            return
        if node_form is not None and not read and node_form.axes is None:
            self._enter(GrowingRegion(node_form.shape, None, self.known), node, node_form)
            return
        joined: list[GrowingRegion] = []
        for region in read:
            if node_form is not None and self._may_join(region, node, node_form):
                joined.append(region)
            elif _reads_inputs(node):
                region.closed = True
        if node_form is None:
            return
        home = GrowingRegion(node_form.shape, node_form.axes, self.known)
        for region in joined:
            if not region.closed:
                home = self._join(home, region, node, node_form)
        self._enter(
            home if home.nodes else self._find_sibling(home, node, node_form), node, node_form
        )

    def _try_extend(self, region: GrowingRegion, node: Node, node_form: NodeForm) -> bool:
        """Add an elementwise node to an open region without reductions, if its operands are simple.

        Most nodes are such: all operands have the region's shape or one element. The result is that
        of the general path, in one look at the inputs.
        """
        if region.closed or region.axes is not None or node_form.axes is not None:
            return False
        shape = region.shape
        if node_form.shape != shape or node.op.refuse is not None or node.op.name == "add":
            return False
        place = region.place(node_form)
        assert place is not None
        new: list[View] = []
        for tensor, view in zip(node.inputs, place[1], strict=True):
            root = self.roots[tensor]
            if self.of.get(root.node) is region:
                if tensor is not root or view != shape or root.node in region.rows:
                    return False
            elif view != shape and prod(view) != 1:
                return False
            elif (tensor, view) not in region.operands:
                new.append((tensor, view))
        if len(region.nodes) >= _MOST_NODES or len(region.operands) + len(new) > _MOST_OPERANDS:
            return False
        region.operands.update(dict.fromkeys(new))
        region.nodes.append(node)
        self.of[node] = region
        self.position[node] = len(self.position)
        return True

    def _groups_read(self, node: Node) -> list[GrowingRegion]:
        found: list[GrowingRegion] = []
        for tensor in node.inputs:
            region = self.of.get(self.roots[tensor].node)
            if region is not None and region not in found:
                found.append(region)
        return found

    def _find_sibling(self, home: GrowingRegion, node: Node, node_form: NodeForm) -> GrowingRegion:
        """Return an open region that reduces the same rows of a tensor that this reduction reads.

        They share a pass over it, and the moments of a norm and of its gradient are computed once.
        """
        if node_form.axes is None:
            return home
        for tensor in node.inputs:
            region = self.readers.get(tensor)
            if (
                region is not None
                and not region.closed
                and (region.shape, region.axes) == (node_form.shape, node_form.axes)
                and self._may_join(region, node, node_form)
                and region.fits(1, self._outside_operands(region, node, node_form), region.axes)
            ):
                return region
        return home

    def _may_join(self, region: GrowingRegion, node: Node, node_form: NodeForm) -> bool:
        """Return whether a node may join a region, with all that it reads of it."""
        place = region.place(node_form)
        if place is None:
            return False
        reduces = region.axes is not None or node_form.axes is not None
        if reduces and not self._may_reduce_columns(region, node, node_form):
            return False
        if node.op.name == "add" and self._exceeds_growth(region, node, node_form):
            return False
        if not place[0] and self._extends_lifetime(region):
            return False
        for tensor, view in zip(node.inputs, place[1], strict=True):
            root = self.roots[tensor]
            if self.of.get(root.node) is not region:
                continue
            if not region.holds(tensor, root, view) or _checks_values(node, tensor):
                return False
        return True

    def _exceeds_growth(self, region: GrowingRegion, node: Node, node_form: NodeForm) -> bool:
        """Return whether a large sum of a region would grow once too often by a later value.

        A region keeps its operands alive until its end. One sum over sixteen micro-batches would
        keep all their gradients, which otherwise exist one after the other.
        """
        left, right = (self.roots[tensor].node for tensor in node.inputs)
        for source, other in ((left, right), (right, left)):
            grows = source.op.name == "add" and self.of.get(source) is region
            if grows and self.of.get(other) is not region and self.seen[other] > self.seen[source]:
                growth = self.grown.get(source, 0) + 1
                large = prod(node_form.shape) * node.specs[0].dtype.itemsize > _LARGE_BYTES
                self.grown[node] = growth if growth <= _GROWTH else 0
                return large and growth > _GROWTH
        return False

    def _extends_lifetime(self, region: GrowingRegion) -> bool:
        """Return whether a value a row would keep a large operand alive that nothing else needs.

        The update of a bias would keep cotangents from the backward pass to the end of a step; the
        sums of their columns are small.
        """
        now = len(self.seen) - 1
        if now - self.seen[region.nodes[-1]] <= _NEARBY_NODES:
            return False
        return any(
            prod(view) * tensor.dtype.itemsize > _LARGE_BYTES
            and self.last_read[self.roots[tensor]] < now
            and self.roots[tensor].node.op.name not in _STEP_LONG_OPS
            for tensor, view in region.operands
        )

    def _may_reduce_columns(self, region: GrowingRegion, node: Node, node_form: NodeForm) -> bool:
        """Return whether a node may join without making column sums write whole tensors.

        Columns are summed in strips, a slow order for writing all elements. So a value that is
        summed by columns must not be needed elsewhere.
        """
        if node_form.axes is None:
            return not region.reduces_columns or node_form.shape != region.shape
        if orientation(node_form.shape, node_form.axes) != "columns":
            return True
        members = {*region.nodes, node}
        return all(
            members.issuperset(self.consumers[n]) and n.outputs[0] not in self.wanted
            for n in region.nodes
            if n not in region.rows
        )

    def _outside_operands(
        self, region: GrowingRegion, node: Node, node_form: NodeForm
    ) -> dict[View, None]:
        """Return a node's operands that are not values of a region."""
        place = region.place(node_form)
        assert place is not None
        return {
            (tensor, view): None
            for tensor, view in zip(node.inputs, place[1], strict=True)
            if self.of.get(self.roots[tensor].node) is not region
        }

    def _join(
        self, home: GrowingRegion, region: GrowingRegion, node: Node, node_form: NodeForm
    ) -> GrowingRegion:
        """Join two regions for a node that reads both; keeps the first alone if they do not fit."""
        if not home.nodes:
            axes = region.axes if node_form.axes is None else node_form.axes
            if region.fits(1, self._outside_operands(region, node, node_form), axes):
                region.axes = axes
                return region
        elif self._merge(home, region, node, node_form):
            return home
        region.closed = True
        return home

    def _merge(
        self, home: GrowingRegion, region: GrowingRegion, node: Node, node_form: NodeForm
    ) -> bool:
        """Merge a region into the one that a node is about to enter, if both fit."""
        axes = home.axes if region.axes is None else region.axes
        axes = axes if node_form.axes is None else node_form.axes
        if home.shape != region.shape or not {home.axes, region.axes} <= {None, axes}:
            return False
        operands = dict(region.operands)
        for view in self._outside_operands(home, node, node_form):
            if self.of.get(self.roots[view[0]].node) is not region:
                operands[view] = None
        if not home.fits(len(region.nodes) + 1, operands, axes):
            return False
        home.axes = axes
        home.operands.update(region.operands)
        home.rows |= region.rows
        home.nodes += region.nodes
        home.nodes.sort(key=self.position.__getitem__)
        for each in region.nodes:
            self.of[each] = home
        region.closed = True  # its nodes now belong to `home`
        return True

    def _enter(self, home: GrowingRegion, node: Node, node_form: NodeForm) -> None:
        place = home.place(node_form)
        assert place is not None
        is_whole, views = place
        if node_form.axes is not None:  # the value of a reduction may be one a row
            is_whole = node_form.result == node_form.shape
        home.nodes.append(node)
        if not is_whole:
            home.rows.add(node)
        for tensor, view in zip(node.inputs, views, strict=True):
            if self.of.get(self.roots[tensor].node) is not home:
                home.operands[tensor, view] = None
        self.of[node] = home
        self.position[node] = len(self.position)
        if node_form.axes is not None:
            self.readers.update(dict.fromkeys(node.inputs, home))


def _checks_values(node: Node, tensor: Tensor) -> bool:
    """Return whether a node's op checks the values of an input when it runs."""
    return node.op.refuse is not None and tensor.dtype.kind != "f"


def _reads_inputs(node: Node) -> bool:
    """Return whether a node reads its inputs in its place.

    Aliases and groups do not read. The source of an assign is read when the step commits or is
    staged, after all other nodes.
    """
    return not (node.op.alias or node.op.name in ("assign", "group"))
