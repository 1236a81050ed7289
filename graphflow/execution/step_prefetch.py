"""Streaming: many steps of the same fetches, the feeds of the next ones sent ahead.

On workers, a step's feeds are converted and sent while the steps before it compute. It computes as
soon as the one before it has committed, but is decided only when its result is asked for: so
whoever stops early, or reads a variable in between, finds the state as after the last result that
was seen, and other calls undo what was begun ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graphflow.base.interrupts import is_interrupt, passing_interrupts
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, FeedError, GraphflowError, NonFiniteError
from graphflow.execution.compiled_fetches import Compiled
from graphflow.execution.step_executor import Steps
from graphflow.frontend.feeds import PlaceholderGroups, convert_feeds
from graphflow.ir.op import Node, Tensor

Array = np.ndarray[Any, Any]
Given = Mapping[Node, Array]
Decide = Callable[[], list[Any] | None]
"""Decides a step if it has begun, and then tells its values; else None."""
Run = Callable[[Sequence[Tensor], Given, Decide], list[Any]]
"""A step of fetches and feeds: values of the fetches."""
Shortly = Callable[[Compiled, Any], list[Any] | None]
"""The same of feeds as they were given, by the short way of steps like those before; None if it is
not for them."""

DEPTH = 3
"""Steps that are under way at most: one computes, and the feeds of the others are there."""

SMALL = 64 << 10
"""Bytes of feeds and fetches up to which a step is small."""

QUICK = 1e-3
"""Seconds of a step by itself below which none is begun ahead where all workers are on this host:
it takes about as long as its client needs to keep several under way, on processors that the workers
need, too."""

MOST = 16
"""Small steps that are under way at most, if they need not wait for each other: they begin by half
as many, since every time costs the workers a wake-up."""


@dataclass
class _Step:
    given: Given | Exception
    usual: bool = False  # its feeds are as those of the last step that ran by itself
    begun: Any = None
    compiled: Compiled | None = None


@dataclass(frozen=True)
class _Usual:
    """Feeds of some shapes, which ran: others that are like them need not be looked at closely."""

    compiled: Compiled
    bindings: dict[str, int]
    feeds: tuple[tuple[Any, Node, tuple[int, ...], Any], ...]  # as given, and what that was

    def taken(self, feeds: Any) -> Given | None:
        """Copies of feeds; None if they are of another kind."""
        if type(feeds) is not dict or len(feeds) != len(self.feeds):
            return None
        given = {}
        for key, node, shape, dtype in self.feeds:
            value = feeds.get(key)
            if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                return None
            given[node] = value.copy()
        return given


class Stream:
    """The steps of one `Session.run(fetches, feeds, steps=…)`.

    Args:
        count: steps.
        compiled: what the fetches are now, or None if they have not run in this way.
        run: runs one step as `Session.run` does.
        shortly: the same in less time, where that is possible.
        named: placeholders that feeds may name.
    """

    def __init__(
        self,
        steps: Steps,
        feeds: Iterable[Any],
        count: int,
        compiled: Callable[[], Compiled | None],
        run: Callable[[Given, Decide], list[Any]],
        shortly: Shortly,
        named: PlaceholderGroups,
    ) -> None:
        self._steps = steps
        self._near = steps.is_near
        self._feeds = iter(feeds)
        self._count = count
        self._compiled = compiled
        self._run = run
        self._shortly = shortly
        self._named = named
        self._free = False  # steps need not wait for each other
        self._wary = 1  # small steps to be seen before more than `DEPTH` are under way
        self._taken = 0  # feeds, from the iterator
        self._fresh: list[Any] = []  # feeds, or steps with theirs, that are in no window yet
        self._window: deque[_Step] = deque()
        self._astray = False  # workers may have a step that is not in the window: Ctrl-C came then
        self._usual: _Usual | None = None
        self._bindings: dict[Any, dict[str, int]] = {}  # of shapes that ran: they are prepared

    def take(self) -> None:
        """Takes the feeds of the next step, and of those that are to be begun ahead. The iterator
        is the user's, and may wait for others who use the session: so by who does not hold it."""
        compiled = self._compiled()
        if not self._gains(compiled):
            if not self._window and not self._fresh:
                self._fresh.append(self._feed())
            return
        with passing_interrupts():
            self._take_ahead()

    def _take_ahead(self) -> None:
        fresh, window = self._fresh, self._window
        while self._taken < self._count and len(fresh) + len(window) < self._depth:
            last = fresh[-1] if fresh else window[-1] if window else None
            if last is not None and isinstance(last.given, Exception):
                return  # the stream ends there, when it is its turn
            fresh.append(step := self._as_step(self._feed(), copied=True))
            if not isinstance(step.given, Exception):
                self._weigh(step.given, ())

    def step(self, number: int) -> list[Any]:
        """The values of the next step, the `number`-th from 1, whose feeds were taken.

        Raises:
            FeedError: its feeds are wrong, or there are none; the step is named.
            GraphflowError: as `Session.run`; nothing after the step before it has happened.
        """
        if (values := self._quickly()) is not None:
            return values
        with passing_interrupts():
            return self._next(number)

    def _next(self, number: int) -> list[Any]:
        self._window += [self._as_step(each, copied=False) for each in self._fresh]
        self._fresh.clear()
        step = self._window[0]
        if isinstance(step.given, Exception):
            raise step.given
        self._begin_all()
        begun = step.begun is not None
        try:
            values = self._run(step.given, lambda: self._decide(step))
            if not begun:
                self._learn(step.given)
        except NonFiniteError:
            if not begun:
                raise
            values = self._run(step.given, nothing)  # finds out where it came from
        except FeedError as error:
            self.retreat()
            raise self._wrong(number, error) from error
        except BaseException:
            self.retreat()
            raise
        self._window.popleft()
        self._weigh(step.given, values)
        return values

    def _quickly(self) -> list[Any] | None:
        """The values of the next step, if it can be run by itself and by the short way."""
        if self._window or isinstance(self._fresh[0], _Step):
            return None
        compiled = self._compiled()
        if compiled is not None:
            with suppress(FeedError):  # the long way says of which step
                if (values := self._shortly(compiled, self._fresh[0])) is not None:
                    self._fresh.clear()
                    return values
        return None

    def _decide(self, step: _Step) -> list[Any] | None:
        begun = step.begun
        if begun is None:
            return None
        assert step.compiled is not None and not isinstance(step.given, Exception)
        self._astray = True
        step.begun = None
        try:
            values = self._steps.finish(begun, step.compiled, step.given)
        except BaseException:
            self.retreat()  # before anything else is done about it
            raise
        self._astray = False
        return values

    def retreat(self) -> None:
        """Undoes what was begun ahead; it is begun again when it is asked for."""
        begun = [step for step in self._window if step.begun is not None]
        if begun:
            self._wary = MOST  # who does something else in between may do so again
        if begun or self._astray:
            self._steps.undo([step.begun for step in begun])
        for step in begun:
            step.begun = None
        self._astray = False

    def _gains(self, compiled: Compiled | None) -> bool:
        """Whether steps are begun ahead."""
        if compiled is None or (self._near and min(compiled.took, default=0.0) < QUICK):
            return False
        return self._steps.can_begin

    @property
    def _depth(self) -> int:
        """How many steps may be under way."""
        return MOST if self._free and not self._wary else DEPTH

    def _weigh(self, given: Given, values: Sequence[Any]) -> None:
        """Sees whether a step was small; of its feeds alone, it may still turn out not to be."""
        nbytes = sum([a.nbytes for a in given.values()])
        nbytes += sum([getattr(each, "nbytes", 0) for each in values])
        if nbytes > SMALL:
            self._wary = MOST
        elif values and self._wary:
            self._wary -= 1

    def _begin_all(self) -> None:
        """Begins the steps whose feeds are there; many together, where several are under way, since
        each time wakes the workers up."""
        compiled = self._compiled()
        if compiled is None or not self._gains(compiled):
            return
        waiting = sum(step.begun is None for step in self._window)
        if self._depth == MOST and waiting < min(MOST // 2, len(self._window)):
            return
        before = -1
        for ahead, step in enumerate(self._window):
            if step.begun is None and not self._begin(step, compiled, ahead, before):
                return
            before = step.begun.step

    def _begin(self, step: _Step, compiled: Compiled, ahead: int, before: int) -> bool:
        usual = self._usual
        if isinstance(step.given, Exception) or usual is None or usual.compiled is not compiled:
            return False
        bindings = usual.bindings if step.usual else self._bindings.get(_shapes(step.given))
        if bindings is None:
            return False
        step.compiled = compiled
        self._astray = True
        step.begun = self._steps.begin(compiled, step.given, bindings, ahead, before)
        self._astray = False
        if step.begun is None:
            return False
        self._free = step.begun.free
        return True

    def _learn(self, given: Given) -> None:
        """Feeds of such shapes ran, so that their program is prepared."""
        compiled = self._compiled()
        if compiled is None:
            return
        if self._usual is None or self._usual.compiled is not compiled:
            self._bindings.clear()
        shapes = {node: a.shape for node, a in given.items()}
        if compiled.suits(shapes):
            bindings = self._bindings[_shapes(given)] = compiled.bindings(shapes)
            feeds = tuple((node.outputs[0], node, a.shape, a.dtype) for node, a in given.items())
            self._usual = _Usual(compiled, bindings, feeds)
            for step in self._window:
                step.usual = False

    def _feed(self) -> Any:
        """The feeds of the next step; or the step with what is to be raised in their stead: when
        its turn comes, since the steps before it have still to happen."""
        number = self._taken + 1
        try:
            feeds = next(self._feeds)
        except StopIteration:
            return _Step(self._wrong(number, f"the feeds ended after {self._taken}"))
        except Exception as error:  # the iterator's own; Ctrl-C is not kept back
            if is_interrupt(error):
                raise
            return _Step(error)
        self._taken = number
        return feeds

    def _as_step(self, feeds: Any, *, copied: bool) -> _Step:
        """The next step, with its feeds: copied where it comes later, for their arrays may be used
        again by then."""
        if isinstance(feeds, _Step):
            return feeds
        if copied and self._usual is not None:
            taken = self._usual.taken(feeds)
            if taken is not None:
                return _Step(taken, usual=True)
        try:
            given = convert_feeds(feeds, self._named)
        except GraphflowError as error:
            wrong = self._wrong(self._taken, error)
            wrong.__cause__ = error
            return _Step(wrong)
        return _Step({node: a.copy() for node, a in given.items()} if copied else given)

    def _wrong(self, number: int, why: object) -> FeedError:
        return FeedError(f"feeds {number} of {self._count}: {why}")


def check_stream(feeds: Any, steps: Any) -> None:
    """Whether `steps` and the iterable of their feeds can be run.

    Raises:
        ArgumentError: steps is no positive integer.
        FeedError: feeds are those of one step, or none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1:
        raise ArgumentError(f"run: steps is an integer above 0, not {steps!r}")
    if (
        feeds is None
        or isinstance(feeds, Mapping | Tensor | str | np.ndarray)
        or not isinstance(feeds, Iterable)
    ):
        raise FeedError(
            f"run with steps={steps} takes an iterable with the feeds of each step, not "
            f"{type(feeds).__name__}; for the same feeds each time: itertools.repeat(feeds)"
        )


def nothing() -> None:
    """A step that has not begun."""


def _shapes(given: Given) -> Any:
    return frozenset([(node, array.shape) for node, array in given.items()])
