"""Simulated windows: turns of workers that run beside each other, with servers between them.

    turn of a worker → push to each server → the server applies it → pull → the worker's next turn

A server takes the pushes in the order in which they come. The consistency decides which workers it
answers then, of those that have a turn left. In a pool, a worker that is free takes the next turn
of one queue.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import field
from typing import NamedTuple

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProblemError
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.placement.problems.arrays import Floats

MAX_BARS = 20_000
"""Bars of a window that are kept; the seconds count all."""


class TurnBar(NamedTuple):
    """A part of a window, in seconds from its start.

    `party` is the index of the party in its node, `letter` is T (turn of a worker), A (update of a
    server) or E (push or pull, at its sender), and `number` counts from 0.
    """

    party: int
    letter: str
    number: int
    start: float
    finish: float


@dataclass(frozen=True)
class TurnSeconds:
    """Seconds of the parts of a window of W workers and S servers.

    Attributes:
        turn: (W,) a turn of each worker.
        update: (S,) the work of each server for one push.
        push: (W, S) for which a worker is busy with its push; pull: (S, W) likewise of servers.
        delay: (W, S) from the end of a push or pull to its arrival.
    """

    turn: Floats
    update: Floats
    push: Floats
    pull: Floats
    delay: Floats

    @staticmethod
    def without_messages(turn: Floats, update: Floats) -> TurnSeconds:
        """Return seconds of a window whose messages take no time."""
        shape = len(turn), len(update)
        free = np.zeros(shape)
        return TurnSeconds(turn, update, free, free.T, free)

    def __post_init__(self) -> None:
        for name, rank in (("turn", 1), ("update", 1), ("push", 2), ("pull", 2), ("delay", 2)):
            object.__setattr__(self, name, _check_seconds(name, getattr(self, name), rank))


@dataclass(frozen=True)
class SimulatedWindow:
    """A window as it is predicted.

    Attributes:
        seconds: from its start to the end of its last part.
        bars: its parts, in the order of their starts at each party.
        busy: party -> seconds in which it computes, pushes or pulls.
        turns: party -> turns that it takes, of each worker.
        order: (pushes,) the worker of each push, as server 0 applied them.
    """

    seconds: float
    bars: tuple[TurnBar, ...]
    busy: dict[int, float]
    turns: dict[int, int]
    order: np.ndarray[tuple[int], np.dtype[np.int32]]


def simulate_window(
    rules: TurnRules, seconds: TurnSeconds, scale: Floats | None = None
) -> SimulatedWindow:
    """Simulate a window.

    Args:
        scale: factors of the seconds of turns: (turns of all workers,) of a pool, in the order of
            its queue; else (workers, turns), by worker. Default: 1.

    Raises:
        ProblemError: an array has another shape, or holds a number that is negative or not finite.
    """
    shape = (len(rules.workers),), (len(rules.servers),)
    if (seconds.turn.shape, seconds.update.shape) != shape:
        raise ProblemError(
            f"the window has {shape[0][0]} workers and {shape[1][0]} servers, and seconds of "
            f"{len(seconds.turn)} and {len(seconds.update)}"
        )
    wanted = rules.turn_shape
    scale = np.ones(wanted) if scale is None else _check_seconds("scale", scale, len(wanted))
    if scale.shape != wanted:
        raise ProblemError(f"scale has the shape {wanted}, got {scale.shape}")
    return _Window(rules, seconds, scale).run()


@dataclass
class _Server:
    """A server in mid-window: its queue of pushes (worker, turn), and what it knows of workers."""

    clocks: list[int]
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    waiting: set[int] = field(default_factory=set)
    is_busy: bool = False
    applied: int = 0
    in_round: int = 0
    round: int = 0


class _Window:
    """The event loop. An event is (time, number, what, worker or server, worker, turn)."""

    def __init__(self, rules: TurnRules, seconds: TurnSeconds, scale: Floats) -> None:
        self._rules, self._seconds, self._scale = rules, seconds, scale
        workers = len(rules.workers)
        self._servers = [_Server([0] * workers) for _ in rules.servers]
        self._taken = 0  # turns of the pool that have begun
        self._dealt = workers  # turns of the pool that server 0 has given to workers
        self._turns = [0] * workers
        self._answers = [0] * workers
        self._events: list[tuple[float, int, str, int, int, int]] = []
        self._bars: list[TurnBar] = []
        self._busy = dict.fromkeys((*rules.servers, *rules.workers), 0.0)
        self._begun = dict.fromkeys(rules.workers, 0)
        self._order: list[int] = []
        self._end, self._count = 0.0, 0

    def run(self) -> SimulatedWindow:
        for s in range(len(self._servers)):
            now = 0.0
            for k in range(len(self._turns)):
                now = self._answer(s, k, now, 0)
            self._servers[s].is_busy = True
            self._add(now, "free", s)
        while self._events:
            now, _, what, at, k, turn = heapq.heappop(self._events)
            if what == "answer":
                self._answers[at] += 1
                if self._answers[at] == len(self._servers):
                    self._answers[at] = 0
                    self._begin(at, now)
                continue
            server = self._servers[at]
            if what == "free":
                server.is_busy = False
            else:
                server.queue.append((k, turn))
            if server.queue and not server.is_busy:
                self._serve(at, now)
        bars = sorted(self._bars, key=lambda bar: (bar.party, bar.start))
        return SimulatedWindow(
            self._end, tuple(bars), self._busy, self._begun, np.array(self._order, np.int32)
        )

    def _add(self, now: float, what: str, at: int, k: int = 0, turn: int = 0) -> None:
        self._count += 1  # of events at one time, the first goes first
        heapq.heappush(self._events, (now, self._count, what, at, k, turn))

    def _begin(self, k: int, now: float) -> None:
        """A worker begins its next turn, if there is one."""
        rules, seconds = self._rules, self._seconds
        at: tuple[int, ...]
        if rules.consistency == "pool":
            number, last, at = self._taken, sum(rules.turns), (self._taken,)
            self._taken += 1
        else:
            number, last, at = self._turns[k], rules.turns[k], (k, self._turns[k])
        if number >= last:
            return
        self._turns[k] += 1
        self._begun[rules.workers[k]] += 1
        now = self._bar(rules.workers[k], "T", number, now, seconds.turn[k] * self._scale[at])
        for s in range(len(self._servers)):
            now = self._bar(rules.workers[k], "E", number, now, seconds.push[k, s])
            self._add(now + seconds.delay[k, s], "push", s, k, number)

    def _serve(self, s: int, now: float) -> None:
        """A server applies the next push, and answers the workers that may go on."""
        server = self._servers[s]
        k, _ = server.queue.popleft()
        server.is_busy = True
        party = self._rules.servers[s]
        now = self._bar(party, "A", server.applied, now, float(self._seconds.update[s]))
        server.applied += 1
        if s == 0:
            self._order.append(k)
        for other in self._release(server, k):
            now = self._answer(s, other, now, server.applied)
        self._add(now, "free", s)

    def _release(self, server: _Server, k: int) -> list[int]:
        """Return the workers that a server answers after a push of worker k."""
        rules = self._rules
        if rules.consistency == "bsp":
            return self._release_round(server, k)
        server.clocks[k] += 1
        if rules.consistency == "pool":
            if server is self._servers[0]:
                self._dealt += 1
            return [k] if self._dealt <= sum(rules.turns) else []
        running = {w for w, turns in enumerate(rules.turns) if server.clocks[w] < turns}
        if rules.consistency == "async" or rules.staleness is None:
            return [k] if k in running else []
        server.waiting.add(k)
        least = min((server.clocks[w] for w in running), default=0)
        near = {w for w in running if server.clocks[w] - rules.staleness <= least}
        found = sorted(server.waiting & near)
        server.waiting -= near
        return found

    def _release_round(self, server: _Server, k: int) -> list[int]:
        """Return the workers that a server answers once a round has its pushes.

        A push that comes after its round has ended is dropped, and its worker joins the next round.
        """
        if server.clocks[k] < server.round:
            server.clocks[k] = self._turns[k] = server.round
            return [k] if server.round < self._rules.turns[k] else []
        server.waiting.add(k)
        server.in_round += 1
        left = sum(turns > server.round for turns in self._rules.turns)
        if server.in_round < min(self._rules.aggregate, left):
            return []
        server.round, server.in_round = server.round + 1, 0
        found = sorted(server.waiting)
        server.waiting.clear()
        for w in found:
            server.clocks[w] = self._turns[w] = server.round
        return [w for w in found if server.round < self._rules.turns[w]]

    def _answer(self, s: int, k: int, now: float, number: int) -> float:
        """A server sends a worker its weights; return when it is free again."""
        now = self._bar(self._rules.servers[s], "E", number, now, self._seconds.pull[s, k])
        self._add(now + self._seconds.delay[k, s], "answer", k)
        return now

    def _bar(self, party: int, letter: str, number: int, start: float, took: float) -> float:
        """Note a part of the window; return its end."""
        finish = start + float(took)
        self._busy[party] += float(took)
        if took and len(self._bars) < MAX_BARS:
            self._bars.append(TurnBar(party, letter, number, start, finish))
        self._end = max(self._end, finish)
        return finish


def _check_seconds(name: str, values: Floats, rank: int) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != rank or not array.size or not np.isfinite(array).all() or array.min() < 0:
        raise ProblemError(
            f"{name} has {rank} axes of finite numbers that are not negative; got {array!r}"
        )
    return array
