"""One session on one worker: its host, the thread that runs its jobs, its links to other workers.

The protocol decides which jobs run; this module runs them, one after the other, on a thread of the
session's own. The worker's I/O thread therefore never waits for a computation. A device's thread
sends its tensors itself, straight into the socket of the link.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.process.user_modules import import_allowed
from graphflow.errors import GraphflowError, ProtocolError, StepTimeout, TransportError
from graphflow.runtime.checkpoint.remote import write_under
from graphflow.runtime.diagnostics.crash_recorder import computing_session
from graphflow.runtime.polling.io_driver import LINGER
from graphflow.runtime.protocol.reliable_stream import Outbound
from graphflow.runtime.protocol.worker_events import (
    BeatPeerLinks,
    JobFinished,
    OfferMemoryToCoordinator,
    Outcome,
    PeerUnreached,
    RunJob,
    UpdatePeerLink,
)
from graphflow.runtime.security.authenticator import ZapAuthenticator
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.array_lending import PeerSharedMemory
from graphflow.runtime.transport.bulk_tcp import TOKEN_WORD, BulkChannel, BulkSender, accept_offer
from graphflow.runtime.transport.shared_memory_arrays import (
    LEND_MIN_BYTES,
    SharedArrayReader,
    is_whole,
)
from graphflow.runtime.transport.unix_socket import UnixSocketChannel
from graphflow.runtime.wire.array_codec import BorrowedBuffer
from graphflow.runtime.wire.messages import (
    Abort,
    Adopt,
    Array,
    Chunk,
    Close,
    Commit,
    Compute,
    Forget,
    Join,
    Load,
    Measure,
    Meet,
    Open,
    Prepare,
    Probe,
    Read,
    Save,
    Saved,
    Write,
)
from graphflow.runtime.wire.step_values import Computed, HostUsage, Key, TensorParcel, step_of
from graphflow.runtime.worker.host_protocol import HostFactory, HostProtocol
from graphflow.runtime.worker.link_probe import DriveUntil, LinkProber
from graphflow.runtime.worker.peer_link import PeerLink
from graphflow.runtime.worker.worker_activity import WorkerActivity

_UNREPORTED = frozenset((Commit, Abort, Save))


class HostedSession:
    """The runner of one session's jobs.

    Args:
        opening: the job with the session's `Open`.
        report: receives each job that ended, from any thread.
        drive_until: drives the worker's sockets until a condition holds.
        wake: wakes the thread that drives the sockets.
        admit_bulk_channel: takes in a bulk connection that another worker offers.
        listen_address: the worker's address as this process knows it.
        checkpoints: the root directory for shards of checkpoints, if this worker has one.
    """

    def __init__(
        self,
        opening: RunJob,
        *,
        context: Any,
        devices: Sequence[str],
        threads: int | None,
        insecure: bool,
        guard: ZapAuthenticator | None,
        factory: HostFactory,
        allow_ops: Collection[str],
        report: Callable[[JobFinished | OfferMemoryToCoordinator | PeerUnreached], None],
        drive_until: DriveUntil,
        wake: Callable[[], None] = lambda: None,
        meters: Meters | None = None,
        checkpoints: str | None = None,
        listen_address: str = "",
        admit_bulk_channel: Callable[[BulkChannel], None] = BulkChannel.close,
    ) -> None:
        message = opening.job
        assert isinstance(message, Open)
        self._session = opening.session
        self._epoch = opening.epoch
        self._token = opening.token
        self._index = message.worker
        self.is_trial = message.trial
        self.meters = meters if meters is not None and not message.trial else Meters()
        self._addresses = message.peers
        self.activity = WorkerActivity(
            self._session, self._epoch, self._index, self.meters, self._addresses
        )
        self._listen_address = listen_address
        self._admit_bulk_channel = admit_bulk_channel
        self._context = context
        self._devices = [f"/worker:{message.worker}/{name}" for name in devices]
        self._threads = threads
        self._insecure = insecure
        self._guard = guard
        self._keys = message.keys
        self._factory = factory
        self._ops = message.ops
        self._allowed = allow_ops
        self._report_event = report
        self._drive_until = drive_until
        self._wake = wake
        self._checkpoints = checkpoints
        self._host: HostProtocol | None = None
        self._links: dict[int, PeerLink] = {}
        self._lost_links: list[PeerLink] = []  # to processes that were lost; closed at the end
        session = opening.session  # not self: a reference cycle would free the memory late
        self._coordinator_memory = PeerSharedMemory(
            lambda token: report(OfferMemoryToCoordinator(session, token))
        )
        self._borrowed_memory: dict[int, SharedArrayReader] = {}
        self._idle = False  # the session's thread has no job, and drives the sockets
        # While these two are equal, the session's thread has no job, and sends nothing.
        self._jobs_given, self._jobs_done = 1, 0
        self._uncounted_commit: int | None = None  # a committed step to count when there is time
        self._cancelled_up_to = -1  # the last cancelled step; earlier ones are cancelled, too
        self._deadline = 0.0  # of the present step
        self._arrays_last = True  # sent arrays are not overwritten before the step is decided
        self._start(opening)

    def _start(self, opening: RunJob) -> None:
        """Start the session's thread, with the job that opens the session."""
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[RunJob] = queue.SimpleQueue()
        name = f"session-{opening.session[:8]}"
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)
        self._prober = LinkProber(
            self._index, self._addresses, self._links, self._drive_until, self._closing,
            f"{name}-echo",
        )  # fmt: skip
        self._thread.start()
        self._jobs.put(opening)

    # From the I/O thread; none of these methods waits ---------------------------------------------

    def submit(self, run: RunJob) -> None:
        """Queue a job."""
        kind = type(run.job)
        if kind is Close:
            self._closing.set()
        if kind is not Chunk or (self._idle and threading.get_ident() == self._thread.ident):
            self._jobs_given += 1
            self._jobs.put(run)
        elif self._jobs_given > self._jobs_done or not self._prober.try_send_back(run):
            self._prober.queue_echo(run)

    def deliver(self, step: int, edge: Key, array: Array, origin: int) -> None:
        """Hand the host a tensor from another worker, `origin`."""
        if self._host is not None:
            self._host.deliver(self._session, step, edge, array)
        self.activity.count_tensor("received", origin, edge, array.nbytes)

    @property
    def keys(self) -> list[str]:
        """The public keys of all workers, in order; none if they have none."""
        return self._keys

    @property
    def queued_jobs(self) -> int:
        """Number of jobs that wait."""
        return self._jobs.qsize()

    def usage(self) -> HostUsage:
        """Return the session's memory use and its waits. Callable from any thread."""
        host = self._host
        return host.usage(self._session) if host is not None else HostUsage()

    def attach(self, origin: int, token: str) -> None:
        """Attach memory that the coordinator or another worker shares, or accept a bulk connection.

        Memory of another host cannot be attached; its owner notices that nobody accepts it.
        """
        if token.startswith(TOKEN_WORD):
            if origin >= 0 and not self._keys:
                accept_offer(token, self._addresses[origin], self._admit_bulk_channel)
            return
        with contextlib.suppress(TransportError):
            self._borrowed_memory[origin] = SharedArrayReader(token)

    def read_borrowed(self, origin: int, chunk: Chunk) -> BorrowedBuffer | None:
        """Return the bytes of a lent array; None if its lender's memory is not attached."""
        borrower = self._borrowed_memory.get(origin)
        if borrower is None:
            return None
        return borrower.defer_borrow(chunk.slot, chunk.turn, chunk.nbytes)

    def update_link(self, update: UpdatePeerLink) -> None:
        """Pass another worker's report to the link to it."""
        link = self._links.get(update.worker)
        if link is not None:
            before = link.resent_count
            link.apply_update(update)
            if again := link.resent_count - before:
                peer = self._addresses[update.worker]
                self.meters.add("graphflow_resent_messages_total", again, peer)

    def beat_links(self, beat: BeatPeerLinks) -> None:
        """Send the links' heartbeats, and report a peer that acknowledges nothing."""
        for worker, link in list(self._links.items()):
            link.heartbeat(owed=worker in beat.owed)
            link.check_inflow()
            if (untaken := link.find_unacknowledged()) is not None:
                asked, (step, edge) = untaken
                self._report_event(PeerUnreached(self._session, worker, step, edge, asked))

    def accept_echo(self, request: int, origin: int, array: Array) -> None:
        """Take in an echo of this worker's probe."""
        self._prober.accept_echo(request, origin, array)

    def cancel_step(self, step: int, error: GraphflowError) -> None:
        """Cancel a step, whether it runs or is still queued."""
        self._cancelled_up_to = step
        host = self._host
        if host is not None:
            host.cancel(self._session, step, error)

    def join(self, seconds: float) -> bool:
        """Wait for the session's thread, which ends after `Close`; return True if it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # On the session's thread ---------------------------------------------------------------------

    def _run_jobs(self) -> None:
        computing_session.set(self._session)
        while True:
            run = self._next_job()
            job, step = run.job, run.step
            self.activity.begin(job, step)
            cancelled = False
            try:
                outcome = self._run_job(run)
            except BaseException as error:  # any error is reported to the coordinator
                outcome, cancelled = error, step <= self._cancelled_up_to
            # Nobody waits for these results, and waking the I/O thread costs more than most
            # commits. A Save reports from a thread of its own.
            if outcome is not None or type(job) not in _UNREPORTED:
                self._report_event(JobFinished(self._session, job, step, self._epoch, outcome))
            if self._uncounted_commit is not None:
                self.activity.on_commit(self._uncounted_commit)
                self._uncounted_commit = None
            self.activity.end(job, step, outcome, cancelled=cancelled)
            self._jobs_done += 1
            if type(job) is Close:
                return

    def _next_job(self) -> RunJob:
        """Return the next job.

        While there is none, this thread drives the worker's sockets for a while. An order that
        follows soon then needs no other thread.
        """
        if self._jobs.empty() and not self._closing.is_set():
            self._idle = True
            self._drive_until(self._has_job, LINGER)
            self._idle = False
        return self._jobs.get()

    def _has_job(self) -> bool:
        return not self._jobs.empty()

    def _run_job(self, run: RunJob) -> Outcome:
        job, session, host = run.job, self._session, self._host
        if type(job) is Compute and host is not None:  # most jobs are of these two types
            if run.commits >= 0:
                self._commit(host, run.commits)
            return self._compute(host, run, job)
        if type(job) is Commit and host is not None:
            host.commit(session, run.step)
            return None
        if isinstance(job, Open):
            self._open()
            return None
        if isinstance(job, Close):
            self._close()
            return None
        if host is None:
            raise ProtocolError("the session could not be opened")
        match job:
            case Load():
                parts = [run.arrays[index] for index in range(job.parts)]
                host.load(session, job.program, parts[0].tobytes(), parts[1:])
            case Prepare():
                host.prepare(session, job.program, job.bindings)
            case Abort():
                host.abort(session, run.step)
            case Read():
                value = np.asarray(host.read(session, job.variable))
                return Computed({job.variable: self._lend_result(job.request, job.variable, value)})
            case Write():
                host.write(session, job.variable, run.arrays[job.variable])
            case Save():
                self._save(run, job, host.snapshot(session))
            case Forget():
                host.forget(session, job.programs, job.variables)
            case Join():
                self._drop_links(job.address)
                absent = [""] * (job.worker - len(self._addresses))
                self._addresses += [*absent, job.address]
                if self._keys:
                    self._keys += [*absent, job.key]
                self._link(job.worker)
            case Adopt():
                host.adopt(session, job.moved, job.copied)
            case Measure():
                return host.probe_speed() if job.probes else host.measure()
            case Meet():
                return self._prober.check_reachability(job)
            case Chunk():
                self._prober.send_back(run)
            case Probe():
                return self._prober.measure_latency(job)
        return None

    def _open(self) -> None:
        import_allowed(self._ops, self._allowed)
        for worker, address in enumerate(self._addresses):
            if worker != self._index and address:
                self._link(worker)
        self._host = self._factory(self._index, self._devices, self._threads, self._outbox)
        self._host.open(self._session)
        keep = self._coordinator_memory.keep
        self._host.connect_mail(
            self._session, self._drive_until, self._wake, self.activity.count_tensor, keep
        )

    def _drop_links(self, address: str) -> None:
        """Drop the links to earlier processes at an address, which are lost."""
        for worker, known in enumerate(self._addresses):
            if known == address and worker in self._links:
                self._lost_links.append(link := self._links.pop(worker))
                link.disconnect()

    def _link(self, worker: int) -> None:
        """Open the link to another worker."""
        address, sealed = self._addresses[worker], bool(self._keys)
        channel = transport_of(address).connect(
            self._context, address, insecure=self._insecure, watch=True, guard=self._guard,
            key=self._keys[worker] if sealed else "",
        )  # fmt: skip
        outbound = Outbound(self._session, self._epoch, self._index, self._token)
        fast_channel = None if sealed else UnixSocketChannel.connect(address)
        sends_bulk = self._listen_address and not sealed
        bulk_sender = BulkSender(self._listen_address) if sends_bulk else None
        self._links[worker] = PeerLink(channel, outbound, fast_channel, bulk_sender, sealed=sealed)

    def _close(self) -> None:
        self._prober.close()
        try:
            if self._host is not None:
                self._host.close(self._session)
        finally:
            for link in (*self._links.values(), *self._lost_links):
                link.close()
            self._coordinator_memory.close()
            # Free the memory now: the garbage collector may not run on a worker for long.
            self._host = None
            self._borrowed_memory.clear()

    def _commit(self, host: HostProtocol, step: int) -> None:
        """Commit a step, as the order of the next step requests."""
        try:
            host.commit(self._session, step)
            self._uncounted_commit = step
        except BaseException as error:  # ends the session here, and the next step with it
            self._report_event(JobFinished(self._session, Commit(), step, self._epoch, error))
            raise

    def _compute(self, host: HostProtocol, run: RunJob, job: Compute) -> Computed:
        if run.step <= self._cancelled_up_to:
            raise StepTimeout(f"step {step_of(run.step)} was cancelled before it started here")
        feeds: Any = run.arrays  # by name
        self._arrays_last = not job.free
        self._deadline = time.monotonic() + job.deadline
        for name in job.feeds:  # feeds that came before the order may be lent
            self._await_feed(run.step, name, feeds[name])
        computed = host.compute(
            self._session, job.program, run.step, job.bindings, feeds, job.trace, job.deadline
        )
        # Return lent feeds before the client learns of the end, and may need their memory.
        if feeds:
            feeds.clear()
        for array in computed.fetches.values():
            if array.nbytes >= LEND_MIN_BYTES:
                break
        else:
            return computed
        handed = {
            n: self._lend_result(job.request, n, each) for n, each in computed.fetches.items()
        }
        return computed._replace(fetches=handed)

    def _await_feed(self, step: int, name: Key, array: Array) -> None:
        """Wait for the rest of a feed that the client was still copying when it announced it."""
        while not is_whole(array):
            if step <= self._cancelled_up_to or time.monotonic() > self._deadline:
                late = f"step {step_of(step)}: feed {name} did not come before the deadline"
                raise StepTimeout(late)

    def _lend_result(self, request: int, name: str, array: Array) -> Array | Chunk:
        return self._coordinator_memory.lend("fetch", request, name, array)

    def _save(self, run: RunJob, job: Save, copies: dict[str, Array]) -> None:
        """Write copies of all variables on a thread of its own, while other jobs go on."""

        def write() -> None:
            try:
                shard = write_under(self._checkpoints, job.folder, job.file, copies, job.of)
                outcome: Outcome = Computed(copies)
                if shard is not None:
                    outcome = Saved(job.request, shard.sha256, shard.nbytes or 0, [])
            except BaseException as error:  # any error is reported to the coordinator
                outcome = error
            self._report_event(JobFinished(self._session, job, run.step, self._epoch, outcome))

        threading.Thread(target=write, name=f"{self._thread.name}-save", daemon=True).start()

    # Between workers -----------------------------------------------------------------------------

    def _outbox(self, parcel: TensorParcel) -> None:
        """Send a tensor of a step; called by the threads of the host's devices."""
        if parcel.target_worker == self._index:
            if self._host is not None:
                self._host.deliver(self._session, parcel.step, parcel.edge, parcel.array)
            return
        target = parcel.target_worker
        self._prober.link_to(target).send(
            "edge", parcel.step, parcel.edge, parcel.array, parcel.owned and self._arrays_last,
            partial(self._should_keep_sending, parcel, self._deadline),
        )  # fmt: skip
        self.activity.count_tensor("sent", target, parcel.edge, parcel.array.nbytes)

    def _should_keep_sending(self, parcel: TensorParcel, until: float) -> bool:
        """Return True if a tensor should still be sent to a worker that has no room for it."""
        if time.monotonic() > until:
            target = parcel.target_worker
            raise StepTimeout(
                f"step {step_of(parcel.step)}: worker {target} at {self._addresses[target]} did "
                f"not take edge {parcel.edge} before the deadline; can it be reached from there?",
                worker=target,
            )
        return parcel.step > self._cancelled_up_to and not self._closing.is_set()
