"""The exchanges of one session on one worker: who takes part, by which way, and when.

A program starts its part in a collective as soon as it has its tensor, and finishes it where the
result is read. What is small is in the others' reach when `start` returns. The rest runs meanwhile
on a thread of the device (its lane), group after group in the order of the program, which is the
same on all devices, so that no two of them wait for each other; a program that has nothing else to
do takes that work over.

The way between workers is agreed when a group first meets (`group_setup.py`), and so is that of
edges between two devices (`shared_memory_edges.py`). A step that fails forgets all of them on every
worker, so nothing of it is left: at once where it ran, and with the next step where it did not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from graphflow.errors import TransportError
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.collectives import nccl
from graphflow.runtime.collectives.device_queue import Lane
from graphflow.runtime.collectives.group_setup import Line, Place, Site, within
from graphflow.runtime.collectives.message_transport import MessageExchange, Post
from graphflow.runtime.collectives.nccl import Communicator, Nccl
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.shared_counters import SLICE, SPINS, SharedCounters, compiled
from graphflow.runtime.collectives.shared_memory_edges import (
    ShmEdge,
    ShmEdgeReceiver,
    ShmEdgeSender,
    carried,
)
from graphflow.runtime.collectives.shared_memory_transport import Mapped, Slots, is_mapped, is_small
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.wire.messages import EXCHANGE_PREFIX, TensorParcel
from graphflow.runtime.wire.tensor_mailbox import Awaited, TensorMailbox

End = TypeVar("End", ShmEdgeReceiver, ShmEdgeSender)


class Exchanges:
    """Everything that a session's devices on one worker exchange.

    Args:
        mail: where parcels come, and where a step's end is known.
        outbox: takes a tensor for another worker.

    Attributes:
        round: how often all ways were forgotten.
        offers: passages of which it is not known yet whether the other end found them.
        open: those that hold memory.
    """

    def __init__(
        self, session: str, worker: int, mail: TensorMailbox, outbox: Callable[[TensorParcel], None]
    ) -> None:
        self.session = session
        self.worker = worker
        self.mail = mail
        self.outbox = outbox
        self._lock = threading.Lock()
        self._sites: dict[Hashable, Site] = {}
        self._attached: dict[
            str, tuple[SharedMemorySegment, set[Hashable]]
        ] = {}  # and the sites that use it
        self._lanes: dict[str, Lane] = {}
        self._named: dict[tuple[str, ...], tuple[int, ...]] = {}  # groups of GPUs in NCCL
        self._communicators: dict[tuple[tuple[int, ...], int], Communicator] = {}
        self.round = 0
        self.offers: list[ShmEdgeSender] = []
        self.open: set[ShmEdge] = set()

    def part(self, program: str, device: str) -> Part:
        """What a device does in the exchanges of a program, made when that is compiled.

        Args:
            program: tells it, and the sizes it is compiled for, from others; the same on all
                workers.
        """
        return Part(self, program, device)

    def lane(self, device: str) -> Lane:
        """The thread of a device, and what it has to do."""
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = Lane(device)
            return self._lanes[device]

    def site(self, key: Hashable, what: Collective) -> Site:
        """Where the ranks of a group meet: the same for all devices of this worker."""
        with self._lock:
            if key not in self._sites:
                self._sites[key] = Site(what, self._name)
            return self._sites[key]

    def _name(self, devices: tuple[str, ...]) -> tuple[int, ...]:
        """Under which GPUs meet in NCCL, the same for all collectives among them."""
        with self._lock:
            if devices not in self._named:
                self._named[devices] = tuple(nccl.library().get_unique_id())
            return self._named[devices]

    def communicator(
        self, what: Collective, rank: int, gpu: Any, unique: tuple[int, ...],
        go_on: Callable[[], None],
    ) -> Communicator | None:  # fmt: skip
        """A rank's end of a group of GPUs, once all ranks are there; None if they do not meet.

        Raises:
            Exception: of `go_on`, which raises when the step is given up.
        """
        key = unique, rank
        if key in self._communicators:
            return self._communicators[key]
        made = self._communicators[key] = Communicator(gpu)
        if made.meet(what.count, unique, rank, go_on):
            return made
        with self._lock:
            self._communicators.pop(key, None)
        made.close()
        return None

    def knows(self, key: Hashable, site: Site | None) -> bool:
        """Whether a site is still in use: none is after a step that failed."""
        return site is not None and self._sites.get(key) is site

    def forget(self, key: Hashable) -> None:
        """Let go of a site: its program is gone or rests, on all workers."""
        with self._lock:
            self._sites.pop(key, None)
            for token, (segment, users) in list(self._attached.items()):
                users.discard(key)
                if not users:
                    segment.close()
                    del self._attached[token]

    def line(self, step: int, key: Sequence[Any], told: str) -> Line:
        """How the workers of a group talk about their way."""
        prefix = f"{EXCHANGE_PREFIX}{'/'.join(map(str, key))}"

        def tell(what: str, worker: int, data: bytes) -> None:
            array = np.frombuffer(data, np.uint8)
            name = f"{prefix}/{what}"
            self.outbox(TensorParcel(self.session, step, name, worker, array, owned=True))

        def hear(what: str, worker: int) -> bytes:
            about = Awaited(f"word of worker {worker} about {told}", worker)
            array: Array = self.mail.take(step, f"{prefix}/{what}", about)
            return array.tobytes()

        def go_on() -> None:
            self.mail.check_cancelled(step, Awaited(told))

        return Line(self.worker, tell, hear, go_on, partial(self._attach, tuple(key)))

    def _attach(self, key: Hashable, token: str) -> SharedMemorySegment:
        with self._lock:
            if token not in self._attached:
                self._attached[token] = (SharedMemorySegment.attach(token), set())
            segment, users = self._attached[token]
            users.add(key)
            return segment

    def abort(self) -> None:
        """Forget all ways after a step that failed and was cancelled, once nobody is on them."""
        for device, lane in list(self._lanes.items()):
            if not lane.abort():  # stuck in what cannot be given up: another thread from now on
                del self._lanes[device]
        self._clear()

    def close(self) -> None:
        """End the threads."""
        for lane in list(self._lanes.values()):
            lane.close()
        self._clear()

    def settle(self, step: int) -> None:
        """Hear what came of the passages that were offered in a step, once all else of it is done.

        Raises:
            GraphflowError: the step was given up.
        """
        while self.offers:
            self.offers.pop().settle(step)

    def _clear(self) -> None:
        with self._lock:
            self.round += 1
            self.offers.clear()
            self._sites.clear()
            self._named.clear()
            for communicator in self._communicators.values():
                communicator.close()
            self._communicators.clear()
            for segment, _ in self._attached.values():
                segment.close()
            self._attached.clear()


class Part:
    """What one device does in the exchanges of one program.

    Attributes:
        arena: where the program's buffers lie, if other processes can reach them.
        segments: other memory of its that they can reach.
    """

    def __init__(self, owner: Exchanges, program: str, device: str) -> None:
        self.owner = owner
        self.program = program
        self.device = device
        self.arena: SharedMemorySegment | None = None
        self.segments: list[SharedMemorySegment] = []
        self.members: list[Member] = []
        self._passages: list[ShmEdge] = []

    def outward(
        self, target: str, peer: int, what: Mapping[int, Awaited], specs: Mapping[int, TensorSpec]
    ) -> dict[int, ShmEdgeSender]:
        """The way of edges to a device of another worker, for those that find room in it."""
        return self._passage(ShmEdgeSender, self.device, target, peer, what, specs)

    def inward(
        self, source: str, peer: int, what: Mapping[int, Awaited], specs: Mapping[int, TensorSpec]
    ) -> dict[int, ShmEdgeReceiver]:
        """The same at the other end."""
        return self._passage(ShmEdgeReceiver, source, self.device, peer, what, specs)

    def _passage(
        self,
        kind: type[End],
        source: str,
        target: str,
        peer: int,
        what: Mapping[int, Awaited],
        specs: Mapping[int, TensorSpec],
    ) -> dict[int, End]:
        specs = carried(specs)
        if not specs:
            return {}
        compiled()
        passage = kind(self.owner, (self.program, f"from {source} to {target}"), peer, what, specs)
        self._passages.append(passage)
        return dict.fromkeys(specs, passage)

    def memory(self, nbytes: int) -> Array | None:
        """Memory that other processes of this host can map; None where there is none."""
        segment = _created(nbytes)
        if segment is None:
            return None
        self.segments.append(segment)
        return segment.memory

    def found(self, array: Array) -> tuple[SharedMemorySegment, int] | None:
        """Where other processes of this host find an array, if they can."""
        return within((*self.segments, *([] if self.arena is None else [self.arena])), array)

    def member(self, what: Collective, name: str) -> Member:
        """The device's part in a group, the same for all its ranks."""
        for member in self.members:
            if member.what.group == what.group:
                return member
        compiled()
        member = Member(self, what, name)
        self.members.append(member)
        self.members.sort(key=lambda each: each.what.group)
        return member

    def rest(self) -> None:
        """Let go of the ways that were agreed with others; they are agreed anew in the next step,
        if all others let go of them, too."""
        for member in self.members:
            member.rest()
        for passage in self._passages:
            passage.close()

    def close(self) -> None:
        """Let go of what the program had in common with others."""
        self.rest()
        for segment in self.segments:
            segment.close()
        self.arena = None


class Member:
    """The part of one device in one group: `start` for each of its ranks, then `finish`.

    Attributes:
        at_once: whether this step's part is done by these alone, without the lane.
        direct: whether this step's arrays are a GPU's.
    """

    def __init__(self, part: Part, what: Collective, name: str) -> None:
        self.what = what
        self.part = part
        self.ranks = tuple(r for r, d in enumerate(what.devices) if d == part.device)
        self.key = (part.program, what.group)
        self.at_once = self.direct = False
        self._owner = part.owner
        self._name = name
        self._gpu: Any = None
        self._nccl: Nccl | None = None
        self._small = is_small(what)
        self._site: Site | None = None
        self._way: Slots | Mapped | MessageExchange | None = None
        self._arrays: dict[int, tuple[Array | None, Array]] = {}
        self._staging: dict[int, tuple[Array, SharedMemorySegment | None]] = {}
        self._step = self._finished = -1

    @property
    def is_mapped(self) -> bool:
        """Whether other processes are to find its tensors and results where they are."""
        return is_mapped(self.what)

    def start(
        self, step: int, rank: int, x: Array | None, y: Array, fixed: bool, meanwhile: bool
    ) -> None:
        """Take part with a rank's tensor; `y` gets the result by the time of `finish`.

        Args:
            fixed: whether `x` is at the same place in every step; `y` always is.
            meanwhile: whether something else runs before `finish`.
        """
        if step != self._step:
            self._step = step
            self._arrays.clear()
            self.direct = False
        self._arrays[rank] = (self._kept(rank, x, fixed), y)
        if len(self._arrays) < len(self.ranks):
            return
        knows = self._owner.knows(self.key, self._site)
        self.at_once = knows and isinstance(self._way, Slots)
        if self.at_once:
            assert isinstance(self._way, Slots)
            self._way.offer(self._given)
        self._lane.started(step, self, meanwhile)

    @property
    def _lane(self) -> Lane:
        return self._owner.lane(self.part.device)

    def use(self, gpu: Any) -> None:
        """Let a GPU's backend take part for its rank, where all ranks can."""
        self._gpu = gpu

    @property
    def on_device(self) -> bool:
        """Whether the tensors are taken from and brought to the GPU itself: by NCCL, once the ranks
        have met."""
        return self._nccl is not None and self._owner.knows(self.key, self._site)

    def start_on_device(self, step: int, x: Any, y: Any) -> None:
        """As `start`, with arrays of the GPU, for its only rank."""
        assert self._nccl is not None
        self._nccl.made()
        self._step, self.at_once, self.direct = step, False, True
        self._arrays = {self.ranks[0]: (x, y)}
        self._lane.started(step, self, True)

    def _kept(self, rank: int, x: Array | None, fixed: bool) -> Array | None:
        """A tensor where the others find it in every step: a copy, if it is not there."""
        if self._small or x is None:
            return x
        alone = set(self.what.workers) == {self._owner.worker}
        if fixed and (alone or self.part.found(x) is not None):
            return x
        if rank not in self._staging:
            segment = None if alone else _created(max(1, x.nbytes))
            memory = np.empty(x.nbytes, np.uint8) if segment is None else segment.memory
            self._staging[rank] = memory[: x.nbytes].view(x.dtype).reshape(x.shape), segment
        copy, _ = self._staging[rank]
        np.copyto(copy, x)
        return copy

    def rest(self) -> None:
        """Let go of the way, and of copies that others find."""
        self._owner.forget(self.key)
        self._site = self._way = self._nccl = None
        for _, segment in self._staging.values():
            if segment is not None:
                segment.close()
        self._staging.clear()

    @property
    def _given(self) -> dict[int, Array | None]:
        return {rank: x for rank, (x, _) in self._arrays.items()}

    @property
    def _results(self) -> dict[int, Array]:
        return {rank: y for rank, (_, y) in self._arrays.items()}

    def finish(self, step: int) -> None:
        """Return when the results of this device's ranks are there.

        Raises:
            GraphflowError: the step was given up.
        """
        if step == self._finished:  # by way of another rank of this device
            return
        if self.at_once:
            assert isinstance(self._way, Slots)
            self._way.take(self._results, self._waiting(step))
        else:
            self._lane.finish(step, self, lambda: self._go_on(step))
        self._finished = step

    @property
    def place(self) -> Sequence[Member]:
        """The device's parts in all groups of its program, in their order."""
        return self.part.members

    def is_started(self, step: int) -> bool:
        """Whether all of the device's ranks have their tensors."""
        return self._step == step and len(self._arrays) == len(self.ranks)

    def run(self, step: int, beside: bool) -> None:
        """All of it, on the thread of the lane, or on that of the program.

        Args:
            beside: whether the program goes on meanwhile, which has better use for the core than
                to look again and again whether others are there.
        """
        if self.direct:
            assert self._nccl is not None
            ((x, y),) = self._arrays.values()
            self._nccl.run(x, y, lambda: self._go_on(step))
            return
        if not self._owner.knows(self.key, self._site):
            self._meet(step)
        match self._way:
            case MessageExchange():
                self._way.run(step, self._given, self._results)
            case Mapped():
                self._way.run(self._waiting(step, 0 if beside else SPINS))
            case Slots():
                self._way.offer(self._given)
                self._way.take(self._results, self._waiting(step, 0 if beside else SPINS))

    def _meet(self, step: int) -> None:
        """Agree on a way with the others."""
        owner, what = self._owner, self.what
        site = owner.site(self.key, what)
        if not self._small:
            for rank, (x, y) in self._arrays.items():
                site.register(rank, self._place(x, y))
        site.agree(owner.line(step, self.key, self._told))
        self._site = site
        if site.memory is None:
            prefix = "/".join(map(str, self.key))
            post = Post(owner.session, prefix, self._name, owner.outbox, owner.mail.take)
            self._way = MessageExchange(what, self.ranks, post)
        elif self._small:
            self._way = Slots(what, self.ranks, site.memory)
        else:
            self._way = Mapped(what, self.ranks, site.memory, site.xs, site.ys)
        self._nccl = None
        if site.unique and self._gpu is not None:
            rank, gpu, line = self.ranks[0], self._gpu, owner.line(step, self.key, self._told)
            group = owner.communicator(what, rank, gpu, site.unique, line.go_on)
            if site.have_met(line, rank, group is not None) and group is not None:
                self._nccl = Nccl(what, rank, group)

    def _place(self, x: Array | None, y: Array) -> Place:
        places = []
        for array in (y if x is None else x, y):
            found = self._found(array)
            places.append(("", 0) if found is None else (found[0].token, found[1]))
        return Place(x, y, *places)

    def _found(self, array: Array) -> tuple[SharedMemorySegment, int] | None:
        copies = [segment for _, segment in self._staging.values() if segment is not None]
        return within(copies, array) or self.part.found(array)

    def _go_on(self, step: int) -> None:
        self._owner.mail.check_cancelled(step, Awaited(self._told))

    def _waiting(self, step: int, spins: int = SPINS) -> Callable[[SharedCounters, int], None]:
        def wait(gates: SharedCounters, value: int) -> None:
            def is_there(rank: int, _: float) -> bool:
                return gates.pending(value, SLICE, spins) != rank

            while (late := gates.pending(value, SLICE, spins)) >= 0:
                self._owner.mail.wait_until(step, self._part_of(late), partial(is_there, late))

        return wait

    @property
    def _told(self) -> str:
        return f"{self.what.kind} {self._name}"

    def _part_of(self, rank: int) -> Awaited:
        told = f"{self._told}: the part of rank {rank} on {self.what.devices[rank]}"
        return Awaited(told, self.what.workers[rank])


def _created(nbytes: int) -> SharedMemorySegment | None:
    try:
        return SharedMemorySegment.create(nbytes)
    except TransportError:
        return None
