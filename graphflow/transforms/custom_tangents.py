"""`gf.custom_jvp`: functions with a rule for tangents, from which reverse mode follows.

A rule builds the tangents of the results, which are linear in the tangents of the arguments. The
cotangents of the arguments are the transposed map. The rule is built once on parameters in place of
the tangents. Its gradient with respect to these is the transposed map, and because the rule is
linear, it does not depend on them: the parameters drop out of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, DifferentiationError
from graphflow.frontend.functions import CachedFunction
from graphflow.frontend.tracing import TracedFunction, make_parameter
from graphflow.ir.graph import Body
from graphflow.ir.op import Tensor, next_serial, user_location
from graphflow.ir.spec import is_inexact, show_distinctly
from graphflow.ops.base.shape_rules import zeros_like
from graphflow.transforms.forward_mode import flat_tangents
from graphflow.transforms.reverse_mode import nodes_built_since, pull_back

TangentRule = Callable[..., list[Tensor | None]]
"""(tangents, y, *inputs) -> the tangent of each result, None where it is zero."""


@checks_argument_names(ArgumentError)
def custom_jvp(
    fn: Callable[..., Any] | None = None, *, jvp: Callable[..., Any] | None = None
) -> Any:
    """Give a function a rule for its tangents, from which its gradient follows, too.

    Write `gf.custom_jvp(fn, jvp=rule)`, or the decorator `@gf.custom_jvp(jvp=rule)`. Forward mode
    (`gf.jvp`) uses the rule as it is. Reverse mode (`gf.gradients`) transposes it, so each op
    between the rule's tangents and its results needs a gradient. The rule builds tensors, so
    derivatives of higher order follow.

    Args:
        jvp: (tangents, y, *tensors) -> the tangent of y. `tangents` is a tuple with one tangent for
            each tensor among the arguments: zeros where an argument does not change, None for ints
            and bools. y and its tangent have the nest that fn returns; None stands for a tangent of
            zeros. The result must be linear in the tangents. Tensors that fn reads from outside get
            no gradient: pass them as arguments.

    Raises:
        ArgumentError: jvp is no function.
        DifferentiationError: later, if the rule returns another nest or other specs than y, or is
            not linear in the tangents.
    """
    if jvp is None or not callable(jvp):
        raise ArgumentError(
            f"custom_jvp at {user_location()}: jvp is a function (tangents, y, *tensors), "
            f"not {jvp!r}; write gf.custom_jvp(fn, jvp=rule)"
        )
    given = jvp

    def add_rules(body: Body, traced: TracedFunction, count: int, name: str) -> Body:
        rule = _wrap_rule(given, traced, count, name)
        return replace(body, rule=_transpose(rule, count, name), tangent_rule=rule)

    if fn is None:
        return functools.partial(CachedFunction, add_rules=add_rules)
    return CachedFunction(fn, add_rules=add_rules)


def _wrap_rule(jvp: Callable[..., Any], traced: TracedFunction, count: int, name: str) -> Any:
    """Make the rule of a body of the user's (tangents, y, *tensors) -> the tangent of y."""

    def rule(tangents: Sequence[Tensor | None], y: Any, *inputs: Tensor) -> list[Tensor | None]:
        outputs = y if isinstance(y, tuple) else (y,)
        result = traced.rebuild(outputs)
        directions = tuple(
            zeros_like(x) if t is None and is_inexact(x.dtype) else t
            for t, x in zip(tangents[:count], inputs, strict=False)
        )
        returned = jvp(directions, result, *inputs[:count])
        try:
            found = flat_tangents(result, returned, what="results")
        except ArgumentError as error:
            raise DifferentiationError(
                f"the jvp of {name} gave {returned!r:.80}, and y is the nest {result!r:.80}: "
                f"{error}"
            ) from None
        for i, (tensor, tangent) in enumerate(zip(outputs, found, strict=True)):
            _check_tangent(name, i, tensor, tangent)
        return found

    return rule


def _check_tangent(name: str, i: int, result: Tensor, tangent: Any) -> None:
    if tangent is None:
        return
    if not isinstance(tangent, Tensor) or tangent.spec != result.spec:
        shown, wanted = f"{tangent!r:.80}", str(result.spec)
        if isinstance(tangent, Tensor):
            shown, wanted = show_distinctly(tangent.spec, result.spec)
        raise DifferentiationError(
            f"the jvp of {name} gave {shown} as tangent {i}, of a result {wanted}; a tangent has "
            "the shape and dtype of its result, or is None for zeros"
        )
    if not is_inexact(result.dtype):
        raise DifferentiationError(
            f"the jvp of {name} gave a tangent of result {i}, which is {result.dtype}; give None"
        )


def _transpose(tangent_rule: TangentRule, count: int, name: str) -> Callable[..., Any]:
    """Return the vjp that follows from a rule for tangents: (g, y, *inputs) -> cotangents."""

    def rule(g: Any, y: Any, *inputs: Tensor) -> list[Tensor | None]:
        since = next_serial()
        directions = [
            make_parameter(x.spec, f"tangent_{i}").outputs[0] if is_inexact(x.dtype) else None
            for i, x in enumerate(inputs[:count])
        ]
        cotangents: list[Tensor | None] = [None] * len(inputs)
        tangents = tangent_rule(directions, y, *inputs)
        gs = g if isinstance(g, tuple) else (g,)
        pairs = [(t, c) for t, c in zip(tangents, gs, strict=True) if t is not None]
        wanted = [d for d in directions if d is not None]
        if not pairs or not wanted:
            return cotangents
        ys = [t for t, _ in pairs]
        found = pull_back(ys, [c for _, c in pairs], wanted, nodes_built_since(ys, since))
        parameters = {d.node for d in wanted}
        if not parameters.isdisjoint(nodes_built_since(found, since)):
            raise DifferentiationError(
                f"the jvp of {name} is not linear in its tangents, so it has no transposed rule; "
                "let each term hold one tangent as a factor, and no tangent in another function"
            )
        results = iter(found)
        cotangents[:count] = [None if d is None else next(results) for d in directions]
        return cotangents

    return rule


__all__ = ["custom_jvp"]
