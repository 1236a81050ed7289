"""Exchanges between GPUs by NCCL, through CuPy: one GPU a rank.

NCCL carries the shares, and each rank folds its own in our order: NCCL's reductions add in an
order that follows from the machine. The bytes are those of a ring: 2 (n - 1) / n for an all-reduce.

All collectives of a session among the same GPUs go by one communicator, one after the other: each
takes the better part of a second to make, and some hundred MB of each GPU.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from graphflow.base.environment import NCCL, setting, word
from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.ops.communication.reduction_order import combine_function, finish, fold
from graphflow.ops.kernels.cuda.cupy_module import imported_cupy
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.protocol.clock_sync import identity
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.gpu")
_importing = threading.Lock()  # filters of warnings are the process's
MEETING = 30.0
"""Seconds for the ranks of a group to meet: they all begin within milliseconds of each other, and
NCCL takes the better part of one."""
_NAME_BYTES = 128  # of a name under which ranks meet
_SLICE = 0.02  # seconds between two looks at whether the step goes on


def library() -> Any:
    """CuPy's NCCL; None where there is none, of which CuPy warns: a machine with one GPU needs
    none."""
    try:
        imported_cupy()
        with _importing, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
    except (DeviceError, ImportError):
        return None
    return nccl if getattr(nccl, "available", True) else None


def gpus(what: Collective, worker: int) -> dict[str, Any] | None:
    """What a worker tells of its ranks' GPUs; None where NCCL is not the way.

    NCCL refuses two ranks on one GPU, so each is told from all others as NCCL does. It speaks to
    other hosts in the clear, and asks nobody who they are: that has to be allowed (`far`).
    """
    names = [DeviceName.parse(device) for device in what.devices]
    allowed = word(*NCCL) or "host"
    if any(name.kind != "gpu" for name in names) or allowed == "off" or library() is None:
        return None
    own = [_gpu(name.index or 0) for name in names if (name.worker or 0) == worker]
    return {"at": own, "far": allowed == "on"}


def may_meet(told: Sequence[Any], count: int) -> bool:
    """Whether NCCL is the way for ranks, by the words of all their workers (`gpus`)."""
    if not all(isinstance(each, dict) and isinstance(each.get("at"), list) for each in told):
        return False
    at = [str(gpu) for each in told for gpu in each["at"]]
    near = len({gpu.rpartition("/")[0] for gpu in at}) == 1
    far = all(each.get("far") is True for each in told)
    return len(set(at)) == len(at) == count and (near or far)


def _gpu(index: int) -> str:
    host = setting("NCCL_HOSTID") or identity()
    return f"{host}/{imported_cupy().cuda.runtime.deviceGetPCIBusId(index)}"


class _Job:
    """Something for the thread of a communicator."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Communicator:
    """A GPU's end of a group, and the thread that speaks to NCCL for it.

    NCCL waits for other ranks as long as it takes: when they meet, when two of them first exchange
    something, and in the GPU's kernels. Only another thread can end that. So this one does it all,
    and who needs it looks meanwhile whether the step goes on.

    Args:
        backend: of the GPU.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.end: Any = None
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        name = f"nccl-gpu-{backend.index}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def meet(self, count: int, unique: Sequence[int], rank: int, go_on: Callable[[], None]) -> bool:
        """Whether all ranks are there; not, with a word in the log, if NCCL fails or they do not
        come in time.

        Args:
            unique: the name under which the ranks meet, of `library().get_unique_id()`.
            go_on: returns if the step goes on, else raises.

        Raises:
            Exception: of `go_on`.
        """
        began = time.monotonic()

        def wait() -> None:
            go_on()
            if time.monotonic() > began + MEETING:
                raise _Late(f"not all {count} ranks came in {MEETING:g} s")

        def run() -> None:
            self.end = _communicator(library(), count, unique, rank)
            if self._closed:  # nobody waited so long
                self._abort()

        told: dict[str, Any] = {"device": f"gpu:{self.backend.index}", "rank": rank}
        job = self._given(run)
        try:
            self._awaited(job, wait)
        except Exception as error:
            if not job.ended.is_set() and not isinstance(error, _Late):
                raise  # the step was given up
            _log.tell("nccl.refused", **told, error=type(error).__name__, reason=str(error))
            return False
        _log.tell("nccl.met", **told, of=count, seconds=round(time.monotonic() - began, 3))
        return True

    def do(self, run: Callable[[], None], go_on: Callable[[], None]) -> None:
        """Run something on the thread. If the step is given up, or NCCL fails, the group is let go
        of: a rank that is gone would keep the GPU for good.

        Raises:
            Exception: of `go_on`, or of `run`.
        """
        try:
            self._awaited(self._given(run), go_on)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the group, whatever its thread waits for. Not by NCCL's orderly end, which may
        wait for ranks that are gone."""
        self._closed = True
        self._jobs.put(None)
        self._abort()

    def _abort(self) -> None:
        if self.end is not None:
            with suppress(Exception):  # of NCCL: it was let go of, or its GPU has failed
                self.end.abort()

    def _given(self, run: Callable[[], Any]) -> _Job:
        job = _Job(run)
        self._jobs.put(job)
        return job

    def _awaited(self, job: _Job, go_on: Callable[[], None]) -> None:
        while not job.ended.wait(_SLICE):
            go_on()
        if job.error is not None:
            raise job.error

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with self.backend.active():
                    job.run()
            except BaseException as error:
                job.error = error
            job.ended.set()


class _Late(TimeoutError):
    """Not all ranks came in time."""


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
        communicator: of the GPUs of all its ranks.
    """

    def __init__(self, what: Collective, rank: int, communicator: Communicator) -> None:
        self.what = what
        self.rank = rank
        self._communicator = communicator
        self._backend = backend = communicator.backend
        self._xp = backend.xp
        self._nccl = library()
        with backend.active():
            self._stream = self._xp.cuda.Stream(non_blocking=True)
            self._made = self._xp.cuda.Event(disable_timing=True)

    def made(self) -> None:
        """The tensor is there once the device's stream is here."""
        self._made.record(self._backend.stream)

    def run(self, x: Any, y: Any, go_on: Callable[[], None]) -> None:
        """All of it, on a stream of its own; `go_on` raises when the step is given up."""
        self._communicator.do(partial(self._all, x, y), go_on)

    def _all(self, x: Any, y: Any) -> None:
        with self._backend.beside(self._stream):
            self._stream.wait_event(self._made)
            kept = self._exchange(x, y)
            self._stream.synchronize()
            del kept  # buffers that were on their way

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
        fold(what.order(self.rank), wide, combine_function(reduction, xp), into, xp.empty_like)
        finish(reduction, what.count, into)
        out[...] = into.astype(what.dtype)

    def _carry(self, sent: dict[int, Any], come: dict[int, Any]) -> None:
        """Everything to and from the other ranks, as bytes, at once."""
        end, stream, kind = self._communicator.end, self._stream.ptr, self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for peer, array in sent.items():
            if peer != self.rank and array.nbytes:
                end.send(array.data.ptr, array.nbytes, kind, peer, stream)
        for peer, array in come.items():
            if array.nbytes:
                end.recv(array.data.ptr, array.nbytes, kind, peer, stream)
        self._nccl.groupEnd()
