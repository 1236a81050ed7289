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

from graphflow.base.environment import NCCL, choice_setting, setting
from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.ops.communication.reduction_order import combine_function, finish, fold
from graphflow.ops.kernels.cuda.cupy_module import import_cupy
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.protocol.clock_sync import clock_identity
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.gpu")
_importing = threading.Lock()  # filters of warnings are the process's
CONNECT_SECONDS = 30.0
"""Seconds for the ranks of a group to meet: they all begin within milliseconds of each other, and
NCCL takes the better part of one."""
_ID_BYTES = 128  # of a name under which ranks meet
_CANCEL_CHECK_SECONDS = 0.02  # seconds between two looks at whether the step goes on


def library() -> Any:
    """CuPy's NCCL; None where there is none, of which CuPy warns: a machine with one GPU needs
    none."""
    try:
        import_cupy()
        with _importing, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
    except (DeviceError, ImportError):
        return None
    return nccl if getattr(nccl, "available", True) else None


def local_gpus(what: Collective, worker: int) -> dict[str, Any] | None:
    """What a worker tells of its ranks' GPUs; None where NCCL is not the way.

    NCCL refuses two ranks on one GPU, so each is told from all others as NCCL does. It speaks to
    other hosts in the clear, and asks nobody who they are: that has to be allowed (`far`).
    """
    names = [DeviceName.parse(device) for device in what.devices]
    allowed = choice_setting(*NCCL) or "host"
    if any(name.kind != "gpu" for name in names) or allowed == "off" or library() is None:
        return None
    own = [_gpu_address(name.index or 0) for name in names if (name.worker or 0) == worker]
    return {"at": own, "far": allowed == "on"}


def can_use_nccl(told: Sequence[Any], count: int) -> bool:
    """Whether NCCL is the way for ranks, by the words of all their workers (`gpus`)."""
    if not all(isinstance(each, dict) and isinstance(each.get("at"), list) for each in told):
        return False
    at = [str(gpu) for each in told for gpu in each["at"]]
    near = len({gpu.rpartition("/")[0] for gpu in at}) == 1
    far = all(each.get("far") is True for each in told)
    return len(set(at)) == len(at) == count and (near or far)


def _gpu_address(index: int) -> str:
    host = setting("NCCL_HOSTID") or clock_identity()
    return f"{host}/{import_cupy().cuda.runtime.deviceGetPCIBusId(index)}"


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
        self.handle: Any = None
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        name = f"nccl-gpu-{backend.index}"
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def connect(
        self, count: int, unique: Sequence[int], rank: int, go_on: Callable[[], None]
    ) -> bool:
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
            if time.monotonic() > began + CONNECT_SECONDS:
                raise _MissingRanks(f"not all {count} ranks came in {CONNECT_SECONDS:g} s")

        def run() -> None:
            self.handle = _create_communicator(library(), count, unique, rank)
            if self._closed:  # nobody waited so long
                self._abort()

        told: dict[str, Any] = {"device": f"gpu:{self.backend.index}", "rank": rank}
        job = self._submit(run)
        try:
            self._wait(job, wait)
        except Exception as error:
            if not job.ended.is_set() and not isinstance(error, _MissingRanks):
                raise  # the step was given up
            _log.tell("nccl.refused", **told, error=type(error).__name__, reason=str(error))
            return False
        _log.tell("nccl.met", **told, of=count, seconds=round(time.monotonic() - began, 3))
        return True

    def run(self, run: Callable[[], None], go_on: Callable[[], None]) -> None:
        """Run something on the thread. If the step is given up, or NCCL fails, the group is let go
        of: a rank that is gone would keep the GPU for good.

        Raises:
            Exception: of `go_on`, or of `run`.
        """
        try:
            self._wait(self._submit(run), go_on)
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
        if self.handle is not None:
            with suppress(Exception):  # of NCCL: it was let go of, or its GPU has failed
                self.handle.abort()

    def _submit(self, run: Callable[[], Any]) -> _Job:
        job = _Job(run)
        self._jobs.put(job)
        return job

    def _wait(self, job: _Job, go_on: Callable[[], None]) -> None:
        while not job.ended.wait(_CANCEL_CHECK_SECONDS):
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


class _MissingRanks(TimeoutError):
    """Not all ranks came in time."""


def _create_communicator(nccl: Any, count: int, unique: Sequence[int], rank: int) -> Any:
    """CuPy takes the name as bytes from version 14 on, and before that as the numbers of C's chars,
    as it gave them."""
    try:
        whole = bytes(each & 0xFF for each in unique).ljust(_ID_BYTES, b"\0")[:_ID_BYTES]
        return nccl.NcclCommunicator(count, whole, rank)
    except TypeError:
        return nccl.NcclCommunicator(count, tuple(unique), rank)


class NcclCollective:
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
            self._ready = self._xp.cuda.Event(disable_timing=True)

    def record_ready(self) -> None:
        """The tensor is there once the device's stream is here."""
        self._ready.record(self._backend.stream)

    def run(self, x: Any, y: Any, go_on: Callable[[], None]) -> None:
        """All of it, on a stream of its own; `go_on` raises when the step is given up."""
        self._communicator.run(partial(self._run_on_stream, x, y), go_on)

    def _run_on_stream(self, x: Any, y: Any) -> None:
        with self._backend.side_stream(self._stream):
            self._stream.wait_event(self._ready)
            kept = self._exchange(x, y)
            self._stream.synchronize()
            del kept  # buffers that were on their way

    def _exchange(self, x: Any, y: Any) -> list[Any]:
        what, rank, xp = self.what, self.rank, self._xp
        parts = [] if x is None else [xp.ascontiguousarray(p) for p in what.input_views(rank, x)]
        places = what.output_views(rank, y)
        if what.kind == "broadcast":
            sent = dict.fromkeys(range(what.count), y if x is None else x) if rank == 0 else {}
            sizes = {0: y}
        else:
            sent = {q: parts[0 if what.sends_same_to_all else q] for q in range(what.count)}
            sizes = {q: parts[rank] if what.reduces else places[q] for q in range(what.count)}
        come = {q: xp.empty(like.shape, like.dtype) for q, like in sizes.items() if q != rank}
        self._send_and_receive(sent, come)
        if rank in sent:
            come[rank] = sent[rank]
        if what.reduces:
            self._fold([come[q] for q in range(what.count)], places[rank])
            if what.kind == "all_reduce":
                own = xp.ascontiguousarray(places[rank])
                others = {q: xp.empty(p.shape, p.dtype) for q, p in enumerate(places) if q != rank}
                self._send_and_receive(dict.fromkeys(range(what.count), own), others)
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
        wide = [piece.astype(what.working_dtype) for piece in pieces]
        into = xp.empty(out.shape, what.working_dtype)
        fold(what.order(self.rank), wide, combine_function(reduction, xp), into, xp.empty_like)
        finish(reduction, what.count, into)
        out[...] = into.astype(what.dtype)

    def _send_and_receive(self, sent: dict[int, Any], come: dict[int, Any]) -> None:
        """Everything to and from the other ranks, as bytes, at once."""
        end, stream, kind = self._communicator.handle, self._stream.ptr, self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for peer, array in sent.items():
            if peer != self.rank and array.nbytes:
                end.send(array.data.ptr, array.nbytes, kind, peer, stream)
        for peer, array in come.items():
            if array.nbytes:
                end.recv(array.data.ptr, array.nbytes, kind, peer, stream)
        self._nccl.groupEnd()
