"""Calls, branches and loops run by Python, over compiled bodies and preallocated buffers.

A compiled body takes arrays and returns arrays that are valid until it runs again. So the state of
a loop has two sets of buffers: an iteration reads one set and writes the other. Loops whose bodies
consist of generated kernels run without Python (`native_loops.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.ops.control_flow.control import call, cond, fold_in, iteration_indices, scan

BodyFunction = Callable[[Sequence[Any], int, int], Sequence[Any]]
"""A compiled body: (arrays, step, draws) -> results."""


class CheckCancelled(Protocol):
    """Raises if the step was cancelled: (step, which loop, iterations done, of how many)."""

    def __call__(self, step: int, loop: str, done: int, of: str) -> None: ...


@dataclass(frozen=True)
class LoopBuffers:
    """Two sets of buffers for a loop's state."""

    first: tuple[Any, ...]
    second: tuple[Any, ...]


def make_body_runner(
    node: Node,
    attrs: Mapping[str, Any],
    routines: Sequence[BodyFunction],
    carried: LoopBuffers,
    copyto: Callable[[Any, Any], None],
    proceed: CheckCancelled,
) -> Callable[..., None]:
    """Return a function (outs, *arrays, step, draws) that runs a node and fills its outputs.

    Args:
        attrs: the node's attributes, with sizes bound.
        routines: its bodies, in the order of its attributes.
        carried: buffers of a loop's state.
        copyto: copies the second array to the first.
        proceed: called before each iteration.
    """
    if node.op is call:
        return _make_call_runner(routines[0], copyto)
    if node.op is cond:
        return _make_cond_runner(routines[0], routines[1], copyto)
    if node.op is scan:
        return _make_scan_runner(node, attrs, routines[0], carried, copyto, proceed)
    return _make_while_runner(node, attrs, routines, carried, copyto, proceed)


def _fill(outs: Sequence[Any], values: Sequence[Any], copyto: Callable[[Any, Any], None]) -> None:
    for out, value in zip(outs, values, strict=True):
        copyto(out, value)


def _make_call_runner(routine: BodyFunction, copyto: Any) -> Callable[..., None]:
    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        _fill(outs, routine(arrays, step, draws), copyto)

    return run


def _make_cond_runner(then: BodyFunction, orelse: BodyFunction, copyto: Any) -> Callable[..., None]:
    def run(outs: Sequence[Any], pred: Any, *arrays: Any, step: int, draws: int) -> None:
        _fill(outs, (then if bool(pred) else orelse)(arrays, step, draws), copyto)

    return run


def _make_scan_runner(
    node: Node,
    attrs: Mapping[str, Any],
    routine: BodyFunction,
    carried: LoopBuffers,
    copyto: Any,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    loop = describe_loop(node)
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
        free, held = carried.first, carried.second
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


def _make_while_runner(
    node: Node,
    attrs: Mapping[str, Any],
    routines: Sequence[BodyFunction],
    carried: LoopBuffers,
    copyto: Any,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    test, body = routines
    loop = describe_loop(node)
    states, limit = attrs["states"], attrs["limit"]

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        state: Sequence[Any] = arrays[:states]
        captures = arrays[states:]
        stacks = outs[1 + states :]
        free, held = carried.first, carried.second
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


def describe_loop(node: Node) -> str:
    """Describe a loop for errors."""
    return f"{node.op.name} {node.name!r} (made at {node.location})"
