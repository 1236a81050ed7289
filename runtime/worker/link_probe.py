"""Arrays that go to another worker and come back: which workers can be reached, and how quick the
ways to them are."""

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

_CLOSING_POLL_SECONDS = 0.05  # seconds between two looks at whether the session is closing
_ECHO_SECONDS = 10.0  # for an echo to be taken by the socket

DriveUntil = Callable[[Callable[[], bool], float], bool]
"""Receives what comes until something is done, for at most so many seconds; False: at once, for
another thread does."""


class LinkProber:
    """Those of one session on worker `index`: asked for here, and sent back to who asked.

    Args:
        links: to the other workers; filled when the session is opened.
        closing: set when nothing is to be waited for any more.
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
        self._queued = self._sent = 0  # echoes, by the thread that is for those that wait
        self._thread = threading.Thread(target=self._send_queued_echoes, name=name, daemon=True)
        self._thread.start()

    def link_to(self, worker: int) -> PeerLink:
        """The way to another worker.

        Raises:
            ProtocolError: there is none.
        """
        link = self._links.get(worker)
        if link is None:
            raise ProtocolError(
                f"worker {self._index} has no link to worker {worker} among {len(self._addresses)}"
            )
        return link

    # For others --------------------------------------------------------------------------------

    def queue_echo(self, run: RunJob) -> None:
        """Sends an array back to who asked, on a thread that may wait for room."""
        self._queued += 1
        self._requests.put(run)

    def try_send_back(self, run: RunJob) -> bool:
        """Sends an array back, unless that would have to wait for room; for who drives the sockets,
        where room is told of, while no thread of the session has a job. Whether it did: waking
        another thread would count as the link's time."""
        chunk = run.job
        assert isinstance(chunk, Chunk)
        link = self._links.get(chunk.name) if isinstance(chunk.name, int) else None
        if self._queued > self._sent or link is None or not link.has_room(chunk.nbytes):
            return False
        self.send_back(run)
        return True

    def send_back(self, run: RunJob) -> None:
        """Sends an array back to who asked."""
        chunk = run.job
        assert isinstance(chunk, Chunk) and isinstance(chunk.name, int)
        (array,) = run.arrays.values()
        go_on = partial(self._has_time, time.monotonic() + _ECHO_SECONDS)
        with contextlib.suppress(GraphflowError):  # the one who asked has a deadline
            self.link_to(chunk.name).send("echoed", chunk.number, self._index, array, True, go_on)

    def _send_queued_echoes(self) -> None:
        while (run := self._requests.get()) is not None:
            self.send_back(run)
            self._sent += 1

    def close(self) -> None:
        """Ends the thread."""
        self._requests.put(None)
        self._thread.join(_ECHO_SECONDS)

    # Our own -----------------------------------------------------------------------------------

    def accept_echo(self, request: int, origin: int, array: Array) -> None:
        """An echo of ours has come back; from any thread."""
        self._returned_echoes.put((request, origin, array))

    def check_reachability(self, job: Meet) -> list[int]:
        """The other workers that do not answer; all are asked at the same time."""
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
        """The median one-way time in seconds, half of a round trip."""
        if job.nbytes > BUDGET:
            raise ProtocolError(f"a probe of {job.nbytes} bytes exceeds {BUDGET}")
        until = time.monotonic() + job.deadline
        array = np.ones(job.nbytes, np.uint8)  # of zeros, the system would keep one page
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
        """The next of some workers whose echo has come."""
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
