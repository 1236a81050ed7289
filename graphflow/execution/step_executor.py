"""Stepping: compiled fetches and feeds in, values out; counts the steps, and tells traces of them.

Most steps are like one before, on one device of this process: they go a shorter way, a `Route`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic_ns, perf_counter
from typing import Any

import numpy as np

from graphflow.base.interrupts import defer_signals, is_interrupt
from graphflow.errors import LinkLost, NonFiniteError, WorkerLost
from graphflow.execution.compiled_fetches import CachedStep, CompiledFetches
from graphflow.execution.replan_policy import window_position
from graphflow.ir.op import Node
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.host.session_state import DRAWS
from graphflow.runtime.partitioning.check_modes import EVERY
from graphflow.runtime.tracing.trace import Trace
from graphflow.runtime.wire.messages import STEP_BITS

Array = np.ndarray[Any, Any]


class StepExecutor:
    """The steps of a session.

    Args:
        deadline: seconds that a step may take.
        sampling: whether a few steps of the same fetches are traced now and then.

    Attributes:
        committed: steps that committed, by which random numbers are drawn.
        trace: of the block that is open.
        last: the fetches of the last step.
        lost: why there will be no more steps.
    """

    def __init__(self, hosts: Hosts, deadline: float, sampling: bool) -> None:
        self.committed = 0
        self.trace: Trace | None = None
        self.last: CompiledFetches | None = None
        self.lost: WorkerLost | None = None
        self._hosts = hosts
        self._deadline = deadline
        self._sampling = sampling
        self._number_base = 1 << STEP_BITS  # added to the session's step number on the wire
        self._number = 0  # of the last step on the wire
        self._programs = 0

    def add(self, compiled: CompiledFetches) -> str:
        """Give the workers the partitions of fetches, under a name of their own, which is to be
        `compiled.program` when all that they read is there, too."""
        if not compiled.name:
            compiled.name = f"p{self._programs}"
            self._programs += 1
        self._hosts.add(compiled.name, compiled.by_worker)
        return compiled.name

    def _next_number(self, ahead: int = 0) -> int:
        """Return the number on the wire of the step after `ahead` others that are not decided: that
        of the session, and bits above it that make it larger than all numbers before."""
        if self._number_base + self.committed + ahead <= self._number:
            self._number_base += 1 << STEP_BITS
        self._number = self._number_base + self.committed + ahead
        return self._number

    def run_cached(
        self, compiled: CompiledFetches, cached: CachedStep, feeds: Any
    ) -> list[Any] | None:
        """A step by the shorter way; None if it is not for it. As `run` otherwise."""
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
            return None  # the long way finds out where it came from
        except LinkLost as error:
            raise compiled.explain_link_loss(error) from None
        except WorkerLost as error:
            self.lost = error
            raise
        except BaseException as error:
            self._count_interrupted(error, number, self.committed)
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
        """A step over all workers: the value of each fetch.

        Raises:
            OpError, StepTimeout, WorkerLost: the step failed, and changed nothing.
        """
        step = self.committed
        traced = self.trace is not None or self._should_sample(compiled)
        if traced and compiled.partitions:
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
            except WorkerLost as error:
                self.lost = error
                raise
            except LinkLost as error:
                raise compiled.explain_link_loss(error) from None
            except NonFiniteError as error:
                raise self._find_nonfinite(error, compiled, arrays, bindings) from None
            except BaseException as error:
                self._count_interrupted(error, number, step)
                raise
            fetched = result.fetches
            if traced:
                edges, exchanges = compiled.edges(bindings), compiled.exchanges(bindings)
                with defer_signals():  # else one of them has a step that the others lack
                    compiled.traced.append(bindings)
                    for trace in filter(None, (self.trace, compiled.trace)):
                        trace.add_step(
                            step, start, monotonic_ns(), result.spans, edges, result.peak,
                            result.errors, exchanges,
                        )  # fmt: skip
            elif compiled.runs:
                compiled.recent_seconds.append((monotonic_ns() - start) * 1e-9)
        else:
            self.committed += 1
        self.last = compiled
        compiled.runs += 1
        return compiled.values(fetched, arrays)

    @property
    def can_begin(self) -> bool:
        """Whether a step may begin before the one before it is decided."""
        return self.trace is None and not self._sampling and self._hosts.can_begin_ahead

    @property
    def is_near(self) -> bool:
        """Whether all workers are on this host."""
        return self._hosts.is_single_host

    def begin(
        self,
        compiled: CompiledFetches,
        arrays: Mapping[Node, Array],
        bindings: Mapping[str, int],
        ahead: int,
        follows: int,
    ) -> Any:
        """Begin a step that is `ahead` of others that are not decided, for `finish`; None where
        that cannot be, as after a recovery, in which workers were given what it needed only.
        `follows` is the number of the one before it, -1 if that is decided."""
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
        """Decide the first of the steps that were begun: the value of each fetch; as `run`."""
        step = self.committed
        try:
            result = self._hosts.finish(begun)
            self.committed = step + 1
        except WorkerLost as error:
            self.lost = error
            raise
        except LinkLost as error:
            raise compiled.explain_link_loss(error) from None
        except BaseException as error:
            self._count_interrupted(error, begun.step, step)
            raise
        self.last = compiled
        compiled.runs += 1
        return compiled.values(result.fetches, arrays)

    def _count_interrupted(self, error: BaseException, number: int, before: int) -> None:
        """Count a step that an interrupt ended if it had committed by then, by its number on the
        wire; `before` it, so many had."""
        if is_interrupt(error) and self._hosts.has_committed(number, error):
            self.committed = before + 1

    def undo(self, begun: Sequence[Any]) -> None:
        """End steps that were begun: nothing of them happens."""
        self._hosts.undo(begun)

    def _find_nonfinite(
        self,
        error: NonFiniteError,
        compiled: CompiledFetches,
        arrays: Mapping[Node, Array],
        bindings: Mapping[str, int],
    ) -> NonFiniteError:
        """What is to be said of a step that was undone because a result is not finite: it runs
        again, node by node, to name the first that was not. Nothing is committed."""
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
        """Whether the next step of some fetches is traced though no block is open."""
        return self._sampling and window_position(compiled.runs) is not None
