"""Lifetime: how a session stays open, and the ways in which it ends.

Whoever does anything in a session holds its lock, and has been told that it is open, whole and of
this process. It ends when it is closed, when its block ends, at SIGTERM, and never in a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from graphflow.base.interrupts import defer_signals
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
    """Of a session that is being opened, and then open.

    Args:
        saves: whether it writes checkpoints, and so does at SIGTERM.

    Attributes:
        lock: held while anything is done.
        queued: what is done later.
        computing: threads that compute parts of steps here.
        drain: what happens at SIGTERM, if the session does anything about it.
        stream: that has begun steps ahead.
        hosts, server, deployment, steps, recovery: what there is once the session is open.
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
            "a session is of the process that opened it, and is neither pickled nor copied; open "
            "another one where it is needed, and take values along by session.save"
        )

    def patience(self, seconds: float) -> Callable[[], float]:
        """How long lost workers are waited for: no longer once SIGTERM came."""
        drain = self.sigterm
        return lambda: 0.0 if drain is not None and drain.asked else seconds

    def begin(
        self,
        hosts: Hosts,
        server: MetricsServer | None,
        deployment: Deployment,
        recovery: Recovery | NoRecovery,
    ) -> None:
        """The session is open.

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
        """Whether this thread is at nothing in the session: who comes from within a step would
        compute in its memory, and change the state under it, or wait for it without an end.

        Raises:
            SessionError: it is.
        """
        if self.lock._is_owned() or threading.get_ident() in self.computing:
            raise SessionError(
                "the session is used from within itself: by a function of gf.host_call, a signal "
                "handler or a finalizer, while a step or another call runs on this thread. Feed "
                "the step what it needs, and have a handler only note that it was called: the "
                "session is free again between two steps"
            )

    def own_lock(self) -> Any:
        """The lock, once it is this thread's turn. It is taken by `with` itself: in a function of
        Python's a signal's handler could raise when it is taken, and before anything lets it go."""
        self.check_not_reentrant()
        return self.lock

    @contextmanager
    def operation(self, *, looks: bool = False) -> Iterator[None]:
        """In a `turn`, for anything but a step; a SIGTERM that came meanwhile is heeded at its end.

        Args:
            looks: nothing that was begun ahead minds what is done.
        """
        self.check_usable(keep=self.stream if looks else None)
        yield
        self.raise_if_draining()

    def check_usable(self, keep: StepStream | None = None) -> None:
        """Whether anything can be done; what another stream than `keep` began ahead is undone.

        Raises:
            SessionError: the session is closed, or of another process.
            StateLost: it lost a worker, and cannot recover.
        """
        if self._closed:
            self.raise_if_draining()
            raise SessionError("the session is closed; open another one")
        stream = self.stream
        if stream is not None and stream is not keep:
            with self.lock:
                self.undo(stream)
        if self._process != os.getpid():
            raise SessionError(
                f"the session belongs to process {self._process}, of which this one is a fork "
                "without its threads; open a session here"
            )
        lost = self.steps.lost
        if lost is not None:
            self.recovery.on_worker_lost(lost)

    def undo(self, stream: StepStream) -> None:
        """Undo what a stream began ahead, and let its feeds go; unless another thread has."""
        if self.stream is stream:
            stream.undo_begun()
            self.stream = None  # only now: an interrupted retreat is done again

    def after_step(self) -> None:
        """After a step: perhaps write a checkpoint, perhaps leave."""
        self.recovery.after_step()
        self.raise_if_draining()

    def raise_if_draining(self) -> None:
        """Leave if SIGTERM came; raises as `Drain.heed`."""
        if self.sigterm is not None:
            self.sigterm.raise_if_draining()

    @property
    def is_open(self) -> bool:
        """Whether the session was not closed, as far as this process knows."""
        return not self._closed

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """The end that the user asks for; raises as `Session.close`."""
        if not self._closed:
            if threading.get_ident() in self.computing:  # it would wait for itself
                self.check_not_reentrant()
            self._end(complete=True)
            self.raise_if_draining()

    def abandon(self, error: BaseException) -> None:
        """The end of a block that an error ends."""
        if self._closed:
            return
        if self._process == os.getpid():
            self.hosts.cancel()  # else the step of a `run_async` would hold the error back
            if type(error) is WorkerLost and isinstance(self.recovery, NoRecovery):
                error.add_note("A session opened with checkpoint=directory recovers by itself.")
        self._end(complete=False)
        self.raise_if_draining()

    def _end(self, *, complete: bool) -> None:
        if self._closed:
            return
        if self._process != os.getpid():  # forked: the threads and workers are the parent's
            self._closed = True
            return
        try:
            self._end_all(complete=complete)
        except BaseException:
            with defer_signals():  # it may have come before anything had ended
                self.hosts.cancel()
                if self.hosts.can_be_lost:  # a step of this process may go on beside
                    self.hosts.close()
            raise

    def _end_all(self, *, complete: bool) -> None:
        with self.executor.lock:
            self._closed = True
        # Who holds the lock runs no step beside it, and would wait for one that waits for it.
        self.executor.close(wait=not self.lock._is_owned())
        with ExitStack() as last:
            if self.sigterm is not None:  # a SIGTERM is heeded when all is done
                last.enter_context(self.lock)
                last.callback(self.sigterm.end)
            try:
                if isinstance(self.recovery, Recovery):
                    self.recovery.close(complete=complete)
            finally:
                if self.server is not None:
                    self.server.close()
                self.stream = None
                self.hosts.close()
                self.computing = frozenset()  # other threads will have these numbers
                # A closed session may be kept, in a notebook: not what it took, arrays among it.
                self.deployment.undeploy(None)

    def _leave_draining_workers(self) -> None:
        """On a thread of its own: a worker was asked to end, perhaps while no step runs."""
        with self.lock:
            if not self._closed:
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
