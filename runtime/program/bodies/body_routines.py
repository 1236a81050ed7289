"""Runs a node's compiled bodies: as native calls if possible, else as Python functions.

A body can run as native calls if it consists of generated kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphflow.ir.op import Node, Tensor
from graphflow.ops.control_flow.concurrent import concurrent
from graphflow.ops.kernels.jit.call_table_driver import copy_task
from graphflow.runtime.native_calls.pointer_table import KernelCall, PointerSource
from graphflow.runtime.program.bodies.body_loops import BodyResults, make_body_runner
from graphflow.runtime.program.bodies.concurrent_parties import make_concurrent_runner
from graphflow.runtime.program.bodies.native_loops import NativeBody, make_native_runner
from graphflow.runtime.program.generated_call_support import LOOP_OPS, EdgeChannel, never_cancelled


class CompiledBody:
    """A body as a function of arrays. Its results are valid until it runs again.

    Args:
        run: the body as a function (arrays, step, draws).
        annotate_error: adds the node of the failing line to an error.
    """

    def __init__(
        self, run: Callable[..., Any], annotate_error: Callable[[Exception], Exception]
    ) -> None:
        self._run = run
        self._annotate_error = annotate_error

    def __call__(self, arrays: Sequence[Any], step: int, draws: int) -> Any:
        try:
            return self._run(arrays, step, draws)
        except Exception as error:
            raise self._annotate_error(error) from error


def make_node_runner(
    node: Node,
    attrs: Mapping[str, Any],
    natives: Sequence[NativeBody | None],
    routines: Callable[[], Sequence[CompiledBody]],
    results: Sequence[BodyResults],
    channel: EdgeChannel,
) -> Callable[..., None]:
    """Return the function that a line calls to run a node that holds bodies.

    Args:
        natives: the bodies as native calls; None for those that cannot run so.
        routines: makes the bodies as Python functions; called only if they are needed.
        results: the results of each body.
    """
    proceed = channel.check_cancelled if node.op.name in LOOP_OPS else never_cancelled
    if node.op is concurrent:
        return make_concurrent_runner(node, routines(), results, channel.cancel)
    known = [native for native in natives if native is not None]
    has_calls = any(native.calls for native in known)
    if node.op.name in LOOP_OPS and len(known) == len(natives) and has_calls:
        return make_native_runner(node, attrs, known, results[-1], proceed)
    return make_body_runner(node, attrs, routines(), results, proceed)


def inline_body(
    node: Node,
    body: NativeBody,
    results: BodyResults,
    place: Callable[[Tensor], PointerSource],
) -> list[KernelCall]:
    """Return a body's calls with the call's inputs in place of the body's parameters."""
    given = {
        parameter.outputs[0]: place(tensor)
        for parameter, tensor in zip(body.body.inputs, node.inputs, strict=True)
    }

    def resolve(place: PointerSource) -> PointerSource:
        return place if isinstance(place, int) else given[place]  # type: ignore[index]

    calls = [
        KernelCall(node, each.task, tuple(resolve(p) for p in each.pointers)) for each in body.calls
    ]
    calls += [
        KernelCall(
            node, copy_task(body.nbytes[i]), (resolve(body.results[i]), place(node.outputs[i]))
        )
        for i in results.direct
    ]
    return [each for each in calls if each.task.rows]
