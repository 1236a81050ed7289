"""Run steps of a session in full: compile, place and check feeds; and run many steps ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.process.interrupts import resend_signal
from graphflow.base.progress import show_progress
from graphflow.errors import MemoryLimitError
from graphflow.execution.compiled_fetches import CompiledFetches, key_of
from graphflow.execution.step_prefetch import Decide, Run, StepStream
from graphflow.ir.op import Node, Tensor
from graphflow.planning.deployment import Deployment
from graphflow.planning.migration.replanning import can_place_anew, place_anew
from graphflow.sessions.session_lifecycle import SessionLifecycle

Array = np.ndarray[Any, Any]
_RESEND_SECONDS = 0.01  # until a generator that is ending is gone


class StepRunner:
    """Runs the steps of a session.

    Args:
        caches_steps: whether a `CachedStep` is looked for, by which later steps of the same fetches
            may run.
        runs_cached: whether steps with prefetched feeds run by it.
    """

    def __init__(
        self,
        life: SessionLifecycle,
        deployment: Deployment,
        *,
        caches_steps: bool,
        runs_cached: bool,
    ) -> None:
        self._life = life
        self._deployment = deployment
        self._steps = deployment.steps
        self._caches_steps = caches_steps
        self._runs_cached = runs_cached

    def step(
        self, tensors: Sequence[Tensor], given: Mapping[Node, Array], begun: Decide
    ) -> list[Any]:
        """Run a step unless it has begun, and return the values of the fetches."""
        if (decided := begun()) is not None:
            return decided
        shapes = {node: a.shape for node, a in given.items()}
        compiled = self._deployment.compile(tensors, shapes)
        arrays = compiled.check_feeds(given, self._deployment.compiled.values())
        bindings = compiled.bindings(shapes)
        try:
            self._deployment.prepare(compiled, shapes, bindings, arrays)
        except MemoryLimitError:
            if not can_place_anew(compiled):
                raise
            compiled = place_anew(self._deployment, compiled, shapes)
        with show_progress("first step of", 0 if compiled.runs else len(compiled.graph)):
            values = self._steps.run(compiled, arrays, bindings)
        if (
            self._caches_steps
            and not compiled.is_timed
            and (compiled.cached_step is None or compiled.cached_step.bindings is not bindings)
        ):
            compiled.find_cached_step(self._deployment.hosts, shapes, bindings)
        return values

    def run_many(
        self,
        tensors: Sequence[Tensor],
        rebuild: Callable[[list[Any]], Any],
        feeds: Iterable[Any],
        count: int,
        run: Run,
    ) -> Iterator[Any]:
        """Yield the results of `count` steps; each runs when it is requested, and some begin
        before.

        Args:
            rebuild: makes a result of values.
            run: runs a step as `Session.run` does.
        """
        known = partial(self._deployment.compiled.get, key_of(tensors))
        named = partial(self._deployment.placeholders, tensors)
        step = partial(run, tensors)
        stream = StepStream(self._steps, feeds, count, known, step, self._run_cached, named)
        life, thread, is_dropped = self._life, 0, False
        try:
            for number in range(1, count + 1):
                life.check_not_reentrant()
                life.check_usable(keep=stream)  # before taking feeds, which may block
                stream.take_feeds()
                with life.lock:
                    life.check_usable(keep=stream)
                    life.stream, thread = stream, threading.get_ident()
                    values = stream.step(number)
                yield rebuild(values)
        except GeneratorExit:
            is_dropped = True
            raise
        finally:
            # The garbage collector may end the generator on any thread, inside any function, where
            # it must not wait for a lock. Then the next call undoes the steps begun ahead.
            try:
                if thread == threading.get_ident() and not life.lock._is_owned():
                    with life.lock:
                        life.undo(stream)
            except BaseException as error:
                # Python ignores errors of a dropped generator, so the signal is sent again.
                if not (is_dropped and resend_signal(error, _RESEND_SECONDS)):
                    raise

    def _run_cached(self, compiled: CompiledFetches, feeds: Any) -> list[Any] | None:
        """Run a step by its fast path, if there is one, and return the values of the fetches."""
        if compiled.cached_step is None or not self._runs_cached:
            return None
        values = self._steps.run_cached(compiled, compiled.cached_step, feeds)
        if values is not None and self._life.sigterm is not None:  # the session writes checkpoints
            self._life.after_step()
        return values

    def undo_begun(self) -> None:
        """Undo the steps begun ahead."""
        if self._life.stream is not None:
            self._life.stream.undo_begun()
