"""A deterministic world for the protocol: machines, a network and a clock, all from one seed.

Links deliver in order but late, and some messages twice. A worker may crash at any time: what it
had sent may still arrive, and its coordinator hears of it later, by a broken link or by silence.
Every message goes through its frame, so the codec is exercised too.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import OpError
from graphflow.runtime.messages import Abort, Commit, Compute, Computed, Hello, Open
from graphflow.runtime.protocol import coordinator as c
from graphflow.runtime.protocol import worker as w
from graphflow.runtime.protocol.stream import Version
from graphflow.runtime.wire import decode, encode


class World:
    """`sessions` coordinators over the same `workers`, each with steps to run one by one."""

    def __init__(self, seed: int, *, workers: int = 3, sessions: int = 2, steps: int = 6) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._link_free: dict[Any, float] = {}
        self.alive = [True] * workers
        self.link_events = self.random.random() < 0.5
        self.machines = [w.WorkerMachine(["cpu:0"]) for _ in range(workers)]
        self.busy: dict[tuple[int, str], float] = {}
        names = [f"session-{index}" for index in range(sessions)]
        addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(workers)]
        self.coordinators = {name: c.CoordinatorMachine(name, addresses, 0.0) for name in names}
        self.outcomes: dict[tuple[str, int], Any] = {}
        self.applied: dict[tuple[int, str, int], str] = {}
        self.started: set[tuple[int, str, int]] = set()
        self.computed: set[tuple[int, str, int]] = set()
        self.told: set[tuple[int, str, int]] = set()
        self.violations: list[str] = []
        self.steps = steps
        self.addresses = addresses
        for name in names:
            self._at(self.random.random(), lambda name=name: self._hello(name))
            self._at(0.25, lambda name=name: self._tick_coordinator(name))
        for index in range(workers):
            self._at(0.3, lambda index=index: self._tick_worker(index))
        if self.random.random() < 0.6:
            victim = self.random.randrange(workers)
            self._at(self.random.uniform(0.5, 8.0), lambda: self._crash(victim))

    # Time ----------------------------------------------------------------------------------------

    def run(self, until: float = 60.0) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def _travel(self, link: Any, action: Callable[[], None]) -> None:
        slow = self.random.random() < 0.05
        delay = self.random.uniform(0.001, 1.0 if slow else 0.02)
        arrival = max(self.now + delay, self._link_free.get(link, 0.0))
        self._link_free[link] = arrival
        self._at(arrival - self.now, action)
        if self.random.random() < 0.1:
            self._at(arrival - self.now + self.random.uniform(0.0, 0.5), action)

    # Coordinators --------------------------------------------------------------------------------

    def _begin(self, name: str, request: int, messages: dict[int, Any], step: int = 0) -> None:
        orders = {index: c.Order(message) for index, message in messages.items()}
        self._coordinate(name, c.Begin(request, orders, 5.0, step))

    def _hello(self, name: str) -> None:
        own = Version.own()
        hello = Hello(1, own.version, own.wire, own.python)
        self._begin(name, 1, dict.fromkeys(range(len(self.machines)), hello))

    def _settled(self, name: str, settle: c.Settle) -> None:
        key = (name, settle.request)
        if key in self.outcomes:
            self.violations.append(f"{key} settled twice")
        self.outcomes[key] = settle.outcome
        workers = range(len(self.machines))
        committed = settle.request > 2 and isinstance(settle.outcome, c.Replies)
        if committed and any((index, *key) not in self.computed for index in workers):
            self.violations.append(f"{key} committed before all had computed it")
        if settle.request == 1 and isinstance(settle.outcome, c.Replies):
            opens = {index: Open(2, index, self.addresses, 20.0) for index in workers}
            self._begin(name, 2, opens)
        elif 2 <= settle.request < 2 + self.steps:
            if settle.request == 2 and not isinstance(settle.outcome, c.Replies):
                return
            request = settle.request + 1
            self._at(0.05, lambda: self._step(name, request))

    def _step(self, name: str, request: int) -> None:
        compute = Compute(request, "p", {}, [], False, 5.0)
        workers = range(len(self.machines))
        self._begin(name, request, dict.fromkeys(workers, compute), step=request)
        if self.random.random() < 0.1:
            self._at(self.random.uniform(0, 0.2), lambda: self._coordinate(name, c.Cancel()))

    def _coordinate(self, name: str, event: Any) -> None:
        for action in self.coordinators[name].handle(event, self.now):
            if isinstance(action, c.Settle):
                self._settled(name, action)
                continue
            index = action.worker
            frame = encode(action.envelope, action.message)
            self._travel(
                (name, index), lambda frame=frame, index=index: self._to_worker(name, index, frame)
            )

    def _tick_coordinator(self, name: str) -> None:
        self._coordinate(name, c.Tick())
        self._at(0.25, lambda: self._tick_coordinator(name))

    # Workers -------------------------------------------------------------------------------------

    def _to_worker(self, name: str, index: int, frame: bytes) -> None:
        if self.alive[index]:
            self._work(index, w.Received(name.encode(), *decode(frame)))

    def _work(self, index: int, event: Any) -> None:
        for action in self.machines[index].handle(event, self.now):
            if isinstance(action, w.Send):
                name = action.route.decode()
                frame = encode(action.envelope, action.message)
                data = bytes(action.data) if action.data is not None else None
                self._travel(
                    (index, name),
                    lambda name=name, frame=frame, data=data: self._coordinate(
                        name, c.Received(index, *decode(frame), data)
                    ),
                )
            elif isinstance(action, w.Run):
                self._job(index, action)

    def _job(self, index: int, run: w.Run) -> None:
        """Jobs of a session take a random time each, one after the other."""
        if isinstance(run.job, Compute):
            self.started.add((index, run.session, run.step))
        if isinstance(run.job, Commit | Abort):
            self.told.add((index, run.session, run.step))
        key = (index, run.session)
        quick = self.random.random() < 0.9
        start = max(self.now, self.busy.get(key, 0.0))
        end = start + self.random.uniform(0.0, 0.05 if quick else 8.0)
        self.busy[key] = end
        self._at(end - self.now, lambda: self._finish(index, run))

    def _finish(self, index: int, run: w.Run) -> None:
        if not self.alive[index]:
            return
        outcome: Any = None
        if isinstance(run.job, Compute):
            fetches = {f"y{index}": np.full(2, run.step, np.float32)}
            failed = self.random.random() < 0.1
            if not failed:
                self.computed.add((index, run.session, run.step))
            outcome = OpError("it failed") if failed else Computed(fetches, [], {"cpu:0": 1})
        if isinstance(run.job, Commit | Abort):
            verdict = type(run.job).__name__
            before = self.applied.setdefault((index, run.session, run.step), verdict)
            if before != verdict:
                self.violations.append(f"{run} after {before}")
        self._work(index, w.Finished(run.session, run.job, run.step, outcome))

    def _tick_worker(self, index: int) -> None:
        if self.alive[index]:
            self._work(index, w.Tick())
        self._at(0.3, lambda: self._tick_worker(index))

    def _crash(self, index: int) -> None:
        self.alive[index] = False
        if self.link_events:
            notice = c.LinkDown(index, "it crashed")
            for name in self.coordinators:
                self._travel((index, name), lambda name=name: self._coordinate(name, notice))
