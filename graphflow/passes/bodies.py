"""MergeBodies and InlineCalls: passes over nodes that hold bodies; and `map_bodies`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Body, Graph, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.ops.control_flow.control import UNPLACED_OPS, call
from graphflow.passes.base import Pass, Phase, register_pass
from graphflow.passes.duplicates import key_of


@dataclass(frozen=True)
class MergeBodies(Pass):
    """Merge all nodes that run one traced body on the same operands.

    A gradient builds a second node of the forward body that returns further results. Without this
    pass the body would run twice.
    """

    phase: ClassVar[Phase] = Phase.BODIES

    def __call__(self, graph: Graph) -> Graph:
        groups: dict[Hashable, list[Node]] = {}
        for node in graph.holders:
            groups.setdefault(_merge_key(node), []).append(node)
        shared = {n: group for group in groups.values() if len(group) > 1 for n in group}
        if not shared:
            return graph
        merged: dict[Node, Node] = {}

        def merge(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
            group = shared.get(node)
            if group is None:
                return None
            if group[0] not in merged:
                merged[group[0]] = _merge_nodes(group, inputs)
            return _outputs_for(node, merged[group[0]])

        return graph.rewrite(merge)


def _merge_key(node: Node) -> Hashable:
    """Return a key that is equal for nodes of the same traced bodies, operands and attributes."""
    attrs = {k: v for k, v in node.attrs.items() if not isinstance(v, Body)}
    roots = tuple(id(body.root) for body in bodies(node))
    return (node.op.name, node.inputs, roots, key_of(attrs))


def _extra_results(node: Node) -> list[tuple[Tensor, ...]]:
    """Return the tensors of each further result, one for each body that has further results."""
    extended = [b for b in bodies(node) if b.base is not None]
    return list(zip(*(b.outputs[b.root.results :] for b in extended), strict=True))


def _merge_nodes(group: Sequence[Node], inputs: tuple[Tensor, ...]) -> Node:
    """Build a node that returns all further results of a group of nodes."""
    node = group[0]
    wanted = list(dict.fromkeys(further for each in group for further in _extra_results(each)))
    widest = max(group, key=lambda each: len(_extra_results(each)))
    attrs = dict(node.attrs)
    at = 0
    for name, body in widest.attrs.items():
        if isinstance(body, Body) and body.base is not None:
            attrs[name] = body.root.with_extra_results([further[at] for further in wanted])
            at += 1
    specs = node.op.infer(*(t.spec for t in inputs), **attrs)
    return node.with_inputs(inputs, attrs, (specs,) if isinstance(specs, TensorSpec) else specs)


def _outputs_for(node: Node, merged: Node) -> tuple[Tensor, ...]:
    """Return the outputs of a merged node that stand for those of one node of the group."""
    own = len(node.outputs) - len(_extra_results(node))
    places = {further: own + i for i, further in enumerate(_extra_results(merged))}
    found = [merged.outputs[places[further]] for further in _extra_results(node)]
    return (*merged.outputs[:own], *found)


def map_bodies(graph: Graph, function: Callable[[Graph], Graph]) -> Graph:
    """Apply a function to the graph of each body, once if nodes share the body."""
    if not graph.holders:
        return graph
    done: dict[Body, Body] = {}

    def map_body(body: Body) -> Body:
        if body not in done:
            changed = function(body.graph)
            done[body] = body if changed is body.graph else replace(body, graph=changed)
        return done[body]

    def visit(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        if not bodies(node):
            return None
        attrs: dict[str, Any] = {
            name: map_body(value) if isinstance(value, Body) else value
            for name, value in node.attrs.items()
        }
        if all(attrs[name] is value for name, value in node.attrs.items()):
            return None
        return node.with_inputs(inputs, attrs).outputs

    return graph.rewrite(visit)


@dataclass(frozen=True)
class InlineCalls(Pass):
    """Replace a call by the nodes of its body if some of these are pinned to other devices.

    Runs after the passes that merge and simplify nodes, so that pins change nothing of what these
    do.
    """

    phase: ClassVar[Phase] = Phase.CALLS

    def __call__(self, graph: Graph) -> Graph:
        return graph.rewrite(_inline_call) if graph.holders else graph


def _inline_call(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
    if node.op is not call or not spans_devices(node):
        return None
    body: Body = node.attrs["body"]
    mapped = {p.outputs[0]: t for p, t in zip(body.inputs, inputs, strict=True)}
    for inner in body.graph.nodes:
        if inner.outputs[0] in mapped:
            continue
        operands = tuple(mapped[t] for t in inner.inputs)
        outputs = _inline_call(inner, operands)
        if outputs is None:
            outputs = Node(
                inner.op, operands, inner.attrs, inner.specs,
                name=f"{node.name}/{inner.name.rpartition('/')[2]}",
                device=node.device.refine(inner.device), location=inner.location,
                origin=inner.origin, equations=inner.equations, turn=node.turn,
            ).outputs  # fmt: skip
        mapped.update(zip(inner.outputs, outputs, strict=True))
    return [mapped[t] for t in body.outputs]


def spans_devices(node: Node) -> bool:
    """Return True if nodes in a node's bodies are pinned to another device than the node."""
    return any(
        inner.device and inner.device != node.device and inner.op.name not in UNPLACED_OPS
        for body in bodies(node)
        for inner in body.graph.walk()
    )


register_pass(MergeBodies())
register_pass(InlineCalls())
