"""Run steps: compiled fetches and feeds in, values out. Counts steps and records them in traces.

Most steps repeat an earlier one on a device of this process. They take the fast path of a
`CachedStep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic_ns, perf_counter
from typing import Any

import numpy as np

from graphflow.base.process.interrupts import defer_signals, is_interrupt
from graphflow.errors import LinkLost, NonFiniteError, WorkerLost
from graphflow.execution.cached_step import CachedStep
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.replan_policy import window_position
from graphflow.ir.op import Node
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.host.session_state import DRAWS
from graphflow.runtime.partitioning.check_modes import EVERY
from graphflow.runtime.tracing.trace import Trace
from graphflow.runtime.tracing.turn_events import window_edges
from graphflow.runtime.wire.step_values import STEP_BITS

Array = np.ndarray[Any, Any]


class StepExecutor:
    """Runs the steps of a session.

    Args:
        deadline: seconds that a step may take.
        sampling: True to trace a window of steps now and then, for replan="auto".

    Attributes:
        committed: steps that committed; random numbers depend on it.
        trace: trace of the open trace block, if any.
        last: fetches of the last step.
        latest: what the last step returned, if somebody watches the session.
        lost: why no further step can run.
        aligns_clocks: whether traced steps wait until the clocks of workers are known. Durations
            need no common clock.
    """

    def __init__(self, hosts: Hosts, deadline: float, sampling: bool) -> None:
        self.committed = 0
        self.trace: Trace | None = None
        self.last: CompiledFetches | None = None
        self.latest: list[Any] | None = None
        self.lost: WorkerLost | None = None
        self.aligns_clocks = True
        self._hosts = hosts
        self._deadline = deadline
        self._sampling = sampling
        self._number_base = 1 << STEP_BITS  # added to the session's step number on the wire
        self._number = 0  # of the last step on the wire
        self._programs = 0

    def add(self, compiled: CompiledFetches) -> str:
        """Send the partitions of fetches to the workers under a new name, and return the name.

        The caller sets `compiled.program` to it when the variables are there as well.
        """
        if not compiled.name:
            compiled.name = f"p{self._programs}"
            self._programs += 1
        self._hosts.add(compiled.name, compiled.by_worker)
        return compiled.name

    def _next_number(self, ahead: int = 0) -> int:
        """Return the wire number of the step after `ahead` others that are not decided yet.

        It is the session's step number plus a base that makes it larger than every number before.
        """
        if self._number_base + self.committed + ahead <= self._number:
            self._number_base += 1 << STEP_BITS
        self._number = self._number_base + self.committed + ahead
        return self._number

    def run_cached(
        self, compiled: CompiledFetches, cached: CachedStep, feeds: Any
    ) -> list[Any] | None:
        """Run a step by its fast path; None if that does not fit. Raises as `run`."""
        if self.trace is not None:
            return None
        named = cached.match_feeds(feeds)
        if named is None:
            found = compiled.match_other_step(self._hosts, feeds)
            if found is None:
                return None
            cached, named = found
        number = self._number_base + self.committed
        if number <= self._number:
            number = self._next_number()
        self._number = number
        start = perf_counter()
        try:
            fetched = cached.ready(number, self.committed, named, self._deadline)
        except NonFiniteError:
            return None  # `run` repeats the step and names the node at fault
        except BaseException as error:
            self._note_failure(error, compiled, number, self.committed)
            raise
        if fetched is None:
            compiled.drop_cached_steps()
            return None
        self.committed += 1
        self.last = compiled
        compiled.runs += 1
        compiled.recent_seconds.append(perf_counter() - start)
        return cached.values(fetched, feeds)

    def run(
        self, compiled: CompiledFetches, arrays: Mapping[Node, Array], bindings: dict[str, int]
    ) -> list[Any]:
        """Run a step over all workers, and return the value of each fetch.

        Raises:
            OpError, StepTimeout, WorkerLost: the step failed, and changed nothing.
        """
        step = self.committed
        traced = self.trace is not None or self._should_sample(compiled)
        if traced and compiled.partitions and self.aligns_clocks:
            self._hosts.wait_for_clocks()
        start = monotonic_ns()
        fetched: Mapping[str, Array] = {}
        if compiled.partitions:
            number = self._next_number()
            try:
                result = self._hosts.step(
                    compiled.program,
                    number,
                    {**bindings, DRAWS: self.committed},
                    compiled.worker_feeds(arrays),
                    traced,
                    self._deadline,
                )
                self.committed = step + 1
            except NonFiniteError as error:
                raise self._find_nonfinite(error, compiled, arrays, bindings) from None
            except BaseException as error:
                self._note_failure(error, compiled, number, step)
                raise
            fetched = result.fetches
            if traced:
                edges, exchanges = compiled.edges(bindings), compiled.exchanges(bindings)
                windows = window_edges(compiled.graph, compiled.partitions)
                with defer_signals():  # the lists must stay of equal length
                    compiled.traced.append(bindings)
                    for trace in filter(None, (self.trace, compiled.trace)):
                        trace.add_step(
                            step, start, monotonic_ns(), result.spans, edges, result.peak,
                            result.errors, exchanges, windows,
                        )  # fmt: skip
            else:
                compiled.note_duration(bindings, (monotonic_ns() - start) * 1e-9)
        else:
            self.committed += 1
        self.last = compiled
        compiled.runs += 1
        compiled.is_warm = True
        compiled.note_ids(arrays)
        compiled.note_facts(step, fetched)
        return compiled.values(fetched, arrays)

    @property
    def can_begin(self) -> bool:
        """True if a step may begin before the one before it is decided."""
        return self.trace is None and not self._sampling and self._hosts.can_begin_ahead

    @property
    def is_near(self) -> bool:
        """True if all workers are on this host."""
        return self._hosts.is_single_host

    def begin(
        self,
        compiled: CompiledFetches,
        arrays: Mapping[Node, Array],
        bindings: Mapping[str, int],
        ahead: int,
        follows: int,
    ) -> Any:
        """Begin a step ahead of time, and return the handle for `finish`; None if that cannot be.

        It cannot be after a recovery, until the workers have the program again.

        Args:
            ahead: number of steps before it that are not decided yet.
            follows: wire number of the step before it; -1 if that is decided.
        """
        if not compiled.partitions or not compiled.program:
            return None
        return self._hosts.begin(
            compiled.program,
            self._next_number(ahead),
            {**bindings, DRAWS: self.committed + ahead},
            compiled.worker_feeds(arrays),
            self._deadline,
            follows,
        )

    def finish(
        self, begun: Any, compiled: CompiledFetches, arrays: Mapping[Node, Array]
    ) -> list[Any]:
        """Decide the first of the steps begun ahead, and return the value of each fetch; raises as
        `run`."""
        step = self.committed
        try:
            result = self._hosts.finish(begun)
            self.committed = step + 1
        except BaseException as error:
            self._note_failure(error, compiled, begun.step, step)
            raise
        self.last = compiled
        compiled.runs += 1
        compiled.is_warm = True
        compiled.note_ids(arrays)
        compiled.note_facts(step, result.fetches)
        return compiled.values(result.fetches, arrays)

    def _note_failure(
        self, error: BaseException, compiled: CompiledFetches, number: int, before: int
    ) -> None:
        """Note what the error of a step means for later steps, before it is raised again.

        A lost worker ends them. An interrupted step may have committed all the same.

        Args:
            number: number of the step on the wire.
            before: steps that had committed before it.
        """
        if isinstance(error, WorkerLost):
            self.lost = error
        elif isinstance(error, LinkLost):
            compiled.explain_link_loss(error)
        elif is_interrupt(error) and self._hosts.has_committed(number, error):
            self.committed = before + 1

    def undo(self, begun: Sequence[Any]) -> None:
        """Discard steps that were begun ahead; they change nothing."""
        self._hosts.undo(begun)

    def _find_nonfinite(
        self,
        error: NonFiniteError,
        compiled: CompiledFetches,
        arrays: Mapping[Node, Array],
        bindings: Mapping[str, int],
    ) -> NonFiniteError:
        """Return the error for a step that was undone because of a result that is not finite.

        The step runs again with a check after each node, to name the first node at fault. It
        commits nothing.
        """
        program = f"{compiled.program}-{EVERY}"
        parts = {
            worker: [replace(part, checks=EVERY) for part in mine]
            for worker, mine in compiled.by_worker.items()
        }
        self._hosts.add(program, parts)
        try:
            self._hosts.step(
                program, self._next_number(), {**bindings, DRAWS: self.committed},
                compiled.worker_feeds(arrays), False, self._deadline,
            )  # fmt: skip
        except NonFiniteError as found:
            return found
        finally:
            self._hosts.forget([program], {})
        return NonFiniteError(
            f"{error}; the step was undone. No node made it of finite values alone: look at "
            "infinities among the feeds, variables and constants"
        )

    def _should_sample(self, compiled: CompiledFetches) -> bool:
        """Return True if the next step of some fetches is traced outside a trace block."""
        if compiled.is_timed:
            return False
        return self._sampling and window_position(compiled.runs) is not None
