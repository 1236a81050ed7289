"""Functions that are traced once for each signature; their calls are nodes that share a body.

`gf.function`, `gf.checkpoint`, `gf.custom_vjp` and `gf.custom_jvp` wrap a Python function in a
`CachedFunction`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, DifferentiationError
from graphflow.frontend.control_flow import call_body, require_function
from graphflow.frontend.pytree import Rebuild
from graphflow.frontend.tracing import TracedFunction, trace
from graphflow.ir.graph import Body
from graphflow.ir.op import Tensor, as_tensor, error_location, user_location
from graphflow.ir.spec import TensorSpec, show_distinctly

AddRules = Callable[[Body, TracedFunction, int, str], Body]
"""Adds rules of derivatives to a body: (body, its trace, number of arguments, name) -> body."""


class CachedFunction:
    """A Python function that is traced once for each signature; each call builds one node.

    A signature is the nest of the arguments, the specs of its tensors, and the values of its other
    leaves, which must be hashable.

    Args:
        recompute: keep nothing of the body for its gradient, which computes it again.
        add_rules: gives each new body the user's rules of derivatives.

    Attributes:
        traces: the number of signatures so far.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        recompute: bool = False,
        add_rules: AddRules | None = None,
    ) -> None:
        with error_location("function"):
            require_function(fn, "fn")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._recompute = recompute
        self._add_rules = add_rules
        self._traces: dict[Any, tuple[Body, tuple[Tensor, ...], Rebuild]] = {}

    @property
    def traces(self) -> int:
        """Number of signatures so far."""
        return len(self._traces)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self._fn, "__name__", "function")
        try:
            tensors, static, fill = _split_static((args, kwargs))
        except TypeError as error:
            raise ArgumentError(
                f"{name} at {user_location()}: an argument that is not a tensor must be hashable, "
                f"since it is part of the signature: {error}"
            ) from None
        key = (static, tuple(t.spec for t in tensors))
        if key not in self._traces:
            self._traces[key] = self._trace(tensors, fill)
        body, captures, rebuild = self._traces[key]
        return rebuild(call_body(body, (*tensors, *captures), name, self._recompute))

    def _trace(
        self, tensors: Sequence[Tensor], fill: Rebuild
    ) -> tuple[Body, tuple[Tensor, ...], Rebuild]:
        def function_of(*values: Tensor) -> Any:
            args, kwargs = fill(values)
            return self._fn(*args, **kwargs)

        function_of.__name__ = getattr(self._fn, "__name__", "function")
        traced = trace(function_of, [t.spec for t in tensors], tuple)
        body = traced.body(traced.captures)
        if self._add_rules is not None:
            body = self._add_rules(body, traced, len(tensors), function_of.__name__)
        return body, traced.captures, traced.rebuild

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind the function to an instance, as methods are."""
        return self if instance is None else functools.partial(self, instance)


def _split_static(nest: Any) -> tuple[list[Tensor], Any, Rebuild]:
    """Split a nest into its tensors, a hashable key of the rest, and a function that rebuilds it.

    Arrays become constants.
    """
    if isinstance(nest, Tensor | np.ndarray):
        return [as_tensor(nest)], "tensor", lambda values: values[0]
    if isinstance(nest, dict):
        keys = tuple(nest)
        tensors, static, fill = _split_static(tuple(nest.values()))
        return (
            tensors,
            (dict, keys, static),
            lambda values: dict(zip(keys, fill(values), strict=True)),
        )
    if isinstance(nest, list | tuple):
        parts = [_split_static(item) for item in nest]
        make: Any = getattr(type(nest), "_make", type(nest))

        def fill(values: Sequence[Any]) -> Any:
            rest = iter(values)
            return make([f([next(rest) for _ in ts]) for ts, _, f in parts])

        flat = [t for ts, _, _ in parts for t in ts]
        return flat, (type(nest), tuple(s for _, s, _ in parts)), fill
    hash(nest)
    return [], (type(nest), nest), lambda values: nest


def _wrap_vjp_rule(vjp: Callable[..., Any], traced: TracedFunction, count: int, name: str) -> Any:
    """Make the rule of a body of the user's (g, y, *args) -> cotangents."""

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
        shown, wanted = repr(part), str(spec)
        if isinstance(part, Tensor):
            shown, wanted = show_distinctly(part.spec, spec)
        raise DifferentiationError(
            f"the vjp of {name} gave {shown} as cotangent {i}, for a tensor {wanted}"
        )


@checks_argument_names(ArgumentError)
def trace_once(fn: Callable[..., Any]) -> CachedFunction:
    """Wrap a function so that its graph is built once for each signature: `@gf.function`.

    Calls are nodes that share one body, so a model stays small that calls the function often (for
    each layer, micro-batch or replica). Python code in the function runs only while it is traced.
    It may read tensors and variables from outside, but not assign them.

    Raises:
        ArgumentError: fn is no function; later, if an argument is neither tensor, nest nor
            hashable.
        VariableError: the function assigns a variable.
    """
    return CachedFunction(fn)


@checks_argument_names(ArgumentError)
def checkpoint(fn: Callable[..., Any]) -> CachedFunction:
    """Wrap a function so that its gradient computes it again (activation checkpointing).

    Between the forward and the backward pass, only its arguments and results stay in memory.

    Source: Chen, Xu, Zhang & Guestrin, "Training deep nets with sublinear memory cost", 2016.
    """
    return CachedFunction(fn, recompute=True)


@checks_argument_names(ArgumentError)
def custom_vjp(
    fn: Callable[..., Any] | None = None, *, vjp: Callable[..., Any] | None = None
) -> Any:
    """Give a function a gradient of your own.

    Write `gf.custom_vjp(fn, vjp=rule)`, or the decorator `@gf.custom_vjp(vjp=rule)`.

    Args:
        vjp: (g, y, *tensors) -> a cotangent, or None, for each tensor among the arguments. g and y
            have the nest that fn returns. The rule builds tensors, so it is differentiable, too.
            Tensors that fn reads from outside get no gradient: pass them as arguments.

    Raises:
        ArgumentError: vjp is no function.
        DifferentiationError: later, if the vjp returns too few cotangents, or other specs.
    """
    if vjp is None or not callable(vjp):
        raise ArgumentError(
            f"custom_vjp at {user_location()}: vjp is a function (g, y, *tensors), not {vjp!r}"
        )
    rule = vjp

    def add_rule(body: Body, traced: TracedFunction, count: int, name: str) -> Body:
        return replace(body, rule=_wrap_vjp_rule(rule, traced, count, name))

    if fn is None:
        return functools.partial(CachedFunction, add_rules=add_rule)
    return CachedFunction(fn, add_rules=add_rule)
