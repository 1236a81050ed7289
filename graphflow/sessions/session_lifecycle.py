"""The life of a session: its lock, and the ways in which it ends.

A thread that works in a session holds its lock, and has checked that the session is open, has lost
nothing, and belongs to this process. A session ends when it is closed, when its block ends, or at
SIGTERM; never in a forked child.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import SessionError, WorkerLost
from graphflow.execution.background_queue import SerialExecutor
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.step_prefetch import StepStream
from graphflow.planning.deployment import Deployment
from graphflow.recovery.graceful_shutdown import SigtermHandler
from graphflow.recovery.no_recovery import NoRecovery
from graphflow.recovery.recoverer import Recovery
from graphflow.runtime.host.host_interface import Hosts

if TYPE_CHECKING:
    from graphflow.runtime.telemetry.metrics_endpoint import MetricsServer


class SessionLifecycle:
    """Life cycle of a session that is being opened, and then open.

    Args:
        saves: True if it writes checkpoints, and so handles SIGTERM.

    Attributes:
        lock: held during all work in the session.
        executor: queue of later steps.
        computing: ids of threads that compute parts of steps in this process.
        sigterm: handler of SIGTERM, if the session saves.
        stream: the stream that has begun steps ahead, if any.
        hosts, server, deployment, steps, recovery: parts of the session, once it is open.
    """

    hosts: Hosts
    deployment: Deployment
    steps: StepExecutor
    server: MetricsServer | None
    recovery: Recovery | NoRecovery

    def __init__(self, *, saves: bool) -> None:
        self.lock: Any = threading.RLock()
        self.executor = SerialExecutor()
        self.sigterm = SigtermHandler(self.lock, self._leave) if saves else None
        self.stream: StepStream | None = None
        self.computing: Set[int] = frozenset()
        self._closed = False
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a session belongs to the process that opened it, and cannot be pickled or copied; "
            "open another one where it is needed, and carry values over with session.save"
        )

    def patience(self, seconds: float) -> Callable[[], float]:
        """Return a function of the seconds to wait for lost workers: 0 once SIGTERM came."""
        drain = self.sigterm
        return lambda: 0.0 if drain is not None and drain.asked else seconds

    def begin(
        self,
        hosts: Hosts,
        server: MetricsServer | None,
        deployment: Deployment,
        recovery: Recovery | NoRecovery,
    ) -> None:
        """Note that the session is open.

        Raises:
            SystemExit: SIGTERM came meanwhile.
        """
        self.hosts, self.server, self.recovery = hosts, server, recovery
        self.computing = hosts.computing_threads
        self.deployment, self.steps = deployment, deployment.steps
        hosts.on_draining(self._leave_draining_workers)
        if self.sigterm is not None:
            self.sigterm.finish_opening()

    def check_not_reentrant(self) -> None:
        """Refuse a call from inside a step or another call of the session on this thread.

        Such a call would compute in the memory of the running step and change its state, or wait
        for it forever.

        Raises:
            SessionError: this thread is inside the session already.
        """
        if self.lock._is_owned() or threading.get_ident() in self.computing:
            raise SessionError(
                "the session is used from within itself: by a function of gf.host_call, a signal "
                "handler or a finalizer, while a step or another call runs on this thread. Feed "
                "the step what it needs, and let a handler only note that it was called: the "
                "session is free again between two steps"
            )

    def own_lock(self) -> Any:
        """Return the lock, after checking that this thread does not hold it.

        The caller enters it with `with` itself. If a Python function took the lock, a signal
        handler could raise between that and the block that releases it.
        """
        self.check_not_reentrant()
        return self.lock

    @contextmanager
    def operation(self, *, looks: bool = False) -> Iterator[None]:
        """Check the session at the start of an operation other than a step, and handle SIGTERM at
        its end.

        Use it inside `own_lock`.

        Args:
            looks: the operation only reads, so steps begun ahead stay valid.
        """
        self.check_usable(keep=self.stream if looks else None)
        yield
        self.raise_if_draining()

    def check_open(self) -> None:
        """Refuse what needs workers once the session is closed.

        Raises:
            SessionError: the session is closed.
        """
        if self._closed:
            self.raise_if_draining()
            raise SessionError("the session is closed; open another one")

    def check_usable(self, keep: StepStream | None = None) -> None:
        """Refuse work in an unusable session, and undo steps begun ahead.

        Args:
            keep: a stream whose steps stay.

        Raises:
            SessionError: the session is closed, or belongs to another process.
            StateLost: it lost a worker, and cannot recover.
        """
        self.check_open()
        stream = self.stream
        if stream is not None and stream is not keep:
            with self.lock:
                self.undo(stream)
        if self._process != os.getpid():
            raise SessionError(
                f"the session belongs to process {self._process}; this process is a fork without "
                "its threads; open a session here"
            )
        lost = self.steps.lost
        if lost is not None:
            self.recovery.on_worker_lost(lost)

    def undo(self, stream: StepStream) -> None:
        """Undo the steps that a stream began ahead, and drop it, unless another thread has."""
        if self.stream is stream:
            stream.undo_begun()
            self.stream = None  # last, so that an interrupted undo is repeated

    def after_step(self) -> None:
        """After a step: write a checkpoint if it is due, and leave if SIGTERM came."""
        self.recovery.after_step()
        self.raise_if_draining()

    def raise_if_draining(self) -> None:
        """Leave if SIGTERM came; raises as `SigtermHandler.raise_if_draining`."""
        if self.sigterm is not None:
            self.sigterm.raise_if_draining()

    @property
    def is_open(self) -> bool:
        """True if the session was not closed, as far as this process knows."""
        return not self._closed

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the session for the user; raises as `Session.close`."""
        if not self._closed:
            if threading.get_ident() in self.computing:  # the step would wait for itself
                self.check_not_reentrant()
            self._end(complete=True)
            self.raise_if_draining()

    def abandon(self, error: BaseException) -> None:
        """Close the session after an error in its block."""
        if self._closed:
            return
        if self._process == os.getpid():
            self.hosts.cancel()  # otherwise a step of `run_async` would delay the error
            if type(error) is WorkerLost and isinstance(self.recovery, NoRecovery):
                error.add_note("A session opened with checkpoint=directory recovers by itself.")
        self._end(complete=False)
        self.raise_if_draining()

    def _end(self, *, complete: bool) -> None:
        if self._closed:
            return
        if self._process != os.getpid():  # in a fork: threads and workers belong to the parent
            self._closed = True
            return
        try:
            self._end_all(complete=complete)
        except BaseException:
            with defer_signals():  # an interrupt may have come before anything had ended
                self.hosts.cancel()
                if self.hosts.can_be_lost:  # in this process a step may still be running
                    self.hosts.close()
            raise

    def _end_all(self, *, complete: bool) -> None:
        with self.executor.lock:
            self._closed = True
        # A thread that holds the lock must not wait for a queued step, which needs the lock.
        self.executor.close(wait=not self.lock._is_owned())
        with ExitStack() as last:
            if self.sigterm is not None:  # a SIGTERM now is handled when all is done
                last.enter_context(self.lock)
                last.callback(self.sigterm.end)
            try:
                self.recovery.close(complete=complete)
            finally:
                if self.server is not None:
                    self.server.close()
                self.stream = None
                self.hosts.close()
                self.computing = frozenset()  # thread ids are reused
                # A notebook may keep a closed session, which then should not keep its arrays.
                self.deployment.undeploy(None)

    def _leave_draining_workers(self) -> None:
        """Leave workers that were asked to end; called on a thread of its own, perhaps between
        steps."""
        with self.lock:
            if not self._closed:
                if self.stream is not None:
                    self.undo(self.stream)
                self.recovery.leave_draining_workers()

    def _leave(self) -> None:
        """At SIGTERM, between two steps: write a checkpoint, close, and end the process.

        Raises:
            SystemExit: with status 0.
        """
        assert isinstance(self.recovery, Recovery)
        try:
            if not self._closed:
                self.recovery.save_last_checkpoint()
        finally:
            self._end(complete=False)
        raise SystemExit(0)
