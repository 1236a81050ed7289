"""Records of windows: the order of pushes at each server, by which a window can be repeated bit for
bit, and how stale each push was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import FeedError
from graphflow.ir.op import Node
from graphflow.parallel.servers.consistency import Rules

Int32s = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, eq=False)
class WindowHistory:
    """The pushes of one window, P of them, at each of S servers.

    Attributes:
        step: the number of the step, counted as `Session.step`.
        order: the worker of each push in the order in which a server took them, int32 (S, P). Feed
            it to `ParameterServer.order`, and the window has the same bits again.
        staleness: for each push, the updates between the values that it was computed from and the
            update that it became a part of, int32 (S, P).
        micro_batches: the micro-batch of each push, int32 (S, P).
        filtered: for "push" and "pull", if they go through filters, the bytes of their messages and
            those of the tensors without filters. The first pulls of a window are not among them.
        dropped: the turns whose pushes were late, of backup workers: those with a staleness above
            0, and those that a worker had begun when the window ended.

    With backup workers the number of pushes varies. Places after the last push have -1.
    """

    step: int
    order: Int32s
    staleness: Int32s
    micro_batches: Int32s
    dropped: int = 0
    filtered: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def histogram(self) -> dict[int, int]:
        """The number of pushes of each staleness, over all servers."""
        values, counts = np.unique(self.staleness[self.order >= 0], return_counts=True)
        return {int(v): int(n) for v, n in zip(values, counts, strict=True)}

    @property
    def turns(self) -> tuple[int, ...]:
        """The number of turns that each worker took."""
        own = self.order[0]
        found = np.bincount(own[own >= 0], minlength=int(own.max()) + 1)
        return tuple(int(n) for n in found)

    def __str__(self) -> str:
        spread = ", ".join(f"{n} of {v}" for v, n in self.histogram.items())
        dropped = f"; {self.dropped} dropped" if self.dropped else ""
        for kind, (after, before) in self.filtered.items():
            dropped += f"; {kind}: {after:,} of {before:,} bytes"
        return (
            f"step {self.step}: turns of workers {self.turns}; pushes by staleness: {spread}"
            f"{dropped}"
        )


@dataclass(frozen=True, eq=False)
class WindowRecords:
    """The outputs of a window's graph that record what happened (see `strategy.StepFacts`).

    Attributes:
        rules: the rules of the window.
        outputs: the indices of the outputs: order, staleness and micro-batches of each server, then
            the bytes of filtered pushes and pulls.
        order: the user's placeholder of orders.
        servers: the number of servers.
        filtered: how many outputs are the bytes of pushes, and of pulls.
    """

    rules: Rules
    outputs: tuple[int, ...]
    order: Node
    servers: int
    filtered: Mapping[str, int]

    @property
    def optional(self) -> frozenset[Node]:
        """The placeholder of orders."""
        return frozenset([self.order])

    def complete_feeds(self, arrays: Mapping[Node, Int32s]) -> Mapping[Node, Int32s]:
        """Return feeds with an order: any, if none is fed.

        Raises:
            FeedError: the order is one of another number of servers or pushes, or one in which a
                worker pushes before it is answered.
        """
        shape = (self.servers, self.rules.turns.total)
        given = arrays.get(self.order)
        if given is None:
            return {**arrays, self.order: np.full(shape, -1, np.int32)}
        if given.shape != shape:
            raise FeedError(
                f"the order has shape {given.shape}, and {self.servers} servers take "
                f"{self.rules.turns.total} pushes each: feed one of shape {shape}, such as the "
                "order of Session.history"
            )
        if not self.rules.has_fixed_order:
            # The first server of a pool deals micro-batches; at others, a worker may be behind.
            for server, row in enumerate(given[: 1 if self.rules.is_pool else None].tolist()):
                place = self.rules.first_impossible(row)
                if place is not None:
                    raise FeedError(
                        f"the order of server {server} has worker {row[place]} at place {place}, "
                        f"which cannot push then with {self.rules.consistency!r} and "
                        f"{self.rules.turns}; feed an order of Session.history, of a window of the "
                        "same strategy"
                    )
        return arrays

    def replayed_feeds(self, values: Sequence[Any]) -> Mapping[Node, Int32s]:
        """Return the feeds by which a step that recorded some values has the same bits again."""
        return {self.order: np.stack(values[: 3 * self.servers : 3])}

    def describe(self, step: int, values: Sequence[Any]) -> WindowHistory:
        """Return what happened in a step that recorded some values."""
        last = 3 * self.servers
        order, staleness, micro_batches = (np.stack(values[i:last:3]) for i in range(3))
        dropped = 0
        if self.rules.has_backups:
            begun = self.rules.turns.workers - self.rules.aggregate
            dropped = int((staleness > 0).sum()) + begun
        filtered = {}
        for kind, count in self.filtered.items():
            after, before = np.sum(values[last : last + count], axis=0)
            filtered[kind] = (int(after), int(before))
            last += count
        return WindowHistory(step, order, staleness, micro_batches, dropped, filtered)


__all__ = ["WindowHistory", "WindowRecords"]
