"""Reverse mode through bodies: a forward body that also returns residuals, and a backward body.

The gradient of a body is built by `gradients` inside it. The resulting graph is cut where forward
values flow into nodes that depend on cotangents. The forward body returns these values as further
results (residuals, which loops stack), unless they are cheap to recompute. The node that computes
the residuals stands beside the original one, and `passes.MergeBodies` merges the two.

Source: the partial evaluation view of reverse mode, Radul et al., "You only linearize once",
POPL 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import Body, Graph, bodies, substitute_tensors
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, make_node
from graphflow.ir.spec import is_inexact
from graphflow.ops.base.shape_rules import zeros_like

Cotangents = tuple[Tensor | None, ...]


def is_differentiable(tensor: Tensor) -> bool:
    """Return True if cotangents flow to the tensor."""
    return is_inexact(tensor.dtype)


@dataclass(frozen=True)
class Backward:
    """The gradient of a body.

    Attributes:
        forward: the body, with the residuals as further results.
        residuals: those results.
        cotangents: parameters that stand for the cotangents of the differentiable results.
        saved: parameters that stand for the residuals.
        grads: the cotangent of each parameter of the body, in terms of `cotangents`, `saved` and
            the body's own parameters; None where no cotangent flows.
    """

    forward: Body
    residuals: tuple[Tensor, ...]
    cotangents: tuple[Node, ...]
    saved: tuple[Node, ...]
    grads: tuple[Tensor | None, ...]


def differentiate_body(
    body: Body,
    varying: Sequence[Node] | None = None,
    recompute: bool = False,
) -> Backward:
    """Differentiate a body's results with respect to its parameters.

    Args:
        varying: parameters that differ between iterations. They become residuals, too, and values
            that depend on none of them are recomputed. Default: none, and every computed value is
            kept.
        recompute: keep no residuals; the backward body computes the forward values again.
    """
    ys = [t for t in body.outputs if is_differentiable(t)]
    cotangents = tuple(make_parameter(t.spec, f"g_{i}") for i, t in enumerate(ys))
    xs = [node.outputs[0] for node in body.inputs if is_differentiable(node.outputs[0])]
    found: list[Tensor] = []
    if ys and xs:
        found = FUNCTIONS["gradients"](ys, xs, [node.outputs[0] for node in cotangents])
    flowing = _dependent_nodes(found, cotangents)
    grads = {
        x.node: g for x, g in zip(xs, found, strict=bool(found)) if g.node in flowing
    }  # a gradient that reads no cotangent is 0
    cut = _ResidualSelector(body, flowing, varying, recompute)
    residuals = cut.residuals(list(grads.values()))
    saved = tuple(make_parameter(t.spec, f"saved_{i}") for i, t in enumerate(residuals))
    rewritten = substitute_tensors(
        list(grads.values()), dict(zip(residuals, (n.outputs[0] for n in saved), strict=True))
    )
    by_node = dict(zip(grads, rewritten, strict=True))
    return Backward(
        body.with_extra_results(residuals) if residuals else body,
        tuple(residuals),
        cotangents,
        saved,
        tuple(by_node.get(node) for node in body.inputs),
    )


def _dependent_nodes(outputs: Sequence[Tensor], sources: Sequence[Node]) -> set[Node]:
    """Return the nodes that depend on any of the sources."""
    reached = set(sources)
    for node in Graph(outputs).nodes if outputs else ():
        if any(t.node in reached for t in node.inputs):
            reached.add(node)
    return reached


class _ResidualSelector:
    """Decides which forward values a gradient keeps as residuals and which it recomputes."""

    def __init__(
        self, body: Body, flowing: set[Node], varying: Sequence[Node] | None, recompute: bool
    ) -> None:
        self._base = set(body.graph.nodes)
        self._flowing = flowing
        self._parameters = set(body.inputs)
        self._varying = set(varying or ())
        self._loop = varying is not None
        self._moving = _dependent_nodes(body.graph.outputs, varying) if varying else set()
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
        if bodies(node):
            return True  # also one built by the gradient: the forward part of an inner gradient
        if node not in self._base:
            return False
        if self._loop and node not in self._moving and not node.op.random:
            return False  # the same in each iteration: stacking it would waste memory
        return bool(node.inputs) or node.op.random


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """Return one tensor or several as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


# call -------------------------------------------------------------------------------------------


def call_vjp(g: Any, y: Any, *inputs: Tensor, body: Body, recompute: bool = False) -> Cotangents:
    """Return the operands' cotangents from one call of the backward body."""
    if body.rule is not None:
        return tuple(body.rule(g, y, *inputs))
    gs = [c for c, t in zip(as_tuple(g), body.outputs, strict=True) if is_differentiable(t)]
    back = differentiate_body(body, recompute=recompute)
    residuals: tuple[Tensor, ...] = ()
    if back.residuals:
        attrs = {"body": back.forward}
        residuals = make_node(REGISTRY["call"], inputs, attrs).outputs[body.results :]
    wanted = [x for x in back.grads if x is not None]
    if not wanted:
        return (None,) * len(inputs)
    parameters = (*back.cotangents, *back.saved, *body.inputs)
    node = make_node(
        REGISTRY["call"],
        (*gs, *residuals, *inputs),
        {"body": Body(parameters, Graph(wanted), len(wanted))},
    )
    return fill_pattern(back.grads, node.outputs)


def call_jvp(
    tangents: Sequence[Tensor | None], y: Any, *inputs: Tensor, body: Body, recompute: bool = False
) -> Any:
    """Return the tangents of the results by the user's rule; NotImplemented if there is none."""
    if body.tangent_rule is None:
        return NotImplemented
    found = body.tangent_rule(tangents, y, *inputs)
    return found if isinstance(y, tuple) else found[0]


def fill_pattern(pattern: Sequence[Tensor | None], values: Sequence[Tensor]) -> Cotangents:
    """Put values into the positions where the pattern is not None."""
    rest = iter(values)
    return tuple(None if x is None else next(rest) for x in pattern)


# cond -------------------------------------------------------------------------------------------


def cond_vjp(g: Any, y: Any, *inputs: Tensor, then: Body, orelse: Body) -> Cotangents:
    """Return the operands' cotangents from a cond of the backward bodies of both branches.

    Each backward branch takes the residuals of its own forward branch.
    """
    pred, operands = inputs[0], inputs[1:]
    gs = [c for c, t in zip(as_tuple(g), then.outputs, strict=True) if is_differentiable(t)]
    backs = [differentiate_body(then), differentiate_body(orelse)]
    wanted = [i for i in range(len(operands)) if any(b.grads[i] is not None for b in backs)]
    if not wanted:
        return (None,) * len(inputs)
    first, second = (list(b.residuals) for b in backs)
    residuals: tuple[Tensor, ...] = ()
    if first or second:
        attrs = {
            "then": then.with_extra_results([*first, *map(_zero_residual, second)]),
            "orelse": orelse.with_extra_results([*map(_zero_residual, first), *second]),
        }
        residuals = make_node(REGISTRY["cond"], inputs, attrs).outputs[then.results :]
    saved = (backs[0].saved, backs[1].saved)
    branches = []
    for at, (back, body) in enumerate(zip(backs, (then, orelse), strict=True)):
        grads = [
            zeros_like(body.inputs[i].outputs[0]) if back.grads[i] is None else back.grads[i]
            for i in wanted
        ]
        blanks = [make_parameter(n.specs[0], n.name) for n in saved[1 - at]]
        held = (*saved[0], *blanks) if at == 0 else (*blanks, *saved[1])
        parameters = (*back.cotangents, *held, *body.inputs)
        branches.append(Body(parameters, Graph(grads), len(grads)))  # type: ignore[arg-type]
    node = make_node(
        REGISTRY["cond"],
        (pred, *gs, *residuals, *operands),
        {"then": branches[0], "orelse": branches[1]},
    )
    pattern = [operands[i] if i in wanted else None for i in range(len(operands))]
    return (None, *fill_pattern(pattern, node.outputs))


def _zero_residual(tensor: Tensor) -> Tensor:
    """Return zeros in place of a residual of the other branch."""
    blank: Tensor = FUNCTIONS["zeros"](tensor.shape, dtype=tensor.dtype.name)
    return blank


__all__ = [
    "Backward", "Cotangents", "as_tuple", "call_jvp", "call_vjp", "cond_vjp",
    "differentiate_body", "fill_pattern", "is_differentiable",
]  # fmt: skip
