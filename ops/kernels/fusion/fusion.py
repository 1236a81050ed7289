"""Fusion: which nodes of a program become one generated kernel.

A region is a set of elementwise nodes of one shape, and of nodes that reduce or scan its rows or
columns: reductions, softmax, norms. It runs in the place of its last node, since nothing outside
reads one of its values earlier. A value that only the region reads takes no memory. A single node
is a region, too, and all kernels compute an op in the same way. So the cut into regions, which
follows from placement, changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Shape, TensorSpec
from graphflow.ops.kernels.codegen.region import (
    Operand,
    Region,
    RegionOp,
    freeze_attributes,
)
from graphflow.ops.kernels.fusion import cuda_expression_trace as cuda_trace
from graphflow.ops.kernels.fusion.region_growth import (
    GrowingRegion,
    NodeForm,
    RegionBuilder,
    Sizes,
    collapse_form,
)
from graphflow.ops.kernels.fusion.region_kernels import (
    TracedOp,
    is_jit_enabled,
    kernel_of,
    trace_op,
)
from graphflow.ops.kernels.fusion.row_ops import (
    MOST_AXES,
    collapsed_form,
    full_shape,
)
from graphflow.ops.kernels.jit.compiler import KernelTask


@dataclass(frozen=True)
class FusedRegion:
    """A region of a program.

    Attributes:
        nodes: its members, in order.
        region: what they compute, up to names and sizes.
        sizes: of its collapsed axes.
        operands: tensors that it reads; one that it reads in two shapes is there twice.
        results: tensors that others read.
        result_axes: along which collapsed axes each result has elements.
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
        """The region's kernel on a CPU."""
        return kernel_of(self.region).task(self.sizes)

    def replaces(self, result: Tensor, operand: Tensor) -> bool:
        """Return whether a result may overwrite an operand.

        It may if each element is read for the last time where the result's element is made.
        """
        ways = [
            o.axes for o, t in zip(self.region.operands, self.operands, strict=True) if t is operand
        ]
        (wanted,) = (w for w, t in zip(self.result_axes, self.results, strict=True) if t is result)
        return len(ways) == 1 and all(
            a == b or n == 1 for a, b, n in zip(ways[0], wanted, self.sizes, strict=True)
        )


def roots_of(graph: Graph) -> dict[Tensor, Tensor]:
    """Return the tensor whose memory each tensor shares: itself, unless it is an alias."""
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
    """Return the region of each node that is in one; looks at each node once, in order.

    Args:
        graph: all that its device runs.
        kind: of the device.
        wanted: tensors that are read after the graph has run, beside its outputs.
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
    """Return the nodes of each region if one device of a kind runs the whole graph."""
    of, _ = _group_nodes(graph, kind, set(graph.outputs), specs, bindings, roots_of(graph))
    return [tuple(g.nodes) for g in {id(group): group for group in of.values()}.values()]


def _group_nodes(
    graph: Graph,
    kind: str,
    wanted: Set[Tensor],
    specs: Mapping[Tensor, TensorSpec],
    bindings: Mapping[str, int],
    roots: Mapping[Tensor, Tensor],
) -> tuple[dict[Node, GrowingRegion], dict[Node, NodeForm]]:
    """Return the growing region of each node that is in one, and the nodes' forms."""
    if not is_jit_enabled():
        return {}, {}
    known = trace_op if kind == "cpu" else cuda_trace.trace_op
    regions = RegionBuilder(graph, wanted, roots)
    items: dict[Node, NodeForm] = {}
    alike: dict[Hashable, NodeForm | None] = {}
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
    """Numbers of specs, equal for equal ones. Most specs are one object, which saves a hash."""

    def __init__(self) -> None:
        self._by_value: dict[TensorSpec, int] = {}
        self._by_id: dict[
            int, tuple[TensorSpec, int]
        ] = {}  # with the spec, which keeps the id from being reused

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
) -> NodeForm | None:
    """Return the form of a node's kernel; None if none can be generated."""
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
        return NodeForm(items, whole, None, tuple(shapes), whole)
    if collapsed_form(op, shapes, attrs) is None:
        return None
    rows = op.rows(*shapes, **attrs)
    views: Any = rows.shapes
    axes = None if rows.axes is None else tuple(rows.axes)
    return NodeForm(items, full_shape(rows), axes, tuple(views), whole)


@dataclass(frozen=True, eq=False)
class _RegionShape:
    """A region that groups of one structure share, and its sizes."""

    region: Region
    sizes: Sizes
    result_axes: tuple[tuple[bool, ...], ...]


def _build_fused(
    group: GrowingRegion,
    graph: Graph,
    wanted: Set[Tensor],
    items: Mapping[Node, NodeForm],
    roots: Mapping[Tensor, Tensor],
    shapes: dict[Hashable, _RegionShape],
) -> FusedRegion:
    """Turn a grown region into a fused one; equal regions are one object, from `shapes`."""
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
    return FusedRegion(
        tuple(nodes), shape.region, shape.sizes, operands, outputs, shape.result_axes
    )


def _region_shape(
    group: GrowingRegion,
    ops: Sequence[tuple[Any, ...]],
    results: Sequence[int],
    shapes: dict[Hashable, _RegionShape],
) -> _RegionShape:
    """Return the region of a group, up to names.

    Args:
        ops: the fields of each `RegionOp`.
    """
    form = collapse_form(group.shape, group.axes, group.operands)
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
    """Return a shape that is known to hold numbers."""
    return shape  # type: ignore[return-value]
