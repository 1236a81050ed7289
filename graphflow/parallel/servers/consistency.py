"""Rules of windows: the pushes that make an update, and the workers that a server answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ops.control_flow.turn_rules import Consistency
from graphflow.parallel.servers.micro_batches import Turns

_NEVER = np.int32(2**30)


class Rules(NamedTuple):
    """The rules of a window.

    Attributes:
        turns: its numbers.
        consistency: see `gf.parallel.ParameterServer`.
        aggregate: the pushes that make an update, M.
        staleness: with "ssp", the turns that a worker may be ahead of the slowest one.
        rows_at_once: each push updates rows of tables when it comes, and its worker is answered
            with rows at once, whatever it waits for otherwise.
    """

    turns: Turns
    consistency: Consistency
    aggregate: int
    staleness: int
    rows_at_once: bool = False

    @property
    def updates(self) -> int:
        """The updates of a window, at each server."""
        return self.turns.each if self.has_backups else self.turns.total // self.aggregate

    @property
    def has_backups(self) -> bool:
        """True if a round takes the first pushes, and drops late ones."""
        return self.consistency == "bsp" and self.aggregate < self.turns.workers

    @property
    def deals_numbers(self) -> bool:
        """True if the first server tells workers what to take next."""
        return self.is_pool or self.has_backups

    @property
    def is_pool(self) -> bool:
        """True if workers take micro-batches from one queue."""
        return self.consistency == "pool"

    @property
    def has_fixed_order(self) -> bool:
        """True if servers take pushes in the order of workers, so that it does not matter when
        they come."""
        return self.consistency == "bsp" and not (self.has_backups or self.rows_at_once)

    def first_impossible(self, order: Sequence[int]) -> int | None:
        """Return the place of the first push in an order that cannot come: its worker has not been
        answered then. None if the order can be followed.

        Args:
            order: the worker of each push, one for each micro-batch; -1 for any.
        """
        if self.has_backups:
            return self._first_impossible_in_rounds(order)
        workers, each = self.turns.workers, self.turns.each
        clocks = [0] * workers
        may_push = [True] * workers
        for place, k in enumerate(order):
            if k == -1:  # from here on the order is open
                return None
            if not 0 <= k < workers or not may_push[k]:
                return place
            clocks[k] += 1
            may_push[k] = place + workers < self.turns.total if self.is_pool else clocks[k] < each
            if self.consistency == "bsp":
                now = (place + 1) // workers
                may_push = [clock <= now and clock < each for clock in clocks]
            if self.consistency == "ssp":
                running = [clock for clock in clocks if clock < each]
                least = min(running, default=0)
                may_push = [clock < each and clock - least <= self.staleness for clock in clocks]
        return None

    def _first_impossible_in_rounds(self, order: Sequence[int]) -> int | None:
        """Return the place of the first push that cannot come, with backup workers."""
        rounds = [0] * self.turns.workers
        now, waiting = 0, set[int]()
        for place, k in enumerate(order):
            if k == -1 or now == self.turns.each:
                return None if k == -1 else place
            if not 0 <= k < len(rounds) or k in waiting:
                return place
            if rounds[k] == now:
                waiting.add(k)
            rounds[k] = now
            if len(waiting) == self.aggregate:
                now += 1
                for each in waiting:
                    rounds[each] = now
                waiting.clear()
        return None

    def answers(
        self, clocks: Tensor, waiting: Tensor, which: Tensor, is_update: bool
    ) -> Tensor | None:
        """Return which workers are answered after a push, bool (workers,); None for nobody.

        Args:
            clocks: the turns of each worker that have been pushed, int32 (workers,).
            waiting: the workers that have pushed and were not answered since, bool (workers,).
            which: the worker that has just pushed.
            is_update: the push completed an update.
        """
        running = clocks < self.turns.each
        if self.consistency == "bsp":
            return running if is_update else None
        if self.consistency == "ssp":
            least = FUNCTIONS["min"](FUNCTIONS["where"](running, clocks, _NEVER))
            near = clocks - least <= np.int32(self.staleness)
            both = FUNCTIONS["logical_and"]
            answered: Tensor = both(both(waiting, running), near)
            return answered
        own = one_hot(which, self.turns.workers)
        if self.is_pool:
            return own
        chosen: Tensor = FUNCTIONS["logical_and"](own, running)
        return chosen


def one_hot(which: Tensor, workers: int) -> Tensor:
    """Return a mask of one worker, bool (workers,)."""
    mask: Tensor = FUNCTIONS["equal"](np.arange(workers, dtype=np.int32), which)
    return mask


__all__ = ["Rules", "one_hot"]
