"""Reverse mode through loops: a scan in the opposite direction over residuals of the forward loop.

Captured tensors collect their cotangent over all iterations. If each iteration contributes a
product of matrices (as for the weights of a recurrent network), the factors are stacked and
multiplied once, after the loop. All other contributions are summed in the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import DifferentiationError
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import Body, Graph, substitute_tensors
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, make_node
from graphflow.ir.spec import Size
from graphflow.ops.base.composite import add_up, widen
from graphflow.ops.base.shape_rules import zeros_like
from graphflow.ops.control_flow.reverse_mode import (
    Backward,
    Cotangents,
    as_tuple,
    differentiate_body,
    fill_pattern,
    is_differentiable,
)


@dataclass(frozen=True)
class _ScanLoop:
    """A forward loop in the terms of scan, which the gradients of scan and while_loop share."""

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
    *inputs: Tensor,
    body: Body,
    carries: int,
    items: int,
    length: Size,
    reverse: bool = False,
    counted: bool = False,
) -> Cotangents:
    """Return the operands' cotangents from a scan of the backward body, run in reverse."""
    count = inputs[0] if counted else None
    loop = _ScanLoop(body, inputs[counted:], carries, items, length, reverse)
    back = _differentiate_loop_body(loop)
    attrs = {
        "body": back.forward, "carries": carries, "items": items, "length": length,
        "reverse": reverse, "counted": counted,
    }  # fmt: skip
    residuals: tuple[Tensor, ...] = ()
    if back.residuals:
        residuals = make_node(REGISTRY["scan"], inputs, attrs).outputs[body.results :]
    grads = _BackwardScan(loop, back, as_tuple(g), residuals, count).cotangents()
    return (None, *grads) if counted else grads


def while_vjp(
    g: Any,
    y: Any,
    *inputs: Tensor,
    test: Body,
    body: Body,
    states: int,
    limit: int | None = None,
) -> Cotangents:
    """Return the operands' cotangents from a backward scan over the recorded iterations."""
    if limit is None:
        raise DifferentiationError(
            "a while_loop without max_iterations has no gradient, since reverse mode records every "
            "iteration; give it max_iterations"
        )
    loop = _ScanLoop(body, inputs, states, 0, limit, False)
    back = _differentiate_loop_body(loop)
    attrs = {"test": test, "body": back.forward, "states": states, "limit": limit}
    node = make_node(REGISTRY["while_loop"], inputs, attrs)
    residuals = node.outputs[1 + body.results :]
    return _BackwardScan(loop, back, as_tuple(g)[1:], residuals, node.outputs[0]).cotangents()


def _differentiate_loop_body(loop: _ScanLoop) -> Backward:
    carried, items, _ = loop.parts(loop.body.inputs)
    varying = (*carried, *items)
    back = differentiate_body(loop.body, varying=varying)
    # The backward loop reads the items themselves, so they need not be recorded as residuals.
    mine = {node.outputs[0] for node in items}
    if not mine.intersection(back.residuals):
        return back
    kept = [(t, s) for t, s in zip(back.residuals, back.saved, strict=True) if t not in mine]
    again = {s.outputs[0]: t for t, s in zip(back.residuals, back.saved, strict=True) if t in mine}
    present = [x for x in back.grads if x is not None]
    grads = substitute_tensors(present, again)
    return Backward(
        loop.body.with_extra_results([t for t, _ in kept]) if kept else loop.body,
        tuple(t for t, _ in kept),
        back.cotangents,
        tuple(s for _, s in kept),
        fill_pattern(back.grads, grads),
    )


class _BackwardScan:
    """The backward scan of a loop.

    It carries the cotangents of differentiable carries and the sums of cotangents of captures. Row
    by row it reads cotangents, residuals and items, and it returns cotangents of items and the
    factors of matrix products.
    """

    def __init__(
        self,
        loop: _ScanLoop,
        back: Backward,
        gs: Sequence[Tensor],
        residuals: Sequence[Tensor],
        count: Tensor | None,
    ) -> None:
        self.loop, self.back, self.count = loop, back, count
        carried, self.items, self.captures = loop.parts(loop.body.inputs)
        self.g_carried, self.g_items, g_captures = loop.parts(back.grads)
        self.moved = [i for i, node in enumerate(carried) if is_differentiable(node.outputs[0])]
        self.g_moved = [gs[i] for i in self.moved]
        self.g_stacked = [
            c
            for c, t in zip(gs[loop.carries :], loop.body.outputs[loop.carries :], strict=True)
            if is_differentiable(t)
        ]
        self.residuals = residuals
        self.carried = carried
        given = {i: x for i, x in enumerate(g_captures) if x is not None}
        factors = {i: _matmul_factors(x) for i, x in given.items()}
        self.products = {i: found for i, found in factors.items() if found is not None}
        self.summed = {i: x for i, x in given.items() if i not in self.products}
        self.streamed = [i for i, x in enumerate(self.g_items) if x is not None]

    def cotangents(self) -> Cotangents:
        """Build the scan and return the cotangents of the loop's operands."""
        loop, back = self.loop, self.back
        _, xs, outer = loop.parts(loop.inputs)
        starts = {i: widen(zeros_like(outer[i])) for i in self.summed}
        sums = [make_parameter(zeros.spec, f"sum_{i}") for i, zeros in starts.items()]
        known = self._known_rows()
        stacked = [
            t
            for t in dict.fromkeys(t for pair in self.products.values() for t in pair[:2])
            if t not in known
        ]
        outputs = [*self._carry_outputs(sums), *(self.g_items[i] for i in self.streamed), *stacked]
        graph = Graph([t for t in outputs if t is not None])
        read = set(graph.nodes)
        rows = [(node, x) for node, x in zip(self.items, xs, strict=True) if node in read]
        held = [(node, x) for node, x in zip(self.captures, outer, strict=True) if node in read]
        first = len(self.moved)
        parameters = (
            *back.cotangents[:first], *sums, *back.cotangents[first:], *back.saved,
            *(node for node, _ in (*rows, *held)),
        )  # fmt: skip
        operands = [
            *self.g_moved, *starts.values(), *self.g_stacked,
            *self.residuals, *(x for _, x in (*rows, *held)),
        ]  # fmt: skip
        node = make_node(
            REGISTRY["scan"],
            (*([] if self.count is None else [self.count]), *operands),
            {
                "body": Body(parameters, graph, len(outputs)), "carries": first + len(sums),
                "items": len(self.g_stacked) + len(self.residuals) + len(rows),
                "length": loop.length, "reverse": not loop.reverse,
                "counted": self.count is not None,
            },
        )  # fmt: skip
        known.update(zip(stacked, node.outputs[len(outputs) - len(stacked) :], strict=True))
        return self._assign_cotangents(node, known)

    def _carry_outputs(self, sums: Sequence[Node]) -> list[Tensor]:
        moved = []
        for i in self.moved:
            found = self.g_carried[i]
            moved.append(zeros_like(self.carried[i].outputs[0]) if found is None else found)
        parts = zip(sums, self.summed.values(), strict=True)
        return moved + [add_up([s.outputs[0], x]) for s, x in parts]

    def _known_rows(self) -> dict[Tensor, Tensor]:
        """Map parameters that stand for rows to the stacked tensors that they are rows of."""
        _, xs, _ = self.loop.parts(self.loop.inputs)
        nodes = (*self.back.saved, *self.items, *self.back.cotangents[len(self.moved) :])
        stacks = (*self.residuals, *xs, *self.g_stacked)
        return {node.outputs[0]: stack for node, stack in zip(nodes, stacks, strict=True)}

    def _assign_cotangents(self, node: Node, stacks: dict[Tensor, Tensor]) -> Cotangents:
        loop = self.loop
        found: list[Tensor | None] = [None] * len(loop.inputs)
        places = [
            *self.moved,
            *(loop.carries + loop.items + i for i in self.summed),
            *(loop.carries + i for i in self.streamed),
        ]
        for place, tensor in zip(places, node.outputs, strict=False):
            found[place] = tensor
        for i, (a, b, transposed) in self.products.items():
            found[loop.carries + loop.items + i] = _sum_of_products(
                stacks[a], stacks[b], transposed
            )
        return tuple(found)


def _matmul_factors(x: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Return the matrices whose product x is, and whether the first is transposed; else None."""
    if x.node.op.name != "matmul" or any(t.ndim != 2 for t in x.node.inputs):
        return None
    if x.node.attrs.get("transpose_b"):
        return None
    a, b = x.node.inputs
    transposed = bool(x.node.attrs.get("transpose_a"))
    if a.node.op.name == "permute_dims":
        return a.node.inputs[0], b, not transposed
    return a, b, transposed


def _sum_of_products(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """Return the sum over t of a[t] @ b[t] (or a[t].T @ b[t]) as one product of matrices."""
    reshape, permute = FUNCTIONS["reshape"], FUNCTIONS["permute_dims"]
    inner = b.shape[0] * b.shape[1]
    if transposed:
        left = permute(reshape(a, (inner, a.shape[2])), (1, 0))
    else:
        left = reshape(permute(a, (1, 0, 2)), (a.shape[1], inner))
    product: Tensor = FUNCTIONS["matmul"](left, reshape(b, (inner, b.shape[2])))
    return product


__all__ = ["scan_vjp", "while_vjp"]
