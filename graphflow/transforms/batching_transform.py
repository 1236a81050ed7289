"""Batching: a traced graph emitted once more, with a batch axis in front of what depends on the
batch.

Each op has a rule (`Op.batch`; see ops/base/batching_rules.py); elementwise ops share one, random
ops draw for each element of the batch, and an op without a rule runs in a loop over the batch.
Nodes that hold bodies get batched bodies; a loop whose condition depends on the batch runs until
all are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError, VariableError
from graphflow.frontend.control_flow import scan as scan_over
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import Body, Graph, bodies, substitute_tensors
from graphflow.ir.op import FUNCTIONS, Node, Tensor, derivative_scope, make_node
from graphflow.ir.spec import Size, is_inexact
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.control_flow import control
from graphflow.ops.pointwise.select import stop_gradient_unless

Twin = tuple[Tensor, bool]
"""What stands for a tensor, and whether it has the batch axis."""
Flags = tuple[bool, ...]
_Cache = dict[tuple[Body, Flags], "_BodyBatching"]


def draws(node: Node) -> bool:
    """Whether a node, or a body that it holds, draws random numbers."""
    if not control.is_control(node.op):
        return node.op.random
    return any(draws(inner) for body in bodies(node) for inner in body.graph.nodes)


class Batching:
    """The twins of the tensors of one graph.

    Args:
        size: of the batch.
        twins: of the graph's parameters; what has none stays as it is.
    """

    def __init__(self, size: Size, twins: dict[Tensor, Twin], cache: _Cache | None = None) -> None:
        self.size = size
        self._twins = twins
        self._cache: _Cache = {} if cache is None else cache

    def twin(self, tensor: Tensor) -> Twin:
        """What stands for a tensor."""
        return self._twins.get(tensor, (tensor, False))

    def batched_twin(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor, with the batch axis in any case."""
        twin, has = self.twin(tensor)
        return twin if has else batching.add_batch_axis(twin, self.size)

    def emit(self, nodes: Sequence[Node]) -> None:
        """Emit nodes, which are in order."""
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
            if control.is_control(node.op):
                return _RULES[node.op.name](self, node, inputs, has)
            return [(t, True) for t in self._apply_rule(node, inputs, has)]
        except GraphflowError as error:
            raise type(error)(f"vmap of {node.name!r} at {node.location}: {error}") from error

    def _apply_rule(self, node: Node, inputs: list[Tensor], has: list[bool]) -> Sequence[Tensor]:
        if not inputs:  # it draws
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
        """Which results of a body depend on the batch, given which parameters do."""
        reached = {t for n, b in zip(body.inputs, flags, strict=True) if b for t in n.outputs}
        for node in body.graph.nodes:
            if draws(node) or any(t in reached for t in node.inputs):
                reached.update(node.outputs)
        return [t in reached for t in body.outputs]

    def inline_body(self, body: Body, twins: Sequence[Twin]) -> list[Tensor]:
        """The results of a body, computed here, all with the batch axis."""
        mapping = dict(zip((n.outputs[0] for n in body.inputs), twins, strict=True))
        inner = Batching(self.size, mapping, self._cache)
        inner.emit(body.graph.nodes)
        return [inner.batched_twin(t) for t in body.outputs]

    def batch_body(
        self, body: Body, flags: Flags, forced: Sequence[bool]
    ) -> tuple[Body, list[bool]]:
        """A body whose parameters and results have the batch axis where said, or where they must.

        What a gradient adds to a body is added to the same batched one, so that both still run as
        one.
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
            self._cache[key] = _BodyBatching(self.size, twins, self._cache)
        return self._cache[key]


class _BodyBatching(Batching):
    """As `Batching`, for a body; keeps what it made."""

    def __init__(self, size: Size, twins: dict[Tensor, Twin], cache: _Cache) -> None:
        super().__init__(size, twins, cache)
        self._parameters = tuple(twin.node for twin, _ in twins.values())
        self._made: dict[Flags, Body] = {}

    def batched_body(self, body: Body, flags: Flags, has: Flags) -> Body:
        """The batched body; one object for each set of results with the axis."""
        if has not in self._made:
            self.emit(body.graph.nodes)
            outputs = [
                self.batched_twin(t) if b else self.twin(t)[0]
                for t, b in zip(body.graph.outputs, has, strict=False)
            ]
            effects = [self.twin(t)[0] for t in body.graph.outputs[len(has) :]]
            rule = None if body.rule is None else _batched_rule(self.size, body, flags)
            graph = Graph([*outputs, *effects])
            self._made[has] = Body(self._parameters, graph, len(outputs), None, rule)
        return self._made[has]


def _batched_rule(size: Size, body: Body, flags: Flags) -> Any:
    """A user's vjp, which is for one element of the batch, for all of them."""

    def rule(g: Any, y: Any, *inputs: Tensor) -> list[Tensor | None]:
        twins: dict[Tensor, Twin] = {}

        def one(tensor: Tensor, has: bool) -> Tensor:
            if not has:
                return tensor
            spec = tensor.spec.with_shape(tensor.shape[1:])
            stand_in = make_parameter(spec, tensor.name).outputs[0]
            twins[stand_in] = (tensor, True)
            return stand_in

        def all_of(given: Any) -> Any:
            if isinstance(given, Tensor):
                return one(given, True)
            return tuple(one(t, True) for t in given)

        arguments = [one(t, has) for t, has in zip(inputs, flags, strict=True)]
        assert body.rule is not None
        parts = body.rule(all_of(g), all_of(y), *arguments)
        engine = Batching(size, twins)
        engine.emit(Graph([p for p in parts if p is not None]).nodes)
        found: list[Tensor | None] = []
        for part, has in zip(parts, flags, strict=True):
            whole = None if part is None else engine.batched_twin(part)
            found.append(whole if has or whole is None else FUNCTIONS["sum"](whole, axis=0))
        return found

    return rule


# Nodes that hold bodies -------------------------------------------------------------------------


def _swap_outer_axes(x: Tensor) -> Tensor:
    """The first two axes exchanged: a stack of batches as a batch of stacks, and back."""
    moved: Tensor = FUNCTIONS["swapaxes"](x, 0, 1)
    return moved


def _select(choice: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the choice, one for each element of the batch, is true, else b."""
    shape = (choice.shape[0], *(1,) * (a.ndim - 1))
    chosen: Tensor = FUNCTIONS["where"](FUNCTIONS["reshape"](choice, shape), a, b)
    return chosen


def _restrict_to(choice: Tensor, twins: Sequence[Twin], size: Size) -> list[Twin]:
    """Operands of a computation that only chosen elements of the batch need.

    The other elements get the operands of the first chosen element, and pass no gradient on. So
    they compute nothing that the chosen ones do not: no error, and no NaN, whose product with a
    cotangent of 0 would be NaN. If none is chosen, operands without the batch axis pass no gradient
    on, either.
    """
    marks = FUNCTIONS["astype"](choice, "int8")  # and one more, since the batch may be empty
    first = FUNCTIONS["argmax"](FUNCTIONS["concat"]([marks, FUNCTIONS["zeros"]((1,), "int8")]))
    rows = FUNCTIONS["where"](choice, FUNCTIONS["arange"](size), first)
    some = FUNCTIONS["any"](choice)
    kept: list[Twin] = []
    for x, has in twins:
        if has:
            x = _select(choice, x, FUNCTIONS["stop_gradient"](FUNCTIONS["take"](x, rows, 0)))
        elif is_inexact(x.dtype):
            x = stop_gradient_unless(some, x)
        kept.append((x, has))
    return kept


def _restrict_to_active(
    active: Tensor, body: Body, flags: Sequence[bool], size: Size
) -> list[Tensor]:
    """The results of a loop's body, computed of what only its active elements are fed."""
    given = [node.outputs[0] for node in body.inputs]
    batched = [t for t, has in zip(given, flags, strict=True) if has]
    kept = [t for t, _ in _restrict_to(active, [(t, True) for t in batched], size)]
    return substitute_tensors(body.outputs, dict(zip(batched, kept, strict=True)))


def _add_batch_axis(engine: Batching, x: Tensor, has: bool, wanted: bool) -> Tensor:
    return batching.add_batch_axis(x, engine.size) if wanted and not has else x


def _batch_call(engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]) -> list[Twin]:
    body: Body = node.attrs["body"]
    # a vjp given by the user is for results that all have the axis
    forced = (body.rule is not None,) * body.results
    inside, flags = engine.batch_body(body, tuple(has), forced)
    outputs = make_node(node.op, tuple(inputs), {**node.attrs, "body": inside}).outputs
    return list(zip(outputs, flags, strict=True))


def _batch_cond(engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]) -> list[Twin]:
    branches = [node.attrs["then"], node.attrs["orelse"]]
    if has[0]:  # both branches, and a choice for each
        twins = list(zip(inputs[1:], has[1:], strict=True))
        chosen = [inputs[0], FUNCTIONS["logical_not"](inputs[0])]
        first, second = (
            engine.inline_body(b, _restrict_to(c, twins, engine.size))
            for b, c in zip(branches, chosen, strict=True)
        )
        return [(_select(inputs[0], a, b), True) for a, b in zip(first, second, strict=True)]
    flags = tuple(has[1:])
    forced = [
        a or b for a, b in zip(*(engine.batched_results(b, flags) for b in branches), strict=True)
    ]
    (then, found), (orelse, _) = (engine.batch_body(b, flags, forced) for b in branches)
    outputs = make_node(node.op, tuple(inputs), {"then": then, "orelse": orelse}).outputs
    return list(zip(outputs, found, strict=True))


@dataclass(frozen=True)
class _BatchedLoop:
    """The operands of a loop, and which have the batch axis: carries, items, captures."""

    engine: Batching
    body: Body
    inputs: list[Tensor]
    flags: Flags
    carries: int
    items: int

    @staticmethod
    def infer_axes(
        engine: Batching,
        body: Body,
        inputs: list[Tensor],
        has: Sequence[bool],
        carries: int,
        items: int,
        everything: bool = False,
    ) -> _BatchedLoop:
        """With what a carry becomes taken into account: the axis that it gets, it begins with."""
        flags = tuple(has)
        while True:
            found = engine.batched_results(body, flags)[:carries]
            carried = tuple(a or b or everything for a, b in zip(flags, found, strict=False))
            if carried == flags[:carries]:
                break
            flags = (*carried, *flags[carries:])
        wide = [
            _add_batch_axis(engine, x, a, b) for x, a, b in zip(inputs, has, flags, strict=True)
        ]
        for i in range(carries, carries + items):
            if flags[i]:
                wide[i] = _swap_outer_axes(wide[i])
        return _BatchedLoop(engine, body, wide, flags, carries, items)

    def required_axes(self, everything: bool = False) -> Flags:
        """Results that must have the axis."""
        rest = self.body.results - self.carries
        return (*self.flags[: self.carries], *(everything,) * rest)

    def results(self, outputs: Sequence[Tensor], has: Sequence[bool]) -> list[Twin]:
        """The outputs of the loop, those that it stacks with the batch axis in front."""
        pairs = list(zip(outputs, has, strict=True))
        stacked = [(_swap_outer_axes(t) if b else t, b) for t, b in pairs[self.carries :]]
        return [*pairs[: self.carries], *stacked]


def _batch_scan(engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]) -> list[Twin]:
    attrs = dict(node.attrs)
    counted = int(attrs.get("counted", False))
    masked = bool(counted and has[0])
    carries, items = attrs["carries"], attrs["items"]
    loop = _BatchedLoop.infer_axes(
        engine, attrs["body"], inputs[counted:], has[counted:], carries, items, masked
    )
    body, flags = engine.batch_body(attrs["body"], loop.flags, loop.required_axes(masked))
    operands = loop.inputs
    count = inputs[:counted]
    if masked:
        body = _masked_body(engine, body, loop)
        position = FUNCTIONS["arange"](attrs["length"])
        end = carries + items
        operands = [*operands[:end], position, *operands[end:], inputs[0]]
        count = [FUNCTIONS["max"](inputs[0])]
        attrs["items"] = items + 1
    outputs = make_node(node.op, (*count, *operands), {**attrs, "body": body}).outputs
    return loop.results(outputs, flags)


def _masked_body(engine: Batching, body: Body, loop: _BatchedLoop) -> Body:
    """A body that does nothing in the iterations beyond the count of an element: what it carries
    stays, what it stacks is 0. The position is a further item, the counts a further capture."""
    position = make_parameter(control.COUNT, "position")
    counts = make_parameter(control.COUNT.with_shape((engine.size,)), "counts")
    active = FUNCTIONS["less"](position.outputs[0], counts.outputs[0])
    before = [n.outputs[0] for n in body.inputs[: loop.carries]]
    before += [FUNCTIONS["zeros_like"](t) for t in body.outputs[loop.carries :]]
    after = _restrict_to_active(active, body, loop.flags, engine.size)
    outputs = [_select(active, t, b) for t, b in zip(after, before, strict=True)]
    end = loop.carries + loop.items
    inputs = (*body.inputs[:end], position, *body.inputs[end:], counts)
    return Body(inputs, Graph(outputs), len(outputs))


def _batch_while(engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]) -> list[Twin]:
    attrs = dict(node.attrs)
    test, states = attrs["test"], attrs["states"]
    loop = _BatchedLoop.infer_axes(engine, attrs["body"], inputs, has, states, 0)
    if any(engine.batched_results(test, loop.flags)):
        return _batch_while_each(engine, node, inputs, has)
    body, flags = engine.batch_body(attrs["body"], loop.flags, loop.required_axes())
    attrs["test"], _ = engine.batch_body(test, loop.flags, (False,))
    outputs = make_node(node.op, tuple(loop.inputs), {**attrs, "body": body}).outputs
    return [(outputs[0], False), *loop.results(outputs[1:], flags)]


def _batch_while_each(
    engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]
) -> list[Twin]:
    """A loop that runs until the condition holds for no element; those that are done keep their
    state. A further state counts the iterations of each."""
    attrs = dict(node.attrs)
    test, states = attrs["test"], attrs["states"]
    loop = _BatchedLoop.infer_axes(engine, attrs["body"], inputs, has, states, 0, everything=True)
    body, _ = engine.batch_body(attrs["body"], loop.flags, loop.required_axes(True))
    counts = make_parameter(control.COUNT.with_shape((engine.size,)), "counts")
    parameters = (*body.inputs[:states], counts, *body.inputs[states:])

    def evaluate_test() -> Tensor:
        twins = list(zip((n.outputs[0] for n in body.inputs), loop.flags, strict=True))
        return engine.inline_body(test, twins)[0]

    active = evaluate_test()
    before = [n.outputs[0] for n in body.inputs[:states]]
    after = _restrict_to_active(active, body, loop.flags, engine.size)
    outputs = [_select(active, t, b) for t, b in zip(after, before, strict=False)]
    outputs.append(counts.outputs[0] + FUNCTIONS["astype"](active, "int64"))
    outputs += after[states:]
    attrs["body"] = Body(parameters, Graph(outputs), len(outputs))
    attrs["test"] = Body(parameters, Graph([FUNCTIONS["any"](active)]), 1)
    attrs["states"] = states + 1
    zeros = FUNCTIONS["zeros"]((engine.size,), dtype="int64")
    operands = (*loop.inputs[:states], zeros, *loop.inputs[states:])
    found = make_node(node.op, operands, attrs).outputs[1:]
    stacked = [(_swap_outer_axes(t), True) for t in found[states + 1 :]]
    return [(found[states], True), *((t, True) for t in found[:states]), *stacked]


_RULES = {"call": _batch_call, "cond": _batch_cond, "scan": _batch_scan, "while_loop": _batch_while}
