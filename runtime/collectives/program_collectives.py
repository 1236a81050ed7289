"""A device's collectives and shared-memory edges in one program.

A program starts a collective as soon as it has the tensor, and finishes it where the result is
read. If the tensors are small, `start` publishes them, and `finish` combines them. Otherwise the
device's queue runs the collective meanwhile (`device_queue.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from graphflow.errors import TransportError
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.collectives.device_queue import DeviceCollectiveQueue
from graphflow.runtime.collectives.group_setup import (
    GroupRendezvous,
    RankBuffers,
    find_segment,
)
from graphflow.runtime.collectives.message_transport import MessageExchange, MessagePort
from graphflow.runtime.collectives.nccl import NcclCollective
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.ring_ends import LoopEdges
from graphflow.runtime.collectives.session_collectives import SessionCollectives
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
)
from graphflow.runtime.collectives.shared_memory_rings import LoopRings
from graphflow.runtime.collectives.shared_memory_transport import (
    MappedTransport,
    SlotTransport,
    is_small,
    uses_mapped_tensors,
)
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited
from graphflow.runtime.wire.step_values import EXCHANGE_PREFIX

EdgeEnd = TypeVar("EdgeEnd", ShmEdgeReceiver, ShmEdgeSender)


class ProgramCollectives:
    """A device's collectives and shared-memory edges in one program, for given sizes.

    Args:
        program: identifies the program and its sizes in the session; equal on all workers.

    Attributes:
        arena: shared memory of the program's buffers, if other processes can map it.
        segments: other shared memory of the program.
        members: the collectives so far, in program order.
        rings: the rings of the edges in loops.
    """

    def __init__(self, owner: SessionCollectives, program: str, device: str) -> None:
        self.owner = owner
        self.program = program
        self.device = device
        self.arena: SharedMemorySegment | None = None
        self.segments: list[SharedMemorySegment] = []
        self.members: list[DeviceCollective] = []
        self._edges: list[ShmEdge] = []
        self.rings: LoopRings | None = None

    def loop_rings(
        self,
        outgoing: Mapping[str, LoopEdges],
        incoming: Mapping[str, LoopEdges],
        copied: frozenset[int],
    ) -> LoopRings:
        """Return the rings of the program's edges in loops, see `LoopRings`."""
        self.rings = LoopRings(self.owner, self.program, self.device, outgoing, incoming, copied)
        return self.rings

    def edge_senders(
        self, target: str, peer: int, what: Mapping[int, Awaited], specs: Mapping[int, TensorSpec]
    ) -> dict[int, ShmEdgeSender]:
        """Return the sender of each edge to a device of another worker, through shared memory.

        Args:
            peer: the other worker.
            what: for each edge, how errors name a wait.
            specs: spec of each edge, as `edges_that_fit` selects them.
        """
        return self._open_edges(ShmEdgeSender, self.device, target, peer, what, specs)

    def edge_receivers(
        self, source: str, peer: int, what: Mapping[int, Awaited], specs: Mapping[int, TensorSpec]
    ) -> dict[int, ShmEdgeReceiver]:
        """Return the receiver of each edge from a device; see `edge_senders`."""
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
        if not specs:
            return {}
        counter_functions()
        edge_end = kind(self.owner, (self.program, f"from {source} to {target}"), peer, what, specs)
        self._edges.append(edge_end)
        return dict.fromkeys(specs, edge_end)

    def shared_memory(self, nbytes: int) -> Array | None:
        """Return memory that other processes of this host can map; None if there is none."""
        segment = _try_create_segment(nbytes)
        if segment is None:
            return None
        self.segments.append(segment)
        return segment.memory

    def locate(self, array: Array) -> tuple[SharedMemorySegment, int] | None:
        """Return the shared memory that contains an array, and the array's offset; else None."""
        return find_segment((*self.segments, *([] if self.arena is None else [self.arena])), array)

    def join(self, collective: Collective, name: str) -> DeviceCollective:
        """Return the device's part in a collective; all ranks of the device share it."""
        for member in self.members:
            if member.collective.group == collective.group:
                return member
        counter_functions()
        member = DeviceCollective(self, collective, name)
        self.members.append(member)
        self.members.sort(key=lambda each: each.collective.group)
        return member

    def forget_agreements(self) -> None:
        """Discard all agreements with other workers, as these do at the same time.

        The program's next step agrees anew.
        """
        for member in self.members:
            member.forget_agreement()
        for edge_end in self._edges:
            edge_end.close()
        if self.rings is not None:
            self.rings.close()

    def close(self) -> None:
        """Release all shared memory. The program does not run again."""
        self.forget_agreements()
        for segment in self.segments:
            segment.close()
        self.arena = None


class DeviceCollective:
    """A device's part in one collective: `start` for each of its ranks, then `finish`.

    Attributes:
        ranks: the device's ranks.
        key: identifies the collective in the session.
        completes_inline: whether `start` and `finish` do this step's work, without the queue.
        is_on_device: whether this step's arrays are on the GPU.
    """

    def __init__(self, part: ProgramCollectives, collective: Collective, name: str) -> None:
        self.collective = collective
        self.program = part
        self.ranks = tuple(r for r, d in enumerate(collective.devices) if d == part.device)
        self.key = (part.program, collective.group)
        self.completes_inline = self.is_on_device = False
        self._owner = part.owner
        self._name = name
        self._gpu: Any = None
        self._nccl: NcclCollective | None = None
        self._is_small = is_small(collective)
        self._traffic = collective.traffic(self.ranks)
        self._rendezvous: GroupRendezvous | None = None
        self._transport: SlotTransport | MappedTransport | MessageExchange | None = None
        self._arrays: dict[int, tuple[Array | None, Array]] = {}
        self._staging: dict[int, tuple[Array, SharedMemorySegment | None]] = {}
        self._step = self._finished = -1

    @property
    def uses_mapped_tensors(self) -> bool:
        """Whether other processes map its tensors and results."""
        return uses_mapped_tensors(self.collective)

    def start(
        self, step: int, rank: int, x: Array | None, y: Array, fixed: bool, meanwhile: bool
    ) -> None:
        """Contribute a rank's tensor `x`; `y` holds the result once `finish` returns.

        Args:
            fixed: whether `x` has the same address in every step, as `y` always has.
            meanwhile: whether the program computes something else before `finish`.
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
        """Use a GPU's backend for its rank, if all ranks can use NCCL."""
        self._gpu = gpu

    @property
    def can_run_on_device(self) -> bool:
        """Whether tensors stay on the GPU: NCCL is connected, and the agreement is valid."""
        return self._nccl is not None and self._owner.is_current(self.key, self._rendezvous)

    def start_on_device(self, step: int, x: Any, y: Any) -> None:
        """As `start`, for arrays of the GPU, which has only one rank."""
        assert self._nccl is not None
        self._nccl.record_ready()
        self._step, self.completes_inline, self.is_on_device = step, False, True
        self._arrays = {self.ranks[0]: (x, y)}
        self._queue.notify_started(step, self, True)

    def _stable_input(self, rank: int, x: Array | None, fixed: bool) -> Array | None:
        """Return a tensor at an address that the other ranks can use in every step.

        It is copied to shared memory unless its own memory is shared and does not move.
        """
        if self._is_small or x is None:
            return x
        alone = set(self.collective.workers) == {self._owner.worker}
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
        """Discard the agreement, and the shared copies of tensors."""
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
        """Wait for the results of this device's ranks.

        Raises:
            GraphflowError: the step was cancelled.
        """
        if step == self._finished:  # by another rank of this device
            return
        if self.completes_inline:
            assert isinstance(self._transport, SlotTransport)
            self._transport.collect(self._results, self._make_wait(step))
        else:
            self._queue.finish(step, self, lambda: self._check_cancelled(step))
        self._finished = step
        observe = self._owner.mail.on_transfer
        if observe is not None and not self._has_sent_messages:
            for how, worker, nbytes in self._traffic:
                observe(how, worker, EXCHANGE_PREFIX, nbytes)

    @property
    def _has_sent_messages(self) -> bool:
        """Whether this step's tensors went by messages, which count when they are sent."""
        return isinstance(self._transport, MessageExchange) and not self.is_on_device

    @property
    def program_order(self) -> Sequence[DeviceCollective]:
        """The device's collectives of this program, in program order."""
        return self.program.members

    def is_started(self, step: int) -> bool:
        """Return True if all of the device's ranks have their tensors."""
        return self._step == step and len(self._arrays) == len(self.ranks)

    def run(self, step: int, beside: bool) -> None:
        """Run the collective, on the queue's thread or on that of the program.

        Args:
            beside: whether the program computes meanwhile. Waits then do not spin, since the
                program has better use for the core.
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
        """Agree on a transport with the other workers."""
        owner, collective = self._owner, self.collective
        site = owner.rendezvous(self.key, collective)
        if not self._is_small:
            for rank, (x, y) in self._arrays.items():
                site.register(rank, self._rank_buffers(x, y))
        site.agree(owner.handshake_channel(step, self.key, self._description))
        self._rendezvous = site
        if site.memory is None:
            prefix = "/".join(map(str, self.key))
            post = MessagePort(owner.session, prefix, self._name, owner.outbox, owner.mail.take)
            self._transport = MessageExchange(collective, self.ranks, post)
        elif self._is_small:
            self._transport = SlotTransport(collective, self.ranks, site.memory)
        else:
            self._transport = MappedTransport(collective, self.ranks, site.memory, site.xs, site.ys)
        self._nccl = None
        if site.nccl_id and self._gpu is not None:
            rank, gpu, channel = (
                self.ranks[0],
                self._gpu,
                owner.handshake_channel(step, self.key, self._description),
            )
            group = owner.communicator(collective, rank, gpu, site.nccl_id, channel.check_cancelled)
            if site.have_all_connected(channel, rank, group is not None) and group is not None:
                self._nccl = NcclCollective(collective, rank, group)

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
        def wait(counters: SharedCounters, value: int) -> None:
            def is_there(rank: int, _: float) -> bool:
                return counters.wait_all(value, CANCEL_CHECK_SECONDS, spins) != rank

            while (late := counters.wait_all(value, CANCEL_CHECK_SECONDS, spins)) >= 0:
                self._owner.mail.wait_until(step, self._awaited_rank(late), partial(is_there, late))

        return wait

    @property
    def _description(self) -> str:
        return f"{self.collective.kind} {self._name}"

    def _awaited_rank(self, rank: int) -> Awaited:
        part = f"{self._description}: the part of rank {rank} on {self.collective.devices[rank]}"
        return Awaited(part, self.collective.workers[rank])


def _try_create_segment(nbytes: int) -> SharedMemorySegment | None:
    try:
        return SharedMemorySegment.create(nbytes)
    except TransportError:
        return None
