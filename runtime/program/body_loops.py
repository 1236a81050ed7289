"""Loops: how a program runs the nodes that hold bodies, over routines and preallocated buffers.

A routine is a compiled body: arrays in, arrays out, which are good until it runs again. So what a
loop carries has two sets of buffers: an iteration reads one and writes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.ops.control_flow.control import call, cond, fold_in, iteration_indices, scan

Routine = Callable[[Sequence[Any], int, int], Sequence[Any]]
"""(arrays, step, draws) -> results."""


class Proceed(Protocol):
    """Ends a loop whose step was given up: (step, which loop, iterations done, of how many)."""

    def __call__(self, step: int, loop: str, done: int, of: str) -> None: ...


@dataclass(frozen=True)
class Carried:
    """The two sets of buffers of what a loop carries."""

    here: tuple[Any, ...]
    there: tuple[Any, ...]


def runner(
    node: Node,
    attrs: Mapping[str, Any],
    routines: Sequence[Routine],
    carried: Carried,
    copyto: Callable[[Any, Any], None],
    proceed: Proceed,
) -> Callable[..., None]:
    """The node as a function (outs, *arrays, step, draws) that fills its outputs.

    Args:
        attrs: with sizes bound.
        routines: of its bodies, in the order of its attributes.
    """
    if node.op is call:
        return _calling(routines[0], copyto)
    if node.op is cond:
        return _branching(routines[0], routines[1], copyto)
    if node.op is scan:
        return _scanning(node, attrs, routines[0], carried, copyto, proceed)
    return _looping(node, attrs, routines, carried, copyto, proceed)


def _fill(outs: Sequence[Any], values: Sequence[Any], copyto: Callable[[Any, Any], None]) -> None:
    for out, value in zip(outs, values, strict=True):
        copyto(out, value)


def _calling(routine: Routine, copyto: Any) -> Callable[..., None]:
    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        _fill(outs, routine(arrays, step, draws), copyto)

    return run


def _branching(then: Routine, orelse: Routine, copyto: Any) -> Callable[..., None]:
    def run(outs: Sequence[Any], pred: Any, *arrays: Any, step: int, draws: int) -> None:
        _fill(outs, (then if bool(pred) else orelse)(arrays, step, draws), copyto)

    return run


def _scanning(
    node: Node,
    attrs: Mapping[str, Any],
    routine: Routine,
    carried: Carried,
    copyto: Any,
    proceed: Proceed,
) -> Callable[..., None]:
    loop = told(node)
    carries, items = attrs["carries"], attrs["items"]
    length, reverse, counted = attrs["length"], attrs["reverse"], attrs["counted"]

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        count = int(arrays[0]) if counted else None
        given = arrays[counted:]
        state: Sequence[Any] = given[:carries]
        rows, captures = given[carries : carries + items], given[carries + items :]
        stacks = outs[carries:]
        order = iteration_indices(length, count, reverse)
        of = f" of {len(order)}"
        if len(order) < length:
            for stack in stacks:
                stack[...] = 0
        free, held = carried.here, carried.there
        for done, i in enumerate(order):
            proceed(step, loop, done, of)
            results = routine(
                (*state, *[row[i] for row in rows], *captures), step, fold_in(draws, i)
            )
            _fill(free, results[:carries], copyto)
            for stack, y in zip(stacks, results[carries:], strict=True):
                stack[i] = y
            state, free, held = free, held, free
        _fill(outs[:carries], state, copyto)

    return run


def _looping(
    node: Node,
    attrs: Mapping[str, Any],
    routines: Sequence[Routine],
    carried: Carried,
    copyto: Any,
    proceed: Proceed,
) -> Callable[..., None]:
    test, body = routines
    loop = told(node)
    states, limit = attrs["states"], attrs["limit"]

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        state: Sequence[Any] = arrays[:states]
        captures = arrays[states:]
        stacks = outs[1 + states :]
        free, held = carried.here, carried.there
        count = 0
        while limit is None or count < limit:
            proceed(step, loop, count, "")
            inputs, drawn = (*state, *captures), fold_in(draws, count)
            if not bool(test(inputs, step, drawn)[0]):
                break
            results = body(inputs, step, drawn)
            _fill(free, results[:states], copyto)
            for stack, y in zip(stacks, results[states:], strict=True):
                stack[count] = y
            state, free, held = free, held, free
            count += 1
        outs[0][...] = count
        for stack in stacks:
            stack[count:] = 0
        _fill(outs[1 : 1 + states], state, copyto)

    return run


def told(node: Node) -> str:
    """Which loop it is, for errors."""
    return f"{node.op.name} {node.name!r} (made at {node.location})"
