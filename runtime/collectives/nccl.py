"""Exchanges between GPUs by NCCL, through CuPy: one GPU a rank.

NCCL carries the shares, and each rank folds its own in our order: NCCL's reductions add in an
order that follows from the machine. The bytes are those of a ring: 2 (n - 1) / n for an all-reduce.

Tried with stand-ins only, not on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ops.reduction_order import combining, finish, fold
from graphflow.runtime.collectives.pieces import Collective

_NAME_BYTES = 128  # of a name under which ranks meet
_PAUSE = 1e-4  # seconds between two looks at whether it is done


def library() -> Any:
    """CuPy's NCCL; None where there is none."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return None
    return nccl if getattr(nccl, "available", True) else None


def _communicator(nccl: Any, count: int, unique: Sequence[int], rank: int) -> Any:
    """CuPy takes the name as bytes from version 14 on, and before that as the numbers of C's chars,
    as it gave them."""
    try:
        whole = bytes(each & 0xFF for each in unique).ljust(_NAME_BYTES, b"\0")[:_NAME_BYTES]
        return nccl.NcclCommunicator(count, whole, rank)
    except TypeError:
        return nccl.NcclCommunicator(count, tuple(unique), rank)


class Nccl:
    """What one GPU does in one collective.

    Args:
        unique: the name under which the ranks meet, of `library().get_unique_id()`.
    """

    def __init__(self, what: Collective, rank: int, backend: Any, unique: Sequence[int]) -> None:
        self.what = what
        self.rank = rank
        self._backend = backend
        self._xp = backend.xp
        self._nccl = library()
        with backend.active():
            self._communicator = _communicator(self._nccl, what.count, unique, rank)
            self._stream = self._xp.cuda.Stream(non_blocking=True)
            self._made = self._xp.cuda.Event(disable_timing=True)
            self._done = self._xp.cuda.Event(disable_timing=True)

    def made(self) -> None:
        """The tensor is there once the device's stream is here."""
        self._made.record(self._backend.stream)

    def run(self, x: Any, y: Any, go_on: Callable[[], None]) -> None:
        """All of it, on a stream of its own; `go_on` raises when the step is given up."""
        try:
            with self._backend.active(), self._stream:
                self._stream.wait_event(self._made)
                kept = self._exchange(x, y)
                self._done.record(self._stream)
            while not self._done.done:
                go_on()
                time.sleep(_PAUSE)
            del kept  # buffers that were on their way
        except BaseException:
            self._communicator.abort()  # a rank that is gone would keep the device for good
            raise

    def _exchange(self, x: Any, y: Any) -> list[Any]:
        what, rank, xp = self.what, self.rank, self._xp
        parts = [] if x is None else [xp.ascontiguousarray(p) for p in what.parts(rank, x)]
        places = what.taken(rank, y)
        if what.kind == "broadcast":
            sent = dict.fromkeys(range(what.count), y if x is None else x) if rank == 0 else {}
            sizes = {0: y}
        else:
            sent = {q: parts[0 if what.is_for_all else q] for q in range(what.count)}
            sizes = {q: parts[rank] if what.reduces else places[q] for q in range(what.count)}
        come = {q: xp.empty(like.shape, like.dtype) for q, like in sizes.items() if q != rank}
        self._carry(sent, come)
        if rank in sent:
            come[rank] = sent[rank]
        if what.reduces:
            self._fold([come[q] for q in range(what.count)], places[rank])
            if what.kind == "all_reduce":
                own = xp.ascontiguousarray(places[rank])
                others = {q: xp.empty(p.shape, p.dtype) for q, p in enumerate(places) if q != rank}
                self._carry(dict.fromkeys(range(what.count), own), others)
                for q, array in others.items():
                    places[q][...] = array
                return [parts, sent, come, own, others]
        else:
            for q, array in come.items():
                places[q][...] = array
        return [parts, sent, come]

    def _fold(self, pieces: Sequence[Any], out: Any) -> None:
        what, xp = self.what, self._xp
        reduction: str = what.attrs["reduction"]
        wide = [piece.astype(what.working) for piece in pieces]
        into = xp.empty(out.shape, what.working)
        fold(what.order(self.rank), wide, combining(reduction, xp), into, xp.empty_like)
        finish(reduction, what.count, into)
        out[...] = into.astype(what.dtype)

    def _carry(self, sent: dict[int, Any], come: dict[int, Any]) -> None:
        """Everything to and from the other ranks, as bytes, at once."""
        stream, kind = self._stream.ptr, self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for peer, array in sent.items():
            if peer != self.rank and array.nbytes:
                self._communicator.send(array.data.ptr, array.nbytes, kind, peer, stream)
        for peer, array in come.items():
            if array.nbytes:
                self._communicator.recv(array.data.ptr, array.nbytes, kind, peer, stream)
        self._nccl.groupEnd()
