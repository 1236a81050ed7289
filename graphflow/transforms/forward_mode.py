"""Forward mode: build the tangents of a graph's outputs as a graph.

An op's vjp gives its forward rule, too. For a dummy cotangent u, the vjp builds J^T u, which is
linear in u. Its own vjp with respect to u, with the tangents of the inputs as cotangents, is J t,
the tangent of the output. J t does not depend on u, and a graph is the closure of its outputs, so
the nodes of u drop out. Ops may declare a cheaper rule (`Op.jvp`).

Source: "A new trick for calculating Jacobian vector products", J. Townsend, 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from graphflow.errors import (
    ArgumentError,
    DifferentiationError,
    DTypeError,
    GraphflowError,
    ShapeError,
)
from graphflow.frontend.pytree import flatten_values
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import Graph, substitute_tensors
from graphflow.ir.nodes.scopes import derivative_seed_scope
from graphflow.ir.op import (
    FUNCTIONS,
    Node,
    Tensor,
    as_tensor,
    derivative_scope,
    function,
    next_serial,
)
from graphflow.ir.spec import is_half, is_inexact, kind, show_shape
from graphflow.ops.base.composite import in_float32, round_to
from graphflow.ops.base.shape_rules import zeros_like
from graphflow.transforms.reverse_mode import input_cotangents, nodes_built_since, pull_back

Tangents = dict[Tensor, Tensor]


@function
def jvp(target: Any, inputs: Any, tangents: Any) -> Any:
    """Compute the Jacobian-vector product: the derivative of tensors along a direction.

    `gf.jvp(y, [x], [t])` returns the tangent of y (a tensor or a nest of them): the sum over the
    inputs of Jacobian times tangent. `gf.jvp(f, (x,), (t,))` calls the function and returns
    (f(x), its tangent). A direction costs about as much as computing the outputs once more, as an
    output does for `gradients`. Outputs that do not depend on the inputs, and outputs of ints and
    bools, have tangents of zeros.

    Args:
        target: tensors, or a function of `inputs`.
        inputs: a list of tensors of the graph; for a function its arguments, each a tensor, an
            array, or a nest.
        tangents: tensors or arrays of the shapes and dtypes of the inputs, in their structure; None
            for an input that does not change.

    Raises:
        DifferentiationError: an input with a tangent is not float or complex, or an op between
            inputs and outputs has no gradient.
        ShapeError, DTypeError: a tangent has another shape or dtype than its input.
        ArgumentError: the numbers of tangents and inputs differ.
    """
    if not isinstance(inputs, list | tuple):
        raise ArgumentError("give lists: gf.jvp(y, [x], [t])")
    if callable(target) and not isinstance(target, Tensor):
        return _jvp_of_function(target, inputs, tangents)
    for x in inputs:
        if not isinstance(x, Tensor):
            raise DifferentiationError(f"{x!r} is not a tensor of the graph")
    outputs, rebuild = flatten_values(target, "the outputs")
    with derivative_seed_scope(outputs[0].node) if outputs else nullcontext():
        given = _collect_directions(list(inputs), _match_tangents(list(inputs), tangents, "inputs"))
    return rebuild(push_forward(outputs, given))


def _jvp_of_function(target: Callable[..., Any], inputs: Sequence[Any], tangents: Any) -> Any:
    """Return the value and the tangent of a function.

    The function is called on parameters first. So a tensor that is given twice counts as two
    inputs, and tensors that the function reads from outside do not count as dependent.
    """
    values, rebuild = flatten_values(tuple(inputs), "the inputs")
    flat = [t for x, t in zip(inputs, _match_tangents(inputs, tangents, "inputs"), strict=True)
            for t in flat_tangents(x, t)]  # fmt: skip
    stand_ins = [make_parameter(x.spec, x.name).outputs[0] for x in values]
    outputs, nest = flatten_values(target(*rebuild(stand_ins)), "what the function returns")
    found = push_forward(outputs, _collect_directions(stand_ins, flat))
    results = substitute_tensors([*outputs, *found], dict(zip(stand_ins, values, strict=True)))
    return nest(results[: len(outputs)]), nest(results[len(outputs) :])


def _match_tangents(
    inputs: Sequence[Any], tangents: Any, what: str, word: str = "tangents"
) -> list[Any]:
    if not isinstance(tangents, list | tuple) or len(tangents) != len(inputs):
        count = len(tangents) if isinstance(tangents, list | tuple) else repr(tangents)
        raise ArgumentError(f"as many {word} as {what} are needed: {len(inputs)}, not {count}")
    return list(tangents)


def flat_tangents(
    x: Any, tangent: Any, word: str = "tangents", what: str = "parts of an input"
) -> list[Any]:
    """Flatten the tangents of a nest to one for each of its tensors."""
    if tangent is None:
        return [None] * len(flatten_values(x, "the inputs")[0])
    if isinstance(x, dict):
        if not isinstance(tangent, dict) or x.keys() != tangent.keys():
            raise ArgumentError(f"the {word} of a dict are a dict of the same keys")
        return [t for key in x for t in flat_tangents(x[key], tangent[key], word, what)]
    if isinstance(x, list | tuple):
        parts = _match_tangents(x, tangent, what, word)
        return [t for a, b in zip(x, parts, strict=True) for t in flat_tangents(a, b, word, what)]
    return [tangent] if x is not None else []


def _collect_directions(inputs: Sequence[Tensor], tangents: Sequence[Any]) -> Tangents:
    """Check tangents, and return them by input; those of an input given twice are added."""
    given: Tangents = {}
    for x, tangent in zip(inputs, tangents, strict=True):
        if tangent is None:
            continue
        if not is_inexact(x.dtype):
            raise DifferentiationError(
                f"{x.name!r} is {x.dtype}, which has no tangent; give None for it, or convert it "
                "with .astype('float32') first"
            )
        tangent = as_tensor(tangent, None if isinstance(tangent, Tensor) else x.dtype)
        if tangent.dtype != x.dtype:
            raise DTypeError(
                f"tangent {tangent.dtype} for {x.name!r} of {x.dtype}; convert it with "
                f".astype('{x.dtype}')"
            )
        if tangent.shape != x.shape:
            raise ShapeError(
                f"tangent {show_shape(tangent.shape)} for {x.name!r} of shape {show_shape(x.shape)}"
            )
        given[x] = given[x] + tangent if x in given else tangent
    return given


# Propagation -----------------------------------------------------------------------------------


def push_forward(outputs: Sequence[Tensor], given: Tangents) -> list[Tensor]:
    """Return the tangents of outputs, given those of some tensors that they depend on."""
    tangents: Tangents = dict(given)
    found = push_through(Graph(outputs).nodes if outputs else (), tangents)
    return [found[y] if y in found else _zero_tangent(y) for y in outputs]


def _zero_tangent(y: Tensor) -> Tensor:
    with derivative_seed_scope(y.node):
        return zeros_like(y)


def push_through(nodes: Sequence[Node], tangents: Tangents) -> Tangents:
    """Propagate tangents through nodes in build order; add to `tangents`, and return it."""
    for node in nodes:
        if not any(t in tangents for t in node.inputs):
            continue
        if not any(is_inexact(s.dtype) for s in node.specs):
            continue
        with derivative_scope(node, "tangents/"):
            results = _node_tangents(node, [tangents.get(t) for t in node.inputs])
        for tensor, tangent in zip(node.outputs, results, strict=True):
            if tangent is not None and is_inexact(tensor.dtype):
                # an input that depends on another one has the sum of both tangents
                before = tangents.get(tensor)
                tangents[tensor] = tangent if before is None else before + tangent
    return tangents


def _node_tangents(node: Node, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the tangents of a node's outputs, None where they are zero."""
    op = node.op
    if op.jvp is None and op.vjp is None:
        raise DifferentiationError(
            f"{op.name} ({node.name!r} at {node.location}) has no gradient; "
            "wrap its input in gf.stop_gradient if none should flow"
        )
    y, xs, tangents = in_float32(node, tangents)
    try:
        found: Any = NotImplemented
        if op.jvp is not None:
            found = op.jvp(tangents, y, *xs, **node.attrs)
        results: Sequence[Tensor | None]
        if found is not NotImplemented:
            results = [found] if len(node.outputs) == 1 else found
        elif _is_diagonal(node, tangents):
            results = [_diagonal_tangent(node, tangents)]
        else:
            results = _double_transpose(node, tangents)
    except GraphflowError as error:
        raise type(error)(f"tangent of {node.name!r} at {node.location}: {error}") from error
    specs = node.specs
    return [
        round_to(t, s.dtype) if is_half(s.dtype) else t for t, s in zip(results, specs, strict=True)
    ]


def _is_diagonal(node: Node, tangents: Sequence[Tensor | None]) -> bool:
    """Return True if the Jacobian of each varying input is diagonal and real, thus symmetric."""
    return (
        node.op.elementwise
        and len(node.outputs) == 1
        and kind(node.specs[0].dtype) == "float"
        and all(
            t is None or x.spec == node.specs[0] for x, t in zip(node.inputs, tangents, strict=True)
        )
    )


def _diagonal_tangent(node: Node, tangents: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for i, tangent in enumerate(tangents):
        if tangent is not None:
            part = input_cotangents(node, tangent)[i]
            if part is not None:
                total = part if total is None else total + part
    return total


def _double_transpose(node: Node, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    since = next_serial()
    # ones, since a vjp may leave out products with constant zeros
    dummies = [
        FUNCTIONS["full_like"](t, t.dtype.type(is_inexact(t.dtype)).item()) for t in node.outputs
    ]
    u: Any = dummies[0] if len(dummies) == 1 else tuple(dummies)
    parts = input_cotangents(node, u)
    pairs = [
        (part, tangent)
        for part, tangent in zip(parts, tangents, strict=True)
        if part is not None and tangent is not None
    ]
    if not pairs:
        return [None] * len(dummies)
    varying = [d for d in dummies if is_inexact(d.dtype)]
    ys = [part for part, _ in pairs]
    found = pull_back(ys, [t for _, t in pairs], varying, nodes_built_since(ys, since))
    results = iter(found)
    return [next(results) if is_inexact(d.dtype) else None for d in dummies]


__all__ = ["flat_tangents", "jvp"]
