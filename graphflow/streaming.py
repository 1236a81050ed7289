"""Streaming: many steps of the same fetches, the feeds of the next ones sent ahead.

On workers, a step's feeds are converted and sent, and its order waits there, while the steps before
it compute. It computes as soon as the one before it has committed, but is decided only when its
result is asked for: so whoever stops early, or reads a variable in between, finds the state as
after the last result that was seen, and other calls undo what was begun ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphflow.compiled import Compiled
from graphflow.errors import ArgumentError, FeedError, GraphflowError, NonFiniteError
from graphflow.feeding import convert_all
from graphflow.op import Node, Tensor
from graphflow.stepping import Steps

Array = np.ndarray[Any, Any]
Given = Mapping[Node, Array]

DEPTH = 3
"""Steps that are under way at most: one computes, and the feeds of the others are there."""


@dataclass
class _Step:
    given: Given | Exception
    begun: Any = None
    compiled: Compiled | None = None


class Stream:
    """The steps of one `Session.run(fetches, feeds, steps=…)`.

    Args:
        count: steps.
        compiled: what the fetches are now, or None if they have not run in this way.
        plain: runs one step as `Session.run` does: values of fetches.
    """

    def __init__(
        self,
        steps: Steps,
        feeds: Iterable[Any],
        count: int,
        compiled: Callable[[], Compiled | None],
        plain: Callable[[Given], list[Any]],
    ) -> None:
        self._steps = steps
        self._feeds = iter(feeds)
        self._count = count
        self._compiled = compiled
        self._plain = plain
        self._taken = 0  # feeds, from the iterator
        self._window: deque[_Step] = deque()
        # Of shapes that ran, so that their programs are prepared; None: they are not begun ahead.
        self._bindings: dict[Any, dict[str, int] | None] = {}
        self._known: Compiled | None = None  # that this is of

    def step(self, number: int) -> list[Any]:
        """The values of the next step, the `number`-th from 1.

        Raises:
            FeedError: its feeds are wrong, or there are none; the step is named.
            GraphflowError: as `Session.run`; nothing after the step before it has happened.
        """
        compiled = self._compiled()
        self._fill(compiled)
        step = self._window.popleft()
        if isinstance(step.given, Exception):
            raise step.given
        try:
            if step.begun is None:
                values = self._plain(step.given)
                self._learn(step.given)
                return values
            assert step.compiled is not None
            return self._steps.finish(step.begun, step.compiled, step.given)
        except NonFiniteError:
            if step.begun is None:
                raise
            self.retreat()
            return self._plain(step.given)  # finds out where it came from
        except FeedError as error:
            self.retreat()
            raise self._wrong(number, error) from error
        except BaseException:
            self.retreat()
            raise

    def retreat(self) -> None:
        """Undoes what was begun ahead; it is begun again when it is asked for."""
        begun = [step for step in self._window if step.begun is not None]
        if begun:
            self._steps.undo([step.begun for step in begun])
        for step in begun:
            step.begun = None

    def _fill(self, compiled: Compiled | None) -> None:
        depth = DEPTH if compiled is not None and self._steps.can_begin else 1
        while len(self._window) < min(depth, self._count - self._taken + len(self._window)):
            if self._window and isinstance(self._window[-1].given, Exception):
                break  # the stream ends there, when it is its turn
            self._window.append(_Step(self._next(copied=depth > 1)))
        if depth == 1 or compiled is None:
            return
        before = -1
        for ahead, step in enumerate(self._window):
            if step.begun is None and not self._begin(step, compiled, ahead, before):
                return
            before = step.begun.step

    def _begin(self, step: _Step, compiled: Compiled, ahead: int, before: int) -> bool:
        if isinstance(step.given, Exception) or compiled is not self._known:
            return False
        bindings = self._bindings.get(_shapes(step.given))
        if bindings is None:
            return False
        step.begun = self._steps.begin(compiled, step.given, bindings, ahead, before)
        step.compiled = compiled
        return step.begun is not None

    def _learn(self, given: Given) -> None:
        """Feeds of such shapes ran: later ones need not be looked at as closely."""
        compiled = self._compiled()
        if compiled is not self._known:
            self._known, self._bindings = compiled, {}
        if compiled is None:
            return
        shapes = {node: a.shape for node, a in given.items()}
        suited = compiled.suits(shapes)
        self._bindings[_shapes(given)] = compiled.bindings(shapes) if suited else None

    def _next(self, copied: bool) -> Given | Exception:
        """The next feeds: copied where their step comes later, for their arrays may be used again
        by then. Or what is to be raised in their stead: when their step's turn comes, since the
        steps before it have still to happen."""
        number = self._taken + 1
        try:
            feeds = next(self._feeds)
        except StopIteration:
            return self._wrong(number, f"the feeds ended after {self._taken}")
        except Exception as error:  # the iterator's own
            return error
        self._taken = number
        try:
            given = convert_all(feeds)
        except GraphflowError as error:
            wrong = self._wrong(number, error)
            wrong.__cause__ = error
            return wrong
        return {node: a.copy() for node, a in given.items()} if copied else given

    def _wrong(self, number: int, why: object) -> FeedError:
        return FeedError(f"step {number} of {self._count}: {why}")


def check_stream(feeds: Any, steps: Any) -> None:
    """Whether `steps` and the iterable of their feeds can be run.

    Raises:
        ArgumentError: steps is no positive integer.
        FeedError: feeds are those of one step, or none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"run: steps is an integer above 0, not {steps!r}")
    if (
        feeds is None
        or isinstance(feeds, Mapping | Tensor | str)
        or not isinstance(feeds, Iterable)
    ):
        raise FeedError(
            f"run with steps={steps} takes an iterable with the feeds of each step, not "
            f"{type(feeds).__name__}; for the same feeds each time: itertools.repeat(feeds)"
        )


def _shapes(given: Given) -> Any:
    return frozenset([(node, array.shape) for node, array in given.items()])
