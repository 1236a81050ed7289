"""The event loop of the simulator where transfers share links: network cards, switches, slots.

The rules are those of `simulate.execute`, and one more: the tensors on their way at one time divide
each shared link fairly (max-min: nobody gets more while somebody who is limited by the same link
gets less), and none goes faster than its pair's own link. A pair still moves one tensor at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Problem

INF = float("inf")


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor on its way: bytes left at `since`, bytes/s, seconds when it started to move.

    `turn` counts its changes of rate, so that an end that was foreseen before can be told.
    """

    tensor: int
    node: int
    source: int
    target: int
    size: float
    readers: tuple[int, ...]
    start: float = 0.0
    left: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    turn: int = 0


class Transfers:
    """All tensors on their way, and those that wait for their pair's link.

    `settle` says when the flows end whose rates have changed; whoever runs events comes back then
    with `ended`.
    """

    def __init__(self, problem: Problem) -> None:
        self._ways = problem.ways
        self._bandwidth = problem.bandwidth_rows
        self._width: list[float] = problem.shared.tolist()
        self._waiting: dict[tuple[int, int], deque[Transfer]] = {}
        self._moving: dict[tuple[int, int], Transfer] = {}
        self._crowd: list[Transfer] = []  # those on shared links
        self._fresh: list[Transfer] = []
        self._changed = False

    def add(self, flow: Transfer, now: float) -> None:
        """A tensor that is ready to leave."""
        pair = (flow.source, flow.target)
        if pair in self._moving:
            self._waiting.setdefault(pair, deque()).append(flow)
        else:
            self._start(flow, now)

    def _start(self, flow: Transfer, now: float) -> None:
        pair = (flow.source, flow.target)
        self._moving[pair] = flow
        flow.start = flow.since = now
        flow.left, flow.rate = flow.size, self._bandwidth[flow.source][flow.target]
        self._fresh.append(flow)
        if pair in self._ways:
            self._crowd.append(flow)
            self._changed = True

    def finish(self, flow: Transfer, now: float) -> None:
        """A tensor has left; the next one of its pair starts."""
        pair = (flow.source, flow.target)
        del self._moving[pair]
        if pair in self._ways:
            self._crowd.remove(flow)
            self._changed = True
        waiting = self._waiting.get(pair)
        if waiting:
            self._start(waiting.popleft(), now)

    def settle(self, now: float) -> Iterator[tuple[float, Transfer]]:
        """(when it will have left, flow) of all that are new or whose rate has changed."""
        fresh, self._fresh = self._fresh, []
        if self._changed:
            self._changed = False
            for flow, rate in zip(self._crowd, self._fair(), strict=True):
                if rate != flow.rate:
                    if now > flow.since:
                        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                        flow.since = now
                    flow.rate = rate
                    if flow not in fresh:
                        fresh.append(flow)
        for flow in fresh:
            flow.turn += 1
            yield flow.since + flow.left / flow.rate, flow

    def _fair(self) -> list[float]:
        """Max-min fair rates of the crowd, by filling the fullest link first."""
        crowd = self._crowd
        limits = [self._bandwidth[flow.source][flow.target] for flow in crowd]
        ways = [self._ways[flow.source, flow.target] for flow in crowd]
        users: dict[int, int] = {}
        for way in ways:
            for link in way:
                users[link] = users.get(link, 0) + 1
        room = {link: self._width[link] for link in users}
        rates = [0.0] * len(crowd)
        open_ = list(range(len(crowd)))
        least = 0.0
        while open_:
            shares = {link: room[link] / count for link, count in users.items() if count}
            tight = min(shares, key=shares.__getitem__)
            least = max(least, shares[tight])  # shares only grow, up to rounding
            done = [i for i in open_ if limits[i] <= least]
            if not done:
                done = [i for i in open_ if tight in ways[i]]
            for i in done:
                rates[i] = min(limits[i], least)
                for link in ways[i]:
                    users[link] -= 1
                    room[link] = max(0.0, room[link] - rates[i])
            settled = set(done)
            open_ = [i for i in open_ if i not in settled]
        return rates


class EventQueue:
    """Events in order of time, then of their numbers: nodes that end, tensors that are there, flows
    that have left."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int]] = []
        self._flows: list[Transfer] = []

    def add(self, when: float, code: int) -> None:
        """A node's end or start; see `execute_shared`."""
        heappush(self._events, (when, code, 0))

    def leaves(self, when: float, flow: Transfer, first: int) -> None:
        """The end of a flow, unless its rate changes before; codes of flows start at `first`."""
        self._flows.append(flow)
        heappush(self._events, (when, first + len(self._flows) - 1, flow.turn))

    def next(self) -> float | None:
        """The time of the next event."""
        return self._events[0][0] if self._events else None

    def due(self, now: float, first: int) -> Iterator[tuple[int, Transfer | None]]:
        """The events of this instant: codes, and the flow that has left."""
        while self._events and self._events[0][0] == now:
            _, code, turn = heappop(self._events)
            if code < first:
                yield code, None
            elif self._flows[code - first].turn == turn:
                yield code, self._flows[code - first]
