"""Group set-up: the workers of a collective agree on a transport.

    root    makes the shared memory and sends its token (token)
    others  answer whether they can attach it, and where their tensors are (joined)
    root    sends whether all can, and where all tensors are (table)
    others  answer whether they can map these (mapped); the root sends whether all can
    others  answer, on GPUs, whether NCCL connected (met); the root sends whether all are connected

If any worker cannot share memory with all others, all use messages. The root is the worker with
the lowest number.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import TransportError
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address
from graphflow.runtime.collectives import nccl
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.shared_memory_transport import (
    is_small,
    private_memory,
    shared_bytes,
)
from graphflow.runtime.transport.shared_memory import SharedMemorySegment

_PAUSE = 0.001  # seconds between checks for the other devices of this worker


@dataclass(frozen=True)
class RankBuffers:
    """A rank's tensor and result, and where other processes find them.

    Attributes:
        x: the tensor; None if the rank contributes none.
        y: the result.
        x_at, y_at: token of the shared memory that holds them, and the offset in bytes. The token
            is "" for memory of this process alone.
    """

    x: Array | None
    y: Array
    x_at: tuple[str, int] = ("", 0)
    y_at: tuple[str, int] = ("", 0)


def find_segment(
    segments: Iterable[SharedMemorySegment], array: Array
) -> tuple[SharedMemorySegment, int] | None:
    """Return the segment that contains an array, and the array's offset; None if none does."""
    at = address(array)
    for segment in segments:
        start = at - address(segment.memory)
        if start >= 0 and start + array.nbytes <= segment.memory.nbytes:
            return segment, start
    return None


@dataclass(frozen=True)
class HandshakeChannel:
    """Control messages between the workers of a group.

    Args:
        worker: this worker.
        send: (topic, worker, data).
        receive: (topic, worker) -> data; raises if the step is cancelled.
        check_cancelled: raises if the step is cancelled.
        attach: token -> shared memory of another worker.
    """

    worker: int
    send: Callable[[str, int, bytes], None]
    receive: Callable[[str, int], bytes]
    check_cancelled: Callable[[], None]
    attach: Callable[[str], SharedMemorySegment]


class GroupRendezvous:
    """This worker's side of a group's agreement on a transport.

    Args:
        named: devices -> the id under which they connect in NCCL; called by the root only.

    Attributes:
        memory: the group's shared memory; None if the group uses messages.
        xs, ys: tensors and results of all ranks, for a large collective in shared memory.
        nccl_id: the id under which the GPUs connect in NCCL; empty if they cannot.
        is_ready: whether the transport is agreed.
    """

    def __init__(
        self, collective: Collective, named: Callable[[tuple[str, ...]], tuple[int, ...]]
    ) -> None:
        self.is_ready = False
        self.memory: Array | None = None
        self.xs: list[Array] = []
        self.ys: list[Array] = []
        self.nccl_id: tuple[int, ...] = ()
        self._collective = collective
        self._new_nccl_id = named
        self._is_small = is_small(collective)
        self._buffers: dict[int, RankBuffers] = {}
        self._segments: list[SharedMemorySegment] = []
        self._connected: dict[int, bool] = {}
        self._all_connected: bool | None = None
        self._voting = threading.Lock()
        self._lock = threading.Lock()

    def register(self, rank: int, place: RankBuffers) -> None:
        """Set where a rank of this worker has its tensor and its result in every step."""
        self._buffers[rank] = place

    def agree(self, channel: HandshakeChannel) -> None:
        """Agree with the other workers; this worker's first device does it for all of its devices.

        Raises:
            GraphflowError: the step was cancelled meanwhile.
        """
        with self._lock:
            if self.is_ready:
                return
            collective = self._collective
            mine = [
                rank for rank, worker in enumerate(collective.workers) if worker == channel.worker
            ]
            while not self._is_small and len(self._buffers) < len(mine):
                channel.check_cancelled()
                time.sleep(_PAUSE)
            workers = sorted(set(collective.workers))
            if len(workers) == 1:
                self.memory = private_memory(shared_bytes(collective))
                self.nccl_id = self._make_nccl_id(nccl.local_gpus(collective, channel.worker))
                self._map([(rank, place.x, place.y) for rank, place in self._buffers.items()])
            elif channel.worker == workers[0]:
                self._agree_as_root(channel, workers[1:])
            else:
                self._agree_with_root(channel, workers[0])
            self.is_ready = True

    def have_all_connected(self, channel: HandshakeChannel, rank: int, met: bool) -> bool:
        """Return True if all ranks have connected in NCCL; waits until each has answered.

        Args:
            met: whether this rank has connected.

        Raises:
            GraphflowError: the step was cancelled meanwhile.
        """
        self._connected[rank] = met
        with self._voting:  # one device waits for the other workers, on behalf of all devices
            if self._all_connected is None:
                while len(self._connected) < self._collective.workers.count(channel.worker):
                    channel.check_cancelled()
                    time.sleep(_PAUSE)
                self._all_connected = self._is_unanimous(
                    channel, "met", all(self._connected.values())
                )
            return self._all_connected

    def _is_unanimous(self, channel: HandshakeChannel, what: str, ok: bool) -> bool:
        """Return True if all workers say `ok`: each tells the root, which tells all the outcome."""
        root, *others = sorted(set(self._collective.workers))
        if channel.worker != root:
            channel.send(f"{what}/{channel.worker}", root, _encode({"ok": ok}))
            return _decode(channel.receive(f"all {what}", root)).get("ok") is True and ok
        heard = [_decode(channel.receive(f"{what}/{other}", other)) for other in others]
        ok = ok and all(each.get("ok") is True for each in heard)
        for other in others:
            channel.send(f"all {what}", other, _encode({"ok": ok}))
        return ok

    def _agree_as_root(self, channel: HandshakeChannel, others: Sequence[int]) -> None:
        try:
            segment: SharedMemorySegment | None = SharedMemorySegment.create(
                shared_bytes(self._collective)
            )
        except TransportError:
            segment = None
        for other in others:
            channel.send("token", other, segment.token.encode() if segment is not None else b"")
        answers = [_decode(channel.receive(f"joined/{other}", other)) for other in others]
        ok = (
            segment is not None and self._is_reachable and all(a.get("ok") is True for a in answers)
        )
        table = [*self._table, *(row for a in answers for row in a.get("places", ()))]
        mine = nccl.local_gpus(self._collective, channel.worker)
        self.nccl_id = self._make_nccl_id(mine, *(a.get("gpus") for a in answers))
        for other in others:
            message = {"ok": ok, "places": table, "nccl": self.nccl_id}
            channel.send("table", other, _encode(message))
        if ok and not self._is_small:
            ok = self._is_unanimous(channel, "mapped", self._can_map_all(channel, table))
        if ok and segment is not None:
            self._segments.append(segment)
            self.memory = segment.memory

    def _agree_with_root(self, channel: HandshakeChannel, root: int) -> None:
        segment = None
        token = channel.receive("token", root).decode("ascii", "replace")
        with contextlib.suppress(TransportError):
            segment = channel.attach(token)
        ok = segment is not None and segment.memory.nbytes == shared_bytes(self._collective)
        answer = {
            "ok": ok and self._is_reachable,
            "places": self._table,
            "gpus": nccl.local_gpus(self._collective, channel.worker),
        }
        channel.send(f"joined/{channel.worker}", root, _encode(answer))
        table = _decode(channel.receive("table", root))
        unique = table.get("nccl")
        if isinstance(unique, list) and all(type(each) is int for each in unique):
            self.nccl_id = tuple(unique)
        ok = ok and table.get("ok") is True
        if ok and not self._is_small:
            ok = self._is_unanimous(
                channel, "mapped", self._can_map_all(channel, table.get("places", ()))
            )
        if ok and segment is not None:
            self.memory = segment.memory

    def _make_nccl_id(self, *gpus: Any) -> tuple[int, ...]:
        """Return the group's NCCL id; empty if its GPUs cannot connect.

        Args:
            gpus: each worker's GPUs, as `nccl.local_gpus` describes them.
        """
        return (
            self._new_nccl_id(self._collective.devices)
            if nccl.can_use_nccl(gpus, self._collective.count)
            else ()
        )

    @property
    def _is_reachable(self) -> bool:
        return all(place.x_at[0] and place.y_at[0] for place in self._buffers.values())

    @property
    def _table(self) -> list[list[Any]]:
        return [[rank, *p.x_at, *p.y_at] for rank, p in self._buffers.items()]

    def _can_map_all(self, channel: HandshakeChannel, table: Sequence[Any]) -> bool:
        """Map the tensors and results of all ranks; return True if that succeeds."""
        collective, found = self._collective, []
        try:
            for rank, x_token, x_at, y_token, y_at in table:
                if rank in self._buffers:
                    found.append((rank, self._buffers[rank].x, self._buffers[rank].y))
                    continue
                has = collective.kind != "broadcast" or rank == 0
                x = (
                    _view(channel.attach(x_token).memory, x_at, collective.specs[rank])
                    if has
                    else None
                )
                y = _view(channel.attach(y_token).memory, y_at, collective.result_spec(rank))
                found.append((rank, x, y))
        except (TransportError, ValueError, TypeError, IndexError):
            return False  # the table comes from another worker, and may be wrong in any way
        if sorted(rank for rank, *_ in found) != list(range(collective.count)):
            return False
        self._map(found)
        return True

    def _map(self, found: Sequence[tuple[int, Array | None, Array]]) -> None:
        for _, x, y in sorted(found, key=lambda each: each[0]):
            self.xs.append(np.empty(0, self._collective.dtype) if x is None else x)
            self.ys.append(y)


def _view(memory: Array, start: Any, spec: TensorSpec) -> Array:
    size = nbytes(spec)
    if type(start) is not int or start % ALIGNMENT or not 0 <= start <= memory.nbytes - size:
        raise TransportError(
            f"offset {start!r} of {spec} must be a multiple of {ALIGNMENT} within "
            f"{memory.nbytes} bytes"
        )
    view: Array = memory[start : start + size].view(spec.dtype).reshape(spec.shape)
    return view


def _encode(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode()


def _decode(data: bytes) -> dict[str, Any]:
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}
