"""Collectives between GPUs by NCCL, through CuPy: one GPU for each rank.

NCCL only carries the shares, and each rank combines its own share in our order. The order of NCCL's
own reductions depends on the machine. An all-reduce of n ranks moves 2 (n - 1) / n of its bytes, as
a ring does.

All collectives of a session among the same GPUs use one communicator, in sequence. To make one
takes most of a second and some hundred MB of each GPU.
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
_importing = threading.Lock()  # filters of warnings are global to the process
CONNECT_SECONDS = 30.0
"""Seconds for the ranks of a group to connect. All begin within milliseconds of each other, and
NCCL takes most of a second."""
_ID_BYTES = 128  # of a unique id
_CANCEL_CHECK_SECONDS = 0.02  # between checks whether the step was cancelled


def library() -> Any:
    """Return CuPy's NCCL module; None if NCCL is missing.

    CuPy's warning about a missing NCCL is suppressed: a machine with one GPU needs none.
    """
    try:
        import_cupy()
        with _importing, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
    except (DeviceError, ImportError):
        return None
    return nccl if getattr(nccl, "available", True) else None


def local_gpus(collective: Collective, worker: int) -> dict[str, Any] | None:
    """Describe a worker's GPUs of a collective; None if the collective cannot use NCCL.

    Returns:
        "at": host and PCI address of each GPU, since NCCL refuses two ranks on one GPU.
        "far": whether NCCL may connect to other hosts. Its traffic is neither encrypted nor
        authenticated, so users have to allow it.
    """
    names = [DeviceName.parse(device) for device in collective.devices]
    allowed = choice_setting(*NCCL) or "host"
    if any(name.kind != "gpu" for name in names) or allowed == "off" or library() is None:
        return None
    own = [_gpu_address(name.index or 0) for name in names if (name.worker or 0) == worker]
    return {"at": own, "far": allowed == "on"}


def can_use_nccl(gpus: Sequence[Any], count: int) -> bool:
    """Return True if `count` ranks can connect by NCCL.

    Args:
        gpus: what each worker's `local_gpus` returned.
    """
    if not all(isinstance(each, dict) and isinstance(each.get("at"), list) for each in gpus):
        return False
    at = [str(gpu) for each in gpus for gpu in each["at"]]
    near = len({gpu.rpartition("/")[0] for gpu in at}) == 1
    far = all(each.get("far") is True for each in gpus)
    return len(set(at)) == len(at) == count and (near or far)


def _gpu_address(index: int) -> str:
    host = setting("NCCL_HOSTID") or clock_identity()
    return f"{host}/{import_cupy().cuda.runtime.deviceGetPCIBusId(index)}"


class _Job:
    """A function for the thread of a communicator, and its outcome."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Communicator:
    """A GPU's NCCL communicator and the thread that calls NCCL for it.

    NCCL waits for other ranks without a timeout: while they connect, when two of them first
    exchange data, and in the GPU's kernels. Only another thread can abort such a wait. So this
    thread makes all calls, and the caller meanwhile checks whether the step was cancelled.

    Args:
        backend: the `GpuBackend` of the GPU.

    Attributes:
        handle: CuPy's communicator; None until connected.
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
        """Connect to the other ranks; return False and log why if NCCL fails or a rank is missing.

        Args:
            count: number of ranks.
            unique: the ranks' common id, from `library().get_unique_id()`.
            go_on: raises if the step was cancelled.

        Raises:
            Exception: raised by `go_on`.
        """
        began = time.monotonic()

        def wait() -> None:
            go_on()
            if time.monotonic() > began + CONNECT_SECONDS:
                raise _MissingRanks(f"not all {count} ranks connected in {CONNECT_SECONDS:g} s")

        def run() -> None:
            self.handle = _create_communicator(library(), count, unique, rank)
            if self._closed:  # the caller gave up waiting
                self._abort()

        fields: dict[str, Any] = {"device": f"gpu:{self.backend.index}", "rank": rank}
        job = self._submit(run)
        try:
            self._wait(job, wait)
        except Exception as error:
            if not job.ended.is_set() and not isinstance(error, _MissingRanks):
                raise  # the step was cancelled
            _log.tell("nccl.refused", **fields, error=type(error).__name__, reason=str(error))
            return False
        _log.tell("nccl.met", **fields, of=count, seconds=round(time.monotonic() - began, 3))
        return True

    def run(self, run: Callable[[], None], go_on: Callable[[], None]) -> None:
        """Run a function on the thread.

        If the step is cancelled, or NCCL fails, the communicator is aborted: otherwise a kernel
        that waits for a missing rank would occupy the GPU forever.

        Raises:
            Exception: raised by `go_on` or `run`.
        """
        try:
            self._wait(self._submit(run), go_on)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the communicator, whatever its thread waits for.

        NCCL's orderly end could wait for ranks that are gone.
        """
        self._closed = True
        self._jobs.put(None)
        self._abort()

    def _abort(self) -> None:
        if self.handle is not None:
            with suppress(Exception):  # it was aborted before, or its GPU has failed
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
    """Not all ranks connected in time."""


def _create_communicator(nccl: Any, count: int, unique: Sequence[int], rank: int) -> Any:
    """Make CuPy's communicator.

    CuPy takes the id as bytes from version 14 on, and before that as the tuple that it returned.
    """
    try:
        whole = bytes(each & 0xFF for each in unique).ljust(_ID_BYTES, b"\0")[:_ID_BYTES]
        return nccl.NcclCommunicator(count, whole, rank)
    except TypeError:
        return nccl.NcclCommunicator(count, tuple(unique), rank)


class NcclCollective:
    """A GPU's part in one collective.

    Args:
        rank: the GPU's rank.
        communicator: connects the GPUs of all ranks.
    """

    def __init__(self, collective: Collective, rank: int, communicator: Communicator) -> None:
        self.collective = collective
        self.rank = rank
        self._communicator = communicator
        self._backend = backend = communicator.backend
        self._xp = backend.xp
        self._nccl = library()
        with backend.active():
            self._stream = self._xp.cuda.Stream(non_blocking=True)
            self._ready = self._xp.cuda.Event(disable_timing=True)

    def record_ready(self) -> None:
        """Mark the point of the device's stream at which the tensor is ready."""
        self._ready.record(self._backend.stream)

    def run(self, x: Any, y: Any, go_on: Callable[[], None]) -> None:
        """Run the collective on a stream of its own; `go_on` raises if the step is cancelled."""
        self._communicator.run(partial(self._run_on_stream, x, y), go_on)

    def _run_on_stream(self, x: Any, y: Any) -> None:
        with self._backend.side_stream(self._stream):
            self._stream.wait_event(self._ready)
            kept = self._exchange(x, y)
            self._stream.synchronize()
            del kept  # buffers that NCCL used until now

    def _exchange(self, x: Any, y: Any) -> list[Any]:
        collective, rank, xp = self.collective, self.rank, self._xp
        parts = (
            [] if x is None else [xp.ascontiguousarray(p) for p in collective.input_views(rank, x)]
        )
        places = collective.output_views(rank, y)
        if collective.kind == "broadcast":
            sent = (
                dict.fromkeys(range(collective.count), y if x is None else x) if rank == 0 else {}
            )
            sizes = {0: y}
        else:
            sent = {
                q: parts[0 if collective.sends_same_to_all else q] for q in range(collective.count)
            }
            sizes = {
                q: parts[rank] if collective.reduces else places[q] for q in range(collective.count)
            }
        come = {q: xp.empty(like.shape, like.dtype) for q, like in sizes.items() if q != rank}
        self._send_and_receive(sent, come)
        if rank in sent:
            come[rank] = sent[rank]
        if collective.reduces:
            self._fold([come[q] for q in range(collective.count)], places[rank])
            if collective.kind == "all_reduce":
                own = xp.ascontiguousarray(places[rank])
                others = {q: xp.empty(p.shape, p.dtype) for q, p in enumerate(places) if q != rank}
                self._send_and_receive(dict.fromkeys(range(collective.count), own), others)
                for q, array in others.items():
                    places[q][...] = array
                return [parts, sent, come, own, others]
        else:
            for q, array in come.items():
                places[q][...] = array
        return [parts, sent, come]

    def _fold(self, pieces: Sequence[Any], out: Any) -> None:
        collective, xp = self.collective, self._xp
        reduction: str = collective.attrs["reduction"]
        wide = [piece.astype(collective.working_dtype) for piece in pieces]
        into = xp.empty(out.shape, collective.working_dtype)
        fold(
            collective.order(self.rank), wide, combine_function(reduction, xp), into, xp.empty_like
        )
        finish(reduction, collective.count, into)
        out[...] = into.astype(collective.dtype)

    def _send_and_receive(self, sent: dict[int, Any], come: dict[int, Any]) -> None:
        """Send to and receive from all other ranks at once, as bytes."""
        end, stream, kind = self._communicator.handle, self._stream.ptr, self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        for peer, array in sent.items():
            if peer != self.rank and array.nbytes:
                end.send(array.data.ptr, array.nbytes, kind, peer, stream)
        for peer, array in come.items():
            if array.nbytes:
                end.recv(array.data.ptr, array.nbytes, kind, peer, stream)
        self._nccl.groupEnd()
