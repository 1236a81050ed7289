"""A deterministic cluster for the protocol: processes, a network and clocks, all from one seed.

Connections deliver late, some messages twice and some damaged; they are reset, and then lose what
was under way or deliver it after what was sent later; pairs of processes are cut off from each
other, in one direction too. Workers and coordinators crash, are replaced, or freeze and go on
later, and no two clocks run alike. Recorded messages are played back by strangers.

After each event the invariants hold that `World` and the simulated processes assert; at the end
everybody has done every step. A world that does not raises `Violation`, with its seed:

    python -m tests.runtime.protocol.soak --schedules 1 --seed SEED      runs one again, exactly
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from graphflow.errors import (
    LinkLost,
    OpError,
    RendezvousTimeout,
    SessionError,
    StaleEpoch,
    StepTimeout,
    WorkerLost,
)
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol import reliable_stream as stream
from graphflow.runtime.protocol import worker_events as w
from graphflow.runtime.protocol.coordinator import DEAD_AFTER
from graphflow.runtime.wire import array_codec
from graphflow.runtime.wire import chunk_assembler as assembler
from graphflow.runtime.wire import frame_codec as wire
from graphflow.runtime.wire.frame_codec import encode
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Chunk,
    Close,
    Envelope,
    Hello,
    Message,
    Open,
    Ping,
)
from tests.runtime.protocol.simulated import SimulatedWorker, User, Zombie

HORIZON = 600.0  # seconds in which everybody must be done
_MISSED = (
    7.0  # seconds in which a frozen worker is lost on the slowest clock, and a step at its end
)
_EXPECTED = (
    OpError, StepTimeout, LinkLost, SessionError, WorkerLost, RendezvousTimeout, StaleEpoch,
)  # fmt: skip
_NO_TRACE = 2.7  # seconds of a cut that costs nothing: 3 on the fastest clock
_AGAIN = 1.5  # seconds after its arrival in which a message may come again, the connection reset
_BELATED = 0.6 + 1.0 + _AGAIN  # seconds for what was said of a cut: a beat later, slow, and again
_REASONS = ("silent for", "killed by signal", "does not know the session", "has not heard us")
Party = Any  # ("worker", index) or ("user", name, life)


class Violation(AssertionError):
    """The protocol broke a promise."""


class World:
    """`sessions` users over the same workers."""

    def __init__(
        self, seed: int, *, workers: int | None = None, sessions: int | None = None,
        steps: int | None = None, quiet: bool = False,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.random = random.Random(seed)
        # Of what changes no promise, so that it changes no schedule: which way messages take.
        self.ways = random.Random(f"ways of {seed}")
        self.lanes = self.ways.random() < 0.7
        self.now = 0.0
        self.log: list[str] = []
        self.messages: Counter[str] = Counter()  # by their kinds
        self.shortly: Counter[str] = Counter()  # what went the short way
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.quiet = quiet
        self._deadly = False  # whether anything happens that may cost a worker its session
        self._woken = 0.0  # when the last user that was frozen goes on
        self._links_tell = self.random.random() < 0.7  # of a connection that is up or down
        self.encoded = self.random.random() < 0.05  # every message goes through its frames
        self._free: dict[tuple[Party, Party], float] = {}
        self._generation: dict[tuple[Party, Party], int] = {}
        self._cut: dict[tuple[Party, Party], float] = {}
        # Between a user and a worker: when what is said may be heard late, or never.
        self._outages: dict[tuple[Party, Party], list[tuple[float, float]]] = {}
        self._users: dict[Party, User | Zombie] = {}
        self._recorded: list[tuple[int, Any]] = []
        self._opening: dict[int, Any] = {}  # what opened a session on each worker last
        self._verdicts: dict[tuple[str, int, int], str] = {}
        self._applied: dict[tuple[str, int, int, int], str] = {}
        self.started: set[tuple[str, int, int, int]] = set()
        self.computed: set[tuple[str, int, int, int]] = set()
        self.zombies: list[Zombie] = []
        count = workers or self.random.choice([1, 2, 2, 3])
        self.addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(count)]
        self.workers: list[SimulatedWorker] = []
        for index in range(count):
            self.workers.append(SimulatedWorker(self, index))
        names = [f"s{index}" for index in range(sessions or self.random.choice([1, 1, 2]))]
        self.users = [User(self, name, steps or self.random.randint(2, 5)) for name in names]
        if not quiet:
            self._misfortunes()

    def run(self) -> World:
        """Until everybody is done.

        Raises:
            Violation: the protocol broke a promise.
        """
        while not all(user.done for user in self.users) or self._is_asking():
            if not self._queue or self._queue[0][0] > HORIZON:
                self.violate("not everybody is done")
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self._check()
        return self

    def _is_asking(self) -> bool:
        return any(zombie.request for zombie in self.zombies)

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    # Promises ------------------------------------------------------------------------------------

    def violate(self, what: str) -> None:
        raise Violation(
            f"seed {self.seed}, at {self.now:.4f} s: {what}\n"
            f"again: python -m tests.runtime.protocol.soak --schedules 1 --seed {self.seed}"
        )

    def _check(self) -> None:
        for user in self.users:
            if user.begun and not user.frozen and self.now > min(user.begun.values()) + 0.1:
                self.violate(f"{user.name} waits beyond its deadline for {user.begun}")

    def check_window(self, outbound: stream.Outbound) -> None:
        """A party has handled an event."""
        many = outbound.pending > stream.WINDOW
        if many or (outbound.pending > 1 and outbound.pending_bytes > stream.WINDOW_BYTES):
            self.violate(f"{outbound.pending} messages are not acknowledged")

    def note_decided(self, session: str, epoch: int, step: int, verdict: str) -> None:
        """A user was told how a step ended."""
        if verdict == "commit":
            for index in range(len(self.workers)):
                if (session, epoch, step, index) not in self.computed:
                    self.violate(f"{session}: step {step} commits, but not every worker did it")
        if self._verdicts.setdefault((session, epoch, step), verdict) != verdict:
            self.violate(f"{session}: step {step} ended twice")

    def note_applied(self, session: str, epoch: int, step: int, worker: int, verdict: str) -> None:
        """A worker does what it was told of a step."""
        key = (session, epoch, step, worker)
        if key in self._applied:
            self.violate(f"worker {worker} was told twice of step {step} of {session}")
        self._applied[key] = verdict
        newest = next(user.epoch for user in self.users if user.name == session)
        # A coordinator that was replaced meanwhile cannot tell its user what it decided.
        decided = self._verdicts.get((session, epoch, step), "" if epoch == newest else verdict)
        if verdict == "commit" and decided != verdict:
            self.violate(f"worker {worker} commits step {step} of {session} by itself")

    def knows(self, key: tuple[str, int, int, int]) -> bool:
        """Whether a worker was told how a step ended: session, epoch, step, worker."""
        return key in self._applied

    def note_ended(self, session: str, epoch: int) -> None:
        """A user is done: every worker was told of every step of this epoch that it began."""
        for key in self.started - self._applied.keys():
            if key[:2] == (session, epoch):
                self.violate(f"worker {key[3]} was never told how step {key[2]} ended")

    def saw(self, outcome: Any, user: User | Zombie) -> None:
        """What ended otherwise than by replies for a user, and why."""
        if type(outcome) not in _EXPECTED:
            self.violate(f"nobody expects {outcome!r}")
        if isinstance(outcome, WorkerLost):
            if not any(why in outcome.reason for why in _REASONS):
                self.violate(f"nobody expects to lose a worker because {outcome.reason}")
            if "silent for" in outcome.reason or "has not heard us" in outcome.reason:
                self._check_outage(outcome, user)
            elif not self._deadly:
                self.violate(f"a worker is lost by what is none's end: {outcome.reason}")
        if isinstance(outcome, StepTimeout):
            for worker in self.workers:
                stopped = worker.alive and worker.frozen and not worker.vouched
                spoke = self._free.get((("worker", worker.index), self._party(user)), 0.0) + _AGAIN
                if stopped and self.now > max(worker.stopped, self._woken, spoke) + _MISSED:
                    self.violate(f"nobody misses worker {worker.index}, frozen for long")
        if isinstance(outcome, LinkLost):
            ends = ("worker", outcome.source), ("worker", outcome.target)
            opens = [
                held.get(way, 0.0) for held in (self._cut, self._free) for way in (ends, ends[::-1])
            ]
            if max(opens) < self.now - _BELATED:
                self.violate(f"nothing cuts these workers off from each other: {outcome}")
        self.log.append(f"{self.now:.6f} {type(outcome).__name__}: {outcome}")

    def _check_outage(self, lost: WorkerLost, user: User | Zombie) -> None:
        """A worker is lost because it was not heard, or did not hear: in that time it was out of
        reach for longer than what costs nothing."""
        since = at = self.now - DEAD_AFTER / user.rate - 0.01
        reached = 0.0
        pair = self._party(user), ("worker", lost.worker)
        for begin, end in sorted(self._outages.get(pair, ())):
            reached += max(0.0, min(begin, self.now) - at)
            at = max(at, min(end, self.now))
        reached += self.now - at
        if self.now - since - reached <= _NO_TRACE + 0.01:
            self.violate(f"a worker that can be reached is lost: {lost.reason}")

    def _silence(self, party: Party, worker: int, seconds: float) -> None:
        """For so long from now on, a user may not hear a worker."""
        held = self._outages.setdefault((party, ("worker", worker)), [])
        held.append((self.now, self.now + seconds))

    def _all_out(self, worker: int, seconds: float) -> None:
        for user in (*self.users, *self.zombies):
            self._silence(self._party(user), worker, seconds)

    # Names ---------------------------------------------------------------------------------------

    def number_of(self, session: str) -> int:
        return int(session[1:])

    def token_of(self, session: str) -> str:
        return f"secret of {session}"

    # The network ---------------------------------------------------------------------------------

    def connect(self, user: User) -> None:
        """A coordinator's connections; each is vouched for when it is up."""
        self.register(user, user)
        for index in range(len(self.workers)):
            self._tell_link(user, index, up=True, delay=self.random.uniform(0, 0.05))

    def register(self, user: User | Zombie, reader: User | Zombie) -> None:
        """Who reads what comes to a coordinator from now on."""
        self._users[self._party(user)] = reader

    def to_worker(self, user: User | Zombie, send: c.SendToWorker) -> None:
        party = self._party(user)
        way = (party, ("worker", send.worker))
        route = (*party, self._generation.get(way, 0))
        lane = self.lanes and not isinstance(send.message, Hello | Open | Ping)
        received = w.MessageReceived(
            route, send.envelope, send.message, _copy_data(send.data), lane
        )
        if isinstance(send.message, Open):
            self._opening[send.worker] = received
        if self.random.random() < 0.01:
            self._recorded.append((send.worker, received))
        self._travel(
            way, send.message, lambda: self.workers[send.worker].hear(self._encode_event(received))
        )

    def to_coordinator(self, worker: int, send: w.SendMessage) -> None:
        ways: Any = (send.fast_route, send.route) if send.fast_route else (send.route,)
        there = [route for route in ways if self._leads(worker, route)]
        if not there:
            return  # that connection is gone
        party = there[0][:-1]
        way = (party, ("worker", worker))
        received = c.WorkerMessageReceived(
            worker, send.envelope, send.message, _copy_data(send.data)
        )

        def arrive() -> None:
            reader = self._users[party]
            if self._party(reader) == party:  # else that process has ended
                reader.hear(self._encode_event(received))

        self._travel(way[::-1], send.message, arrive)

    def _leads(self, worker: int, route: Any) -> bool:
        """Whether a way to a coordinator is still there."""
        party, generation = route[:-1], route[-1]
        way = (party, ("worker", worker))
        return party in self._users and self._generation.get(way, 0) == generation

    def is_short(self) -> bool:
        """Whether the short way is tried for what comes now."""
        return self.ways.random() < 0.6

    def send_between_workers(
        self, source: int, target: int, letter: stream.OutgoingMessage
    ) -> None:
        """A message from worker to worker."""
        received = w.MessageReceived(
            ("worker", source), letter.envelope, letter.message, _copy_data(letter.data)
        )
        if self.random.random() < 0.01:
            self._recorded.append((target, received))
        way = (("worker", source), ("worker", target))
        self._travel(
            way, letter.message, lambda: self.workers[target].hear(self._encode_event(received))
        )

    def _party(self, user: User | Zombie) -> Party:
        return ("user", user.name, user.life)

    def _travel(self, way: tuple[Party, Party], kind: Message, arrive: Callable[[], None]) -> None:
        self.messages[type(kind).__name__] += 1
        chance = self.random.random()
        delay = 0.001 + 0.004 * chance if self.quiet else 0.0001 + 0.02 * chance * chance
        if chance > 0.99 and not self.quiet:
            delay += self.random.random()
        opens = self._cut.get(way, 0.0)
        if opens > self.now:
            if chance < 0.5:
                return  # the connection did not survive it
            delay += opens - self.now
        time = max(self.now + delay, self._free.get(way, 0.0))
        self._free[way] = time
        pair = _pair(way)
        if chance > 0.99 and pair[0][0] == "user":
            self._silence(pair[0], pair[1][1], time - self.now)
        generation = self._generation.get(pair, 0)

        def act() -> None:
            if self._generation.get(pair, 0) == generation:
                arrive()
            elif self.random.random() < 0.3:  # it was received before the reset, but not read
                self.schedule(self.random.uniform(0, 0.5), arrive)

        self.schedule(time - self.now, act)
        if chance < 0.03 and not self.quiet:
            self.schedule(time - self.now + self.random.random(), arrive)

    def _encode_event(self, event: Any) -> Any:
        """What comes of a message: at times another byte, in some worlds from its frames."""
        if isinstance(event.message, Chunk) and not self.quiet and self.random.random() < 0.02:
            damaged = bytearray(event.data)
            damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
            return event._replace(data=bytes(damaged))
        if self.encoded:
            envelope, message = wire.decode(encode(event.envelope, event.message))
            return event._replace(envelope=envelope, message=message)
        return event

    def _tell_link(self, user: User, worker: int, *, up: bool, delay: float) -> None:
        down = c.LinkDown(worker, "it cannot be reached")
        self._tell(user, c.LinkUp(worker) if up else down, delay)

    def _tell(self, user: User, event: c.LinkUp | c.LinkDown | c.WorkerGone, delay: float) -> None:
        life = user.life

        def tell() -> None:
            stopped = self.workers[event.worker]
            shaken = not isinstance(event, c.LinkUp) or not stopped.frozen or stopped.vouched
            if user.life == life and shaken:  # with who is stopped, no handshake comes to its end
                user.hear(event)

        if self._links_tell:
            self.schedule(delay, tell)

    # Misfortunes ---------------------------------------------------------------------------------

    def _misfortunes(self) -> None:
        kinds = [
            self._reset, self._reset, self._cut_off, self._cut_off, self._cut_off_for_long,
            self._crash, self._freeze, self._hold, self._die, self._freeze_user, self._replay,
            self._jump,
        ]  # fmt: skip
        cuts = 0
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            kind = self.random.choice(kinds)
            cuts += kind == self._cut_off
            harmless = kind in (self._reset, self._replay, self._jump, self._cut_off)
            harmless |= kind == self._hold and self._links_tell
            self._deadly = self._deadly or not harmless or cuts > 1
            self.schedule(self.random.uniform(0.0, 1.0) ** 2 * 3.0, kind)

    def _ways(self) -> Iterator[tuple[Party, Party]]:
        places = [("worker", index) for index in range(len(self.workers))]
        parties = [self._party(user) for user in self.users] + places
        for source in parties:
            for target in places:
                if source != target:
                    yield source, target

    def _reset(self) -> None:
        """Connections break and are made again; what was under way is lost, or late."""
        for way in list(self._ways()):
            if self.random.random() < 0.5:
                self._break(way)

    def _break(self, way: tuple[Party, Party]) -> None:
        self._generation[way] = self._generation.get(way, 0) + 1
        user = self._users.get(way[0])
        if isinstance(user, User):
            self._tell_link(user, way[1][1], up=False, delay=0.0)
            self._tell_link(user, way[1][1], up=True, delay=self.random.uniform(0.05, 0.3))

    def _cut_off(self) -> None:
        """Messages between some pairs do not get through for a while, one way or both."""
        self._cut_for(self.random.choice([0.5, _NO_TRACE, _NO_TRACE]))

    def _cut_off_for_long(self) -> None:
        self._cut_for(10.0)

    def _cut_for(self, seconds: float) -> None:
        for way in list(self._ways()):
            if self.random.random() < 0.5:
                one_way = self.random.random() < 0.3
                self._cut[way if self.random.random() < 0.5 else way[::-1]] = self.now + seconds
                if not one_way:
                    self._cut[way] = self._cut[way[::-1]] = self.now + seconds
                user = self._users.get(way[0])
                if way[0][0] == "user":
                    self._silence(way[0], way[1][1], seconds)
                if isinstance(user, User):
                    noticed = self.random.uniform(2.0, 3.0)
                    if noticed < seconds:
                        self._tell_link(user, way[1][1], up=False, delay=noticed)
                    self._tell_link(user, way[1][1], up=True, delay=seconds)
                self.schedule(seconds, lambda way=way: self._break(way))

    def _crash(self) -> None:
        """A worker's process ends; its supervisor starts another at the same address."""
        worker = self.random.choice(self.workers)
        worker.crash()
        for user in self.users:
            self._tell(
                user, c.WorkerGone(worker.index, "killed by signal 9"), self.random.random() / 3
            )
        seconds = self.random.uniform(0.3, 3.0)
        self._all_out(worker.index, seconds)
        self.schedule(seconds, worker.start)
        if self._opening.get(worker.index) and self.random.random() < 0.5:  # it was still queued
            late = self._opening[worker.index]
            self.schedule(seconds + 0.2 * self.random.random(), lambda: worker.hear(late))

    def _freeze(self) -> None:
        """A worker's process is stopped, and goes on later."""
        worker = self.random.choice(self.workers)
        seconds = self.random.choice([1.0, 4.0, 8.0, 20.0])
        if not worker.frozen:
            worker.frozen, worker.vouched, worker.stopped = True, False, self.now
            self._all_out(worker.index, seconds)
        life = worker.life
        for user in self.users:
            if seconds > 3.0:
                self._tell_link(user, worker.index, up=False, delay=self.random.uniform(2.0, 3.0))
            self._tell_link(user, worker.index, up=True, delay=seconds + 0.1)
        self.schedule(seconds, lambda: worker.thaw() if worker.life == life else None)

    def _hold(self) -> None:
        """An op holds the interpreter of a worker, which says nothing, while the transport goes on
        to vouch for it."""
        worker = self.random.choice(self.workers)
        if not worker.frozen:
            worker.frozen, worker.vouched, life = True, True, worker.life
            seconds = self.random.choice([2.0, 6.0, 9.0])
            self._all_out(worker.index, seconds)
            self.schedule(seconds, lambda: worker.thaw() if worker.life == life else None)

    def _die(self) -> None:
        """A coordinator's process ends."""
        user = self.random.choice(self.users)
        if user.machine is not None and not user.done:
            user.die()

    def _freeze_user(self) -> None:
        user = self.random.choice(self.users)
        if user.machine is not None and not user.done and not user.frozen:
            seconds = self.random.choice([1.0, 6.0, 20.0])
            self._woken = self.now + seconds
            for worker in self.workers:
                self._silence(self._party(user), worker.index, seconds)
            user.freeze(seconds)

    def _replay(self) -> None:
        """A stranger plays back what it recorded as of another session, and makes up an order with
        all that it could guess."""
        stranger: Any = ("stranger", 0, 0)
        for worker, event in self._recorded:
            session = self.random.choice(self.users).name
            there = session in self.workers[worker].machine.sessions
            # Who opens one that is not there has a session of his own, under a name that is taken.
            if session != event.envelope.session and (there or not isinstance(event.message, Open)):
                envelope = event.envelope._replace(session=session)
                self.workers[worker].hear(event._replace(route=stranger, envelope=envelope))
        for worker in self.workers:
            for user in self.users:
                if user.name in worker.machine.sessions:
                    due = worker.machine.stream(user.name).inbound.received + 1
                    envelope = Envelope(user.name, user.epoch, COORDINATOR, 0, due, 0, "a guess")
                    worker.hear(w.MessageReceived(stranger, envelope, Close(9)))

    def _jump(self) -> None:
        """The wall clock jumps. No machine has one: see the test that takes it away."""
        self.log.append(f"{self.now:.6f} the wall clock jumps")


def _pair(way: tuple[Party, Party]) -> tuple[Party, Party]:
    """The connection that a direction belongs to: that of who connected."""
    return way[::-1] if way[1][0] == "user" else way


def _copy_data(data: Any) -> bytes | None:
    return None if data is None else bytes(data)


@contextmanager
def small_windows() -> Iterator[None]:
    """Windows and chunks so small that a world of a few steps meets their ends."""
    with (
        mock.patch.object(stream, "WINDOW", 4),
        mock.patch.object(stream, "WINDOW_BYTES", 160),
        mock.patch.object(stream, "ACK_EVERY", 3),
        mock.patch.object(stream, "ACK_BYTES", 80),
        mock.patch.object(array_codec, "CHUNK_BYTES", 64),
        mock.patch.object(assembler, "CHUNK_BYTES", 64),
    ):
        yield


def check(seeds: range, *, progress: Callable[[int], None] | None = None) -> None:
    """Runs the worlds of these seeds.

    Raises:
        Violation: of the first that broke a promise.
    """
    with small_windows():
        for seed in seeds:
            World(seed).run()
            if progress is not None:
                progress(seed)
