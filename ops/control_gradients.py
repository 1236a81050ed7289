"""Reverse mode through bodies: a forward body that also returns what its gradient needs, and a
backward body that takes it.

The gradient of a body is built by `gradients` inside it; the graph that results is cut where
forward values flow into what depends on the cotangents. What is cut is returned by the forward body
as further results ("residuals"; loops stack them), unless it is cheap to compute again. The node
that computes them stands beside the first one and `passes.MergeBodies` makes the two one.

Source: the partial evaluation view of reverse mode, Radul et al., "You only linearize once",
POPL 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphflow.errors import DifferentiationError
from graphflow.graph import Body, Graph
from graphflow.op import FUNCTIONS, Node, Tensor, make_node
from graphflow.ops.control import call, cond, is_control, scan, while_loop
from graphflow.spec import Size, is_inexact
from graphflow.tracing import parameter

Cotangents = tuple[Tensor | None, ...]


def differentiable(tensor: Tensor) -> bool:
    """Whether cotangents flow to a tensor."""
    return is_inexact(tensor.dtype)


@dataclass(frozen=True)
class Backward:
    """The gradient of a body.

    Attributes:
        forward: the body, with the residuals as further results.
        residuals: those results.
        cotangents: parameters that stand for the cotangents of the differentiable results.
        saved: parameters that stand for the residuals.
        grads: for each parameter of the body its cotangent, in terms of `cotangents`, `saved` and
            the body's own parameters; None where none flows.
    """

    forward: Body
    residuals: tuple[Tensor, ...]
    cotangents: tuple[Node, ...]
    saved: tuple[Node, ...]
    grads: tuple[Tensor | None, ...]

    def reads(self, node: Node) -> bool:
        """Whether a gradient reads a parameter."""
        return any(node is n for n in Graph([g for g in self.grads if g is not None]).nodes)


def backward_of(
    body: Body,
    varying: Sequence[Node] | None = None,
    recompute: bool = False,
) -> Backward:
    """Differentiate a body's results with respect to its parameters.

    Args:
        varying: parameters that differ from iteration to iteration: a gradient keeps them as
            residuals, too, and recomputes what depends on no such parameter. Default: none, and
            whatever is computed is kept.
        recompute: keep nothing, compute the body again.
    """
    ys = [t for t in body.outputs if differentiable(t)]
    cotangents = tuple(parameter(t.spec, f"g_{i}") for i, t in enumerate(ys))
    xs = [node.outputs[0] for node in body.inputs if differentiable(node.outputs[0])]
    found: list[Tensor] = []
    if ys and xs:
        found = FUNCTIONS["gradients"](ys, xs, [node.outputs[0] for node in cotangents])
    flowing = _dependent(found, cotangents)
    grads = {
        x.node: g for x, g in zip(xs, found, strict=bool(found)) if g.node in flowing
    }  # a gradient that reads no cotangent is 0
    cut = _Cut(body, flowing, varying, recompute)
    residuals = cut.residuals(list(grads.values()))
    saved = tuple(parameter(t.spec, f"saved_{i}") for i, t in enumerate(residuals))
    rewritten = _substituted(
        list(grads.values()), dict(zip(residuals, (n.outputs[0] for n in saved), strict=True))
    )
    by_node = dict(zip(grads, rewritten, strict=True))
    return Backward(
        body.extended(residuals) if residuals else body,
        tuple(residuals),
        cotangents,
        saved,
        tuple(by_node.get(node) for node in body.inputs),
    )


def _dependent(outputs: Sequence[Tensor], sources: Sequence[Node]) -> set[Node]:
    """Nodes that depend on any of the sources."""
    reached = set(sources)
    for node in Graph(outputs).nodes if outputs else ():
        if any(t.node in reached for t in node.inputs):
            reached.add(node)
    return reached


class _Cut:
    """Decides what of the forward part of a gradient is kept, and what is computed again."""

    def __init__(
        self, body: Body, flowing: set[Node], varying: Sequence[Node] | None, recompute: bool
    ) -> None:
        self._base = set(body.graph.nodes)
        self._flowing = flowing
        self._parameters = set(body.inputs)
        self._varying = set(varying or ())
        self._loop = varying is not None
        self._moving = _dependent(body.graph.outputs, varying) if varying else set()
        self._recompute = recompute

    def residuals(self, grads: Sequence[Tensor]) -> list[Tensor]:
        kept: dict[Tensor, None] = {}
        seen: set[Tensor] = set()
        stack = list(grads)
        while stack:
            tensor = stack.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor.node not in self._flowing and self._keeps(tensor):
                kept[tensor] = None
            else:
                stack.extend(tensor.node.inputs)
        return sorted(kept, key=lambda t: (t.node.serial, t.index))

    def _keeps(self, tensor: Tensor) -> bool:
        node = tensor.node
        if node in self._parameters:
            return node in self._varying
        if self._recompute or node.op.name == "constant" or node.op.alias:
            return False
        if is_control(node.op):
            return True  # also one built by the gradient: the forward part of an inner gradient
        if node not in self._base:
            return False
        if self._loop and node not in self._moving and not node.op.random:
            return False  # the same in each iteration: stacking it would waste memory
        return bool(node.inputs) or node.op.random


def _substituted(outputs: Sequence[Tensor], replaced: dict[Tensor, Tensor]) -> list[Tensor]:
    """Outputs with some tensors replaced by others, and what depends on them rebuilt."""
    mapped = dict(replaced)
    for node in Graph(outputs).nodes if outputs else ():
        inputs = tuple(mapped.get(t, t) for t in node.inputs)
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            continue
        twin = node.with_inputs(inputs)
        for old, new in zip(node.outputs, twin.outputs, strict=True):
            mapped.setdefault(old, new)
    return [mapped.get(t, t) for t in outputs]


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _zeros(tensor: Tensor) -> Tensor:
    zeros: Tensor = FUNCTIONS["full_like"](tensor, 0)
    return zeros


# call -------------------------------------------------------------------------------------------


def call_vjp(
    g: Any, y: Any, inputs: Sequence[Tensor], body: Body, recompute: bool = False
) -> Cotangents:
    """One call of the backward body."""
    if body.rule is not None:
        return tuple(body.rule(g, y, *inputs))
    gs = [c for c, t in zip(_tuple(g), body.outputs, strict=True) if differentiable(t)]
    back = backward_of(body, recompute=recompute)
    residuals: tuple[Tensor, ...] = ()
    if back.residuals:
        attrs = {"body": back.forward}
        residuals = make_node(call, tuple(inputs), attrs).outputs[body.results :]
    wanted = [x for x in back.grads if x is not None]
    if not wanted:
        return (None,) * len(inputs)
    parameters = (*back.cotangents, *back.saved, *body.inputs)
    node = make_node(
        call,
        (*gs, *residuals, *inputs),
        {"body": Body(parameters, Graph(wanted), len(wanted))},
    )
    return _placed(back.grads, node.outputs)


def _placed(pattern: Sequence[Tensor | None], values: Sequence[Tensor]) -> Cotangents:
    """Values at the places where the pattern has something."""
    rest = iter(values)
    return tuple(None if x is None else next(rest) for x in pattern)


# cond -------------------------------------------------------------------------------------------


def cond_vjp(g: Any, y: Any, inputs: Sequence[Tensor], then: Body, orelse: Body) -> Cotangents:
    """A cond of the branches' backward bodies; each takes the residuals of its own forward."""
    pred, operands = inputs[0], inputs[1:]
    gs = [c for c, t in zip(_tuple(g), then.outputs, strict=True) if differentiable(t)]
    backs = [backward_of(then), backward_of(orelse)]
    wanted = [i for i in range(len(operands)) if any(b.grads[i] is not None for b in backs)]
    if not wanted:
        return (None,) * len(inputs)
    first, second = (list(b.residuals) for b in backs)
    residuals: tuple[Tensor, ...] = ()
    if first or second:
        attrs = {
            "then": then.extended([*first, *map(_blank, second)]),
            "orelse": orelse.extended([*map(_blank, first), *second]),
        }
        residuals = make_node(cond, tuple(inputs), attrs).outputs[then.results :]
    saved = (backs[0].saved, backs[1].saved)
    branches = []
    for at, (back, body) in enumerate(zip(backs, (then, orelse), strict=True)):
        grads = [
            _zeros(body.inputs[i].outputs[0]) if back.grads[i] is None else back.grads[i]
            for i in wanted
        ]
        blanks = [parameter(n.specs[0], n.name) for n in saved[1 - at]]
        held = (*saved[0], *blanks) if at == 0 else (*blanks, *saved[1])
        parameters = (*back.cotangents, *held, *body.inputs)
        branches.append(Body(parameters, Graph(grads), len(grads)))  # type: ignore[arg-type]
    node = make_node(
        cond,
        (pred, *gs, *residuals, *operands),
        {"then": branches[0], "orelse": branches[1]},
    )
    pattern = [operands[i] if i in wanted else None for i in range(len(operands))]
    return (None, *_placed(pattern, node.outputs))


def _blank(tensor: Tensor) -> Tensor:
    """What stands for a residual of the other branch."""
    blank: Tensor = FUNCTIONS["zeros"](tensor.shape, dtype=tensor.dtype.name)
    return blank


# scan and while_loop ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loop:
    """What the gradients of scan and while_loop share: the forward loop, in the terms of scan."""

    body: Body
    inputs: tuple[Tensor, ...]  # carries, items, captures
    carries: int
    items: int
    length: Size
    reverse: bool

    def parts(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        end = self.carries + self.items
        return values[: self.carries], values[self.carries : end], values[end:]


def scan_vjp(
    g: Any,
    y: Any,
    inputs: Sequence[Tensor],
    body: Body,
    carries: int,
    items: int,
    length: Size,
    reverse: bool = False,
    counted: bool = False,
) -> Cotangents:
    """The scan of the backward body, the other way round."""
    count = inputs[0] if counted else None
    loop = _Loop(body, tuple(inputs[counted:]), carries, items, length, reverse)
    back = _loop_backward(loop)
    attrs = {
        "body": back.forward, "carries": carries, "items": items, "length": length,
        "reverse": reverse, "counted": counted,
    }  # fmt: skip
    residuals: tuple[Tensor, ...] = ()
    if back.residuals:
        residuals = make_node(scan, tuple(inputs), attrs).outputs[body.results :]
    grads = _scan_back(loop, back, _tuple(g), residuals, count)
    return (None, *grads) if counted else grads


def while_vjp(
    g: Any,
    y: Any,
    inputs: Sequence[Tensor],
    test: Body,
    body: Body,
    states: int,
    limit: int | None = None,
) -> Cotangents:
    """A scan backwards over the iterates that were recorded, as many as there were."""
    if limit is None:
        raise DifferentiationError(
            "a while_loop is differentiated by recording its iterates, so it must be known how "
            "many there may be; give it max_iterations"
        )
    loop = _Loop(body, tuple(inputs), states, 0, limit, False)
    back = _loop_backward(loop)
    attrs = {"test": test, "body": back.forward, "states": states, "limit": limit}
    node = make_node(while_loop, tuple(inputs), attrs)
    residuals = node.outputs[1 + body.results :]
    return _scan_back(loop, back, _tuple(g)[1:], residuals, node.outputs[0])


def _loop_backward(loop: _Loop) -> Backward:
    carried, items, _ = loop.parts(loop.body.inputs)
    varying = (*carried, *items)
    back = backward_of(loop.body, varying=varying)
    # Items are at hand already; the backward loop reads them once more.
    mine = {node.outputs[0] for node in items}
    if not mine.intersection(back.residuals):
        return back
    kept = [(t, s) for t, s in zip(back.residuals, back.saved, strict=True) if t not in mine]
    again = {s.outputs[0]: t for t, s in zip(back.residuals, back.saved, strict=True) if t in mine}
    present = [x for x in back.grads if x is not None]
    grads = _substituted(present, again)
    return Backward(
        loop.body.extended([t for t, _ in kept]) if kept else loop.body,
        tuple(t for t, _ in kept),
        back.cotangents,
        tuple(s for _, s in kept),
        _placed(back.grads, grads),
    )


def _scan_back(
    loop: _Loop,
    back: Backward,
    gs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    count: Tensor | None,
) -> Cotangents:
    """Cotangents of a loop's operands, by a scan in the opposite direction.

    It carries the cotangents of the differentiable carries, and sums of those of the captures.
    """
    carried, items, captures = loop.parts(loop.body.inputs)
    g_carried, g_items, g_captures = loop.parts(back.grads)
    results = loop.body.outputs
    moved = [i for i, node in enumerate(carried) if differentiable(node.outputs[0])]
    summed = [i for i, x in enumerate(g_captures) if x is not None]
    streamed = [i for i, x in enumerate(g_items) if x is not None]
    g_moved = [gs[i] for i in moved]
    g_stacked = [
        c for c, t in zip(gs[loop.carries :], results[loop.carries :], strict=True)
        if differentiable(t)
    ]  # fmt: skip
    sums = [parameter(captures[i].specs[0], f"sum_{i}") for i in summed]
    outputs = [
        _zeros(carried[i].outputs[0]) if g_carried[i] is None else g_carried[i] for i in moved
    ]
    outputs += [s.outputs[0] + g_captures[i] for s, i in zip(sums, summed, strict=True)]
    outputs += [g_items[i] for i in streamed]
    graph = Graph([t for t in outputs if t is not None])
    _, xs, outer = loop.parts(loop.inputs)
    read = set(graph.nodes)
    rows = [(node, x) for node, x in zip(items, xs, strict=True) if node in read]
    held = [(node, x) for node, x in zip(captures, outer, strict=True) if node in read]
    parameters = (
        *back.cotangents[: len(moved)], *sums, *back.cotangents[len(moved) :], *back.saved,
        *(node for node, _ in (*rows, *held)),
    )  # fmt: skip
    operands = [
        *g_moved, *(_zeros(outer[i]) for i in summed), *g_stacked, *residuals,
        *(x for _, x in (*rows, *held)),
    ]  # fmt: skip
    node = make_node(
        scan,
        (*([] if count is None else [count]), *operands),
        {
            "body": Body(parameters, graph, len(outputs)), "carries": len(moved) + len(sums),
            "items": len(g_stacked) + len(residuals) + len(rows), "length": loop.length,
            "reverse": not loop.reverse, "counted": count is not None,
        },
    )  # fmt: skip
    found: list[Tensor | None] = [None] * len(loop.inputs)
    places = [
        *moved,
        *(loop.carries + loop.items + i for i in summed),
        *(loop.carries + i for i in streamed),
    ]
    for place, tensor in zip(places, node.outputs, strict=True):
        found[place] = tensor
    return tuple(found)


__all__ = ["Backward", "backward_of", "call_vjp", "cond_vjp", "scan_vjp", "while_vjp"]
