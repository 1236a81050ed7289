"""The protocol under mirrors: whichever worker dies at whichever message, the state of every part
is that of the last step that its user saw commit.

Each part of the state is a counter. Its holder adds one to it in each step, and sends the new value
to the worker that mirrors it, which compares it with its own. When a worker is lost, the session
stays in its epoch: mirrors become the parts, a worker joins, and new mirrors are copied.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from graphflow.errors import StepTimeout, WorkerLost
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol import worker_events as w
from graphflow.runtime.protocol.coordinator import CoordinatorMachine
from graphflow.runtime.protocol.worker import WorkerMachine
from graphflow.runtime.wire.messages import Abort, Adopt, Commit, Compute, Hello, Join, Open
from graphflow.runtime.wire.step_values import Computed

SESSION, TOKEN, STEPS = "s0", "secret", 7
MIRROR = "<mirror>/"
COPY, COUNT = "copy", "count"
Places = dict[str, tuple[int, int | None]]
"""The holder of each part, and the worker that mirrors it."""


class Host:
    """A worker's process: the machine, the parts that it holds, and those that it mirrors."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index, self.alive = world, index, True
        self.machine = WorkerMachine(["cpu:0"], process=index + 1)
        self.values: dict[str, int] = {}
        self.mail: dict[tuple[int, str], int] = {}
        self.waiting: w.RunJob | None = None
        self.pending: dict[int, dict[str, int]] = {}

    def handle(self, event: w.WorkerEvent) -> None:
        if not self.alive:
            return
        for action in self.machine.handle(event, self.world.now):
            match action:
                case w.SendMessage(_, envelope, message, data):
                    self.world.to_coordinator(self.index, envelope, message, data)
                case w.RunJob():
                    self._run(action)
                case w.CancelStep() if self.waiting is not None:
                    run, self.waiting = self.waiting, None
                    self._finish(run, StepTimeout("cancelled"))

    def deliver(self, step: int, part: str, value: int) -> None:
        self.mail[step, part] = value
        if self.alive and self.waiting is not None:
            run, self.waiting = self.waiting, None
            self._compute(run)

    def _run(self, run: w.RunJob) -> None:
        job = run.job
        if isinstance(job, Compute):
            if run.commits >= 0:
                self.values.update(self.pending.pop(run.commits))
            for part, (holder, mirror) in self.world.places_in(job.program).items():
                if holder == self.index and mirror is not None:
                    value = self.values[part] + (not job.program.startswith(COPY))
                    self.world.send_between_workers(self.index, mirror, run.step, part, value)
            self._compute(run)
            return
        match job:
            case Commit():
                self.values.update(self.pending.pop(run.step))
            case Abort():
                self.pending = {step: new for step, new in self.pending.items() if step > run.step}
            case Adopt(_, moved):
                for name, old in moved.items():
                    self.values[name] = self.values.pop(old)
        self._finish(run, None)

    def _compute(self, run: w.RunJob) -> None:
        """Compute a step once all values that it mirrors are there."""
        assert isinstance(run.job, Compute)
        program = run.job.program
        places = self.world.places_in(program)
        mirrored = [part for part, place in places.items() if place[1] == self.index]
        if any((run.step, part) not in self.mail for part in mirrored):
            self.waiting = run
            return
        new = {MIRROR + part: self.mail[run.step, part] for part in mirrored}
        if not program.startswith(COPY):
            for name, value in new.items():
                assert value == self.values[name] + 1, f"{name} is not what it mirrors"
            held = [part for part, place in places.items() if place[0] == self.index]
            new |= {part: self.values[part] + 1 for part in held}
        self.pending[run.step] = new
        self._finish(run, Computed())

    def _finish(self, run: w.RunJob, outcome: Any) -> None:
        self.handle(w.JobFinished(SESSION, run.job, run.step, run.epoch, outcome))


class World:
    """A session over some workers, of which the `victims` die, each at a message."""

    def __init__(self, seed: int, workers: int, victims: dict[int, int]) -> None:
        self.random = random.Random(seed)
        self.now, self.carried, self.committed = 0.0, 0, 0
        self.victims = victims  # number of the message -> worker
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._requests = itertools.count(), itertools.count(1)
        self._free: dict[tuple[int, int], float] = {}
        self._outcomes: dict[int, Any] = {}
        self._step = 0
        addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(workers)]
        self.machine = CoordinatorMachine(SESSION, addresses, 0.0, 1, TOKEN)
        self.addresses = addresses
        self.hosts = [Host(self, index) for index in range(workers)]
        self.places: Places = {
            str(index): (index, (index + 1) % workers) for index in range(workers)
        }
        self._programs: dict[str, Places] = {}

    # The network ----------------------------------------------------------------------------------

    def send_between_workers(
        self, source: int, target: int, step: int, part: str, value: int
    ) -> None:
        self._carry(source, target, lambda: self.hosts[target].deliver(step, part, value))

    def to_coordinator(self, worker: int, envelope: Any, message: Any, data: Any) -> None:
        event = c.WorkerMessageReceived(worker, envelope, message, data)
        self._carry(worker, -1, lambda: self.tell(event))

    def _carry(self, source: int, target: int, arrive: Callable[[], None]) -> None:
        """Deliver a message later, after those before it on the same way."""
        delay = 0.0001 + 0.02 * self.random.random() ** 3
        time = self._free[source, target] = max(
            self.now + delay, self._free.get((source, target), 0.0)
        )
        heapq.heappush(self._queue, (time, next(self._order), arrive))
        worker = self.victims.get(self.carried)
        self.carried += 1
        if worker is not None and worker < len(self.hosts) and self.hosts[worker].alive:
            self.kill(worker)

    def kill(self, worker: int) -> None:
        self.hosts[worker].alive = False
        gone = c.WorkerGone(worker, "killed by signal 9")
        noticed = self.now + 0.03 * self.random.random()
        heapq.heappush(self._queue, (noticed, next(self._order), lambda: self.tell(gone)))

    def tell(self, event: c.CoordinatorEvent) -> None:
        for action in self.machine.handle(event, self.now):
            if isinstance(action, c.SendToWorker):
                received = w.MessageReceived(b"", action.envelope, action.message, action.data)
                host = self.hosts[action.worker]
                self._carry(-1, action.worker, lambda h=host, r=received: h.handle(r))
            elif isinstance(action, c.SettleOperation):
                self._outcomes[action.request] = action.outcome

    def _drive(self, until: Callable[[], bool]) -> None:
        while not until():
            due = self.machine.wake_at(self.now)
            if not self._queue or due <= self._queue[0][0]:
                self.now = max(self.now, due)
                self.tell(c.CoordinatorTick())
            else:
                self.now, _, act = heapq.heappop(self._queue)
                act()
            assert self.now < 600.0, "not everything is done"

    # The session ----------------------------------------------------------------------------------

    def ask(self, messages: dict[int, Any], step: int = 0) -> Any:
        """The outcome of an operation."""
        request = next(iter(messages.values())).request
        orders = {worker: c.Order(message) for worker, message in messages.items()}
        self.tell(c.BeginOperation(request, orders, 5.0, step))
        self._drive(lambda: request in self._outcomes)
        outcome = self._outcomes.pop(request)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def open(self) -> None:
        """Open the session on all workers, with every part and mirror at 0."""
        request = next(self._requests)
        self.ask({host.index: Hello(request, "1", 1, "3") for host in self.hosts})
        request = next(self._requests)
        self.ask(
            {host.index: Open(request, host.index, self.addresses, 30.0) for host in self.hosts}
        )
        for part, (holder, mirror) in self.places.items():
            self.hosts[holder].values[part] = 0
            assert mirror is not None
            self.hosts[mirror].values[MIRROR + part] = 0

    def places_in(self, program: str) -> Places:
        return self._programs[program]

    def run(self, kind: str, places: Places) -> None:
        """Run a step over the workers that have a share in it."""
        self._step += 1
        program = f"{kind} {self._step}"
        self._programs[program] = places
        workers = {each for place in places.values() for each in place if each is not None}
        order = Compute(next(self._requests), program, {}, [], False, 3.0)
        self.ask(dict.fromkeys(sorted(workers), order), self._step)

    def train(self) -> World:
        """Run steps until enough are committed; each loss costs none."""
        while self.committed < STEPS:
            try:
                self.run(COUNT, self.places)
                self.committed += 1
                self._copy_one()
            except WorkerLost:
                while not self._take_over():
                    pass
        self._check()
        return self

    def _take_over(self) -> bool:
        """Let mirrors become the parts of lost workers; False if one more was lost meanwhile."""
        lost = self.machine.loss_reasons()
        for part, (holder, mirror) in self.places.items():
            if holder in lost:
                if mirror is None or mirror in lost:
                    raise BothLost
                adopt = Adopt(next(self._requests), {part: MIRROR + part}, {})
                try:
                    self.ask({mirror: adopt})
                except WorkerLost:
                    return False
                self.places[part] = mirror, None
            elif mirror in lost:
                self.places[part] = holder, None
        self._check()
        return True

    def _copy_one(self) -> None:
        """Copy one part to a new mirror: on a worker that is left, or on one that joins."""
        bare = [part for part, (_, mirror) in self.places.items() if mirror is None]
        if not bare:
            return
        part = bare[0]
        holder = self.places[part][0]
        lost = self.machine.loss_reasons()
        left = [host.index for host in self.hosts if host.index not in (*lost, holder)]
        mirror = self.random.choice(left) if left and self.random.random() < 0.7 else self._join()
        self.run(COPY, {part: (holder, mirror)})
        self.places[part] = holder, mirror

    def _join(self) -> int:
        """Let a worker join, and return its number."""
        number, lost = len(self.hosts), self.machine.loss_reasons()
        self.addresses.append(f"tcp://127.0.0.1:{7000 + number}")
        self.hosts.append(Host(self, number))
        self.tell(c.AddWorker(self.addresses[-1]))
        self.ask({number: Hello(next(self._requests), "1", 1, "3")})
        peers = ["" if i in lost else address for i, address in enumerate(self.addresses)]
        self.ask({number: Open(next(self._requests), number, peers, 30.0)})
        join = Join(next(self._requests), number, self.addresses[-1])
        self.ask({i: join for i in range(number) if i not in lost})
        return number

    def _check(self) -> None:
        """Every part is as the user saw the last step end, once the workers know that."""
        holders = {holder for holder, _ in self.places.values()}
        settled = lambda: all(  # noqa: E731
            not self.hosts[holder].pending for holder in holders if self.hosts[holder].alive
        )
        self._drive(settled)
        for part, (holder, mirror) in self.places.items():
            for name, worker in ((part, holder), (MIRROR + part, mirror)):
                if worker is not None and self.hosts[worker].alive and worker in holders:
                    assert self.hosts[worker].values[name] == self.committed, name


class BothLost(Exception):
    """Both copies of a part are gone."""


def run_training(seed: int, workers: int, victims: dict[int, int]) -> World:
    world = World(seed, workers, {})
    world.open()
    world.carried, world.victims = 0, victims
    return world.train()


@pytest.mark.parametrize("workers", [2, 3])
def test_any_worker_may_die_at_any_message(workers: int) -> None:
    messages = run_training(0, workers, {}).carried
    assert messages > 5 * STEPS
    for at in range(messages):
        for victim in range(workers):
            world = run_training(at, workers, {at: victim})
            assert world.committed == STEPS and not world.hosts[victim].alive


def test_a_second_death_is_survived_or_takes_both_copies() -> None:
    ends = {"survived": 0, "lost": 0}
    for seed in range(300):
        draw = random.Random(seed)
        victims = {draw.randrange(120): draw.randrange(4) for _ in range(2)}
        try:
            run_training(seed, 3, victims)
            ends["survived"] += 1
        except BothLost:
            ends["lost"] += 1
    assert min(ends.values()) > 10


def test_a_loss_that_undoes_a_step_which_has_committed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers that are not told of a commit before they are told to drop the step after it."""
    monkeypatch.setattr(CoordinatorMachine, "_send_commit", lambda self, worker: [])
    with pytest.raises(AssertionError):
        for at in range(40):
            run_training(at, 2, {at: 0})


def test_an_answer_before_the_value_has_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors that acknowledge a step, and change with the next one."""
    compute = Host._compute

    def compute_early(self: Host, run: w.RunJob) -> None:
        assert isinstance(run.job, Compute)
        for part, (_, mirror) in self.world.places_in(run.job.program).items():
            if mirror == self.index:
                self.mail.setdefault((run.step, part), self.values[MIRROR + part])
        compute(self, run)

    monkeypatch.setattr(Host, "_compute", compute_early)
    with pytest.raises(AssertionError, match="is not what it mirrors"):
        run_training(0, 2, {})
