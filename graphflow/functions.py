"""Functions as parts of a graph: control flow, and functions that are traced once.

`gf.call`, `gf.cond`, `gf.scan` and `gf.while_loop` trace Python functions into bodies and make the
node that holds them; `gf.function`, `gf.checkpoint` and `gf.custom_vjp` wrap a function so that
calling it makes a `call`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DifferentiationError, ShapeError
from graphflow.graph import Body, Graph
from graphflow.op import (
    Node,
    Op,
    Tensor,
    as_tensor,
    device,
    function,
    located,
    make_node,
    next_stream,
    user_location,
)
from graphflow.ops import control
from graphflow.spec import Size, TensorSpec, equate, normalize_shape, show_shape
from graphflow.structure import Rebuild, flatten_values
from graphflow.tracing import Traced, graph_body, trace

# Control flow -----------------------------------------------------------------------------------


@function
def call(fn: Callable[..., Any] | Graph, *args: Any, name: str | None = None) -> Any:
    """`fn(*args)` as one node that holds what the function builds.

    Args:
        fn: a function of nests of tensors, or a Graph, whose placeholders are the arguments in the
            order in which they were made.

    Returns:
        What the function returns; of a Graph, a tuple of its outputs.

    Raises:
        ArgumentError: no function; as many arguments as a graph has placeholders are needed.
        VariableError: it assigns variables.
        ShapeError: an argument of a graph is not what its placeholder takes.
    """
    if isinstance(fn, Graph):
        return _call_graph(fn, args, name)
    _require_function(fn, "fn")
    traced, tensors = _traced(fn, args)
    body = traced.body(traced.captures)
    return traced.rebuild(_call(body, (*tensors, *traced.captures), name))


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
    return _call(body, (*tensors, *captures), name)


def _call(
    body: Body, operands: Sequence[Tensor], name: str | None, recompute: bool = False
) -> tuple[Tensor, ...]:
    attrs: dict[str, Any] = {"body": _drawing_anew(body)}
    if recompute:
        attrs["recompute"] = True
    return _node(control.call, operands, attrs, name).outputs


def _node(op: Op, operands: Sequence[Tensor], attrs: dict[str, Any], name: str | None) -> Node:
    """A node that holds bodies; where all that is pinned in them has one pin, it has it, too."""
    inner = (n for v in attrs.values() if isinstance(v, Body) for n in v.graph.walk())
    pins = {n.device for n in inner if n.op.name not in control.FREE and n.device}
    if len(pins) != 1:
        return make_node(op, tuple(operands), attrs, name)
    (pin,) = pins
    with device(pin):
        return make_node(op, tuple(operands), attrs, name)


def _drawing_anew(body: Body) -> Body:
    """The body with random streams of its own, so that each call draws other numbers."""
    if not any("stream" in node.attrs for node in body.graph.walk()):
        return body

    def restream(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        attrs = dict(node.attrs)
        if "stream" in attrs:
            attrs["stream"] = next_stream()
        for key, value in node.attrs.items():
            if isinstance(value, Body):
                attrs[key] = _drawing_anew(value)
        if all(attrs[key] is value for key, value in node.attrs.items()):
            return None
        return node.with_inputs(inputs, attrs).outputs

    return Body(body.inputs, body.graph.rewrite(restream), body.results, None, body.rule)


@function
def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    *args: Any,
    name: str | None = None,
) -> Any:
    """`true_fn(*args)` where `pred` holds, else `false_fn(*args)`; only one of them runs.

    Args:
        pred: one bool. A Python bool chooses now, and nothing is decided when the graph runs.
        true_fn, false_fn: functions of nests of tensors that return the same nest, shapes, dtypes.

    Raises:
        ArgumentError: no functions, or they return nests of different structure.
        ShapeError, DTypeError: the predicate is not one bool; the branches differ.
        VariableError: a branch assigns variables.
    """
    _require_function(true_fn, "true_fn")
    _require_function(false_fn, "false_fn")
    if isinstance(pred, bool | np.bool_):
        return (true_fn if pred else false_fn)(*args)
    then, tensors = _traced(true_fn, args)
    orelse, _ = _traced(false_fn, args)
    _require_same_nest(then, orelse)
    captures = _united(then, orelse)
    node = _node(
        control.cond,
        (as_tensor(pred), *tensors, *captures),
        {"then": then.body(captures), "orelse": orelse.body(captures)},
        name,
    )
    return then.rebuild(node.outputs)


def _require_same_nest(then: Traced, orelse: Traced) -> None:
    here, there = (repr(t.rebuild(range(len(t.outputs)))) for t in (then, orelse))
    if here != there:
        raise ArgumentError(
            f"the branches return different nests: true_fn {here}, false_fn {there} (numbers stand "
            "for tensors); let both return the same"
        )


def _united(*traced: Traced) -> tuple[Tensor, ...]:
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
    """A loop over the first axis of `xs` that carries a state and stacks what it makes.

    Args:
        body_fn: (carry, x) -> (carry, y): nests; the carry keeps its shapes and dtypes; y may be
            None. It is traced once. What it reads from outside may be any tensor.
        init: the first carry.
        xs: a nest of tensors of the same first size; None if only `length` counts (x is None then).
        reverse: from the last x to the first; the ys keep their places.
        length: the number of iterations, if there are no xs.

    Returns:
        The last carry, and the ys, each with a first axis of that length.

    Raises:
        ArgumentError: body_fn is no function, or does not return a pair; neither xs nor length.
        ShapeError: the carry changes; the first sizes of xs differ.
        VariableError: the body assigns variables.
    """
    _require_function(body_fn, "body_fn")
    carry, carry_of = flatten_values(init, "init")
    items, x_of = flatten_values(xs, "xs")
    size = _length(items, length)
    specs = [t.spec for t in carry]
    specs += [t.spec.with_shape(t.shape[1:]) for t in items]

    def arguments(values: Sequence[Any]) -> tuple[Any, Any]:
        return carry_of(values[: len(carry)]), x_of(values[len(carry) :])

    traced = trace(_returning_a_pair(body_fn), specs, arguments)
    _check_carry(init, traced, len(carry), "carry")
    body = traced.body(traced.captures)
    attrs = {
        "body": body, "carries": len(carry), "items": len(items), "length": size,
        "reverse": bool(reverse), "counted": False,
    }  # fmt: skip
    operands = (*carry, *_same_length(items, size), *traced.captures)
    if not traced.outputs:
        raise ArgumentError("body_fn returns neither a carry nor a y: nothing is computed")
    outputs = _node(control.scan, operands, attrs, name).outputs
    return traced.rebuild(outputs)


def _returning_a_pair(body_fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body_fn)
    def checked(carry: Any, x: Any) -> Any:
        returned = body_fn(carry, x)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ArgumentError(
                f"body_fn returns a pair (carry, y), not {type(returned).__name__}; y may be None"
            )
        return returned

    return checked


def _length(items: Sequence[Tensor], length: Any) -> Size:
    for i, item in enumerate(items):
        if not item.shape:
            raise ShapeError(f"xs {i} is one number, {item.spec}: it has no first axis to scan")
    if length is None:
        if not items:
            raise ArgumentError("give xs, or length: the number of iterations")
        return items[0].shape[0]
    (size,) = normalize_shape((length,), "length")
    return size


def _same_length(items: Sequence[Tensor], size: Size) -> list[Tensor]:
    """The items, their first sizes equated to the length."""
    same = []
    for i, item in enumerate(items):
        what = f"xs {i} has {show_shape(item.shape)}, and the length is {size}"
        if item.shape[0] != size:
            equate(item.shape[0], size, what)
            item = _reshaped(item, (size, *item.shape[1:]))
        same.append(item)
    return same


def _reshaped(tensor: Tensor, shape: Sequence[Size]) -> Tensor:
    """A tensor whose size is known by another name."""
    from graphflow.ops.shape import reshape

    result: Tensor = reshape(tensor, tuple(shape))
    return result


def _check_carry(init: Any, traced: Traced, carries: int, what: str) -> None:
    """The nest and the specs of what is carried stay the same."""
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
            raise ShapeError(
                f"{what} {i} begins as {before} and comes back as {after}; give an initial value "
                "of that shape and dtype, or convert what is returned"
            )


@function
def while_loop(
    cond_fn: Callable[[Any], Any],
    body_fn: Callable[[Any], Any],
    init: Any,
    max_iterations: int | None = None,
    name: str | None = None,
) -> Any:
    """`state = body_fn(state)` while `cond_fn(state)` holds.

    Args:
        cond_fn: state -> one bool.
        body_fn: state -> state, of the same nest, shapes and dtypes.
        init: the first state.
        max_iterations: the loop ends after so many, if it has not before. A loop with a gradient
            needs it: it says how many iterates may have to be kept. Without it, a loop that does
            not end is ended by the session's deadline.

    Returns:
        The last state.

    Raises:
        ArgumentError: no functions; the state comes back as another nest; a bad max_iterations.
        ShapeError: the state changes shape or dtype; the condition is not one bool.
        VariableError: a function assigns variables.
    """
    _require_function(cond_fn, "cond_fn")
    _require_function(body_fn, "body_fn")
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
    captures = _united(test, body)
    if len(test.outputs) != 1:
        raise ShapeError(f"cond_fn returns one bool, not {len(test.outputs)} tensors")
    limit = None if max_iterations is None else int(max_iterations)
    node = _node(
        control.while_loop,
        (*state, *captures),
        {
            "test": test.body(captures), "body": body.body(captures), "states": len(state),
            "limit": limit,
        },
        name,
    )  # fmt: skip
    return body.rebuild(node.outputs[1:])


def _require_function(fn: Any, what: str) -> None:
    if not callable(fn):
        raise ArgumentError(f"{what} is a function, not {fn!r}")


def _traced(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Traced, list[Tensor]]:
    tensors, arguments = flatten_values(tuple(args), "args")
    return trace(fn, [t.spec for t in tensors], arguments), tensors


# Functions that are traced once -----------------------------------------------------------------


class Function:
    """A Python function that is traced once for each signature; each call makes one node.

    A signature is the nest of the arguments, the specs of the tensors in it, and the values of
    whatever else is in it (which must be hashable).

    Attributes:
        traces: how many signatures there were.
    """

    def __init__(self, fn: Callable[..., Any], recompute: bool = False, rule: Any = None) -> None:
        with located("function"):
            _require_function(fn, "fn")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._recompute = recompute
        self._rule = rule
        self._known: dict[Any, tuple[Body, tuple[Tensor, ...], Rebuild]] = {}

    @property
    def traces(self) -> int:
        return len(self._known)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self._fn, "__name__", "function")
        try:
            tensors, static, fill = _separated((args, kwargs))
        except TypeError as error:
            raise ArgumentError(
                f"{name} at {user_location()}: an argument that is no tensor must be hashable, for "
                f"it is part of the signature: {error}"
            ) from None
        key = (static, tuple(t.spec for t in tensors))
        if key not in self._known:
            self._known[key] = self._trace(tensors, fill)
        body, captures, rebuild = self._known[key]
        return rebuild(_call(body, (*tensors, *captures), name, self._recompute))

    def _trace(
        self, tensors: Sequence[Tensor], fill: Rebuild
    ) -> tuple[Body, tuple[Tensor, ...], Rebuild]:
        def function_of(*values: Tensor) -> Any:
            args, kwargs = fill(values)
            return self._fn(*args, **kwargs)

        function_of.__name__ = getattr(self._fn, "__name__", "function")
        traced = trace(function_of, [t.spec for t in tensors], tuple)
        body = traced.body(traced.captures)
        if self._rule is not None:
            rule = _given_rule(self._rule, traced, len(tensors), function_of.__name__)
            body = Body(body.inputs, body.graph, body.results, None, rule)
        return body, traced.captures, traced.rebuild

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method, it is bound like any function."""
        return self if instance is None else functools.partial(self, instance)


def _separated(nest: Any) -> tuple[list[Tensor], Any, Rebuild]:
    """The tensors of a nest (arrays become constants), the rest as a hashable key, and the way
    back."""
    if isinstance(nest, Tensor | np.ndarray):
        return [as_tensor(nest)], "tensor", lambda values: values[0]
    if isinstance(nest, dict):
        keys = tuple(nest)
        tensors, static, fill = _separated(tuple(nest.values()))
        return (
            tensors,
            (dict, keys, static),
            lambda values: dict(zip(keys, fill(values), strict=True)),
        )
    if isinstance(nest, list | tuple):
        parts = [_separated(item) for item in nest]
        make: Any = getattr(type(nest), "_make", type(nest))

        def fill(values: Sequence[Any]) -> Any:
            rest = iter(values)
            return make([f([next(rest) for _ in ts]) for ts, _, f in parts])

        flat = [t for ts, _, _ in parts for t in ts]
        return flat, (type(nest), tuple(s for _, s, _ in parts)), fill
    hash(nest)
    return [], (type(nest), nest), lambda values: nest


def _given_rule(vjp: Callable[..., Any], traced: Traced, count: int, name: str) -> Any:
    """The user's (g, y, *args) -> cotangents as the rule of a body."""

    def rule(g: Any, y: Any, *inputs: Tensor) -> Sequence[Tensor | None]:
        outs = y if isinstance(y, tuple) else (y,)
        gs = g if isinstance(g, tuple) else (g,)
        given = vjp(traced.rebuild(gs), traced.rebuild(outs), *inputs[:count])
        found = list(given) if isinstance(given, tuple | list) else [given]
        if len(found) != count:
            raise DifferentiationError(
                f"the vjp of {name} gave {len(found)} cotangents for {count} tensors"
            )
        for i, (x, part) in enumerate(zip(inputs, found, strict=False)):
            _check_cotangent(name, i, x.spec, part)
        return [*found, *([None] * (len(inputs) - count))]

    return rule


def _check_cotangent(name: str, i: int, spec: TensorSpec, part: Any) -> None:
    if part is not None and (not isinstance(part, Tensor) or part.spec != spec):
        shown = part.spec if isinstance(part, Tensor) else repr(part)
        raise DifferentiationError(
            f"the vjp of {name} gave {shown} as cotangent {i}, for a tensor {spec}"
        )


def traced_once(fn: Callable[..., Any]) -> Function:
    """A function whose graph is built once for each signature: `@gf.function`.

    Its calls are nodes that share what was built, so that a large model that is called often (for
    each layer, micro-batch or replica) stays small. Python code in it runs while it is traced only.
    It may read tensors and variables from outside; it may not assign.

    Raises:
        ArgumentError: no function; later, an argument that is neither tensor, nest nor hashable.
        VariableError: it assigns.
    """
    return Function(fn)


def checkpoint(fn: Callable[..., Any]) -> Function:
    """A function whose gradient computes it again instead of keeping what is inside.

    What lives from the forward to the backward pass is its arguments and results only.

    Source: Chen, Xu, Zhang & Guestrin, "Training deep nets with sublinear memory cost", 2016.
    """
    return Function(fn, recompute=True)


def custom_vjp(
    fn: Callable[..., Any] | None = None, *, vjp: Callable[..., Any] | None = None
) -> Any:
    """A function with a gradient of your own: `gf.custom_vjp(fn, vjp=rule)`, or as a decorator
    `@gf.custom_vjp(vjp=rule)`.

    Args:
        vjp: (g, y, *tensors) -> a cotangent, or None, for each tensor among the arguments. g and y
            are of the nest that fn returns. It builds tensors, so that it is differentiable, too.
            Tensors that fn reads from outside get no gradient: pass them in.

    Raises:
        ArgumentError: no vjp.
        DifferentiationError: later, if the vjp gives too few cotangents, or of other specs.
    """
    if vjp is None or not callable(vjp):
        raise ArgumentError(
            f"custom_vjp at {user_location()}: vjp is a function (g, y, *tensors), not {vjp!r}"
        )
    if fn is None:
        return functools.partial(Function, rule=vjp)
    return Function(fn, rule=vjp)
