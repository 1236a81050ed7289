"""Calls, branches and loops run by Python, over compiled bodies and preallocated buffers.

A compiled body takes arrays and returns arrays that are valid until it runs again. The results of a
node that holds bodies have buffers, which are also a loop's state. A body computes results into
them where it can (`memory/live_ranges.py`), and others are copied there at its end. Loops whose
bodies consist of generated kernels run without Python (`native_loops.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.ops.control_flow.control import call, cond, fold_in, iteration_indices, scan
from graphflow.ops.control_flow.numbered_call import numbered_call

BodyFunction = Callable[[Sequence[Any], int, int], Sequence[Any]]
"""A compiled body: (arrays, step, draws) -> results."""


class CheckCancelled(Protocol):
    """Raises if the step was cancelled: (step, which loop, iterations done, of how many)."""

    def __call__(self, step: int, loop: str, done: int, of: str) -> None: ...


@dataclass(frozen=True)
class BodyResults:
    """The buffers of a body's results, and the results that are computed elsewhere.

    Attributes:
        buffers: of a loop, those of its state only.
        direct: numbers of the results that are copied to their buffers, in order.
        swapped: numbers of the results that are copied to spare memory first.
        spares: the spare memory of each of these.
        initial: numbers of a loop's states that do not begin in their buffers.
        copyto: copies the second array to the first.
    """

    buffers: tuple[Any, ...]
    direct: tuple[int, ...]
    swapped: tuple[int, ...]
    spares: tuple[Any, ...]
    initial: tuple[int, ...]
    copyto: Callable[[Any, Any], None]

    def begin(self, values: Sequence[Any]) -> None:
        """Copy the initial values of a loop's state to its buffers."""
        for i in self.initial:
            self.copyto(self.buffers[i], values[i])

    def store(self, results: Sequence[Any]) -> None:
        """Copy the results of a body to their buffers."""
        for i, spare in zip(self.swapped, self.spares, strict=True):
            self.copyto(spare, results[i])
        for i in self.direct:
            self.copyto(self.buffers[i], results[i])
        for i, spare in zip(self.swapped, self.spares, strict=True):
            self.copyto(self.buffers[i], spare)


def make_body_runner(
    node: Node,
    attrs: Mapping[str, Any],
    routines: Sequence[BodyFunction],
    results: Sequence[BodyResults],
    proceed: CheckCancelled,
) -> Callable[..., None]:
    """Return a function (outs, *arrays, step, draws) that runs a node and fills its outputs.

    Args:
        attrs: the node's attributes, with sizes bound.
        routines: its bodies, in the order of its attributes.
        results: the results of each body.
        proceed: called before each iteration.
    """
    if node.op is call:
        return _make_call_runner(routines[0], results[0])
    if node.op is numbered_call:
        return _make_numbered_runner(routines[0], results[0])
    if node.op is cond:
        return _make_cond_runner(routines, results)
    if node.op is scan:
        return _make_scan_runner(node, attrs, routines[0], results[0], proceed)
    return _make_while_runner(node, attrs, routines, results[1], proceed)


def _make_call_runner(routine: BodyFunction, results: BodyResults) -> Callable[..., None]:
    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        results.store(routine(arrays, step, draws))

    return run


def _make_numbered_runner(routine: BodyFunction, results: BodyResults) -> Callable[..., None]:
    def run(outs: Sequence[Any], number: Any, *arrays: Any, step: int, draws: int) -> None:
        results.store(routine(arrays, step, int(number)))

    return run


def _make_cond_runner(
    routines: Sequence[BodyFunction], results: Sequence[BodyResults]
) -> Callable[..., None]:
    def run(outs: Sequence[Any], pred: Any, *arrays: Any, step: int, draws: int) -> None:
        chosen = 0 if bool(pred) else 1
        results[chosen].store(routines[chosen](arrays, step, draws))

    return run


def _make_scan_runner(
    node: Node,
    attrs: Mapping[str, Any],
    routine: BodyFunction,
    state: BodyResults,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    loop = describe_loop(node)
    carries, items = attrs["carries"], attrs["items"]
    length, reverse, counted = attrs["length"], attrs["reverse"], attrs["counted"]

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        count = int(arrays[0]) if counted else None
        given = arrays[counted:]
        state.begin(given)
        rows, captures = given[carries : carries + items], given[carries + items :]
        stacks = outs[carries:]
        order = iteration_indices(length, count, reverse)
        of = f" of {len(order)}"
        if len(order) < length:
            for stack in stacks:
                stack[...] = 0
        for done, i in enumerate(order):
            proceed(step, loop, done, of)
            inputs = (*state.buffers, *[row[i] for row in rows], *captures)
            results = routine(inputs, step, fold_in(draws, i))
            for stack, y in zip(stacks, results[carries:], strict=True):  # y may be a state
                stack[i] = y
            state.store(results)

    return run


def _make_while_runner(
    node: Node,
    attrs: Mapping[str, Any],
    routines: Sequence[BodyFunction],
    state: BodyResults,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    test, body = routines
    loop = describe_loop(node)
    states, limit = attrs["states"], attrs["limit"]

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        state.begin(arrays)
        inputs = (*state.buffers, *arrays[states:])
        stacks = outs[1 + states :]
        count = 0
        while limit is None or count < limit:
            proceed(step, loop, count, "")
            drawn = fold_in(draws, count)
            if not bool(test(inputs, step, drawn)[0]):
                break
            results = body(inputs, step, drawn)
            for stack, y in zip(stacks, results[states:], strict=True):
                stack[count] = y
            state.store(results)
            count += 1
        outs[0][...] = count
        for stack in stacks:
            stack[count:] = 0

    return run


def describe_loop(node: Node) -> str:
    """Describe a loop for errors."""
    return f"{node.op.name} {node.name!r} (made at {node.location})"
