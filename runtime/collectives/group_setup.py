"""Sites: where the ranks of a group meet, and how their workers agree on the way.

    root    makes what all have in common, and tells the others where (token)
    others  say whether they reach it, and where their tensors lie (joined)
    root    says whether all do, and where everything lies (table)
    others  say whether they reach that, too (mapped); root says whether all do
    others  say, among GPUs, whether they are in NCCL's group (met); root says whether all are

Where a worker cannot share memory with all others, or nobody can, the way is parcels for all.
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

_PAUSE = 0.001  # seconds between two looks at whether another device of this worker is there


@dataclass(frozen=True)
class RankBuffers:
    """Where a rank's tensor and result are: in a segment, if other processes can reach them.

    Attributes:
        x_at, y_at: the token of the segment ("": memory of this process alone), and where in it
            they begin, in bytes.
    """

    x: Array | None
    y: Array
    x_at: tuple[str, int] = ("", 0)
    y_at: tuple[str, int] = ("", 0)


def find_segment(
    segments: Iterable[SharedMemorySegment], array: Array
) -> tuple[SharedMemorySegment, int] | None:
    """The segment that an array lies in, and where."""
    at = address(array)
    for segment in segments:
        start = at - address(segment.memory)
        if start >= 0 and start + array.nbytes <= segment.memory.nbytes:
            return segment, start
    return None


@dataclass(frozen=True)
class HandshakeChannel:
    """Words between the workers of a group.

    Args:
        tell: (what, worker, data).
        hear: (what, worker) -> data; raises if the step is given up.
        go_on: returns if the step goes on, else raises.
        attach: token -> a segment of another worker.
    """

    worker: int
    send: Callable[[str, int, bytes], None]
    receive: Callable[[str, int], bytes]
    check_cancelled: Callable[[], None]
    attach: Callable[[str], SharedMemorySegment]


class GroupRendezvous:
    """Where the ranks of a group meet, from this worker's side.

    Args:
        named: devices -> the name under which they meet in NCCL, if this worker says it.

    Attributes:
        memory: what they have in common; None: parcels are the way.
        xs, ys: tensors and results of all ranks, of a large collective.
        unique: the name under which GPUs meet in NCCL, if all ranks are GPUs and can.
        ready: whether the way is known.
    """

    def __init__(
        self, what: Collective, named: Callable[[tuple[str, ...]], tuple[int, ...]]
    ) -> None:
        self.is_ready = False
        self.memory: Array | None = None
        self.xs: list[Array] = []
        self.ys: list[Array] = []
        self.nccl_id: tuple[int, ...] = ()
        self._what = what
        self._new_nccl_id = named
        self._is_small = is_small(what)
        self._buffers: dict[int, RankBuffers] = {}
        self._segments: list[SharedMemorySegment] = []
        self._connected: dict[int, bool] = {}
        self._all_connected: bool | None = None
        self._voting = threading.Lock()
        self._lock = threading.Lock()

    def register(self, rank: int, place: RankBuffers) -> None:
        """Where a rank of this worker has its tensor and its result, in every step."""
        self._buffers[rank] = place

    def agree(self, line: HandshakeChannel) -> None:
        """Find the way with the other workers; the first device of this one does it for all.

        Raises:
            GraphflowError: the step was given up meanwhile.
        """
        with self._lock:
            if self.is_ready:
                return
            what = self._what
            mine = [rank for rank, worker in enumerate(what.workers) if worker == line.worker]
            while not self._is_small and len(self._buffers) < len(mine):
                line.check_cancelled()
                time.sleep(_PAUSE)
            workers = sorted(set(what.workers))
            if len(workers) == 1:
                self.memory = private_memory(shared_bytes(what))
                self.nccl_id = self._nccl_id(nccl.local_gpus(what, line.worker))
                self._map([(rank, place.x, place.y) for rank, place in self._buffers.items()])
            elif line.worker == workers[0]:
                self._agree_as_root(line, workers[1:])
            else:
                self._agree_with_root(line, workers[0])
            self.is_ready = True

    def have_all_connected(self, line: HandshakeChannel, rank: int, met: bool) -> bool:
        """Whether all ranks have met in NCCL, once each has said whether it has.

        Raises:
            GraphflowError: the step was given up meanwhile.
        """
        self._connected[rank] = met
        with self._voting:  # who holds it waits for those who are yet to agree
            if self._all_connected is None:
                while len(self._connected) < self._what.workers.count(line.worker):
                    line.check_cancelled()
                    time.sleep(_PAUSE)
                self._all_connected = self._is_unanimous(line, "met", all(self._connected.values()))
            return self._all_connected

    def _is_unanimous(self, line: HandshakeChannel, what: str, ok: bool) -> bool:
        """Whether all workers say yes: each tells the root, which tells them what came of it."""
        root, *others = sorted(set(self._what.workers))
        if line.worker != root:
            line.send(f"{what}/{line.worker}", root, _encode({"ok": ok}))
            return _decode(line.receive(f"all {what}", root)).get("ok") is True and ok
        heard = [_decode(line.receive(f"{what}/{other}", other)) for other in others]
        ok = ok and all(each.get("ok") is True for each in heard)
        for other in others:
            line.send(f"all {what}", other, _encode({"ok": ok}))
        return ok

    def _agree_as_root(self, line: HandshakeChannel, others: Sequence[int]) -> None:
        try:
            segment: SharedMemorySegment | None = SharedMemorySegment.create(
                shared_bytes(self._what)
            )
        except TransportError:
            segment = None
        for other in others:
            line.send("token", other, segment.token.encode() if segment is not None else b"")
        answers = [_decode(line.receive(f"joined/{other}", other)) for other in others]
        ok = (
            segment is not None and self._is_reachable and all(a.get("ok") is True for a in answers)
        )
        table = [*self._table, *(row for a in answers for row in a.get("places", ()))]
        mine = nccl.local_gpus(self._what, line.worker)
        self.nccl_id = self._nccl_id(mine, *(a.get("gpus") for a in answers))
        for other in others:
            told = {"ok": ok, "places": table, "nccl": self.nccl_id}
            line.send("table", other, _encode(told))
        if ok and not self._is_small:
            ok = self._is_unanimous(line, "mapped", self._can_map_all(line, table))
        if ok and segment is not None:
            self._segments.append(segment)
            self.memory = segment.memory

    def _agree_with_root(self, line: HandshakeChannel, root: int) -> None:
        segment = None
        token = line.receive("token", root).decode("ascii", "replace")
        with contextlib.suppress(TransportError):
            segment = line.attach(token)
        ok = segment is not None and segment.memory.nbytes == shared_bytes(self._what)
        answer = {
            "ok": ok and self._is_reachable,
            "places": self._table,
            "gpus": nccl.local_gpus(self._what, line.worker),
        }
        line.send(f"joined/{line.worker}", root, _encode(answer))
        table = _decode(line.receive("table", root))
        unique = table.get("nccl")
        if isinstance(unique, list) and all(type(each) is int for each in unique):
            self.nccl_id = tuple(unique)
        ok = ok and table.get("ok") is True
        if ok and not self._is_small:
            ok = self._is_unanimous(
                line, "mapped", self._can_map_all(line, table.get("places", ()))
            )
        if ok and segment is not None:
            self.memory = segment.memory

    def _nccl_id(self, *told: Any) -> tuple[int, ...]:
        """Of the group in NCCL, where that is the way."""
        return (
            self._new_nccl_id(self._what.devices)
            if nccl.can_use_nccl(told, self._what.count)
            else ()
        )

    @property
    def _is_reachable(self) -> bool:
        return all(place.x_at[0] and place.y_at[0] for place in self._buffers.values())

    @property
    def _table(self) -> list[list[Any]]:
        return [[rank, *p.x_at, *p.y_at] for rank, p in self._buffers.items()]

    def _can_map_all(self, line: HandshakeChannel, table: Sequence[Any]) -> bool:
        """Map the tensors and results of all ranks; whether they are there."""
        what, found = self._what, []
        try:
            for rank, x_token, x_at, y_token, y_at in table:
                if rank in self._buffers:
                    found.append((rank, self._buffers[rank].x, self._buffers[rank].y))
                    continue
                has = what.kind != "broadcast" or rank == 0
                x = _view(line.attach(x_token).memory, x_at, what.specs[rank]) if has else None
                y = _view(line.attach(y_token).memory, y_at, what.result_spec(rank))
                found.append((rank, x, y))
        except (TransportError, ValueError, TypeError, IndexError):
            return False  # words from another worker: what does not fit is no way
        if sorted(rank for rank, *_ in found) != list(range(what.count)):
            return False
        self._map(found)
        return True

    def _map(self, found: Sequence[tuple[int, Array | None, Array]]) -> None:
        for _, x, y in sorted(found, key=lambda each: each[0]):
            self.xs.append(np.empty(0, self._what.dtype) if x is None else x)
            self.ys.append(y)


def _view(memory: Array, start: Any, spec: TensorSpec) -> Array:
    size = nbytes(spec)
    if type(start) is not int or start % ALIGNMENT or not 0 <= start <= memory.nbytes - size:
        raise TransportError(f"{start!r} is no place for {spec} in {memory.nbytes} bytes")
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
