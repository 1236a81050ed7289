"""The exchanges of one session on one worker: who takes part, by which way, and when.

A program starts its part in a collective as soon as it has its tensor, and finishes it where the
result is read. What goes in one small chunk is in the others' memory when `start` returns. The rest
runs meanwhile on a thread of the device (its lane), group after group in the order of the program,
which is the same on all devices, so that no two of them wait for each other; a program that has
nothing else to do takes that work over.

The way between workers is agreed when a group first meets: memory of one host, if all can attach to
it, else parcels. A step that fails forgets all of them on every worker, so nothing of it is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np

from graphflow.errors import GraphflowError, StepTimeout, TransportError
from graphflow.runtime.collectives.gate import Gates
from graphflow.runtime.collectives.parcels import Parcels, Post
from graphflow.runtime.collectives.pieces import Array, Collective
from graphflow.runtime.collectives.shared import Ground, Shared, is_small, private
from graphflow.runtime.messages import Parcel
from graphflow.runtime.transport.segment import Segment

_SLICE = 0.02  # seconds between two looks at whether a step was given up


class Mailbox(Protocol):
    """Where parcels come, and where a step's end is known."""

    deadline: float

    def take(self, step: int, edge: Any, what: str) -> Any: ...

    def given_up(self, step: int) -> GraphflowError | None:
        """What the step was cancelled with."""


class Exchanges:
    """Everything that a session's devices on one worker exchange.

    Args:
        outbox: takes a tensor for another worker.
    """

    def __init__(
        self, session: str, worker: int, mail: Mailbox, outbox: Callable[[Parcel], None]
    ) -> None:
        self.session = session
        self.worker = worker
        self.mail = mail
        self.outbox = outbox
        self._lock = threading.RLock()
        self._sites: dict[Any, Site] = {}
        self._lanes: dict[str, Lane] = {}

    def member(self, program: str, device: str, what: Collective, name: str) -> Member:
        """The part of a device in a group of a program, made when the program is compiled."""
        return Member(self, program, device, what, name)

    def lane(self, device: str) -> Lane:
        """The thread of a device, and what it has to do."""
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = Lane(device)
            return self._lanes[device]

    def site(self, key: Any, what: Collective, small: bool) -> Site:
        """Where the ranks of a group meet: the same for all devices of this worker."""
        with self._lock:
            if key not in self._sites:
                self._sites[key] = Site(self, key, what, small)
            return self._sites[key]

    def known(self, site: Site) -> bool:
        """Whether a site is still in use: none is after a step that failed."""
        return self._sites.get(site.key) is site

    def abort(self) -> None:
        """Forget all ways after a step that failed and was cancelled, once nobody is on them."""
        for lane in list(self._lanes.values()):
            lane.abort()
        with self._lock:
            self._sites.clear()

    def close(self) -> None:
        """End the threads."""
        for lane in list(self._lanes.values()):
            lane.close()
        with self._lock:
            self._sites.clear()

    def go_on(self, step: int, what: str) -> None:
        """Return if the step goes on.

        Raises:
            StepTimeout: its deadline has passed; `what` is waited for.
            GraphflowError: what it was cancelled with.
        """
        reason = self.mail.given_up(step)
        if reason is not None:
            raise reason
        if monotonic() > self.mail.deadline:
            raise StepTimeout(
                f"step {step}: {what} did not come before the deadline; is that worker slow or "
                "stuck? give Session a longer deadline"
            )


class Site:
    """Where the ranks of a group meet, from this worker's side.

    Attributes:
        ground: the memory that all of them share, once it is agreed on.
        ready: whether a way is agreed on.
    """

    def __init__(self, owner: Exchanges, key: Any, what: Collective, small: bool) -> None:
        self.key = key
        self.ready = False
        self.ground: Ground | None = None
        self._owner = owner
        self._what = what
        self._slot = Ground.slot(what) if small else Ground.slot_of_chunks(what.count)
        self._lock = threading.Lock()
        self._segment: Segment | None = None

    def agree(self, step: int) -> None:
        """Find the way with the other workers; the first device of this one does it for all.

        Raises:
            GraphflowError: the step was given up meanwhile.
        """
        with self._lock:
            if self.ready:
                return
            workers = sorted(set(self._what.workers))
            nbytes = Ground.nbytes(self._what.count, self._slot)
            if len(workers) == 1:
                memory: Array | None = private(nbytes)
            elif self._owner.worker == workers[0]:
                memory = self._offered(step, nbytes, workers[1:])
            else:
                memory = self._joined(step, nbytes, workers[0])
            if memory is not None:
                self.ground = Ground(memory, self._what.count, self._slot)
            self.ready = True

    def _offered(self, step: int, nbytes: int, others: Sequence[int]) -> Array | None:
        """Memory that this worker made, if all others reach it."""
        try:
            self._segment = Segment.create(nbytes)
            token = self._segment.token.encode()
        except TransportError:
            token = b""
        for other in others:
            self._tell(step, "token", other, token)
        answers = [self._hear(step, f"joined/{other}", other) for other in others]
        agreed = bool(token) and all(answers)
        for other in others:
            self._tell(step, "agreed", other, b"1" * agreed)
        return self._segment.memory if agreed and self._segment is not None else None

    def _joined(self, step: int, nbytes: int, root: int) -> Array | None:
        """Memory that another worker made, if all reach it."""
        token = self._hear(step, "token", root).decode("ascii", "replace")
        try:
            self._segment = Segment.attach(token) if token else None
        except TransportError:
            self._segment = None
        if self._segment is not None and self._segment.memory.nbytes != nbytes:
            self._segment = None
        self._tell(step, f"joined/{self._owner.worker}", root, b"1" * (self._segment is not None))
        agreed = bool(self._hear(step, "agreed", root))
        return self._segment.memory if agreed and self._segment is not None else None

    def _tell(self, step: int, what: str, worker: int, data: bytes) -> None:
        array = np.frombuffer(data, np.uint8)
        owner = self._owner
        name = f"collective/{'/'.join(map(str, self.key))}/{what}"
        owner.outbox(Parcel(owner.session, step, name, worker, array, owned=True))

    def _hear(self, step: int, what: str, worker: int) -> bytes:
        name = f"collective/{'/'.join(map(str, self.key))}/{what}"
        told = f"word of worker {worker} about how to exchange for {self._what.kind}"
        array: Array = self._owner.mail.take(step, name, told)
        return array.tobytes()


class Member:
    """The part of one device in one group: `start` for each of its ranks, then `finish`."""

    def __init__(
        self, owner: Exchanges, program: str, device: str, what: Collective, name: str
    ) -> None:
        self.what = what
        self.group = what.group
        self.device = device
        self.ranks = tuple(r for r, d in enumerate(what.devices) if d == device)
        self.small = is_small(what)
        self._owner = owner
        self._program = program
        self._name = name
        self._lane = owner.lane(device)
        self._site: Site | None = None
        self._way: Shared | Parcels | None = None
        self._arrays: dict[int, tuple[Array | None, Array]] = {}
        self._step = self._finished = -1
        self._at_once = False
        self.place: list[Member] = []  # the groups of its program on this device, in their order

    def start(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        """Take part with a rank's tensor; `y` gets the result by the time of `finish`."""
        if step != self._step:
            self._step = step
            self._arrays.clear()
        self._arrays[rank] = (x, y)
        if len(self._arrays) < len(self.ranks):
            return
        site = self._site
        ready = site is not None and self._owner.known(site) and self._way is not None
        self._at_once = self.small and ready and isinstance(self._way, Shared)
        if self._at_once:
            assert isinstance(self._way, Shared)
            self._way.offer({r: self._arrays[r][0] for r in self.ranks})
        self._lane.started(step, self)

    def finish(self, step: int) -> None:
        """Return when the results of this device's ranks are there.

        Raises:
            GraphflowError: the step was given up.
        """
        if step == self._finished:  # by way of another rank of this device
            return
        if self._at_once:
            assert isinstance(self._way, Shared)
            self._way.small({r: self._arrays[r][1] for r in self.ranks}, self._waiting(step))
        else:
            self._lane.finish(step, self, lambda: self._owner.go_on(step, self._told()))
        self._finished = step

    @property
    def at_once(self) -> bool:
        """Whether this step's part is done by `start` and `finish` alone."""
        return self._at_once

    def is_started(self, step: int) -> bool:
        """Whether all of the device's ranks have their tensors."""
        return self._step == step and len(self._arrays) == len(self.ranks)

    def run(self, step: int) -> None:
        """All of it, on the thread of the lane, or on that of the program."""
        self._meet(step)
        way = self._way
        given = {rank: x for rank, (x, _) in self._arrays.items()}
        results = {rank: y for rank, (_, y) in self._arrays.items()}
        if isinstance(way, Parcels):
            way.run(step, given, results)
            return
        assert isinstance(way, Shared)
        way.offer(given)
        if self.small:
            way.small(results, self._waiting(step))
        else:
            way.run(results, self._waiting(step))

    def _meet(self, step: int) -> None:
        """Agree on a way with the others, unless that was done."""
        if self._site is not None and self._owner.known(self._site) and self._way is not None:
            return
        own = ("small", self._program, self.group) if self.small else ("chunks",)
        where = "+".join(self.what.devices) if not self.small else str(self.what.result(0))
        site = self._owner.site((*own, where), self.what, self.small)
        site.agree(step)
        self._site = site
        if site.ground is not None:
            self._way = Shared(self.what, self.ranks, site.ground)
        else:
            post = Post(
                self._owner.session, f"{self._program}/{self.group}", self._name,
                self._owner.outbox, self._owner.mail.take,
            )  # fmt: skip
            self._way = Parcels(self.what, self.ranks, post)

    def _waiting(self, step: int) -> Callable[[Gates, int], None]:
        def wait(gates: Gates, value: int) -> None:
            while (late := gates.pending(value, _SLICE)) >= 0:
                self._owner.go_on(step, self._told(late))

        return wait

    def _told(self, rank: int | None = None) -> str:
        what = f"{self.what.kind} {self._name}"
        if rank is None:
            return what
        return f"{what}: the part of rank {rank} on {self.what.devices[rank]}"


class Lane:
    """What a device has to do in the groups of a step, one after the other; and a thread for it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._step = -1
        self._todo: list[Member] = []
        self._next = 0
        self._busy = False
        self._error: BaseException | None = None
        self._closed = False

    def started(self, step: int, member: Member) -> None:
        """A member has its tensors."""
        with self._changed:
            if step != self._step:
                self._step, self._todo, self._next = step, member.place, 0
                self._error = None
            if member.at_once:
                return
            if self._thread is None:
                name = f"collectives-{self._device.strip('/')}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, step: int, member: Member, go_on: Callable[[], None]) -> None:
        """Do what is left up to a member, or wait until it is done."""
        while True:
            with self._changed:
                while True:
                    if self._error is not None:
                        raise self._error
                    if self._step != step or self._is_done(member):
                        return
                    if not self._busy and (due := self._due()) is not None:
                        self._busy = True
                        break
                    self._changed.wait(_SLICE)
                    go_on()
            self._run(due, step)

    def _is_done(self, member: Member) -> bool:
        return member not in self._todo[self._next :]

    def _due(self) -> Member | None:
        """The next member, if it has its tensors; those that are done at once are passed over."""
        while self._next < len(self._todo):
            member = self._todo[self._next]
            if not member.is_started(self._step):
                return None
            if not member.at_once:
                return member
            self._next += 1
        return None

    def _run(self, member: Member, step: int) -> None:
        error: BaseException | None = None
        try:
            member.run(step)
        except BaseException as raised:
            error = raised
        with self._changed:
            self._busy = False
            if self._step == step:
                self._next += 1
                self._error = self._error or error
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._busy or self._error is not None or (due := self._due()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                if self._closed:
                    return
                self._busy, step = True, self._step
            self._run(due, step)

    def abort(self) -> None:
        """Forget the step, once nobody works for it: a part that runs gives up soon."""
        with self._changed:
            self._todo, self._step = [], -1
            while self._busy:
                self._changed.wait(_SLICE)

    def close(self) -> None:
        """End the thread."""
        self.abort()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
