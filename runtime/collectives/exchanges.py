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
from graphflow.runtime.collectives.device_queue import DeviceCollectiveQueue
from graphflow.runtime.collectives.group_setup import (
    GroupRendezvous,
    HandshakeChannel,
    RankBuffers,
    find_segment,
)
from graphflow.runtime.collectives.message_transport import MessageExchange, MessagePort
from graphflow.runtime.collectives.nccl import Communicator, NcclCollective
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.shared_counters import (
    CANCEL_CHECK_SECONDS,
    DEFAULT_SPINS,
    SharedCounters,
    counter_functions,
)
from graphflow.runtime.collectives.shared_memory_edges import (
    ShmEdge,
    ShmEdgeReceiver,
    ShmEdgeSender,
    edges_that_fit,
)
from graphflow.runtime.collectives.shared_memory_transport import (
    MappedTransport,
    SlotTransport,
    is_small,
    uses_mapped_tensors,
)
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.messages import EXCHANGE_PREFIX, TensorParcel

EdgeEnd = TypeVar("EdgeEnd", ShmEdgeReceiver, ShmEdgeSender)


class SessionCollectives:
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
        self._rendezvous: dict[Hashable, GroupRendezvous] = {}
        self._attached: dict[
            str, tuple[SharedMemorySegment, set[Hashable]]
        ] = {}  # and the sites that use it
        self._queues: dict[str, DeviceCollectiveQueue] = {}
        self._nccl_ids: dict[tuple[str, ...], tuple[int, ...]] = {}  # groups of GPUs in NCCL
        self._communicators: dict[tuple[tuple[int, ...], int], Communicator] = {}
        self.generation = 0
        self.offered_edges: list[ShmEdgeSender] = []
        self.open_edges: set[ShmEdge] = set()

    def for_program(self, program: str, device: str) -> ProgramCollectives:
        """What a device does in the exchanges of a program, made when that is compiled.

        Args:
            program: tells it, and the sizes it is compiled for, from others; the same on all
                workers.
        """
        return ProgramCollectives(self, program, device)

    def device_queue(self, device: str) -> DeviceCollectiveQueue:
        """The thread of a device, and what it has to do."""
        with self._lock:
            if device not in self._queues:
                self._queues[device] = DeviceCollectiveQueue(device)
            return self._queues[device]

    def rendezvous(self, key: Hashable, what: Collective) -> GroupRendezvous:
        """Where the ranks of a group meet: the same for all devices of this worker."""
        with self._lock:
            if key not in self._rendezvous:
                self._rendezvous[key] = GroupRendezvous(what, self._nccl_id)
            return self._rendezvous[key]

    def _nccl_id(self, devices: tuple[str, ...]) -> tuple[int, ...]:
        """Under which GPUs meet in NCCL, the same for all collectives among them."""
        with self._lock:
            if devices not in self._nccl_ids:
                self._nccl_ids[devices] = tuple(nccl.library().get_unique_id())
            return self._nccl_ids[devices]

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
        if made.connect(what.count, unique, rank, go_on):
            return made
        with self._lock:
            self._communicators.pop(key, None)
        made.close()
        return None

    def is_current(self, key: Hashable, site: GroupRendezvous | None) -> bool:
        """Whether a site is still in use: none is after a step that failed."""
        return site is not None and self._rendezvous.get(key) is site

    def forget(self, key: Hashable) -> None:
        """Let go of a site: its program is gone or rests, on all workers."""
        with self._lock:
            self._rendezvous.pop(key, None)
            for token, (segment, users) in list(self._attached.items()):
                users.discard(key)
                if not users:
                    segment.close()
                    del self._attached[token]

    def handshake_channel(self, step: int, key: Sequence[Any], told: str) -> HandshakeChannel:
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

        return HandshakeChannel(self.worker, tell, hear, go_on, partial(self._attach, tuple(key)))

    def _attach(self, key: Hashable, token: str) -> SharedMemorySegment:
        with self._lock:
            if token not in self._attached:
                self._attached[token] = (SharedMemorySegment.attach(token), set())
            segment, users = self._attached[token]
            users.add(key)
            return segment

    def abort(self) -> None:
        """Forget all ways after a step that failed and was cancelled, once nobody is on them."""
        for device, lane in list(self._queues.items()):
            if not lane.abort():  # stuck in what cannot be given up: another thread from now on
                del self._queues[device]
        self._clear()

    def close(self) -> None:
        """End the threads."""
        for lane in list(self._queues.values()):
            lane.close()
        self._clear()

    def finish_handshakes(self, step: int) -> None:
        """Hear what came of the passages that were offered in a step, once all else of it is done.

        Raises:
            GraphflowError: the step was given up.
        """
        while self.offered_edges:
            self.offered_edges.pop().finish_handshake(step)

    def _clear(self) -> None:
        with self._lock:
            self.generation += 1
            self.offered_edges.clear()
            self._rendezvous.clear()
            self._nccl_ids.clear()
            for communicator in self._communicators.values():
                communicator.close()
            self._communicators.clear()
            for segment, _ in self._attached.values():
                segment.close()
            self._attached.clear()


class ProgramCollectives:
    """What one device does in the exchanges of one program.

    Attributes:
        arena: where the program's buffers lie, if other processes can reach them.
        segments: other memory of its that they can reach.
    """

    def __init__(self, owner: SessionCollectives, program: str, device: str) -> None:
        self.owner = owner
        self.program = program
        self.device = device
        self.arena: SharedMemorySegment | None = None
        self.segments: list[SharedMemorySegment] = []
        self.members: list[DeviceCollective] = []
        self._edges: list[ShmEdge] = []

    def edge_senders(
        self, target: str, peer: int, what: Mapping[int, Awaited], specs: Mapping[int, TensorSpec]
    ) -> dict[int, ShmEdgeSender]:
        """The way of edges to a device of another worker, for those that find room in it."""
        return self._open_edges(ShmEdgeSender, self.device, target, peer, what, specs)

    def edge_receivers(
        self, source: str, peer: int, what: Mapping[int, Awaited], specs: Mapping[int, TensorSpec]
    ) -> dict[int, ShmEdgeReceiver]:
        """The same at the other end."""
        return self._open_edges(ShmEdgeReceiver, source, self.device, peer, what, specs)

    def _open_edges(
        self,
        kind: type[EdgeEnd],
        source: str,
        target: str,
        peer: int,
        what: Mapping[int, Awaited],
        specs: Mapping[int, TensorSpec],
    ) -> dict[int, EdgeEnd]:
        specs = edges_that_fit(specs)
        if not specs:
            return {}
        counter_functions()
        passage = kind(self.owner, (self.program, f"from {source} to {target}"), peer, what, specs)
        self._edges.append(passage)
        return dict.fromkeys(specs, passage)

    def shared_memory(self, nbytes: int) -> Array | None:
        """Memory that other processes of this host can map; None where there is none."""
        segment = _try_create_segment(nbytes)
        if segment is None:
            return None
        self.segments.append(segment)
        return segment.memory

    def locate(self, array: Array) -> tuple[SharedMemorySegment, int] | None:
        """Where other processes of this host find an array, if they can."""
        return find_segment((*self.segments, *([] if self.arena is None else [self.arena])), array)

    def join(self, what: Collective, name: str) -> DeviceCollective:
        """The device's part in a group, the same for all its ranks."""
        for member in self.members:
            if member.what.group == what.group:
                return member
        counter_functions()
        member = DeviceCollective(self, what, name)
        self.members.append(member)
        self.members.sort(key=lambda each: each.what.group)
        return member

    def forget_agreements(self) -> None:
        """Let go of the ways that were agreed with others; they are agreed anew in the next step,
        if all others let go of them, too."""
        for member in self.members:
            member.forget_agreement()
        for passage in self._edges:
            passage.close()

    def close(self) -> None:
        """Let go of what the program had in common with others."""
        self.forget_agreements()
        for segment in self.segments:
            segment.close()
        self.arena = None


class DeviceCollective:
    """The part of one device in one group: `start` for each of its ranks, then `finish`.

    Attributes:
        at_once: whether this step's part is done by these alone, without the lane.
        direct: whether this step's arrays are a GPU's.
    """

    def __init__(self, part: ProgramCollectives, what: Collective, name: str) -> None:
        self.what = what
        self.program = part
        self.ranks = tuple(r for r, d in enumerate(what.devices) if d == part.device)
        self.key = (part.program, what.group)
        self.completes_inline = self.is_on_device = False
        self._owner = part.owner
        self._name = name
        self._gpu: Any = None
        self._nccl: NcclCollective | None = None
        self._is_small = is_small(what)
        self._rendezvous: GroupRendezvous | None = None
        self._transport: SlotTransport | MappedTransport | MessageExchange | None = None
        self._arrays: dict[int, tuple[Array | None, Array]] = {}
        self._staging: dict[int, tuple[Array, SharedMemorySegment | None]] = {}
        self._step = self._finished = -1

    @property
    def uses_mapped_tensors(self) -> bool:
        """Whether other processes are to find its tensors and results where they are."""
        return uses_mapped_tensors(self.what)

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
            self.is_on_device = False
        self._arrays[rank] = (self._stable_input(rank, x, fixed), y)
        if len(self._arrays) < len(self.ranks):
            return
        knows = self._owner.is_current(self.key, self._rendezvous)
        self.completes_inline = knows and isinstance(self._transport, SlotTransport)
        if self.completes_inline:
            assert isinstance(self._transport, SlotTransport)
            self._transport.publish(self._inputs)
        self._queue.notify_started(step, self, meanwhile)

    @property
    def _queue(self) -> DeviceCollectiveQueue:
        return self._owner.device_queue(self.program.device)

    def use_gpu(self, gpu: Any) -> None:
        """Let a GPU's backend take part for its rank, where all ranks can."""
        self._gpu = gpu

    @property
    def can_run_on_device(self) -> bool:
        """Whether the tensors are taken from and brought to the GPU itself: by NCCL, once the ranks
        have met."""
        return self._nccl is not None and self._owner.is_current(self.key, self._rendezvous)

    def start_on_device(self, step: int, x: Any, y: Any) -> None:
        """As `start`, with arrays of the GPU, for its only rank."""
        assert self._nccl is not None
        self._nccl.record_ready()
        self._step, self.completes_inline, self.is_on_device = step, False, True
        self._arrays = {self.ranks[0]: (x, y)}
        self._queue.notify_started(step, self, True)

    def _stable_input(self, rank: int, x: Array | None, fixed: bool) -> Array | None:
        """A tensor where the others find it in every step: a copy, if it is not there."""
        if self._is_small or x is None:
            return x
        alone = set(self.what.workers) == {self._owner.worker}
        if fixed and (alone or self.program.locate(x) is not None):
            return x
        if rank not in self._staging:
            segment = None if alone else _try_create_segment(max(1, x.nbytes))
            memory = np.empty(x.nbytes, np.uint8) if segment is None else segment.memory
            self._staging[rank] = memory[: x.nbytes].view(x.dtype).reshape(x.shape), segment
        copy, _ = self._staging[rank]
        np.copyto(copy, x)
        return copy

    def forget_agreement(self) -> None:
        """Let go of the way, and of copies that others find."""
        self._owner.forget(self.key)
        self._rendezvous = self._transport = self._nccl = None
        for _, segment in self._staging.values():
            if segment is not None:
                segment.close()
        self._staging.clear()

    @property
    def _inputs(self) -> dict[int, Array | None]:
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
        if self.completes_inline:
            assert isinstance(self._transport, SlotTransport)
            self._transport.collect(self._results, self._make_wait(step))
        else:
            self._queue.finish(step, self, lambda: self._check_cancelled(step))
        self._finished = step

    @property
    def program_order(self) -> Sequence[DeviceCollective]:
        """The device's parts in all groups of its program, in their order."""
        return self.program.members

    def is_started(self, step: int) -> bool:
        """Whether all of the device's ranks have their tensors."""
        return self._step == step and len(self._arrays) == len(self.ranks)

    def run(self, step: int, beside: bool) -> None:
        """All of it, on the thread of the lane, or on that of the program.

        Args:
            beside: whether the program goes on meanwhile, which has better use for the core than
                to look again and again whether others are there.
        """
        if self.is_on_device:
            assert self._nccl is not None
            ((x, y),) = self._arrays.values()
            self._nccl.run(x, y, lambda: self._check_cancelled(step))
            return
        if not self._owner.is_current(self.key, self._rendezvous):
            self._choose_transport(step)
        match self._transport:
            case MessageExchange():
                self._transport.run(step, self._inputs, self._results)
            case MappedTransport():
                self._transport.run(self._make_wait(step, 0 if beside else DEFAULT_SPINS))
            case SlotTransport():
                self._transport.publish(self._inputs)
                self._transport.collect(
                    self._results, self._make_wait(step, 0 if beside else DEFAULT_SPINS)
                )

    def _choose_transport(self, step: int) -> None:
        """Agree on a way with the others."""
        owner, what = self._owner, self.what
        site = owner.rendezvous(self.key, what)
        if not self._is_small:
            for rank, (x, y) in self._arrays.items():
                site.register(rank, self._rank_buffers(x, y))
        site.agree(owner.handshake_channel(step, self.key, self._description))
        self._rendezvous = site
        if site.memory is None:
            prefix = "/".join(map(str, self.key))
            post = MessagePort(owner.session, prefix, self._name, owner.outbox, owner.mail.take)
            self._transport = MessageExchange(what, self.ranks, post)
        elif self._is_small:
            self._transport = SlotTransport(what, self.ranks, site.memory)
        else:
            self._transport = MappedTransport(what, self.ranks, site.memory, site.xs, site.ys)
        self._nccl = None
        if site.nccl_id and self._gpu is not None:
            rank, gpu, line = (
                self.ranks[0],
                self._gpu,
                owner.handshake_channel(step, self.key, self._description),
            )
            group = owner.communicator(what, rank, gpu, site.nccl_id, line.check_cancelled)
            if site.have_all_connected(line, rank, group is not None) and group is not None:
                self._nccl = NcclCollective(what, rank, group)

    def _rank_buffers(self, x: Array | None, y: Array) -> RankBuffers:
        places = []
        for array in (y if x is None else x, y):
            found = self._locate(array)
            places.append(("", 0) if found is None else (found[0].token, found[1]))
        return RankBuffers(x, y, *places)

    def _locate(self, array: Array) -> tuple[SharedMemorySegment, int] | None:
        copies = [segment for _, segment in self._staging.values() if segment is not None]
        return find_segment(copies, array) or self.program.locate(array)

    def _check_cancelled(self, step: int) -> None:
        self._owner.mail.check_cancelled(step, Awaited(self._description))

    def _make_wait(
        self, step: int, spins: int = DEFAULT_SPINS
    ) -> Callable[[SharedCounters, int], None]:
        def wait(gates: SharedCounters, value: int) -> None:
            def is_there(rank: int, _: float) -> bool:
                return gates.wait_all(value, CANCEL_CHECK_SECONDS, spins) != rank

            while (late := gates.wait_all(value, CANCEL_CHECK_SECONDS, spins)) >= 0:
                self._owner.mail.wait_until(step, self._awaited_rank(late), partial(is_there, late))

        return wait

    @property
    def _description(self) -> str:
        return f"{self.what.kind} {self._name}"

    def _awaited_rank(self, rank: int) -> Awaited:
        told = f"{self._description}: the part of rank {rank} on {self.what.devices[rank]}"
        return Awaited(told, self.what.workers[rank])


def _try_create_segment(nbytes: int) -> SharedMemorySegment | None:
    try:
        return SharedMemorySegment.create(nbytes)
    except TransportError:
        return None
