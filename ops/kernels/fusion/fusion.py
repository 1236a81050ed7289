"""Fusion: which nodes of a program become one generated kernel.

A region is a set of elementwise nodes of one shape, and of nodes that go along its rows (or
columns): reductions, softmax, norms. They run together, where the last of them stands: nothing
outside reads a value of theirs before that. A value that only the region reads takes no memory. A
single node is a region as well, and all kernels compute an op in the same way, so a program's cut
into regions, which follows from where its nodes are placed, changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from math import prod
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Shape, TensorSpec
from graphflow.ops.kernels.codegen.elementwise_emitter import (
    Attributes,
    Operand,
    Region,
    RegionOp,
    freeze_attributes,
)
from graphflow.ops.kernels.fusion import cuda_expression_trace as cuda_trace
from graphflow.ops.kernels.fusion.region_kernels import (
    TracedOp,
    is_jit_enabled,
    kernel_of,
    trace_op,
)
from graphflow.ops.kernels.fusion.row_ops import (
    MOST_AXES,
    CollapsedShape,
    collapse_axes,
    collapsed_form,
    full_shape,
    orientation,
)
from graphflow.ops.kernels.jit.compiler import KernelTask

_MOST_NODES = 64
_MOST_OPERANDS = 32
_GROWTH = 1
"""How often a large sum may grow within a region by what is made later."""
_LARGE = 16384
"""Bytes of what is large."""
_NEARBY_NODES = 2
"""How many nodes further on a value a row still joins what keeps something large until then."""
_STEP_LONG_OPS = ("variable", "placeholder", "constant")
"""Ops whose values are there throughout a step."""
Sizes = tuple[int, ...]
View = tuple[Tensor, Sizes]
"""A tensor, and the shape, as long as the whole's, in which a region reads it."""


@dataclass(frozen=True)
class FusedRegion:
    """A region of a program.

    Attributes:
        nodes: its members, in order; it runs where the last one stands.
        region: what they compute, up to names and sizes.
        sizes: of its collapsed axes.
        operands: what it reads of others; a tensor that it reads in two ways is there twice.
        results: what others read of it.
        ways: along which collapsed axes each result has elements.
    """

    nodes: tuple[Node, ...]
    region: Region
    sizes: Sizes
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    result_axes: tuple[tuple[bool, ...], ...]

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @cached_property
    def task(self) -> KernelTask:
        """Its kernel on a cpu."""
        return kernel_of(self.region).task(self.sizes)

    def replaces(self, result: Tensor, operand: Tensor) -> bool:
        """Whether a result may be written over an operand: each element is read for the last time
        where the result's is made."""
        ways = [
            o.axes for o, t in zip(self.region.operands, self.operands, strict=True) if t is operand
        ]
        (wanted,) = (w for w, t in zip(self.result_axes, self.results, strict=True) if t is result)
        return len(ways) == 1 and all(
            a == b or n == 1 for a, b, n in zip(ways[0], wanted, self.sizes, strict=True)
        )


_Placement = tuple[bool, tuple[Sizes, ...]]
"""Whether a node has a value for each element of a region (or for each row), and in which shapes it
sees its inputs."""


@dataclass(frozen=True, eq=False)
class _NodeForm:
    """What a kernel for a node would compute; nodes that are alike have the same one.

    Attributes:
        shape: of the whole that it goes over.
        axes: that it reduces; None: it is elementwise.
        views: the shape in which it sees each input.
        result: its shape.
    """

    attrs: Attributes
    shape: Sizes
    axes: Sizes | None
    views: tuple[Sizes, ...]
    result: Sizes


class _GrowingRegion:
    """A region while it grows. It is closed when something else has read a value of it."""

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
        """The shape of a value a row, with the reduced axes; None where none is reduced."""
        if self.axes is None:
            return None
        return tuple(1 if a in self.axes else n for a, n in enumerate(self.shape))

    def place(self, item: _NodeForm) -> _Placement | None:
        """How an item lies here; None where it does not belong here."""
        key = (item, self.shape, self.axes)
        if key not in self._known:
            self._known[key] = self._place(item)
        return self._known[key]

    def _place(self, item: _NodeForm) -> _Placement | None:
        if item.axes is not None:
            if item.shape != self.shape or self.axes not in (None, item.axes):
                return None
            return True, tuple(_pad_shape(v, len(self.shape)) for v in item.views)
        if item.shape == self.shape:
            return True, tuple(_pad_shape(v, len(self.shape)) for v in item.views)
        if self.axes is None:
            return None
        if item.shape == self.row:
            return False, tuple(_pad_shape(v, len(self.shape)) for v in item.views)
        left = [a for a in range(len(self.shape)) if a not in self.axes]
        if item.shape != tuple(self.shape[a] for a in left):
            return None
        return False, tuple(_insert_axes(v, left, len(self.shape)) for v in item.views)

    def holds(self, tensor: Tensor, root: Tensor, view: Sizes) -> bool:
        """Whether a tensor that is a member's value, or an alias of it, is that value here."""
        if root.node in self.rows:
            return view == self.row
        return tensor is root and view == self.shape

    def fits(self, nodes: int, operands: Iterable[View], axes: Sizes | None) -> bool:
        """Whether so many nodes that read these operands, and reduce these axes, may come in."""
        new = [view for view in operands if view not in self.operands]
        if len(self.nodes) + nodes > _MOST_NODES or len(self.operands) + len(new) > _MOST_OPERANDS:
            return False
        if axes == self.axes:
            whole = self.shape
            further = [v for _, v in new if v != whole and prod(v) != 1]
            if not further or all(v == self.row for v in further):
                return True  # no operand of these parts the axes any further
        form = _form(self.shape, axes, (*self.operands, *new))
        return form is not None


_PlacementCache = dict[tuple[_NodeForm, Sizes, Sizes | None], _Placement | None]
"""How items lie in groups of a shape that reduce some axes."""


def _form(shape: Sizes, axes: Sizes | None, operands: Iterable[View]) -> CollapsedShape | None:
    form = collapse_axes(shape, [view for _, view in operands], axes)
    return None if form is None or len(form.sizes) > MOST_AXES else form


def _pad_shape(shape: Sizes, rank: int) -> Sizes:
    return (1,) * (rank - len(shape)) + shape


def _insert_axes(shape: Sizes, left: Sequence[int], rank: int) -> Sizes:
    """A shape without the reduced axes, with them."""
    view = [1] * rank
    for axis, size in zip(left, _pad_shape(shape, len(left)), strict=True):
        view[axis] = size
    return tuple(view)


class _RegionBuilder:
    """The groups of a program, while its nodes are looked at in order."""

    def __init__(self, graph: Graph, wanted: Set[Tensor], roots: Mapping[Tensor, Tensor]) -> None:
        self.consumers = graph.consumers
        self.wanted = wanted
        self.roots = roots
        self.known: _PlacementCache = {}
        self.of: dict[Node, _GrowingRegion] = {}
        self.position: dict[Node, int] = {}
        self.readers: dict[Tensor, _GrowingRegion] = {}  # that reduce
        self.seen: dict[Node, int] = {}
        self.grown: dict[Node, int] = {}
        self.last_read = {  # of what lies in a tensor's memory
            roots[t]: i for i, n in enumerate(graph.nodes) if not n.op.alias for t in n.inputs
        }

    def add(self, node: Node, item: _NodeForm | None) -> None:
        """The next node: into the groups that it reads, if it may; it closes the others."""
        self.seen[node] = len(self.seen)
        read = self._groups_read(node)
        if item is not None and len(read) == 1 and self._try_extend(read[0], node, item):
            return
        if item is not None and not read and item.axes is None:
            self._enter(_GrowingRegion(item.shape, None, self.known), node, item)
            return
        joined: list[_GrowingRegion] = []
        for group in read:
            if item is not None and self._may_join(group, node, item):
                joined.append(group)
            elif _reads_inputs(node):
                group.closed = True
        if item is None:
            return
        home = _GrowingRegion(item.shape, item.axes, self.known)
        for group in joined:
            if not group.closed:
                home = self._join(home, group, node, item)
        self._enter(home if home.nodes else self._find_sibling(home, node, item), node, item)

    def _try_extend(self, group: _GrowingRegion, node: Node, item: _NodeForm) -> bool:
        """Let an open group without reductions take in an elementwise node of its shape, all whose
        operands have that shape or one element. Most nodes are such: what follows is what the
        longer way does with them, in one look at their inputs."""
        if group.closed or group.axes is not None or item.axes is not None:
            return False
        shape = group.shape
        if item.shape != shape or node.op.refuse is not None or node.op.name == "add":
            return False
        place = group.place(item)
        assert place is not None
        new: list[View] = []
        for tensor, view in zip(node.inputs, place[1], strict=True):
            root = self.roots[tensor]
            if self.of.get(root.node) is group:
                if tensor is not root or view != shape or root.node in group.rows:
                    return False
            elif view != shape and prod(view) != 1:
                return False
            elif (tensor, view) not in group.operands:
                new.append((tensor, view))
        if len(group.nodes) >= _MOST_NODES or len(group.operands) + len(new) > _MOST_OPERANDS:
            return False
        group.operands.update(dict.fromkeys(new))
        group.nodes.append(node)
        self.of[node] = group
        self.position[node] = len(self.position)
        return True

    def _groups_read(self, node: Node) -> list[_GrowingRegion]:
        found: list[_GrowingRegion] = []
        for tensor in node.inputs:
            group = self.of.get(self.roots[tensor].node)
            if group is not None and group not in found:
                found.append(group)
        return found

    def _find_sibling(self, home: _GrowingRegion, node: Node, item: _NodeForm) -> _GrowingRegion:
        """An open region that reduces the same rows of something that a reduction reads: they share
        a pass over it, and the moments of a norm and of its gradient are computed once."""
        if item.axes is None:
            return home
        for tensor in node.inputs:
            group = self.readers.get(tensor)
            if (
                group is not None
                and not group.closed
                and (group.shape, group.axes) == (item.shape, item.axes)
                and self._may_join(group, node, item)
                and group.fits(1, self._outside_operands(group, node, item), group.axes)
            ):
                return group
        return home

    def _may_join(self, group: _GrowingRegion, node: Node, item: _NodeForm) -> bool:
        """Whether a node belongs in a group, with all that it reads of it."""
        place = group.place(item)
        if place is None:
            return False
        reduces = group.axes is not None or item.axes is not None
        if reduces and not self._may_reduce_columns(group, node, item):
            return False
        if node.op.name == "add" and self._exceeds_growth(group, node, item):
            return False
        if not place[0] and self._extends_lifetime(group):
            return False
        for tensor, view in zip(node.inputs, place[1], strict=True):
            root = self.roots[tensor]
            if self.of.get(root.node) is not group:
                continue
            if not group.holds(tensor, root, view) or _checks_values(node, tensor):
                return False
        return True

    def _exceeds_growth(self, group: _GrowingRegion, node: Node, item: _NodeForm) -> bool:
        """Whether a large sum of a group would grow by what was made after it, once too often. A
        region keeps what it reads until its end: one sum over sixteen micro-batches would keep all
        their gradients, which took turns to keep those of one."""
        left, right = (self.roots[tensor].node for tensor in node.inputs)
        for source, other in ((left, right), (right, left)):
            grows = source.op.name == "add" and self.of.get(source) is group
            if grows and self.of.get(other) is not group and self.seen[other] > self.seen[source]:
                growth = self.grown.get(source, 0) + 1
                large = prod(item.shape) * node.specs[0].dtype.itemsize > _LARGE
                self.grown[node] = growth if growth <= _GROWTH else 0
                return large and growth > _GROWTH
        return False

    def _extends_lifetime(self, group: _GrowingRegion) -> bool:
        """Whether a value a row would keep something large that a group reads, and nobody else any
        more. A bias's update would keep cotangents from the backward pass to the end of a step, and
        a sum over micro-batches those of all; the sums of their columns are small."""
        now = len(self.seen) - 1
        if now - self.seen[group.nodes[-1]] <= _NEARBY_NODES:
            return False
        return any(
            prod(view) * tensor.dtype.itemsize > _LARGE
            and self.last_read[self.roots[tensor]] < now
            and self.roots[tensor].node.op.name not in _STEP_LONG_OPS
            for tensor, view in group.operands
        )

    def _may_reduce_columns(self, group: _GrowingRegion, node: Node, item: _NodeForm) -> bool:
        """Columns are summed in strips, which is a slow way to write what has all elements: what
        goes into a sum of columns goes nowhere else."""
        if item.axes is None:
            return not group.reduces_columns or item.shape != group.shape
        if orientation(item.shape, item.axes) != "columns":
            return True
        members = {*group.nodes, node}
        return all(
            members.issuperset(self.consumers[n]) and n.outputs[0] not in self.wanted
            for n in group.nodes
            if n not in group.rows
        )

    def _outside_operands(
        self, group: _GrowingRegion, node: Node, item: _NodeForm
    ) -> dict[View, None]:
        """What a node reads that is no value of a group."""
        place = group.place(item)
        assert place is not None
        return {
            (tensor, view): None
            for tensor, view in zip(node.inputs, place[1], strict=True)
            if self.of.get(self.roots[tensor].node) is not group
        }

    def _join(
        self, home: _GrowingRegion, group: _GrowingRegion, node: Node, item: _NodeForm
    ) -> _GrowingRegion:
        """Two groups as one, to which a node comes; the first alone if that is too much."""
        if not home.nodes:
            axes = group.axes if item.axes is None else item.axes
            if group.fits(1, self._outside_operands(group, node, item), axes):
                group.axes = axes
                return group
        elif self._merge(home, group, node, item):
            return home
        group.closed = True
        return home

    def _merge(
        self, home: _GrowingRegion, group: _GrowingRegion, node: Node, item: _NodeForm
    ) -> bool:
        """Take a group into the one that a node is about to enter, if they go together."""
        axes = home.axes if group.axes is None else group.axes
        axes = axes if item.axes is None else item.axes
        if home.shape != group.shape or not {home.axes, group.axes} <= {None, axes}:
            return False
        operands = dict(group.operands)
        for view in self._outside_operands(home, node, item):
            if self.of.get(self.roots[view[0]].node) is not group:
                operands[view] = None
        if not home.fits(len(group.nodes) + 1, operands, axes):
            return False
        home.axes = axes
        home.operands.update(group.operands)
        home.rows |= group.rows
        home.nodes += group.nodes
        home.nodes.sort(key=self.position.__getitem__)
        for each in group.nodes:
            self.of[each] = home
        group.closed = True  # it is none any more
        return True

    def _enter(self, home: _GrowingRegion, node: Node, item: _NodeForm) -> None:
        place = home.place(item)
        assert place is not None
        is_whole, views = place
        if item.axes is not None:  # a reduction's own value may be one a row
            is_whole = item.result == item.shape
        home.nodes.append(node)
        if not is_whole:
            home.rows.add(node)
        for tensor, view in zip(node.inputs, views, strict=True):
            if self.of.get(self.roots[tensor].node) is not home:
                home.operands[tensor, view] = None
        self.of[node] = home
        self.position[node] = len(self.position)
        if item.axes is not None:
            self.readers.update(dict.fromkeys(node.inputs, home))


def _checks_values(node: Node, tensor: Tensor) -> bool:
    """Whether a node's op looks at the values of an input where the node stands."""
    return node.op.refuse is not None and tensor.dtype.kind != "f"


def roots_of(graph: Graph) -> dict[Tensor, Tensor]:
    """The tensor whose memory each tensor shares: itself, mostly."""
    roots: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        for tensor in node.outputs:
            if node.op.alias:
                roots[tensor] = roots[node.inputs[0]]
            elif node.op.name == "assign":
                roots[tensor] = roots[node.inputs[1]]
            else:
                roots[tensor] = tensor
    return roots


def plan_regions(
    graph: Graph,
    kind: str,
    wanted: Iterable[Tensor],
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    roots: Mapping[Tensor, Tensor],
) -> dict[Node, FusedRegion]:
    """The region of each node that is in one. One look at each node, in order.

    Args:
        graph: all that its device runs.
        kind: of the device.
        wanted: what is read when all has run, beside the graph's outputs.
        specs: concrete spec of each tensor.
        roots: the tensor whose memory each tensor shares.
    """
    kept = {*graph.outputs, *wanted}
    of, items = _group_nodes(graph, kind, kept, specs, bindings, roots)
    distinct = {id(group): group for group in of.values()}
    shapes: dict[Hashable, _RegionShape] = {}
    return {
        node: fused
        for group in distinct.values()
        for fused in [_build_fused(group, graph, kept, items, roots, shapes)]
        for node in group.nodes
    }


def regions_of(
    graph: Graph, kind: str, specs: Mapping[Tensor, TensorSpec], bindings: Mapping[str, int]
) -> list[tuple[Node, ...]]:
    """The nodes of each region that there is if one device of a kind runs all of a graph."""
    of, _ = _group_nodes(graph, kind, set(graph.outputs), specs, bindings, roots_of(graph))
    return [tuple(g.nodes) for g in {id(group): group for group in of.values()}.values()]


def _group_nodes(
    graph: Graph,
    kind: str,
    wanted: Set[Tensor],
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    roots: Mapping[Tensor, Tensor],
) -> tuple[dict[Node, _GrowingRegion], dict[Node, _NodeForm]]:
    """The group of each node that is in one, and what a kernel for it would compute."""
    if not is_jit_enabled():
        return {}, {}
    known = trace_op if kind == "cpu" else cuda_trace.trace_op
    regions = _RegionBuilder(graph, wanted, roots)
    items: dict[Node, _NodeForm] = {}
    alike: dict[Hashable, _NodeForm | None] = {}
    numbers = _SpecNumbers()
    for node in graph.nodes:
        if node.op.expr is None:
            found = None
        elif node.attrs:
            found = _node_form(node, specs, bindings, known)
        else:
            key = (node.op, *[numbers.number(specs[t]) for t in (*node.inputs, *node.outputs)])
            if key not in alike:
                alike[key] = _node_form(node, specs, bindings, known)
            found = alike[key]
        if found is not None:
            items[node] = found
        regions.add(node, found)
    return regions.of, items


class _SpecNumbers:
    """Numbers of specs, equal for equal ones. Most are the same object, and need no hash."""

    def __init__(self) -> None:
        self._by_value: dict[TensorSpec, int] = {}
        self._by_id: dict[int, tuple[TensorSpec, int]] = {}  # with the spec, which keeps its id

    def number(self, spec: TensorSpec) -> int:
        known = self._by_id.get(id(spec))
        if known is None:
            number = self._by_value.setdefault(spec, len(self._by_value))
            known = self._by_id[id(spec)] = spec, number
        return known[1]


def _node_form(
    node: Node,
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    known: Callable[..., TracedOp | None],
) -> _NodeForm | None:
    """What a kernel for a node would compute; None where none can be generated."""
    op = node.op
    if op.expr is None or not (op.elementwise or op.rows is not None) or bodies(node):
        return None
    attrs = bind_attrs(node.attrs, bindings)
    found = known(op, [t.dtype for t in node.inputs], attrs)
    if found is None or found.dtype != node.outputs[0].dtype:
        return None
    shapes = [_concrete_shape(specs[t].shape) for t in node.inputs]
    items = freeze_attributes(attrs)
    assert items is not None
    whole = _concrete_shape(specs[node.outputs[0]].shape)
    if op.rows is None:
        if len(whole) > MOST_AXES and collapsed_form(op, shapes, attrs) is None:
            return None
        return _NodeForm(items, whole, None, tuple(shapes), whole)
    if collapsed_form(op, shapes, attrs) is None:
        return None
    rows = op.rows(*shapes, **attrs)
    views: Any = rows.shapes
    axes = None if rows.axes is None else tuple(rows.axes)
    return _NodeForm(items, full_shape(rows), axes, tuple(views), whole)


def _reads_inputs(node: Node) -> bool:
    """Whether a node reads its inputs where it stands. Aliases and groups do not read at all; what
    an assign takes is read when the step commits, or staged, which comes after all else."""
    return not (node.op.alias or node.op.name in ("assign", "group"))


@dataclass(frozen=True, eq=False)
class _RegionShape:
    """What groups of one structure have in common as regions."""

    region: Region
    sizes: Sizes
    ways: tuple[tuple[bool, ...], ...]


def _build_fused(
    group: _GrowingRegion,
    graph: Graph,
    wanted: Set[Tensor],
    items: Mapping[Node, _NodeForm],
    roots: Mapping[Tensor, Tensor],
    shapes: dict[Hashable, _RegionShape],
) -> FusedRegion:
    """A group as a region; equal regions are one object, in `shapes`: they are compared once."""
    nodes, rows, consumers = group.nodes, group.rows, graph.consumers
    number = {view: i for i, view in enumerate(group.operands)}
    place = {node: i for i, node in enumerate(nodes)}
    ops: list[tuple[Any, ...]] = []
    results: list[int] = []
    for i, node in enumerate(nodes):
        if node.outputs[0] in wanted or not all(map(place.__contains__, consumers[node])):
            results.append(i)
        seen = group.place(items[node])
        assert seen is not None
        refs: list[tuple[bool, int]] = []
        for tensor, view in zip(node.inputs, seen[1], strict=True):
            at = place.get(roots[tensor].node)
            refs.append((False, number[tensor, view]) if at is None else (True, at))
        ops.append((node.op, items[node].attrs, tuple(refs), node not in rows))
    operands = tuple([tensor for tensor, _ in group.operands])
    read = tuple([(tensor.dtype, view) for tensor, view in group.operands])
    key = (group.shape, group.axes, tuple(ops), tuple(results), read)
    shape = shapes.get(key)
    if shape is None:
        shape = shapes[key] = _region_shape(group, ops, results, shapes)
    outputs = tuple([nodes[i].outputs[0] for i in results])
    return FusedRegion(tuple(nodes), shape.region, shape.sizes, operands, outputs, shape.ways)


def _region_shape(
    group: _GrowingRegion,
    ops: Sequence[tuple[Any, ...]],
    results: Sequence[int],
    shapes: dict[Hashable, _RegionShape],
) -> _RegionShape:
    """The region of a group, up to names.

    Args:
        ops: the fields of each `RegionOp`.
    """
    form = _form(group.shape, group.axes, group.operands)
    assert form is not None
    region = Region(
        len(form.sizes),
        tuple(
            Operand(t.dtype.name, axes)
            for (t, _), axes in zip(group.operands, form.axes, strict=True)
        ),
        tuple(RegionOp(*each) for each in ops),
        tuple(results),
        form.over,
    )
    reduced = {"rows": 1, "columns": 2}.get(form.over, 0)
    row = tuple(len(form.sizes) - i != reduced for i in range(len(form.sizes)))
    ways = tuple(
        row if group.nodes[i] in group.rows else (True,) * len(form.sizes) for i in results
    )
    made = _RegionShape(region, form.sizes, ways)
    return _RegionShape(shapes.setdefault(region, made).region, form.sizes, ways)


def _concrete_shape(shape: Shape) -> Sizes:
    """A concrete shape."""
    return shape  # type: ignore[return-value]
