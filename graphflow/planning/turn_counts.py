"""The values of strategies' counters of turns, read from workers only where they are not known.

A counter decides how a step is partitioned, so the client has to know it before the step begins. A
step that committed moved it by a known number. Any other change of the state makes the client read
it again.
"""

from __future__ import annotations

from typing import NamedTuple

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.ir.op import Node


class _Count(NamedTuple):
    """A counter's value before a step.

    Attributes:
        value: the value.
        compiled: the fetches that ran next.
        committed, runs: how many steps had committed, and how many of these fetches.
        writes: how often the state had been written.
    """

    value: int
    compiled: CompiledFetches
    committed: int
    runs: int
    writes: int


class TurnCounts:
    """The values of counters, as far as the client knows them."""

    def __init__(self, state: VariableStore, steps: StepExecutor) -> None:
        self._state = state
        self._steps = steps
        self._known: dict[Node, _Count] = {}

    def read(self, counter: Node) -> int:
        """Return the value of a counter."""
        known = self._known.get(counter)
        if known is not None and known.writes == self._state.writes:
            passed = self._steps.committed - known.committed
            ran = known.compiled.runs - known.runs
            division = known.compiled.division
            if passed == ran == 0:
                return known.value
            if passed == ran == 1 and division is not None:
                return known.value + division.counter_step
        return int(self._state.peek(counter))

    def note(self, counter: Node, value: int, compiled: CompiledFetches) -> None:
        """Note the value of a counter before a step of some fetches."""
        self._known[counter] = _Count(
            value, compiled, self._steps.committed, compiled.runs, self._state.writes
        )


__all__ = ["TurnCounts"]
