"""Running: steps of a session by the long way, which finds out all that is to be done, and steps
that are begun ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.interrupts import comes_again
from graphflow.base.progress import telling
from graphflow.execution.compiled_fetches import Compiled, key_of
from graphflow.execution.step_prefetch import Decide, Run, Stream
from graphflow.ir.op import Node, Tensor
from graphflow.planning.deployment import Deployment
from graphflow.sessions.session_lifecycle import SessionLifecycle

Array = np.ndarray[Any, Any]
_MOMENT = 0.01  # seconds for a generator that ends to be gone


class Running:
    """Runs the steps of a session.

    Args:
        routes: whether a short way is looked for, that later steps of the same fetches may take.
        short: whether steps here take it themselves.
    """

    def __init__(
        self, life: SessionLifecycle, deployment: Deployment, *, routes: bool, short: bool
    ) -> None:
        self._life = life
        self._deployment = deployment
        self._steps = deployment.steps
        self._routes = routes
        self._short = short

    def step(
        self, tensors: Sequence[Tensor], given: Mapping[Node, Array], begun: Decide
    ) -> list[Any]:
        """A step, unless it has begun: values of fetches."""
        if (decided := begun()) is not None:
            return decided
        shapes = {node: a.shape for node, a in given.items()}
        compiled = self._deployment.of(tensors, shapes)
        arrays = compiled.arrays(given, self._deployment.compiled.values())
        bindings = compiled.bindings(shapes)
        self._deployment.prepare(compiled, shapes, bindings)
        with telling("first step of", 0 if compiled.runs else len(compiled.graph)):
            values = self._steps.run(compiled, arrays, bindings)
        if self._routes and (compiled.route is None or compiled.route.bindings is not bindings):
            compiled.find_route(self._deployment.hosts, shapes, bindings)
        return values

    def ahead(
        self,
        tensors: Sequence[Tensor],
        rebuild: Callable[[list[Any]], Any],
        feeds: Iterable[Any],
        count: int,
        run: Run,
    ) -> Iterator[Any]:
        """Results of so many steps, each run when its result is asked for; some begin before that.

        Args:
            rebuild: makes a result of values.
            run: what a step takes, `step` among it.
        """
        known = partial(self._deployment.compiled.get, key_of(tensors))
        named = partial(self._deployment.placeholders, tensors)
        step = partial(run, tensors)
        stream = Stream(self._steps, feeds, count, known, step, self._shortly, named)
        life, thread, is_dropped = self._life, 0, False
        try:
            for number in range(1, count + 1):
                life.check_turn()
                life.check(keep=stream)  # before feeds are taken, which may wait
                stream.take()
                with life.lock:
                    life.check(keep=stream)
                    life.stream, thread = stream, threading.get_ident()
                    values = stream.step(number)
                yield rebuild(values)
        except GeneratorExit:
            is_dropped = True
            raise
        finally:
            # The garbage collector may end it on any thread and in the middle of anything, where
            # nothing can be waited for: then the next call undoes what was begun.
            try:
                if thread == threading.get_ident() and not life.lock._is_owned():
                    with life.lock:
                        life.undo(stream)
            except BaseException as error:
                # Python passes over what a generator raises that nobody has: it comes again.
                if not (is_dropped and comes_again(error, _MOMENT)):
                    raise

    def _shortly(self, compiled: Compiled, feeds: Any) -> list[Any] | None:
        """A step by the short way, if there is one: values of fetches."""
        if compiled.route is None or not self._short:
            return None
        values = self._steps.routed(compiled, compiled.route, feeds)
        if values is not None and self._life.drain is not None:  # there are checkpoints
            self._life.after()
        return values

    def undo(self) -> None:
        """End what was begun ahead."""
        if self._life.stream is not None:
            self._life.stream.retreat()
