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
from graphflow.runtime.collectives.shared_memory_transport import ground, is_small, private
from graphflow.runtime.transport.shared_memory import SharedMemorySegment

_PAUSE = 0.001  # seconds between two looks at whether another device of this worker is there


@dataclass(frozen=True)
class Place:
    """Where a rank's tensor and result are: in a segment, if other processes can reach them.

    Attributes:
        x_at, y_at: the token of the segment ("": memory of this process alone), and where in it
            they begin, in bytes.
    """

    x: Array | None
    y: Array
    x_at: tuple[str, int] = ("", 0)
    y_at: tuple[str, int] = ("", 0)


def within(
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
class Line:
    """Words between the workers of a group.

    Args:
        tell: (what, worker, data).
        hear: (what, worker) -> data; raises if the step is given up.
        go_on: returns if the step goes on, else raises.
        attach: token -> a segment of another worker.
    """

    worker: int
    tell: Callable[[str, int, bytes], None]
    hear: Callable[[str, int], bytes]
    go_on: Callable[[], None]
    attach: Callable[[str], SharedMemorySegment]


class Site:
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
        self.ready = False
        self.memory: Array | None = None
        self.xs: list[Array] = []
        self.ys: list[Array] = []
        self.unique: tuple[int, ...] = ()
        self._what = what
        self._named = named
        self._small = is_small(what)
        self._places: dict[int, Place] = {}
        self._segments: list[SharedMemorySegment] = []
        self._met: dict[int, bool] = {}
        self._all_met: bool | None = None
        self._voting = threading.Lock()
        self._lock = threading.Lock()

    def register(self, rank: int, place: Place) -> None:
        """Where a rank of this worker has its tensor and its result, in every step."""
        self._places[rank] = place

    def agree(self, line: Line) -> None:
        """Find the way with the other workers; the first device of this one does it for all.

        Raises:
            GraphflowError: the step was given up meanwhile.
        """
        with self._lock:
            if self.ready:
                return
            what = self._what
            mine = [rank for rank, worker in enumerate(what.workers) if worker == line.worker]
            while not self._small and len(self._places) < len(mine):
                line.go_on()
                time.sleep(_PAUSE)
            workers = sorted(set(what.workers))
            if len(workers) == 1:
                self.memory = private(ground(what))
                self.unique = self._name(nccl.gpus(what, line.worker))
                self._map([(rank, place.x, place.y) for rank, place in self._places.items()])
            elif line.worker == workers[0]:
                self._lead(line, workers[1:])
            else:
                self._follow(line, workers[0])
            self.ready = True

    def have_met(self, line: Line, rank: int, met: bool) -> bool:
        """Whether all ranks have met in NCCL, once each has said whether it has.

        Raises:
            GraphflowError: the step was given up meanwhile.
        """
        self._met[rank] = met
        with self._voting:  # who holds it waits for those who are yet to agree
            if self._all_met is None:
                while len(self._met) < self._what.workers.count(line.worker):
                    line.go_on()
                    time.sleep(_PAUSE)
                self._all_met = self._all_say(line, "met", all(self._met.values()))
            return self._all_met

    def _all_say(self, line: Line, what: str, ok: bool) -> bool:
        """Whether all workers say yes: each tells the root, which tells them what came of it."""
        root, *others = sorted(set(self._what.workers))
        if line.worker != root:
            line.tell(f"{what}/{line.worker}", root, _written({"ok": ok}))
            return _read(line.hear(f"all {what}", root)).get("ok") is True and ok
        heard = [_read(line.hear(f"{what}/{other}", other)) for other in others]
        ok = ok and all(each.get("ok") is True for each in heard)
        for other in others:
            line.tell(f"all {what}", other, _written({"ok": ok}))
        return ok

    def _lead(self, line: Line, others: Sequence[int]) -> None:
        try:
            segment: SharedMemorySegment | None = SharedMemorySegment.create(ground(self._what))
        except TransportError:
            segment = None
        for other in others:
            line.tell("token", other, segment.token.encode() if segment is not None else b"")
        answers = [_read(line.hear(f"joined/{other}", other)) for other in others]
        ok = segment is not None and self._reachable and all(a.get("ok") is True for a in answers)
        table = [*self._table, *(row for a in answers for row in a.get("places", ()))]
        mine = nccl.gpus(self._what, line.worker)
        self.unique = self._name(mine, *(a.get("gpus") for a in answers))
        for other in others:
            told = {"ok": ok, "places": table, "nccl": self.unique}
            line.tell("table", other, _written(told))
        if ok and not self._small:
            ok = self._all_say(line, "mapped", self._reach(line, table))
        if ok and segment is not None:
            self._segments.append(segment)
            self.memory = segment.memory

    def _follow(self, line: Line, root: int) -> None:
        segment = None
        token = line.hear("token", root).decode("ascii", "replace")
        with contextlib.suppress(TransportError):
            segment = line.attach(token)
        ok = segment is not None and segment.memory.nbytes == ground(self._what)
        answer = {
            "ok": ok and self._reachable,
            "places": self._table,
            "gpus": nccl.gpus(self._what, line.worker),
        }
        line.tell(f"joined/{line.worker}", root, _written(answer))
        table = _read(line.hear("table", root))
        unique = table.get("nccl")
        if isinstance(unique, list) and all(type(each) is int for each in unique):
            self.unique = tuple(unique)
        ok = ok and table.get("ok") is True
        if ok and not self._small:
            ok = self._all_say(line, "mapped", self._reach(line, table.get("places", ())))
        if ok and segment is not None:
            self.memory = segment.memory

    def _name(self, *told: Any) -> tuple[int, ...]:
        """Of the group in NCCL, where that is the way."""
        return self._named(self._what.devices) if nccl.may_meet(told, self._what.count) else ()

    @property
    def _reachable(self) -> bool:
        return all(place.x_at[0] and place.y_at[0] for place in self._places.values())

    @property
    def _table(self) -> list[list[Any]]:
        return [[rank, *p.x_at, *p.y_at] for rank, p in self._places.items()]

    def _reach(self, line: Line, table: Sequence[Any]) -> bool:
        """Map the tensors and results of all ranks; whether they are there."""
        what, found = self._what, []
        try:
            for rank, x_token, x_at, y_token, y_at in table:
                if rank in self._places:
                    found.append((rank, self._places[rank].x, self._places[rank].y))
                    continue
                has = what.kind != "broadcast" or rank == 0
                x = _view(line.attach(x_token).memory, x_at, what.specs[rank]) if has else None
                y = _view(line.attach(y_token).memory, y_at, what.result(rank))
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


def _written(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode()


def _read(data: bytes) -> dict[str, Any]:
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}
