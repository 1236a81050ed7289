"""State that a session's collectives and shared-memory edges on one worker share.

Workers agree on a transport when a group first runs (`group_setup.py`), and on shared memory when
an edge is first used (`shared_memory_edges.py`). A failed step discards all agreements on every
worker, so that nothing of it is left: at once on workers that ran it, and with the next step on the
others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphflow.runtime.collectives import nccl
from graphflow.runtime.collectives.device_queue import DeviceCollectiveQueue
from graphflow.runtime.collectives.group_setup import (
    GroupRendezvous,
    HandshakeChannel,
)
from graphflow.runtime.collectives.nccl import Communicator
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.shared_memory_edges import ShmEdgeSender
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import EXCHANGE_PREFIX, TensorParcel


class SessionCollectives:
    """Queues, agreements, mapped memory and NCCL communicators of a session on one worker.

    Args:
        mail: receives messages, and knows whether a step is cancelled.
        outbox: sends a message to another worker.

    Attributes:
        generation: how often all agreements were discarded.
        offered_edges: senders that still wait for the receiver's answer.
        open_edges: shared-memory edges, and segments of rings, that hold memory.
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
        ] = {}  # and the groups that use it
        self._queues: dict[str, DeviceCollectiveQueue] = {}
        self._nccl_ids: dict[
            tuple[str, ...], tuple[int, ...]
        ] = {}  # GPUs of a group -> its NCCL id
        self._communicators: dict[tuple[tuple[int, ...], int], Communicator] = {}
        self.generation = 0
        self.offered_edges: list[ShmEdgeSender] = []
        self.open_edges: set[Any] = set()

    def device_queue(self, device: str) -> DeviceCollectiveQueue:
        """Return a device's queue of collectives."""
        with self._lock:
            if device not in self._queues:
                self._queues[device] = DeviceCollectiveQueue(device)
            return self._queues[device]

    def rendezvous(self, key: Hashable, collective: Collective) -> GroupRendezvous:
        """Return the agreement of a group, which all devices of this worker share."""
        with self._lock:
            if key not in self._rendezvous:
                self._rendezvous[key] = GroupRendezvous(collective, self._nccl_id)
            return self._rendezvous[key]

    def _nccl_id(self, devices: tuple[str, ...]) -> tuple[int, ...]:
        """Return the NCCL id of a group of GPUs; all collectives among them share it."""
        with self._lock:
            if devices not in self._nccl_ids:
                self._nccl_ids[devices] = tuple(nccl.library().get_unique_id())
            return self._nccl_ids[devices]

    def communicator(
        self, collective: Collective, rank: int, gpu: Any, unique: tuple[int, ...],
        go_on: Callable[[], None],
    ) -> Communicator | None:  # fmt: skip
        """Return a rank's NCCL communicator once all ranks are connected; None if that fails.

        Args:
            gpu: the rank's `GpuBackend`.
            unique: the group's NCCL id.
            go_on: raises if the step was cancelled.

        Raises:
            Exception: raised by `go_on`.
        """
        key = unique, rank
        if key in self._communicators:
            return self._communicators[key]
        made = self._communicators[key] = Communicator(gpu)
        if made.connect(collective.count, unique, rank, go_on):
            return made
        with self._lock:
            self._communicators.pop(key, None)
        made.close()
        return None

    def is_current(self, key: Hashable, site: GroupRendezvous | None) -> bool:
        """Return True if an agreement is still valid; a failed step discards it."""
        return site is not None and self._rendezvous.get(key) is site

    def forget(self, key: Hashable) -> None:
        """Discard an agreement, as all workers of the group do, and memory that only it used."""
        with self._lock:
            self._rendezvous.pop(key, None)
            for token, (segment, users) in list(self._attached.items()):
                users.discard(key)
                if not users:
                    segment.close()
                    del self._attached[token]

    def handshake_channel(self, step: int, key: Sequence[Any], purpose: str) -> HandshakeChannel:
        """Return the channel on which the workers of a group, or the ends of an edge, agree.

        Args:
            key: identifies the group or the edge in the session.
            purpose: names the collective or the edge in errors.
        """
        prefix = f"{EXCHANGE_PREFIX}{'/'.join(map(str, key))}"

        def tell(what: str, worker: int, data: bytes) -> None:
            array = np.frombuffer(data, np.uint8)
            name = f"{prefix}/{what}"
            self.outbox(TensorParcel(self.session, step, name, worker, array, owned=True))

        def hear(what: str, worker: int) -> bytes:
            about = Awaited(f"the answer of worker {worker} about {purpose}", worker)
            array: Array = self.mail.take(step, f"{prefix}/{what}", about)
            return array.tobytes()

        def go_on() -> None:
            self.mail.check_cancelled(step, Awaited(purpose))

        return HandshakeChannel(self.worker, tell, hear, go_on, partial(self._attach, tuple(key)))

    def _attach(self, key: Hashable, token: str) -> SharedMemorySegment:
        with self._lock:
            if token not in self._attached:
                self._attached[token] = (SharedMemorySegment.attach(token), set())
            segment, users = self._attached[token]
            users.add(key)
            return segment

    def abort(self) -> None:
        """Discard all agreements after a failed step, once no collective runs any more."""
        for device, queue in list(self._queues.items()):
            if not queue.abort():  # stuck in a call that cannot be cancelled: use a new thread
                del self._queues[device]
        self._clear()

    def close(self) -> None:
        """End the threads, and release all memory and communicators."""
        for queue in list(self._queues.values()):
            queue.close()
        self._clear()

    def finish_handshakes(self, step: int) -> None:
        """Finish the shared-memory handshakes offered in a step, after all other work of the step.

        Raises:
            GraphflowError: the step was cancelled.
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
