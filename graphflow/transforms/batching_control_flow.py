"""Batched versions of nodes that hold bodies: call, cond, scan and while_loop.

A `cond` whose predicate depends on the batch computes both branches; a loop whose condition depends
on the batch runs until all are done.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import Body, Graph, substitute_tensors
from graphflow.ir.op import FUNCTIONS, Node, Tensor, make_node
from graphflow.ir.spec import Size, is_inexact
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.control_flow import control
from graphflow.ops.pointwise.select import stop_gradient_unless
from graphflow.transforms.batching_transform import Batching, BodyRule, Flags, Twin


def _swap_outer_axes(x: Tensor) -> Tensor:
    """Exchange the first two axes: a stack of batches becomes a batch of stacks, and back."""
    moved: Tensor = FUNCTIONS["swapaxes"](x, 0, 1)
    return moved


def _select_rows(choice: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Select a if the choice, one bool for each element of the batch, is true, else b."""
    shape = (choice.shape[0], *(1,) * (a.ndim - 1))
    chosen: Tensor = FUNCTIONS["where"](FUNCTIONS["reshape"](choice, shape), a, b)
    return chosen


def _restrict_to(choice: Tensor, twins: Sequence[Twin], size: Size) -> list[Twin]:
    """Replace the operands of elements of the batch that are not chosen.

    They get the operands of the first chosen element, and pass no gradient on. So they raise no
    error and compute no NaN that the chosen elements do not; NaN times a cotangent of 0 would be
    NaN. If no element is chosen, operands without the batch axis pass no gradient on, either.
    """
    marks = FUNCTIONS["astype"](choice, "int8")  # with one more, as argmax refuses empty batches
    first = FUNCTIONS["argmax"](FUNCTIONS["concat"]([marks, FUNCTIONS["zeros"]((1,), "int8")]))
    rows = FUNCTIONS["where"](choice, FUNCTIONS["arange"](size), first)
    some = FUNCTIONS["any"](choice)
    kept: list[Twin] = []
    for x, has in twins:
        if has:
            x = _select_rows(choice, x, FUNCTIONS["stop_gradient"](FUNCTIONS["take"](x, rows, 0)))
        elif is_inexact(x.dtype):
            x = stop_gradient_unless(some, x)
        kept.append((x, has))
    return kept


def _restrict_to_active(
    active: Tensor, body: Body, flags: Sequence[bool], size: Size
) -> list[Tensor]:
    """Return the results of a loop's body, whose inactive elements compute as an active one."""
    given = [node.outputs[0] for node in body.inputs]
    batched = [t for t, has in zip(given, flags, strict=True) if has]
    kept = [t for t, _ in _restrict_to(active, [(t, True) for t in batched], size)]
    return substitute_tensors(body.outputs, dict(zip(batched, kept, strict=True)))


def _add_batch_axis(engine: Batching, x: Tensor, has: bool, wanted: bool) -> Tensor:
    return batching.add_batch_axis(x, engine.size) if wanted and not has else x


def _batch_call(engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]) -> list[Twin]:
    body: Body = node.attrs["body"]
    # the batched rule of a user's vjp expects the axis on all results
    forced = (body.rule is not None,) * body.results
    inside, flags = engine.batch_body(body, tuple(has), forced)
    outputs = make_node(node.op, tuple(inputs), {**node.attrs, "body": inside}).outputs
    return list(zip(outputs, flags, strict=True))


def _batch_cond(engine: Batching, node: Node, inputs: list[Tensor], has: list[bool]) -> list[Twin]:
    branches = [node.attrs["then"], node.attrs["orelse"]]
    if has[0]:  # compute both branches, and select for each element
        twins = list(zip(inputs[1:], has[1:], strict=True))
        chosen = [inputs[0], FUNCTIONS["logical_not"](inputs[0])]
        first, second = (
            engine.inline_body(b, _restrict_to(c, twins, engine.size))
            for b, c in zip(branches, chosen, strict=True)
        )
        return [(_select_rows(inputs[0], a, b), True) for a, b in zip(first, second, strict=True)]
    flags = tuple(has[1:])
    forced = [
        a or b for a, b in zip(*(engine.batched_results(b, flags) for b in branches), strict=True)
    ]
    (then, found), (orelse, _) = (engine.batch_body(b, flags, forced) for b in branches)
    outputs = make_node(node.op, tuple(inputs), {"then": then, "orelse": orelse}).outputs
    return list(zip(outputs, found, strict=True))


@dataclass(frozen=True)
class _BatchedLoop:
    """The operands of a batched loop (carries, items, captures), and which have the batch axis."""

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
        """Find the carries that need the batch axis, and add it to their initial values.

        A carry that gets the axis in the body must begin with it. This may give the axis to further
        carries, so the search goes on to a fixed point.
        """
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
        """Return the results that must have the axis: those of carries that begin with it."""
        rest = self.body.results - self.carries
        return (*self.flags[: self.carries], *(everything,) * rest)

    def results(self, outputs: Sequence[Tensor], has: Sequence[bool]) -> list[Twin]:
        """Return the twins of the loop's outputs, with the batch axis before the stacking axis."""
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
    """Return a body that does nothing for an element beyond its number of iterations.

    Carries then stay, and stacked rows are 0. The position is a further item, the counts are a
    further capture.
    """
    position = make_parameter(control.COUNT, "position")
    counts = make_parameter(control.COUNT.with_shape((engine.size,)), "counts")
    active = FUNCTIONS["less"](position.outputs[0], counts.outputs[0])
    before = [n.outputs[0] for n in body.inputs[: loop.carries]]
    before += [FUNCTIONS["zeros_like"](t) for t in body.outputs[loop.carries :]]
    after = _restrict_to_active(active, body, loop.flags, engine.size)
    outputs = [_select_rows(active, t, b) for t, b in zip(after, before, strict=True)]
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
    """Build a loop that runs until the condition is false for all elements of the batch.

    Elements that are done keep their state. A further state counts the iterations of each.
    """
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
    outputs = [_select_rows(active, t, b) for t, b in zip(after, before, strict=False)]
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


BODY_RULES: dict[str, BodyRule] = {
    "call": _batch_call,
    "cond": _batch_cond,
    "scan": _batch_scan,
    "while_loop": _batch_while,
}
