"""What the simulator runs on its machines: workers with real state, and users who train with them.

Each worker of a session keeps one counter. A step adds one to it everywhere, after every worker has
compared its counter with that of the worker before it, by a tensor over the edge between them. So
an update that is lost, applied twice or applied at some workers only shows at the next step. Other
steps, which are free, only look: they fetch the counter as it is.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from graphflow.errors import (
    OpError,
    RendezvousTimeout,
    StaleEpoch,
    StepTimeout,
    WorkerLost,
)
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol import worker_events as w
from graphflow.runtime.protocol.fast_path import (
    FastPathCoordinator,
    FastPathWorker,
    SteadyStateStep,
)
from graphflow.runtime.protocol.reliable_stream import Outbound, OutgoingMessage, Version
from graphflow.runtime.protocol.worker_session import AHEAD
from graphflow.runtime.wire.array_codec import split_array
from graphflow.runtime.wire.frame_codec import decode, decode_frames, encode
from graphflow.runtime.wire.messages import (
    Abort,
    Close,
    Commit,
    Compute,
    Done,
    Hello,
    Open,
    Read,
    Write,
)
from graphflow.runtime.wire.step_values import Computed
from graphflow.runtime.worker.peer_link import PeerLink

DEADLINE = 3.0  # seconds of a step
COUNT, LOOK = "count", "look"  # programs; the steps of the second are free


class Wire:
    """A connection from one worker to another, as a link sees it."""

    address = "tcp://127.0.0.1:1"

    def __init__(self, world: Any, source: int, target: int) -> None:
        self.lock = threading.Lock()
        self.carry = lambda letter: world.send_between_workers(source, target, letter)

    def send_unlocked(self, frames: list[Any]) -> bool:
        self.carry(OutgoingMessage(*decode_frames(frames)))
        return True


class QueuedLink(PeerLink):
    """A link that puts aside what its window has no room for, where a thread would wait."""

    def __init__(self, wire: Wire, outbound: Outbound, encoded: bool) -> None:
        super().__init__(wire, outbound)
        self.outbound = outbound
        self._wire, self._encoded = wire, encoded
        self._queued: deque[tuple[Any, memoryview]] = deque()

    def queue(self, step: int, edge: int, array: Any) -> None:
        self._last_sent = (step, edge)
        self._queued += [(chunk, data) for chunk, data in split_array("edge", step, edge, array)]
        self.flush()

    def flush(self) -> None:
        while self._queued and self.outbound.has_room(self._queued[0][1].nbytes):
            chunk, data = self._queued.popleft()
            self._transmit(self.outbound.post(chunk, chunk.number, data))

    def apply_update(self, heard: w.UpdatePeerLink) -> None:
        super().apply_update(heard)
        self.flush()

    def _transmit(self, letter: OutgoingMessage) -> None:
        if self._encoded:
            super()._transmit(letter)
        else:
            self._wire.carry(letter)


class Hosted:
    """One session in one epoch on a worker: a counter, and jobs one after the other."""

    def __init__(self, worker: SimulatedWorker, opening: w.RunJob) -> None:
        self.worker, self.world = worker, worker.world
        self.session, self.epoch = opening.session, opening.epoch
        self.index = opening.job.worker
        self.count = len(opening.job.peers)
        self.counter = 0
        self.pending: dict[int, int] = {}  # counters of steps that were computed
        self.closed = False
        self.cancelled = -1
        self.mail: dict[int, Any] = {}
        self.jobs: deque[w.RunJob] = deque()
        self.current: tuple[w.RunJob, float, float] | None = None  # with when it may end, and must
        self.token = opening.token
        self.links: dict[int, QueuedLink] = {}
        self.submit(opening)

    @property
    def before(self) -> int:
        return (self.index - 1) % self.count

    def submit(self, run: w.RunJob) -> None:
        if run.commits >= 0:
            self.submit(w.RunJob(run.session, Commit(), run.commits, run.epoch))
            run = run._replace(commits=-1)
        if self.closed:
            self.world.violate(f"{run.job} after the close of {self.session} {self.epoch}")
        self.closed = isinstance(run.job, Close)
        self.jobs.append(run)
        self.go_on()

    def deliver(self, step: int, array: Any) -> None:
        if array[0] != self.world.number_of(self.session) or array[1] != step:
            self.world.violate(f"{self.session} was given a tensor of another session or step")
        self.mail[step] = array
        self.go_on()

    def wake(self, step: int) -> None:
        self.cancelled = max(self.cancelled, step)
        self.go_on()

    def go_on(self) -> None:
        """Ends the job under way if it can end, and begins the next."""
        if self.current is None and self.jobs:
            self._begin(self.jobs.popleft())
        if self.current is None:
            return
        run, earliest, latest = self.current
        now = self.world.now
        stuck = isinstance(run.job, Compute) and self.count > 1 and run.step not in self.mail
        if run.step <= self.cancelled and isinstance(run.job, Compute):
            self._finish(run, StepTimeout(f"step {run.step} was cancelled"))
        elif stuck and now >= latest:
            text = f"step {run.step}: the edge from worker {self.before} did not come"
            self._finish(run, StepTimeout(text, worker=self.before))
        elif not stuck and now >= earliest:
            self._finish(run, self._do(run))

    def _begin(self, run: w.RunJob) -> None:
        random = self.world.random
        kind = random.random()
        usual = kind < 0.93 or self.world.quiet
        takes = random.uniform(0, 0.02 if usual else 0.5 if kind < 0.98 else 5.0)
        self.current = (run, self.world.now + takes, self.world.now + DEADLINE)
        self.worker.later(takes, self.go_on)
        if isinstance(run.job, Compute):
            self.world.started.add((self.session, self.epoch, run.step, self.index))
        if isinstance(run.job, Compute) and self.count > 1:
            self.worker.later(DEADLINE, self.go_on)
            number = self.world.number_of(self.session)
            values = [number, run.step, self.counter, *range(self.world.random.randrange(12))]
            target = (self.index + 1) % self.count
            self.link(target).queue(run.step, self.index, np.array(values, np.int64))

    def link(self, target: int) -> QueuedLink:
        if target not in self.links:
            outbound = Outbound(self.session, self.epoch, self.index, self.token)
            wire = Wire(self.world, self.index, target)
            self.links[target] = QueuedLink(wire, outbound, self.world.encoded)
        return self.links[target]

    def _finish(self, run: w.RunJob, outcome: Any) -> None:
        self.current = None
        finished = w.JobFinished(self.session, run.job, run.step, self.epoch, outcome)
        self.worker.handle(finished)
        if not isinstance(run.job, Close):
            self.go_on()

    def _do(self, run: w.RunJob) -> Any:
        job, step = run.job, run.step
        match job:
            case Compute():
                if self.count > 1 and self.mail[step][2] != self.counter:
                    self.world.violate(
                        f"step {step} of {self.session}: worker {self.index} has counted "
                        f"{self.counter}, worker {self.before} {self.mail[step][2]}"
                    )
                if self.world.random.random() < 0.05 and not self.world.quiet:
                    return OpError("it failed")
                value = self.counter + (job.program == COUNT)
                if any(each != value for each in self.pending.values()):
                    self.world.violate(f"step {step} computes before what it follows has committed")
                self.pending[step] = value
                fetched = np.full(9, value, np.int64)
                self.world.computed.add((self.session, self.epoch, step, self.index))
                peak = {"cpu:0": 1} if self.world.ways.random() < 0.2 else {}
                return Computed({"y": fetched}, [], peak)
            case Commit():
                self.world.note_applied(self.session, self.epoch, step, self.index, "commit")
                if step not in self.pending:
                    self.world.violate(f"worker {self.index} commits step {step} uncomputed")
                self.counter = self.pending.pop(step)
                self._forget(step)
            case Abort():
                for each in self._open(step):
                    self.world.note_applied(self.session, self.epoch, each, self.index, "abort")
                    self.pending.pop(each, None)
                self._forget(step)
            case Write():
                self.counter = int(run.arrays["n"][0])
            case Read():
                return np.full(3, self.counter, np.int64)
        return None

    def _open(self, last: int) -> list[int]:
        """The steps up to one that began here and were not decided."""
        mine = [key for key in self.world.started if (*key[:2], key[3]) == self.key]
        return sorted(key[2] for key in mine if key[2] <= last and not self.world.knows(key))

    @property
    def key(self) -> tuple[str, int, int]:
        return self.session, self.epoch, self.index

    def _forget(self, step: int) -> None:
        self.mail = {number: array for number, array in self.mail.items() if number > step}


class Process:
    """A process of a world. It has lives, one after the other, and it may freeze, and go on with
    everything that came meanwhile."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.rate = world.random.choice([1.0, 1.0, 0.9, 1.1])  # of its clock
        self.life = 0
        self.alive = self.frozen = False
        self.backlog: list[Any] = []

    def thaw(self) -> None:
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for action in backlog:
            action()

    def later(self, delay: float, action: Any) -> None:
        """Does something of this life; when it is frozen, after that."""
        life = self.life
        self.world.schedule(delay, lambda: self._act(life, action))

    def hear(self, event: Any) -> None:
        self._act(self.life, lambda: self.handle(event))

    def handle(self, event: Any) -> None:
        """Give its machine an event, and do what that says."""
        raise NotImplementedError

    def _act(self, life: int, action: Any) -> None:
        if life != self.life or not self.alive:
            return
        if self.frozen:
            self.backlog.append(lambda: self._act(life, action))
        else:
            action()


class SimulatedWorker(Process):
    """A worker's process. It may crash, and start again without what it knew."""

    def __init__(self, world: Any, index: int) -> None:
        super().__init__(world)
        self.index = index
        self.skew = world.random.uniform(0, 1e6)
        self.start()

    def clock(self) -> float:
        """The time on its clock, which no other process has."""
        return self.skew + self.world.now * self.rate

    def start(self) -> None:
        self.alive, self.frozen = True, False
        self.vouched, self.stopped = False, 0.0  # while it is frozen: by the transport; since when
        self.life += 1
        self.machine = FastPathWorker(["cpu:0"], process=self.life)
        self.depth = 0
        self.hosted: dict[str, Hosted] = {}
        self.backlog = []
        self._tick()

    def crash(self) -> None:
        self.alive = False

    def handle(self, event: w.WorkerEvent) -> None:
        self.depth += 1  # what it does may end a job at once, of which the machine is told
        self._do(event)
        self.depth -= 1
        if not self.depth:
            self._check()

    def _do(self, event: w.WorkerEvent) -> None:
        if self.world.is_short() and self._does_shortly(event):
            return
        for action in self.machine.handle(event, self.clock()):
            match action:
                case w.SendMessage():
                    self.world.to_coordinator(self.index, action)
                case w.RunJob():
                    self._run(action)
                case w.DeliverTensor(session, step, _, array):
                    self.hosted[session].deliver(step, array)
                case w.UpdatePeerLink(session):
                    self.hosted[session].link(action.worker).apply_update(action)
                case w.BeatPeerLinks(session):
                    for target, link in self.hosted[session].links.items():
                        link.heartbeat(owed=target in action.owed)
                        if (untaken := link.find_unacknowledged()) is not None:
                            asked, (step, edge) = untaken
                            self.handle(w.PeerUnreached(session, target, step, edge, asked))
                case w.CancelStep(session, step):
                    self.hosted[session].wake(step)

    def _does_shortly(self, event: w.WorkerEvent) -> bool:
        """Does what an event says by the short way, if that is possible."""
        machine = self.machine
        if (
            isinstance(event, w.MessageReceived)
            and event.is_fast
            and isinstance(event.message, Compute)
        ):
            frame = encode(event.envelope, event.message)
            run = machine.accept_order(event.route, frame, self.clock())
            if run is not None:
                self.world.shortly["order"] += 1
                self._run(run)
            return run is not None
        if isinstance(event, w.JobFinished):
            answer = machine.encode_answer(event)
            if answer is not None:
                self.world.shortly["answer"] += 1
                lane, route, (frame, _, known) = answer
                send = w.SendMessage(route, *decode(frame), None, lane, known)
                self.world.to_coordinator(self.index, send)
            return answer is not None
        return False

    def _check(self) -> None:
        for name in self.machine.sessions:
            self.world.check_window(self.machine.stream(name).outbound)
            if self.hosted[name].closed:
                self.world.violate(f"worker {self.index} has {name} open and closed")
            for link in self.hosted[name].links.values():
                self.world.check_window(link.outbound)

    def _run(self, run: w.RunJob) -> None:
        hosted = self.hosted.get(run.session)
        if isinstance(run.job, Open):
            if hosted is not None and (not hosted.closed or hosted.epoch >= run.epoch):
                self.world.violate(f"{run.session} is opened at {run.epoch} in {hosted.epoch}")
            self.hosted[run.session] = Hosted(self, run)
        elif hosted is None or hosted.epoch != run.epoch:
            self.world.violate(f"{run} is of another epoch than what it is given to")
        else:
            hosted.submit(run)

    def _tick(self) -> None:
        self.handle(w.WorkerTick())
        self.later(0.5, self._tick)


class User(Process):
    """Runs `steps` steps in one session, with checkpoints, and recovers by a higher epoch."""

    def __init__(self, world: Any, name: str, steps: int) -> None:
        super().__init__(world)
        self.name, self.steps = name, steps
        self.epoch = 0
        self.done = False
        self.checkpoint = 0
        self.machine: FastPathCoordinator | None = None
        self.begun: dict[int, float] = {}
        self._then: dict[int, tuple[Any, int]] = {}  # what to do with replies; the step, if any
        self.recover()

    @property
    def everyone(self) -> range:
        return range(len(self.world.workers))

    def recover(self) -> None:
        """Another coordinator goes on from the checkpoint."""
        self.life += 1
        self.epoch += 1
        self.alive, self.frozen, self.backlog = True, False, []
        self.committed, self.step, self.request = self.checkpoint, 0, 0
        self.begun = {}
        self.machine = FastPathCoordinator(
            self.name, self.world.addresses, self.world.now * self.rate, self.epoch,
            self.world.token_of(self.name),
        )  # fmt: skip
        self.world.connect(self)
        own = Version.own()
        self.ask(
            lambda request: Hello(request, own.version, own.wire, own.python), self._open_workers
        )
        self._tick()

    def die(self) -> None:
        """The process ends; another is started."""
        self.life += 1
        self.alive, self.machine, self.begun = False, None, {}
        self.world.schedule(self.world.random.uniform(0.1, 8.0), self.recover)

    def freeze(self, seconds: float) -> None:
        """It stops for a while, and another may take over before it goes on."""
        self.frozen = True
        if self.world.random.random() < 0.5:
            zombie = Zombie(self)
            self.world.register(zombie, zombie)
            self.world.schedule(seconds, zombie.thaw)
            self.world.zombies.append(zombie)
            self.life += 1
            self.machine = None  # nobody is there to die, or freeze, before the other one
            self.world.schedule(self.world.random.uniform(0, seconds), self.recover)
        else:
            self.world.schedule(seconds, self.thaw)

    def handle(self, event: c.CoordinatorEvent) -> None:
        machine, now = self.machine, self.world.now * self.rate
        assert machine is not None
        actions = None
        is_answer = isinstance(event, c.WorkerMessageReceived) and isinstance(event.message, Done)
        if is_answer and self.world.is_short():
            frame = encode(event.envelope, event.message)
            actions = machine.accept_answer(event.worker, frame, now)
            self.world.shortly["answered"] += actions is not None
        for action in machine.handle(event, now) if actions is None else actions:
            if isinstance(action, c.SendToWorker):
                self.world.to_worker(self, action)
            elif (
                isinstance(action, c.SettleOperation)
                and self.begun.pop(action.request, None) is not None
            ):
                self.settle(action.request, action.outcome)
        heard = getattr(event, "worker", None)
        for index in self.everyone if heard is None else [heard]:
            self.world.check_window(machine.stream(index).outbound)

    def _tick(self) -> None:
        assert self.machine is not None
        self.handle(c.CoordinatorTick())
        if self.machine is not None and not self.done:
            now = self.world.now
            self.later(
                max(self.machine.wake_at(now * self.rate) / self.rate - now, 0.02), self._tick
            )

    # What it does --------------------------------------------------------------------------------

    def ask(self, message: Any, then: Any, arrays: Any = (), step: int = 0) -> None:
        self.request += 1
        orders = {index: c.Order(message(self.request), arrays) for index in self.everyone}
        self._begin(orders, then, step)

    def _begin(
        self, orders: dict[int, c.Order], then: Any, step: int = 0, follows: int = -1
    ) -> None:
        seconds = DEADLINE if step else 20.0
        held = follows >= 0  # then its time begins when the one before it has ended
        self.begun[self.request] = inf if held else self._deadline_in(seconds)
        self._then[self.request] = (then, step)
        if not held and step and self.world.is_short() and self._repeats(orders, step):
            return
        self.handle(c.BeginOperation(self.request, orders, seconds, step, follows, held))

    def _repeats(self, orders: dict[int, c.Order], step: int) -> bool:
        """Begins a step by the short way, if that is possible."""
        assert self.machine is not None
        compute = replace(orders[0].message, free=False)  # it follows none
        repeat = SteadyStateStep(self.request, step, compute, list(orders), {})
        told = self.machine.begin_step(repeat, self.world.now * self.rate)
        if told is None:
            return False
        for worker, (frame, _, known) in zip(orders, told, strict=True):
            self.world.shortly["repeat"] += 1
            self.world.to_worker(self, c.SendToWorker(worker, *decode(frame), None, known))
            self.world.check_window(self.machine.stream(worker).outbound)
        return True

    def _deadline_in(self, seconds: float) -> float:
        return float(self.world.now + (seconds + 2.0) / self.rate)

    def settle(self, request: int, outcome: Any) -> None:
        then, step = self._then.pop(request)
        self.begun = dict.fromkeys(self.begun, self._deadline_in(DEADLINE))
        if isinstance(outcome, WorkerLost | RendezvousTimeout | StaleEpoch):
            self.world.saw(outcome, self)
            self.life += 1
            self.alive, self.machine, self.begun = False, None, {}
            self.world.schedule(self.world.random.uniform(0.05, 1.0), self.recover)
        elif isinstance(outcome, c.Replies):
            then(outcome)
        elif step:
            self.world.saw(outcome, self)
            self.world.note_decided(self.name, self.epoch, step, "abort")
            if not self.begun:
                self.later(0.01, self._go_on)
        else:
            self.world.saw(outcome, self)
            self.life += 1
            self.alive, self.machine, self.begun = False, None, {}
            self.world.schedule(0.5, self.recover)

    def _open_workers(self, replies: c.Replies) -> None:
        self.request += 1
        addresses = self.world.addresses
        orders = {i: c.Order(Open(self.request, i, addresses, 12.0)) for i in self.everyone}
        self._begin(orders, self._write_checkpoint)

    def _write_checkpoint(self, replies: c.Replies) -> None:
        value = np.array([self.checkpoint], np.int64)
        self.ask(
            lambda request: Write(request, "n"), self._go_on_after_write, [("value", "n", value)]
        )

    def _go_on_after_write(self, replies: c.Replies) -> None:
        self._go_on()

    def _go_on(self) -> None:
        if self.committed >= self.steps:
            self.ask(lambda request: Read(request, "n"), self._finish)
            return
        counts = self.world.quiet or self.world.random.random() < 0.7
        due = self.steps - self.committed - counts
        self.step += 1
        self._run(self.step, counts)
        while self.machine is not None and self._is_ahead():
            if self.world.random.random() < 0.3:
                counts = not counts
            if counts and not due:
                break
            due -= counts
            self.step += 1
            self._run(self.step, counts, follows=self.step - 1)
        if self.world.random.random() < 0.05 and not self.world.quiet:
            self.later(self.world.random.uniform(0, 0.1), lambda: self.handle(c.CancelSteps()))

    def _is_ahead(self) -> bool:
        """Whether to begin a step before the one before it is decided."""
        if not self.begun or self.world.quiet or self.world.random.random() >= 0.4:
            return False
        return len(self.begun) <= AHEAD  # all but the first may wait for it

    def _run(self, step: int, counts: bool, follows: int = -1) -> None:
        self.request += 1
        request, program = self.request, COUNT if counts else LOOK
        compute = Compute(
            request, program, {}, [], False, DEADLINE, follows=follows, free=not counts
        )
        orders = {index: c.Order(compute) for index in self.everyone}
        self._begin(orders, partial(self._go_on_after_step, step, counts), step, follows)
        if follows >= 0:  # its user looks at the one before first
            self.later(self.world.random.uniform(0, 0.2), lambda: self._release(request))

    def _release(self, request: int) -> None:
        if request in self.begun:
            if request == min(self.begun):
                self.handle(c.ReleaseStep(request))
            else:
                self.later(0.01, lambda: self._release(request))

    def _go_on_after_step(self, step: int, counts: bool, replies: c.Replies) -> None:
        self.world.note_decided(self.name, self.epoch, step, "commit")
        self.committed += counts
        self._expect(replies, "y", self.committed)
        if self.begun:
            return
        if self.world.random.random() < 0.3:
            self.ask(lambda request: Read(request, "n"), self._note_checkpoint)
        else:
            self.later(self.world.random.choice([0.0, 0.0, 0.01, 0.1]), self._go_on)

    def _note_checkpoint(self, replies: c.Replies) -> None:
        self._expect(replies, "n", self.committed)
        self.checkpoint = self.committed
        self._go_on()

    def _finish(self, replies: c.Replies) -> None:
        self._expect(replies, "n", self.steps)
        self.world.note_ended(self.name, self.epoch)
        self.done = True

    def _expect(self, replies: c.Replies, name: str, value: int) -> None:
        found = {index: int(replies.arrays[index][name][0]) for index in self.everyone}
        if set(found.values()) != {value}:
            self.world.violate(f"{self.name}: the counters are {found}, not {value}")


class Zombie:
    """A coordinator that was frozen while another took over: nothing it says may count."""

    def __init__(self, user: User) -> None:
        self.world, self.machine, self.rate = user.world, user.machine, user.rate
        self.name, self.life, self.epoch = user.name, user.life, user.epoch
        self.request, self.step = user.request + 100, user.step + 100
        self.awake = False
        self.backlog: list[c.CoordinatorEvent] = []

    def thaw(self) -> None:
        self.awake = True
        for event in self.backlog:
            self.handle(event)
        hosted = (worker.hosted.get(self.name) for worker in self.world.workers)
        self.fenced = any(each is not None and each.epoch > self.epoch for each in hosted)
        self.handle(c.CancelSteps())  # what it had begun ahead
        compute = Compute(self.request, COUNT, {}, [], False, DEADLINE)
        orders = {index: c.Order(compute) for index in range(len(self.world.workers))}
        self.handle(c.BeginOperation(self.request, orders, DEADLINE, self.step))
        self.tick()

    def hear(self, event: c.CoordinatorEvent) -> None:
        if self.awake:
            self.handle(event)
        else:
            self.backlog.append(event)

    def tick(self) -> None:
        self.handle(c.CoordinatorTick())
        if self.request:
            self.world.schedule(0.5, self.tick)

    def handle(self, event: c.CoordinatorEvent) -> None:
        for action in self.machine.handle(event, self.world.now * self.rate):
            if isinstance(action, c.SendToWorker):
                self.world.to_worker(self, action)
            elif isinstance(action, c.SettleOperation) and action.request == self.request:
                self.request = 0
                if not isinstance(action.outcome, c.Replies):
                    self.world.saw(action.outcome, self)
                elif self.fenced:
                    self.world.violate("a coordinator of an old epoch ran a step")
