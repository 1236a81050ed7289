"""Many steps of the same fetches, with the feeds of the next ones sent ahead.

Workers receive the feeds of the next steps while earlier steps compute. A step computes as soon as
the one before it has committed. It is decided only when its result is requested. So a caller that
stops early, or reads a variable in between, sees the state after the last result that it took.
Other calls undo the steps begun ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graphflow.base.argument_checks import as_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import is_interrupt, passing_interrupts
from graphflow.errors import ArgumentError, FeedError, GraphflowError, NonFiniteError
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.step_executor import StepExecutor
from graphflow.frontend.feeds import PlaceholderGroups, convert_feeds
from graphflow.ir.op import Node, Tensor

Array = np.ndarray[Any, Any]
Given = Mapping[Node, Array]
Decide = Callable[[], list[Any] | None]
"""Decides a step that has begun and returns its values; None if the step has not begun."""
Run = Callable[[Sequence[Tensor], Given, Decide], list[Any]]
"""Runs a step of fetches and feeds, and returns the values of the fetches."""
RunCached = Callable[[CompiledFetches, Any], list[Any] | None]
"""Runs a step on the feeds as given by its fast path; None if the fast path does not fit."""

MAX_STEPS = 3
"""Steps under way: one computes, and the feeds of the others have been sent."""

SMALL_STEP_BYTES = 64 << 10
"""Bytes of feeds and fetches up to which a step is small."""

QUICK_STEP_SECONDS = 1e-3
"""Duration below which no step is begun ahead if all workers are on this host.

The client needs about as long to keep several steps under way, on processors that the workers need,
too.
"""

MAX_SMALL_STEPS = 16
"""Small steps under way if they need not wait for each other.

They begin in batches of half as many, since each batch costs the workers a wake-up.
"""


@dataclass
class _QueuedStep:
    """A step whose feeds are known: converted, or the error to raise when its turn comes.

    Attributes:
        repeated: True if the feeds have the shapes of the last step that ran by itself.
        begun: the handle of a step begun ahead.
        compiled: the fetches with which it was begun.
    """

    given: Given | Exception
    repeated: bool = False
    begun: Any = None
    compiled: CompiledFetches | None = None


@dataclass(frozen=True)
class _RepeatedFeeds:
    """Shapes and dtypes of feeds that ran: feeds that match them need no conversion.

    Attributes:
        feeds: for each key of the dict: the key, its placeholder, shape and dtype.
    """

    compiled: CompiledFetches
    bindings: dict[str, int]
    feeds: tuple[tuple[Any, Node, tuple[int, ...], Any], ...]

    def copy_matching(self, feeds: Any) -> Given | None:
        """Return copies of feeds that match; None if they do not."""
        if type(feeds) is not dict or len(feeds) != len(self.feeds):
            return None
        given = {}
        for key, node, shape, dtype in self.feeds:
            value = feeds.get(key)
            if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                return None
            given[node] = value.copy()
        return given


class StepStream:
    """The steps of one `Session.run(fetches, feeds, steps=…)`.

    Args:
        count: number of steps.
        compiled: returns the compiled fetches, or None if they have not run in this form.
        run: runs one step as `Session.run` does.
        run_cached: runs one step by its fast path, if it fits.
        placeholders: placeholders that feeds may name.
    """

    def __init__(
        self,
        steps: StepExecutor,
        feeds: Iterable[Any],
        count: int,
        compiled: Callable[[], CompiledFetches | None],
        run: Callable[[Given, Decide], list[Any]],
        run_cached: RunCached,
        placeholders: PlaceholderGroups,
    ) -> None:
        self._steps = steps
        self._near = steps.is_near
        self._feeds = iter(feeds)
        self._count = count
        self._compiled = compiled
        self._run = run
        self._run_cached = run_cached
        self._placeholders = placeholders
        self._is_independent = False  # steps need not wait for each other
        self._cautious_steps = 1  # small steps to see before `MAX_STEPS` is exceeded
        self._feeds_taken = 0  # from the iterator
        self._arrived: list[Any] = []  # feeds, or steps, that are not in the window yet
        self._window: deque[_QueuedStep] = deque()
        # True while workers may have begun a step that the window lacks, after an interrupt.
        self._may_be_inconsistent = False
        self._repeated: _RepeatedFeeds | None = None
        self._bindings: dict[Any, dict[str, int]] = {}  # by shapes of feeds that ran

    def take_feeds(self) -> None:
        """Take the feeds of the next step, and those of steps to begin ahead, from the user's
        iterator.

        The iterator may wait for other threads that use the session. So the caller must not hold
        the session's lock.
        """
        compiled = self._compiled()
        if not self._should_prefetch(compiled):
            if not self._window and not self._arrived:
                self._arrived.append(self._next_feeds())
            return
        with passing_interrupts():
            self._take_ahead()

    def _take_ahead(self) -> None:
        fresh, window = self._arrived, self._window
        while self._feeds_taken < self._count and len(fresh) + len(window) < self._depth:
            last = fresh[-1] if fresh else window[-1] if window else None
            if last is not None and isinstance(last.given, Exception):
                return  # the stream ends with this step
            fresh.append(step := self._as_step(self._next_feeds(), copied=True))
            if not isinstance(step.given, Exception):
                self._note_size(step.given, ())

    def step(self, number: int) -> list[Any]:
        """Return the values of the next step; begin the steps after it."""
        if (values := self._run_alone()) is not None:
            return values
        with passing_interrupts():
            return self._next(number)

    def _next(self, number: int) -> list[Any]:
        self._window += [self._as_step(each, copied=False) for each in self._arrived]
        self._arrived.clear()
        step = self._window[0]
        if isinstance(step.given, Exception):
            raise step.given
        self._begin_all()
        begun = step.begun is not None
        try:
            values = self._run(step.given, lambda: self._decide(step))
            if not begun:
                self._remember_shapes(step.given)
        except NonFiniteError:
            if not begun:
                raise
            values = self._run(step.given, not_begun)  # runs again, and names the node at fault
        except FeedError as error:
            self.undo_begun()
            raise self._feed_error(number, error) from error
        except BaseException:
            self.undo_begun()
            raise
        self._window.popleft()
        self._note_size(step.given, values)
        return values

    def _run_alone(self) -> list[Any] | None:
        """Run the next step by its fast path if nothing was begun ahead; None if it does not
        fit."""
        if self._window or isinstance(self._arrived[0], _QueuedStep):
            return None
        compiled = self._compiled()
        if compiled is not None:
            with suppress(FeedError):  # `_as_step` raises it again, with the step's number
                if (values := self._run_cached(compiled, self._arrived[0])) is not None:
                    self._arrived.clear()
                    return values
        return None

    def _decide(self, step: _QueuedStep) -> list[Any] | None:
        """Decide a step that was begun ahead, and return its values; None if it was not begun."""
        begun = step.begun
        if begun is None:
            return None
        assert step.compiled is not None and not isinstance(step.given, Exception)
        self._may_be_inconsistent = True
        step.begun = None
        try:
            values = self._steps.finish(begun, step.compiled, step.given)
        except BaseException:
            self.undo_begun()  # first: whatever handles the error must not find begun steps
            raise
        self._may_be_inconsistent = False
        return values

    def undo_begun(self) -> None:
        """Undo the steps begun ahead; they begin again when they are requested."""
        begun = [step for step in self._window if step.begun is not None]
        if begun:
            self._cautious_steps = MAX_SMALL_STEPS  # other calls in between may come again
        if begun or self._may_be_inconsistent:
            self._steps.undo([step.begun for step in begun])
        for step in begun:
            step.begun = None
        self._may_be_inconsistent = False

    def _should_prefetch(self, compiled: CompiledFetches | None) -> bool:
        """Return True if steps are to begin ahead.

        If a counter decides how a step is partitioned, the step before it has to end first.
        """
        if compiled is None or compiled.is_timed:
            return False
        if compiled.division is not None and compiled.division.counter is not None:
            return False
        if self._near and min(compiled.recent_seconds, default=0.0) < QUICK_STEP_SECONDS:
            return False
        return self._steps.can_begin

    @property
    def _depth(self) -> int:
        """Largest number of steps under way."""
        return MAX_SMALL_STEPS if self._is_independent and not self._cautious_steps else MAX_STEPS

    def _note_size(self, given: Given, values: Sequence[Any]) -> None:
        """Note whether a step was small. Without values, only its feeds are judged."""
        nbytes = sum([a.nbytes for a in given.values()])
        nbytes += sum([getattr(each, "nbytes", 0) for each in values])
        if nbytes > SMALL_STEP_BYTES:
            self._cautious_steps = MAX_SMALL_STEPS
        elif values and self._cautious_steps:
            self._cautious_steps -= 1

    def _begin_all(self) -> None:
        """Begin the steps whose feeds are there; small ones in batches, since each batch wakes the
        workers."""
        compiled = self._compiled()
        if compiled is None or not self._should_prefetch(compiled):
            return
        waiting = sum(step.begun is None for step in self._window)
        if self._depth == MAX_SMALL_STEPS and waiting < min(
            MAX_SMALL_STEPS // 2, len(self._window)
        ):
            return
        before = -1
        for ahead, step in enumerate(self._window):
            if step.begun is None and not self._begin(step, compiled, ahead, before):
                return
            before = step.begun.step

    def _begin(self, step: _QueuedStep, compiled: CompiledFetches, ahead: int, before: int) -> bool:
        """Begin a step ahead; return False if that cannot be."""
        repeated = self._repeated
        if (
            isinstance(step.given, Exception)
            or repeated is None
            or repeated.compiled is not compiled
        ):
            return False
        bindings = repeated.bindings if step.repeated else self._bindings.get(_shapes(step.given))
        if bindings is None:
            return False
        step.compiled = compiled
        self._may_be_inconsistent = True
        step.begun = self._steps.begin(compiled, step.given, bindings, ahead, before)
        self._may_be_inconsistent = False
        if step.begun is None:
            return False
        self._is_independent = step.begun.free
        return True

    def _remember_shapes(self, given: Given) -> None:
        """Note shapes of feeds that ran, so that their program is prepared."""
        compiled = self._compiled()
        if compiled is None:
            return
        if self._repeated is None or self._repeated.compiled is not compiled:
            self._bindings.clear()
        shapes = {node: a.shape for node, a in given.items()}
        if compiled.suits(shapes):
            bindings = self._bindings[_shapes(given)] = compiled.bindings(shapes)
            feeds = tuple((node.outputs[0], node, a.shape, a.dtype) for node, a in given.items())
            self._repeated = _RepeatedFeeds(compiled, bindings, feeds)
            for step in self._window:
                step.repeated = False

    def _next_feeds(self) -> Any:
        """Return the next feeds, or a step that holds the error of the iterator.

        The error is raised in that step's turn, since the steps before it have still to run.
        """
        number = self._feeds_taken + 1
        try:
            feeds = next(self._feeds)
        except StopIteration:
            return _QueuedStep(
                self._feed_error(number, f"the feeds ended after {self._feeds_taken}")
            )
        except Exception as error:  # of the user's iterator; Ctrl-C is raised at once
            if is_interrupt(error):
                raise
            return _QueuedStep(error)
        self._feeds_taken = number
        return feeds

    def _as_step(self, feeds: Any, *, copied: bool) -> _QueuedStep:
        """Return the next step with its feeds.

        Args:
            copied: copy the arrays, which the user may reuse before the step begins.
        """
        if isinstance(feeds, _QueuedStep):
            return feeds
        if copied and self._repeated is not None:
            taken = self._repeated.copy_matching(feeds)
            if taken is not None:
                return _QueuedStep(taken, repeated=True)
        try:
            given = convert_feeds(feeds, self._placeholders)
        except GraphflowError as error:
            wrong = self._feed_error(self._feeds_taken, error)
            wrong.__cause__ = error
            return _QueuedStep(wrong)
        return _QueuedStep({node: a.copy() for node, a in given.items()} if copied else given)

    def _feed_error(self, number: int, why: object) -> FeedError:
        return FeedError(f"feeds {number} of {self._count}: {why}")


def check_stream(feeds: Any, steps: Any) -> None:
    """Check the number of steps and the iterable of their feeds.

    Raises:
        ArgumentError: steps is no positive integer.
        FeedError: feeds are those of one step, or None.
    """
    if as_count(steps) is None:
        raise ArgumentError(f"run: steps must be a positive integer, not {steps!r}")
    if (
        feeds is None
        or isinstance(feeds, Mapping | Tensor | str | np.ndarray)
        or not isinstance(feeds, Iterable)
    ):
        raise FeedError(
            f"run with steps={steps} takes an iterable with the feeds of each step, not "
            f"{type(feeds).__name__}; for the same feeds each time: itertools.repeat(feeds)"
        )


def not_begun() -> None:
    """Return None: the `Decide` of a step that has not begun."""


def _shapes(given: Given) -> Any:
    return frozenset([(node, array.shape) for node, array in given.items()])
