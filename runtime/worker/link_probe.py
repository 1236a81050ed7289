"""Probes of the links between workers: which workers can be reached, and how fast the links are.

A probe is an array that another worker sends back (an echo).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from graphflow.errors import GraphflowError, ProtocolError, StepTimeout
from graphflow.runtime.protocol.worker_events import RunJob
from graphflow.runtime.transport.shared_memory_arrays import is_whole
from graphflow.runtime.wire.frame_codec import BUDGET
from graphflow.runtime.wire.messages import Array, Chunk, Meet, Probe
from graphflow.runtime.worker.peer_link import PeerLink

_CLOSING_POLL_SECONDS = 0.05  # seconds between two checks whether the session is closing
_ECHO_SECONDS = 10.0  # for the socket to accept an echo

DriveUntil = Callable[[Callable[[], bool], float], bool]
"""Drives the sockets until a condition holds, for at most some seconds. Returns False, at once, if
another thread drives them."""


class LinkProber:
    """The probes of one session on worker `index`, and its answers to the probes of others.

    Args:
        links: to the other workers; filled when the session is opened.
        closing: set when all waits must end.
        name: of the thread that answers.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        links: Mapping[int, PeerLink],
        drive_until: DriveUntil,
        closing: threading.Event,
        name: str,
    ) -> None:
        self._index = index
        self._addresses = addresses
        self._links = links
        self._drive_until = drive_until
        self._closing = closing
        self._returned_echoes: queue.SimpleQueue[tuple[int, int, Array]] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[RunJob | None] = queue.SimpleQueue()
        self._queued = self._sent = 0  # echoes of the answering thread
        self._thread = threading.Thread(target=self._send_queued_echoes, name=name, daemon=True)
        self._thread.start()

    def link_to(self, worker: int) -> PeerLink:
        """Return the link to another worker.

        Raises:
            ProtocolError: there is no such worker.
        """
        link = self._links.get(worker)
        if link is None:
            raise ProtocolError(
                f"worker {self._index} has no link to worker {worker} among {len(self._addresses)}"
            )
        return link

    # For others --------------------------------------------------------------------------------

    def queue_echo(self, run: RunJob) -> None:
        """Send an array back on the answering thread, which may wait for room."""
        self._queued += 1
        self._requests.put(run)

    def try_send_back(self, run: RunJob) -> bool:
        """Send an array back, unless that would have to wait for room; return True if it was sent.

        Called by the thread that drives the sockets, while no thread of the session has a job.
        Waking another thread would be measured as time of the link.
        """
        chunk = run.job
        assert isinstance(chunk, Chunk)
        link = self._links.get(chunk.name) if isinstance(chunk.name, int) else None
        if self._queued > self._sent or link is None or not link.has_room(chunk.nbytes):
            return False
        self.send_back(run)
        return True

    def send_back(self, run: RunJob) -> None:
        """Send an array back to the worker that sent it."""
        chunk = run.job
        assert isinstance(chunk, Chunk) and isinstance(chunk.name, int)
        (array,) = run.arrays.values()
        go_on = partial(self._has_time, time.monotonic() + _ECHO_SECONDS)
        with contextlib.suppress(GraphflowError):  # the prober has a deadline of its own
            self.link_to(chunk.name).send("echoed", chunk.number, self._index, array, True, go_on)

    def _send_queued_echoes(self) -> None:
        while (run := self._requests.get()) is not None:
            self.send_back(run)
            self._sent += 1

    def close(self) -> None:
        """End the answering thread."""
        self._requests.put(None)
        self._thread.join(_ECHO_SECONDS)

    # Our own -----------------------------------------------------------------------------------

    def accept_echo(self, request: int, origin: int, array: Array) -> None:
        """Take in an echo of this worker's probe. Callable from any thread."""
        self._returned_echoes.put((request, origin, array))

    def check_reachability(self, job: Meet) -> list[int]:
        """Return the other workers that do not answer; all are probed at the same time."""
        until = time.monotonic() + job.deadline
        nothing = np.zeros(0, np.uint8)
        for target in self._links:
            self._send_probe(target, job.request, nothing, until)
        missing = set(self._links)
        with contextlib.suppress(StepTimeout):
            while missing:
                missing.discard(self._next_answer(job.request, missing, job.deadline, until))
        return sorted(missing)

    def measure_latency(self, job: Probe) -> float:
        """Return the median one-way time in seconds: half of a round trip."""
        if job.nbytes > BUDGET:
            raise ProtocolError(f"a probe of {job.nbytes} bytes exceeds {BUDGET}")
        until = time.monotonic() + job.deadline
        array = np.ones(job.nbytes, np.uint8)  # zeros would all share one page of memory
        times = []
        for _ in range(max(1, job.repeats)):
            started = time.perf_counter()
            self._send_probe(job.target, job.request, array, until)
            self._next_answer(job.request, {job.target}, job.deadline, until)
            times.append(time.perf_counter() - started)
        return float(np.median(times)) / 2

    def _send_probe(self, target: int, request: int, array: Array, until: float) -> None:
        go_on = partial(self._has_time, until)
        self.link_to(target).send("echo", request, self._index, array, True, go_on)

    def _next_answer(
        self, request: int, targets: Collection[int], seconds: float, until: float
    ) -> int:
        """Return the next of some workers whose echo has arrived."""
        while self._has_time(until):
            self._drive_until(self._has_come, until - time.monotonic())
            with contextlib.suppress(queue.Empty):
                answered, origin, array = self._returned_echoes.get(timeout=_CLOSING_POLL_SECONDS)
                if answered != request or origin not in targets:
                    continue
                while not is_whole(array) and self._has_time(until):
                    pass
                return origin
        late = min(targets)
        raise StepTimeout(
            f"worker {late} at {self._addresses[late]} did not answer worker {self._index} within "
            f"{seconds:g} s; can that address be reached from there?"
        )

    def _has_come(self) -> bool:
        return not self._returned_echoes.empty() or self._closing.is_set()

    def _has_time(self, until: float) -> bool:
        return time.monotonic() < until and not self._closing.is_set()
