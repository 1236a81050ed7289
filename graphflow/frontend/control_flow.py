"""Control flow: trace Python functions into bodies, and build the nodes that hold them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.pytree import flatten_values
from graphflow.frontend.tracing import TracedFunction, graph_body, trace
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import (
    Node,
    Op,
    Tensor,
    as_tensor,
    device,
    function,
    make_node,
    next_stream,
)
from graphflow.ir.spec import (
    Size,
    equate,
    mismatch_hint,
    normalize_shape,
    show_distinctly,
    show_shape,
)
from graphflow.ops.control_flow import control
from graphflow.ops.control_flow.numbered_call import numbered_call
from graphflow.ops.tensors.shape import reshape


@function
def call(fn: Callable[..., Any] | Graph, *args: Any, name: str | None = None) -> Any:
    """Build `fn(*args)` as one node, whose body holds the nodes that the function builds.

    Args:
        fn: a function of nests of tensors, or a Graph, whose placeholders are the arguments in the
            order in which they were made.

    Returns:
        The nest that the function returns; for a Graph, a tuple of its outputs.

    Raises:
        ArgumentError: fn is no function, or a graph gets another number of arguments than it has
            placeholders.
        VariableError: fn assigns variables.
        ShapeError: an argument does not have the shape of the graph's placeholder.
    """
    if isinstance(fn, Graph):
        return _call_graph(fn, args, name)
    require_function(fn, "fn")
    traced, tensors = _trace_call(fn, args)
    body = traced.body(traced.captures)
    return traced.rebuild(call_body(body, (*tensors, *traced.captures), name))


def _call_graph(graph: Graph, args: Sequence[Any], name: str | None) -> tuple[Tensor, ...]:
    body, captures = graph_body(graph)
    wanted = graph.placeholders
    if len(args) != len(wanted):
        raise ArgumentError(
            f"the graph has {len(wanted)} placeholders "
            f"({', '.join(graph.names[p] for p in wanted)}), and {len(args)} arguments are given"
        )
    tensors = [
        as_tensor(a, None if isinstance(a, Tensor) else p.specs[0].dtype)
        for a, p in zip(args, wanted, strict=True)
    ]
    return call_body(body, (*tensors, *captures), name)


def call_body(
    body: Body, operands: Sequence[Tensor], name: str | None, recompute: bool = False
) -> tuple[Tensor, ...]:
    """Build a `call` node of a body, with new random streams."""
    attrs: dict[str, Any] = {"body": _with_new_streams(body)}
    if recompute:
        attrs["recompute"] = True
    return _make_control_node(control.call, operands, attrs, name).outputs


def call_numbered(number: Tensor, fn: Callable[[], Any]) -> Any:
    """Build `fn()` as one node that draws the random numbers of a step of a given number.

    Args:
        number: int64, from 0 up to 2**48.
        fn: a function of no arguments, which may read any tensors from outside.
    """
    traced, _ = _trace_call(fn, ())
    attrs = {"body": traced.body(traced.captures)}
    operands = (number, *traced.captures)
    return traced.rebuild(_make_control_node(numbered_call, operands, attrs, None).outputs)


def _make_control_node(
    op: Op, operands: Sequence[Tensor], attrs: dict[str, Any], name: str | None
) -> Node:
    """Build a node that holds bodies, with the pin of their nodes if these have only one."""
    inner = (n for v in attrs.values() if isinstance(v, Body) for n in v.graph.walk())
    pins = {n.device for n in inner if n.op.name not in control.UNPLACED_OPS and n.device}
    if len(pins) != 1:
        return make_node(op, tuple(operands), attrs, name)
    (pin,) = pins
    with device(pin):
        return make_node(op, tuple(operands), attrs, name)


def _with_new_streams(body: Body) -> Body:
    """Give a body new random streams, so that each call of it draws other numbers."""
    if not any("stream" in node.attrs for node in body.graph.walk()):
        return body

    def restream(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        attrs = dict(node.attrs)
        if "stream" in attrs:
            attrs["stream"] = next_stream()
        for key, value in node.attrs.items():
            if isinstance(value, Body):
                attrs[key] = _with_new_streams(value)
        if all(attrs[key] is value for key, value in node.attrs.items()):
            return None
        return node.with_inputs(inputs, attrs).outputs

    return replace(body, graph=body.graph.rewrite(restream), base=None)


@function
def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    *args: Any,
    name: str | None = None,
) -> Any:
    """Build `true_fn(*args)` if `pred` is true, else `false_fn(*args)`; only one of them runs.

    Args:
        pred: one bool. A Python bool chooses while the graph is built.
        true_fn, false_fn: functions of nests of tensors that return the same nest, shapes, dtypes.

    Raises:
        ArgumentError: a branch is no function, or the branches return different nests.
        ShapeError, DTypeError: the predicate is not one bool, or the branches return different
            shapes or dtypes.
        VariableError: a branch assigns variables.
    """
    require_function(true_fn, "true_fn")
    require_function(false_fn, "false_fn")
    if isinstance(pred, bool | np.bool_):
        return (true_fn if pred else false_fn)(*args)
    then, tensors = _trace_call(true_fn, args)
    orelse, _ = _trace_call(false_fn, args)
    _require_same_nest(then, orelse)
    captures = merge_captures(then, orelse)
    node = _make_control_node(
        control.cond,
        (as_tensor(pred), *tensors, *captures),
        {"then": then.body(captures), "orelse": orelse.body(captures)},
        name,
    )
    return then.rebuild(node.outputs)


def _require_same_nest(then: TracedFunction, orelse: TracedFunction) -> None:
    here, there = (repr(t.rebuild(range(len(t.outputs)))) for t in (then, orelse))
    if here != there:
        raise ArgumentError(
            f"the branches return different nests: true_fn {here}, false_fn {there} (numbers stand "
            "for tensors); let both return the same"
        )


def merge_captures(*traced: TracedFunction) -> tuple[Tensor, ...]:
    captures = dict.fromkeys(t for each in traced for t in each.captures)
    return tuple(sorted(captures, key=lambda t: (t.node.serial, t.index)))


@function
def scan(
    body_fn: Callable[..., Any],
    init: Any,
    xs: Any = None,
    *,
    reverse: bool = False,
    length: Any = None,
    name: str | None = None,
) -> Any:
    """Build a loop over the first axis of `xs` that carries a state and stacks its outputs.

    Args:
        body_fn: (carry, x) -> (carry, y), all nests. The carry keeps its shapes and dtypes; y may
            be None. The function is traced once, and may read any tensors from outside.
        init: the first carry.
        xs: a nest of tensors of the same first size; None if there is only a `length` (then x is
            None).
        reverse: go from the last x to the first; the ys keep the order of xs.
        length: the number of iterations, if there are no xs.

    Returns:
        The last carry, and the ys, stacked along a new first axis.

    Raises:
        ArgumentError: body_fn is no function, or does not return a pair; xs and length are missing.
        ShapeError: the carry changes shape or dtype; the first sizes of xs differ.
        VariableError: the body assigns variables.
    """
    require_function(body_fn, "body_fn")
    carry, carry_of = flatten_values(init, "init")
    items, x_of = flatten_values(xs, "xs")
    size = _scan_length(items, length)
    specs = [t.spec for t in carry]
    specs += [t.spec.with_shape(t.shape[1:]) for t in items]

    def arguments(values: Sequence[Any]) -> tuple[Any, Any]:
        return carry_of(values[: len(carry)]), x_of(values[len(carry) :])

    traced = trace(_require_pair(body_fn), specs, arguments)
    _check_carry(init, traced, len(carry), "carry")
    body = traced.body(traced.captures)
    attrs = {
        "body": body, "carries": len(carry), "items": len(items), "length": size,
        "reverse": bool(reverse), "counted": False,
    }  # fmt: skip
    operands = (*carry, *_equate_lengths(items, size), *traced.captures)
    if not traced.outputs:
        raise ArgumentError("body_fn returns neither a carry nor a y: nothing is computed")
    outputs = _make_control_node(control.scan, operands, attrs, name).outputs
    return traced.rebuild(outputs)


def _require_pair(body_fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body_fn)
    def call_and_check(carry: Any, x: Any) -> Any:
        returned = body_fn(carry, x)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ArgumentError(
                f"body_fn returns a pair (carry, y), not {type(returned).__name__}; y may be None"
            )
        return returned

    return call_and_check


def _scan_length(items: Sequence[Tensor], length: Any) -> Size:
    for i, item in enumerate(items):
        if not item.shape:
            raise ShapeError(f"xs {i} is one number, {item.spec}: it has no first axis to scan")
    if length is None:
        if not items:
            raise ArgumentError("give xs, or length: the number of iterations")
        return items[0].shape[0]
    (size,) = normalize_shape((length,), "length")
    return size


def _equate_lengths(items: Sequence[Tensor], size: Size) -> list[Tensor]:
    """Equate the first sizes of the items to the length, and reshape items of another symbol."""
    same = []
    for i, item in enumerate(items):
        what = f"xs {i} has {show_shape(item.shape)}, and the length is {size}"
        if item.shape[0] != size:
            equate(item.shape[0], size, what)
            item = reshape(item, (size, *item.shape[1:]))
        same.append(item)
    return same


def _check_carry(init: Any, traced: TracedFunction, carries: int, what: str) -> None:
    """Require a carried value to keep its nest and its specs."""
    _, init_of = flatten_values(init, "init")
    numbered = traced.rebuild(range(len(traced.outputs)))
    carried = numbered[0] if what == "carry" else numbered
    if repr(carried) != repr(init_of(range(carries))):
        raise ArgumentError(
            f"the {what} begins as the nest {init_of(range(carries))!r} and comes back as "
            f"{carried!r} (numbers stand for tensors); return it as it came"
        )
    for i in range(carries):
        before, after = traced.inputs[i].specs[0], traced.outputs[i].spec
        if before != after:
            first, last = show_distinctly(before, after)
            raise ShapeError(
                f"{what} {i} begins as {first} and comes back as {last}; "
                f"{mismatch_hint(before, after)}"
            )


@function
def while_loop(
    cond_fn: Callable[[Any], Any],
    body_fn: Callable[[Any], Any],
    init: Any,
    max_iterations: int | None = None,
    name: str | None = None,
) -> Any:
    """Build a loop: `state = body_fn(state)` while `cond_fn(state)` is true.

    Args:
        cond_fn: state -> one bool.
        body_fn: state -> state, of the same nest, shapes and dtypes.
        init: the first state.
        max_iterations: the largest number of iterations. A loop with a gradient needs it, since it
            bounds the number of iterates to keep. Without it, only the session's deadline ends an
            infinite loop.

    Returns:
        The last state.

    Raises:
        ArgumentError: an argument is no function; the state comes back as another nest;
            max_iterations is not a positive int.
        ShapeError: the state changes shape or dtype; the condition is not one bool.
        VariableError: a function assigns variables.
    """
    require_function(cond_fn, "cond_fn")
    require_function(body_fn, "body_fn")
    if max_iterations is not None and (
        isinstance(max_iterations, bool)
        or not isinstance(max_iterations, int | np.integer)
        or max_iterations < 1
    ):
        raise ArgumentError(f"max_iterations is an int of at least 1, not {max_iterations!r}")
    state, state_of = flatten_values(init, "init")
    if not state:
        raise ArgumentError("init holds no tensor: a loop needs a state")
    specs = [t.spec for t in state]

    def arguments(values: Sequence[Any]) -> tuple[Any]:
        return (state_of(values),)

    test = trace(cond_fn, specs, arguments)
    body = trace(body_fn, specs, arguments)
    _check_carry(init, body, len(state), "state")
    captures = merge_captures(test, body)
    if len(test.outputs) != 1:
        raise ShapeError(f"cond_fn returns one bool, not {len(test.outputs)} tensors")
    limit = None if max_iterations is None else int(max_iterations)
    node = _make_control_node(
        control.while_loop,
        (*state, *captures),
        {
            "test": test.body(captures), "body": body.body(captures), "states": len(state),
            "limit": limit,
        },
        name,
    )  # fmt: skip
    return body.rebuild(node.outputs[1:])


def require_function(fn: Any, what: str) -> None:
    """Raise ArgumentError if `fn` is not callable."""
    if not callable(fn):
        raise ArgumentError(f"{what} is a function, not {fn!r}")


def _trace_call(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[TracedFunction, list[Tensor]]:
    tensors, arguments = flatten_values(tuple(args), "args")
    return trace(fn, [t.spec for t in tensors], arguments), tensors
