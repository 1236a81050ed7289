"""The batching transform: emit a traced graph again, with a batch axis in front of tensors.

Only tensors that depend on the batch get this axis. Most ops have a rule (`Op.batch`; see
ops/base/batching_rules.py), and elementwise ops share one. Random ops draw for each element of the
batch, and an op without a rule runs in a loop over the batch. Nodes that hold bodies get batched
bodies (batching_control_flow.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphflow.errors import GraphError, GraphflowError, VariableError
from graphflow.frontend.control_flow import scan as scan_over
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import Body, Graph, bodies
from graphflow.ir.op import FUNCTIONS, Node, Tensor, derivative_scope, make_node
from graphflow.ir.spec import Size
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.control_flow import control

Twin = tuple[Tensor, bool]
"""The tensor that stands for another one, and whether it has the batch axis."""
Flags = tuple[bool, ...]
BodyRule = Callable[["Batching", Node, list[Tensor], list[bool]], list[Twin]]
"""(engine, node, inputs, which of them have the batch axis) -> the node's outputs."""
_Cache = dict[tuple[Body, Flags], "_BodyBatching"]


def draws(node: Node) -> bool:
    """Return True if a node, or a node of a body that it holds, draws random numbers."""
    if not control.is_control(node.op):
        return node.op.random
    return any(draws(inner) for body in bodies(node) for inner in body.graph.nodes)


class Batching:
    """Batches the nodes of one graph: it holds the twin of each tensor.

    Args:
        size: the size of the batch.
        twins: the twins of the graph's parameters; a tensor without one stands for itself.
        rules: by op, how nodes that hold bodies are batched.
    """

    def __init__(
        self,
        size: Size,
        twins: dict[Tensor, Twin],
        rules: Mapping[str, BodyRule],
        cache: _Cache | None = None,
    ) -> None:
        self.size = size
        self.rules = rules
        self._twins = twins
        self._cache: _Cache = {} if cache is None else cache

    def twin(self, tensor: Tensor) -> Twin:
        """Return the twin of a tensor; the tensor itself if it does not depend on the batch."""
        return self._twins.get(tensor, (tensor, False))

    def batched_twin(self, tensor: Tensor) -> Tensor:
        """Return the twin of a tensor, repeated along a batch axis if it has none."""
        twin, has = self.twin(tensor)
        return twin if has else batching.add_batch_axis(twin, self.size)

    def emit(self, nodes: Sequence[Node]) -> None:
        """Emit the twins of nodes, which are in build order."""
        for node in nodes:
            if node.outputs[0] in self._twins:
                continue
            twins = [self.twin(t) for t in node.inputs]
            if any(has for _, has in twins) or draws(node):
                with derivative_scope(node, "vmap/"):
                    results = self._emit_node(node, twins)
            elif any(a is not b for (a, _), b in zip(twins, node.inputs, strict=True)):
                moved = node.with_inputs(tuple(t for t, _ in twins))
                results = [(t, False) for t in moved.outputs]
            else:
                continue
            self._twins.update(zip(node.outputs, results, strict=True))

    def _emit_node(self, node: Node, twins: Sequence[Twin]) -> list[Twin]:
        inputs, has = [t for t, _ in twins], [b for _, b in twins]
        if node.op.name in ("assign", "group"):
            raise VariableError(
                f"{node.op.name} {node.name!r} (made at {node.location}) depends on the batch: "
                "vmap has no single value to assign; return the value, reduce it, assign it outside"
            )
        try:
            if node.op.name == "concurrent":
                raise GraphError("vmap has no rule for parties that exchange tensors")
            if control.is_control(node.op):
                return self.rules[node.op.name](self, node, inputs, has)
            return [(t, True) for t in self._apply_rule(node, inputs, has)]
        except GraphflowError as error:
            raise type(error)(f"vmap of {node.name!r} at {node.location}: {error}") from error

    def _apply_rule(self, node: Node, inputs: list[Tensor], has: list[bool]) -> Sequence[Tensor]:
        if not inputs:  # only random ops without inputs get here
            attrs = {**node.attrs, "shape": (self.size, *node.attrs["shape"])}
            return make_node(node.op, (), attrs).outputs
        rule = node.op.batch or (batching.elementwise if node.op.elementwise else None)
        found: Any = NotImplemented
        if rule is not None:
            found = rule(node.op, inputs, has, **node.attrs)
        if found is NotImplemented:
            found = self._loop_over_batch(node, inputs, has)
        return found if isinstance(found, tuple) else (found,)

    def _loop_over_batch(self, node: Node, inputs: Sequence[Tensor], has: Sequence[bool]) -> Any:
        def loop_body(carry: tuple[()], rows: list[Tensor]) -> tuple[tuple[()], Any]:
            rest = iter(rows)
            given = tuple(next(rest) if b else t for t, b in zip(inputs, has, strict=True))
            return (), make_node(node.op, given, node.attrs).outputs

        xs = [t for t, b in zip(inputs, has, strict=True) if b]
        return scan_over(loop_body, (), xs)[1]

    # Bodies -------------------------------------------------------------------------------------

    def batched_results(self, body: Body, flags: Sequence[bool]) -> list[bool]:
        """Return which results of a body depend on the batch, if the flagged parameters do."""
        reached = {t for n, b in zip(body.inputs, flags, strict=True) if b for t in n.outputs}
        for node in body.graph.nodes:
            if draws(node) or any(t in reached for t in node.inputs):
                reached.update(node.outputs)
        return [t in reached for t in body.outputs]

    def inline_body(self, body: Body, twins: Sequence[Twin]) -> list[Tensor]:
        """Emit a body's nodes here, and return its results, all with the batch axis."""
        mapping = dict(zip((n.outputs[0] for n in body.inputs), twins, strict=True))
        inner = Batching(self.size, mapping, self.rules, self._cache)
        inner.emit(body.graph.nodes)
        return [inner.batched_twin(t) for t in body.outputs]

    def batch_body(
        self, body: Body, flags: Flags, forced: Sequence[bool]
    ) -> tuple[Body, list[bool]]:
        """Return a batched body, and which of its results have the batch axis.

        Args:
            flags: the parameters that have the axis.
            forced: the results that must have it; others have it if they depend on the batch.

        Further results that a gradient asks for are added to the same batched root, so
        `passes.MergeBodies` still merges both nodes.
        """
        inner = self._body_batching(body, flags)
        inner.emit(body.graph.nodes)
        twins = [
            (inner.batched_twin(t), True) if force else inner.twin(t)
            for t, force in zip(body.outputs, forced, strict=True)
        ]
        outputs, has = [t for t, _ in twins], [b for _, b in twins]
        known = len(body.root.outputs)
        if body.base is not None:
            root = inner.batched_body(body.root, flags, tuple(has[:known]))
            return root.with_extra_results(outputs[known:]), has
        return inner.batched_body(body, flags, tuple(has)), has

    def _body_batching(self, body: Body, flags: Flags) -> _BodyBatching:
        key = (body.root, flags)
        if key not in self._cache:
            twins: dict[Tensor, Twin] = {}
            for node, flag in zip(body.inputs, flags, strict=True):
                (spec,) = node.specs
                wide = spec.with_shape((self.size, *spec.shape))
                twins[node.outputs[0]] = (
                    (make_parameter(wide, node.name) if flag else node).outputs[0],
                    flag,
                )
            self._cache[key] = _BodyBatching(self.size, twins, self.rules, self._cache)
        return self._cache[key]


class _BodyBatching(Batching):
    """Batches the nodes of a body, and caches the batched bodies."""

    def __init__(
        self, size: Size, twins: dict[Tensor, Twin], rules: Mapping[str, BodyRule], cache: _Cache
    ) -> None:
        super().__init__(size, twins, rules, cache)
        self._parameters = tuple(twin.node for twin, _ in twins.values())
        self._made: dict[Flags, Body] = {}

    def batched_body(self, body: Body, flags: Flags, has: Flags) -> Body:
        """Return the batched body whose flagged results have the axis; one object for each set."""
        if has not in self._made:
            self.emit(body.graph.nodes)
            outputs = [
                self.batched_twin(t) if b else self.twin(t)[0]
                for t, b in zip(body.graph.outputs, has, strict=False)
            ]
            effects = [self.twin(t)[0] for t in body.graph.outputs[len(has) :]]
            graph = Graph([*outputs, *effects])
            made = Body(self._parameters, graph, len(outputs))
            self._made[has] = _with_batched_rules(made, self, body, flags)
        return self._made[has]


def _with_batched_rules(batched: Body, outer: Batching, body: Body, flags: Flags) -> Body:
    """Give a batched body the user's rules of derivatives, which are written for one element."""

    def rule(g: Any, y: Any, *inputs: Tensor) -> list[Tensor | None]:
        single = _SingleElements(outer)
        arguments = single.stand_ins(inputs, flags)
        assert body.rule is not None
        parts = body.rule(single.all_stand_ins(g), single.all_stand_ins(y), *arguments)
        return [
            whole if has or whole is None else FUNCTIONS["sum"](whole, axis=0)
            for whole, has in zip(single.batch(parts), flags, strict=True)
        ]

    def tangent_rule(
        tangents: Sequence[Tensor | None], y: Any, *inputs: Tensor
    ) -> list[Tensor | None]:
        single = _SingleElements(outer)
        given, arguments = single.stand_ins(tangents, flags), single.stand_ins(inputs, flags)
        assert body.tangent_rule is not None
        return single.batch(body.tangent_rule(given, single.all_stand_ins(y), *arguments))

    return replace(
        batched,
        rule=None if body.rule is None else rule,
        tangent_rule=None if body.tangent_rule is None else tangent_rule,
    )


class _SingleElements:
    """Stand-ins for one element of batched tensors, and the batch of what is made of them."""

    def __init__(self, outer: Batching) -> None:
        self._outer = outer
        self._twins: dict[Tensor, Twin] = {}

    def stand_ins(self, tensors: Sequence[Tensor | None], flags: Flags) -> list[Any]:
        """Return a stand-in for each flagged tensor; the others stay."""
        return [
            t if t is None or not has else self._stand_in(t)
            for t, has in zip(tensors, flags, strict=True)
        ]

    def all_stand_ins(self, given: Any) -> Any:
        """Return a stand-in for a tensor, or for each of a tuple."""
        if isinstance(given, Tensor):
            return self._stand_in(given)
        return tuple(map(self._stand_in, given))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        spec = tensor.spec.with_shape(tensor.shape[1:])
        stand_in = make_parameter(spec, tensor.name).outputs[0]
        self._twins[stand_in] = (tensor, True)
        return stand_in

    def batch(self, parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Emit what a rule built from stand-ins, with the batch axis."""
        engine = Batching(self._outer.size, self._twins, self._outer.rules)
        engine.emit(Graph([part for part in parts if part is not None]).nodes)
        return [None if part is None else engine.batched_twin(part) for part in parts]
