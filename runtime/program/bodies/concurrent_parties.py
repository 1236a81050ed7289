"""Runs the parties of a `concurrent` node that are on one device.

If all parties of the node are there, they run one at a time, in the planned order. Otherwise each
runs on a thread of its own, since it waits for parties of other devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from graphflow.errors import GraphflowError, OpError
from graphflow.ir.op import Node
from graphflow.ops.communication.channel_scheduler import ChannelScheduler
from graphflow.ops.communication.channels import CHANNEL_OPS
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.runtime.program.bodies.body_loops import BodyFunction, BodyResults
from graphflow.runtime.wire.step_values import step_of


def make_concurrent_runner(
    node: Node,
    routines: Sequence[BodyFunction],
    results: Sequence[BodyResults],
    cancel: Callable[[int, GraphflowError], None],
) -> Callable[..., None]:
    """Return a function (outs, *arrays, step, draws) that runs a node and fills its outputs.

    Args:
        routines: the parties, compiled.
        results: the results of each party.
        cancel: ends all waits of a step with an error.
    """
    parties = parties_of(node.attrs)
    are_all_here = any(n.op.name in CHANNEL_OPS for body in parties for n in body.graph.walk())

    def run(outs: Sequence[Any], *arrays: Any, step: int, draws: int) -> None:
        calls = [partial(routine, arrays, step, draws) for routine in routines]
        if are_all_here:
            found = ChannelScheduler(len(calls)).run(calls)
        else:
            found = _run_in_threads(calls, partial(cancel, step), step)
        for own, values in zip(results, found, strict=True):
            own.store(values)

    return run


def _run_in_threads(
    calls: Sequence[Callable[[], Any]], cancel: Callable[[GraphflowError], None], step: int
) -> list[Any]:
    """Run functions in parallel; the first failure ends the waits of the others, and is raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)
            cancel(OpError(f"step {step_of(step)} failed in another party: {error}"))

    threads = [
        threading.Thread(target=copy_context().run, args=(run, i), daemon=True)
        for i in range(len(calls) - 1)
    ]
    for thread in threads:
        thread.start()
    run(len(calls) - 1)  # on this thread, which saves a switch
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
