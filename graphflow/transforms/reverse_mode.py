"""Reverse mode: build the gradients of a graph as a graph.

Each op's vjp builds nodes, so gradients can be differentiated again. Contributions to a cotangent
are added in the build order of the tensor's consumers, so sums do not depend on the placement.
Gradient nodes count as built at the line of the node that they differentiate, and share its pin.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.process.gc_pause import without_collection
from graphflow.errors import (
    ArgumentError,
    DifferentiationError,
    DTypeError,
    GraphflowError,
    ShapeError,
)
from graphflow.ir.graph import Graph
from graphflow.ir.nodes.scopes import derivative_seed_scope
from graphflow.ir.op import (
    FUNCTIONS,
    Node,
    Tensor,
    as_tensor,
    derivative_scope,
    next_serial,
    user_location,
)
from graphflow.ir.spec import is_half, is_inexact, kind, show_shape
from graphflow.ops.base.composite import add_up, in_float32, round_to
from graphflow.ops.base.shape_rules import unbroadcast, zeros_like
from graphflow.ops.communication.collectives import groups_of


@checks_arguments(ArgumentError)
@without_collection
def gradients(
    y: Tensor | Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Any = None,
) -> list[Tensor]:
    """Build d(sum of y · grad_y) / dx for each x; zeros where y does not depend on x.

    Args:
        y: float tensor(s); without `grad_ys` a scalar, or an array that counts as summed. Complex
            ones need `grad_ys`.
        xs: float or complex tensors (variables, placeholders or anything computed). The gradient
            of a complex z is dy/dRe z + i·dy/dIm z: its direction of steepest ascent.
        grad_ys: cotangent(s) of `y` (tensors or arrays), of the same shapes; None means ones.

    Raises:
        DifferentiationError: y or an x is not float (or complex), or an op on the way has no
            gradient.
        ShapeError, DTypeError: a cotangent is of another shape or dtype.
    """
    ys: list[Any] = list(y) if isinstance(y, list | tuple) else [y]
    if not isinstance(xs, list | tuple):
        raise DifferentiationError(
            f"gradients at {user_location()}: give a list of tensors, gf.gradients(y, [x])"
        )
    for tensor in (*ys, *xs):
        _require_inexact(tensor)
    return pull_back(ys, _make_seeds(ys, grad_ys), xs, Graph(ys).nodes)


def pull_back(
    ys: Sequence[Tensor], seeds: Sequence[Tensor], xs: Sequence[Tensor], nodes: Sequence[Node]
) -> list[Tensor]:
    """Return the cotangents of `xs`, given those of `ys`, through nodes in build order."""
    cotangents = _Cotangents()
    for tensor, seed in zip(ys, seeds, strict=True):
        cotangents.add(tensor, seed)
    wanted = _nodes_leading_to(nodes, xs)
    results: dict[Tensor, Tensor] = {}
    targets = set(xs)
    groups = _groups_by_node(nodes)
    for node in reversed(nodes):
        for tensor in node.outputs:
            if tensor in targets:
                with derivative_scope(node):
                    results[tensor] = cotangents.total(tensor)
        flows = any(t.node in wanted for t in node.inputs)
        if node in groups:
            if flows and groups[node][0] is node:  # the first one: all consumers are done
                _propagate_group(groups[node], cotangents, wanted)
        elif flows and any(cotangents.has(t) for t in node.outputs):
            _propagate(node, cotangents, wanted)
    with derivative_seed_scope(ys[0].node) if ys else nullcontext():
        return [results[x] if x in results else zeros_like(x) for x in xs]


class _Cotangents:
    """Contributions to the cotangent of each tensor, in reverse build order of their consumers."""

    def __init__(self) -> None:
        self._parts: dict[Tensor, list[Tensor]] = {}

    def add(self, tensor: Tensor, part: Tensor) -> None:
        """Add a contribution to the cotangent of a tensor."""
        self._parts.setdefault(tensor, []).append(part)

    def has(self, tensor: Tensor) -> bool:
        """Return True if a tensor has a contribution."""
        return tensor in self._parts

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum, which replaces its parts. A sum of 16-bit floats is rounded once."""
        parts = self._parts.get(tensor)
        if parts is None:
            return zeros_like(tensor)
        whole = add_up(parts[::-1])
        whole = round_to(whole, tensor.dtype) if is_half(tensor.dtype) else whole
        self._parts[tensor] = [whole]
        return whole


def _propagate(node: Node, cotangents: _Cotangents, wanted: set[Node]) -> None:
    """Pass the cotangents of a node's outputs on to its inputs."""
    if node.op.vjp is None:
        raise DifferentiationError(
            f"{node.op.name} ({node.name!r} at {node.location}) has no gradient; "
            "wrap its input in gf.stop_gradient if none should flow"
        )
    with derivative_scope(node):
        gs = tuple(cotangents.total(t) for t in node.outputs)
        try:
            parts = input_cotangents(node, gs[0] if len(gs) == 1 else gs)
        except GraphflowError as error:
            raise type(error)(f"gradient of {node.name!r} at {node.location}: {error}") from error
        for tensor, part in zip(node.inputs, parts, strict=True):
            if part is not None and tensor.node in wanted:
                cotangents.add(tensor, _cast_cotangent(part, tensor))


def input_cotangents(node: Node, g: Any) -> Sequence[Tensor | None]:
    """Return the cotangents of a node's inputs, given `g`, those of its outputs.

    The vjp of an elementwise op may ignore broadcasting: sums over broadcast axes are added here.
    Cotangents of 16-bit inputs are float32 if the op computes in float32.
    """
    op = node.op
    assert op.vjp is not None
    since = next_serial()
    y, xs, wide = in_float32(node, g)
    parts: Sequence[Tensor | None] = op.vjp(wide, y, *xs, **node.attrs)
    if y is not node.outputs[0] and _reads_only_output(parts, y, xs, since):
        y, xs, wide = in_float32(node, g, again=False)  # computing y again would keep x alive
        parts = op.vjp(wide, y, *xs, **node.attrs)
    if len(parts) != len(xs):
        raise DifferentiationError(
            f"the vjp of {op.name} gave {len(parts)} cotangents for {len(xs)} inputs"
        )
    if op.elementwise:
        parts = [
            p if p is None else unbroadcast(p, x.shape) for p, x in zip(parts, xs, strict=True)
        ]
    return parts


def _reads_only_output(
    parts: Sequence[Tensor | None], y: Any, xs: Sequence[Tensor], since: int
) -> bool:
    """Return True if cotangents read an op's output y, but not its inputs xs."""
    nodes = nodes_built_since([part for part in parts if part is not None], since)
    if not isinstance(y, Tensor) or y.node not in nodes:
        return False
    inputs = {*xs}
    return not any(t in inputs for node in nodes if node is not y.node for t in node.inputs)


def nodes_built_since(outputs: Sequence[Tensor], since: int) -> list[Node]:
    """Return the nodes that outputs depend on and that were built after `since`, in order."""
    seen: set[Node] = set()
    stack = [t.node for t in outputs]
    while stack:
        node = stack.pop()
        if node.serial > since and node not in seen:
            seen.add(node)
            stack.extend(t.node for t in node.inputs)
    return sorted(seen, key=lambda node: node.serial)


def _groups_by_node(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Map each node of a complete group of collectives to the group, in build order."""
    return {
        node: sorted(group, key=lambda each: each.serial)
        for group in groups_of(nodes)
        for node in group
    }


def _propagate_group(group: Sequence[Node], cotangents: _Cotangents, wanted: set[Node]) -> None:
    """Pass the cotangents of a group of collectives on to their inputs.

    If at least two ranks have a cotangent, collectives exchange them (`Op.joint`).
    """
    reached = [node for node in group if cotangents.has(node.outputs[0])]
    ranked = sorted(group, key=lambda node: int(node.attrs["rank"]))
    joint, parts = ranked[0].op.joint, None
    if joint is not None and len(reached) > 1:
        gs = []
        for node in ranked:
            with derivative_scope(node):
                gs.append(cotangents.total(node.outputs[0]))
        with derivative_scope(ranked[0]):
            parts = joint(ranked, gs)
    if parts is None:
        for node in reversed(reached):
            _propagate(node, cotangents, wanted)
        return
    for tensor, part in zip(ranked[0].inputs, parts, strict=True):
        if tensor.node in wanted:
            cotangents.add(tensor, part)


def _cast_cotangent(part: Tensor, tensor: Tensor) -> Tensor:
    """Convert a cotangent to its tensor's dtype; that of a real tensor is a real part.

    A cotangent of a 16-bit tensor stays float32 until it is summed.
    """
    if part.dtype != tensor.dtype:
        if kind(tensor.dtype) != "complex":
            part = FUNCTIONS["real"](part)
        if not (is_half(tensor.dtype) and part.dtype == np.float32):
            part = FUNCTIONS["astype"](part, tensor.dtype)
    return part


def _nodes_leading_to(nodes: Sequence[Node], xs: Sequence[Tensor]) -> set[Node]:
    """Return the nodes through which gradients flow to xs, and the nodes of xs."""
    wanted = {x.node for x in xs}
    for node in nodes:
        if node not in wanted and any(
            t.node in wanted and is_inexact(t.dtype) for t in node.inputs
        ):
            wanted.add(node)
    return wanted


def _make_seeds(ys: Sequence[Tensor], given: Any) -> list[Tensor]:
    if given is None:
        given = [None] * len(ys)
    elif not isinstance(given, list | tuple):
        given = [given]
    if len(given) != len(ys):
        raise DifferentiationError(
            f"gradients at {user_location()}: {len(given)} cotangents for {len(ys)} outputs"
        )
    seeds = []
    for y, seed in zip(ys, given, strict=True):
        if seed is None and kind(y.dtype) == "complex":
            raise DifferentiationError(
                f"gradients at {user_location()}: {y.name!r} is {y.dtype}; give grad_ys, or "
                "differentiate a real number made of it (gf.real, gf.abs)"
            )
        with derivative_seed_scope(y.node):
            if seed is None:
                seed = FUNCTIONS["full_like"](y, 1)
            seed = as_tensor(seed, None if isinstance(seed, Tensor) else y.dtype)
        if seed.dtype != y.dtype:
            raise DTypeError(
                f"gradients at {user_location()}: cotangent {seed.dtype} for an output of "
                f"{y.dtype}; convert it with .astype('{y.dtype}')"
            )
        if seed.shape != y.shape:
            raise ShapeError(
                f"gradients at {user_location()}: cotangent {show_shape(seed.shape)} "
                f"for an output of shape {show_shape(y.shape)}"
            )
        seeds.append(seed)
    return seeds


def _require_inexact(tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise DifferentiationError(
            f"gradients at {user_location()}: {tensor!r} is not a tensor of the graph"
        )
    if not is_inexact(tensor.dtype):
        raise DifferentiationError(
            f"gradients at {user_location()}: {tensor.name!r} is {tensor.dtype}, which has no "
            "gradient; convert it with .astype('float32') first"
        )


FUNCTIONS["gradients"] = gradients  # vjps of control flow ops differentiate bodies
