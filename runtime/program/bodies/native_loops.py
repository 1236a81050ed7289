"""Native loops: scans and while loops over generated kernels that do not return to Python.

An iteration's end copies the parts of the new state that are computed elsewhere than in the state's
buffers. Pointers to rows of scanned and stacked arrays advance by one row in each iteration. After
some milliseconds of iterations, Python checks whether the step was cancelled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Body
from graphflow.ir.op import Node
from graphflow.ops.control_flow.control import iteration_indices, scan
from graphflow.ops.kernels.fusion.region_kernels import GIL_RELEASE_NANOSECONDS
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import copy_task, driver, loop_frame
from graphflow.runtime.native_calls.native_segments import CANCEL_CHECK_NANOSECONDS, NativeSegment
from graphflow.runtime.native_calls.pointer_table import KernelCall, PointerSource, RuntimeOperand
from graphflow.runtime.program.bodies.body_loops import BodyResults, CheckCancelled, describe_loop

_UNBOUNDED = 1 << 40
"""Limit of iterations for a loop without a bound."""
_CALL_NANOSECONDS = 10.0
"""Nanoseconds that a call costs besides its work."""


@dataclass(frozen=True)
class NativeBody:
    """A body that consists of generated kernels.

    Attributes:
        calls: its kernel calls, in order.
        results: pointer to each result; for a result that is a parameter, the parameter's.
        nbytes: size of each result.
    """

    body: Body
    calls: tuple[KernelCall, ...]
    results: tuple[PointerSource, ...]
    nbytes: tuple[int, ...]

    @property
    def parameters(self) -> list[RuntimeOperand]:
        """The run-time operand of each parameter."""
        return [node.outputs[0] for node in self.body.inputs]


def make_native_runner(
    node: Node,
    attrs: Mapping[str, Any],
    parts: Sequence[NativeBody],
    state: BodyResults,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    """As `body_loops.make_body_runner`, for a scan or a while loop over native bodies."""
    if node.op is scan:
        return _make_scan_runner(node, attrs, parts[0], state, proceed)
    return _make_while_runner(node, attrs, parts[0], parts[1], state, proceed)


class _Iterations:
    """The calls of one iteration, and their pointers.

    Args:
        tests: number of leading calls that compute the predicate of a while loop.
        pred: pointer to the predicate; None for a scan.
    """

    def __init__(
        self, calls: Sequence[KernelCall], tests: int = 0, pred: PointerSource | None = None
    ) -> None:
        self._segment = NativeSegment(calls)
        self._pred = pred
        known = pred if isinstance(pred, int) else 0
        self._frame = loop_frame(address(self._segment.entries), tests, len(calls), 0, 0, known)
        self._frame_pointer = ctypes.c_void_p(address(self._frame))
        self._work = max(1.0, self._segment.nanoseconds + _CALL_NANOSECONDS * len(calls))
        self._rounds = max(1, int(CANCEL_CHECK_NANOSECONDS / self._work))

    def bind(self, slot: RuntimeOperand, place: int) -> None:
        """Set the address that an operand has in all iterations."""
        slots = self._segment.runtime_pointers.get(slot)
        if slots is not None:
            self._segment.pointers[slots] = place
        if self._pred is slot:
            self._frame[5] = place

    def moving_pointers(
        self, slot: RuntimeOperand, first: int, stride: int
    ) -> list[tuple[int, int, int]]:
        """Return table rows that advance an operand by `stride` bytes in each iteration.

        Returns:
            (address of the pointer, first address, stride) for each use of the operand.
        """
        return [
            (self._segment.pointer_address(i), first, stride)
            for i in self._segment.runtime_pointers.get(slot, ())
        ]

    def run(
        self, count: int, moves: Sequence[tuple[int, int, int]], proceed: Callable[[int], None]
    ) -> int:
        """Run up to `count` iterations, until the predicate is false; return how many ran."""
        table = np.array(moves or [(0, 0, 0)], np.int64)
        self._frame[3], self._frame[4] = address(table), len(moves)
        done = 0
        while done < count:
            proceed(done)
            stop = min(count, done + self._rounds)
            is_long = (stop - done) * self._work > GIL_RELEASE_NANOSECONDS
            function = driver().loop.releasing_gil if is_long else driver().loop.holding_gil
            function(self._frame_pointer, None, done, stop)
            done = int(self._frame[6])
            if done < stop:
                break
        return done


def _carry_calls(node: Node, part: NativeBody, state: BodyResults) -> list[KernelCall]:
    """Return the calls that end an iteration: stack its outputs, then copy the new state."""

    def copy(k: int, source: PointerSource, target: PointerSource) -> KernelCall:
        return KernelCall(node, copy_task(part.nbytes[k]), (source, target))

    count = len(state.buffers)
    places, spares = ([address(a) for a in arrays] for arrays in (state.buffers, state.spares))
    swapped = list(zip(state.swapped, spares, strict=True))
    return [
        *(copy(k, part.results[k], ("row", k - count)) for k in range(count, part.body.results)),
        *(copy(k, part.results[k], spare) for k, spare in swapped),
        *(copy(k, part.results[k], places[k]) for k in state.direct),
        *(copy(k, spare, places[k]) for k, spare in swapped),
    ]


def _stack_pointers(
    iterations: _Iterations, stacks: Sequence[Any], first: int, direction: int
) -> list[Any]:
    """Return the moving pointers to the rows of stacked outputs; `direction` is 1 or -1."""
    return [
        move
        for k, stack in enumerate(stacks)
        for step in [stack.nbytes // max(len(stack), 1)]
        for move in iterations.moving_pointers(
            ("row", k), address(stack) + first * step, direction * step
        )
    ]


def _make_scan_runner(
    node: Node,
    attrs: Mapping[str, Any],
    part: NativeBody,
    state: BodyResults,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    loop = describe_loop(node)
    carries, items = attrs["carries"], attrs["items"]
    length, reverse, counted = attrs["length"], attrs["reverse"], attrs["counted"]
    direction = -1 if reverse else 1
    iterations = _Iterations([*part.calls, *_carry_calls(node, part, state)])
    slots = part.parameters

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        given = arrays[counted:]
        order = iteration_indices(length, int(arrays[0]) if counted else None, reverse)
        count, first = len(order), order[0] if order else 0
        of = f" of {count}"
        state.begin(given)
        moves = _stack_pointers(iterations, outs[carries:], first, direction)
        for k in range(carries, len(given)):
            array = given[k]
            if k < carries + items:
                size = array.nbytes // max(len(array), 1)
                moves += iterations.moving_pointers(
                    slots[k], address(array) + first * size, direction * size
                )
            else:
                iterations.bind(slots[k], address(array))
        if count < length:
            for stack in outs[carries:]:
                stack[...] = 0
        iterations.run(count, moves, lambda done: proceed(step, loop, done, of))

    return run


def _make_while_runner(
    node: Node,
    attrs: Mapping[str, Any],
    test: NativeBody,
    body: NativeBody,
    state: BodyResults,
    proceed: CheckCancelled,
) -> Callable[..., None]:
    loop = describe_loop(node)
    states, limit = attrs["states"], attrs["limit"]
    calls = [*test.calls, *body.calls, *_carry_calls(node, body, state)]
    iterations = _Iterations(calls, len(test.calls), test.results[0])

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        stacks = outs[1 + states :]
        state.begin(arrays)
        for part in (test, body):
            for slot, array in zip(part.parameters[states:], arrays[states:], strict=True):
                iterations.bind(slot, address(array))
        most = _UNBOUNDED if limit is None else limit
        count = iterations.run(
            most,
            _stack_pointers(iterations, stacks, 0, 1),
            lambda done: proceed(step, loop, done, ""),
        )
        outs[0][...] = count
        for stack in stacks:
            stack[count:] = 0

    return run
