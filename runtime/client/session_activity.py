"""The activity of a distributed session, as its coordinator's log events and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from graphflow.runtime.protocol.clock_sync import PeerClock
from graphflow.runtime.protocol.coordinator import CoordinatorMachine
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.wire.step_values import step_of

_log = Log("graphflow.coordinator")


class SessionActivity:
    """Counts a session's steps, bytes and lost workers. Its metrics outlive epochs."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.opened = time.monotonic()
        self.meters = Meters()
        self._fed = 0  # bytes, of steps that have not ended
        self._lost: set[int] = set()
        self._resent: Callable[[], dict[tuple[str, ...], float]] = dict

    def watch(self, machine: CoordinatorMachine, addresses: Sequence[str]) -> None:
        """Let the metrics read the state of an epoch's workers whenever somebody asks for them.

        Args:
            addresses: the addresses of the epoch's workers, none of which is lost yet.
        """
        self._lost.clear()

        def states() -> dict[tuple[str, ...], float]:
            lost = len(machine.loss_reasons())
            return {("up",): len(addresses) - lost, ("lost",): lost}

        def clocks(read: Callable[[PeerClock], float]) -> dict[tuple[str, ...], float]:
            values = {(str(w),): read(machine.clock(w)) for w in range(len(addresses))}
            return {worker: value for worker, value in values.items() if math.isfinite(value)}

        def error(clock: PeerClock) -> float:
            return clock.estimate_at(time.monotonic()).error

        before = {address: count for address, count in self._resent().items() if count}

        def resent() -> dict[tuple[str, ...], float]:
            counts = dict(before)
            for worker, address in enumerate(addresses):
                now = machine.stream(worker).outbound.resent_count
                counts[address,] = before.get((address,), 0) + now
            return counts

        self._resent = resent  # the next epoch goes on from these counts: counters only grow

        self.meters.watch("graphflow_workers", states)
        self.meters.watch("graphflow_resent_messages_total", resent)
        self.meters.watch("graphflow_round_trip_seconds", lambda: clocks(lambda c: c.round_trip))
        self.meters.watch("graphflow_clock_error_seconds", lambda: clocks(error))

    def add_fed_bytes(self, nbytes: int) -> None:
        """Count bytes fed to a step that has not ended yet."""
        self._fed += nbytes

    def on_commit(self, step: int, seconds: float, fetched: int, fed: int = 0) -> None:
        """Record a step that was committed.

        Args:
            fetched: bytes of its fetches.
            fed: bytes of its feeds, besides those that `add_fed_bytes` has counted.
        """
        fed, self._fed = fed + self._fed, 0
        self.meters.add_later(self._count, (seconds, fed, fetched))
        if _log.is_enabled("step.committed"):
            _log.tell("step.committed", session=self.session, step=step_of(step), seconds=seconds)

    def _count(self, steps: Sequence[tuple[float, int, int]]) -> None:
        meters = self.meters
        seconds, fed, fetched = zip(*steps, strict=True)
        meters.add("graphflow_steps_total", len(steps), "committed")
        meters.observe("graphflow_step_seconds", *seconds)
        meters.add_all(
            {
                "graphflow_feed_bytes_total": sum(fed),
                "graphflow_fetch_bytes_total": sum(fetched),
            }
        )

    def on_abort(self, step: int, seconds: float, error: BaseException) -> None:
        """Record a step that was aborted."""
        self.meters.add("graphflow_steps_total", 1, "aborted")
        _log.tell(
            "step.aborted", session=self.session, step=step_of(step), seconds=seconds,
            error=type(error).__name__, reason=str(error),
        )  # fmt: skip

    def on_workers_lost(self, workers: Mapping[int, str], addresses: Sequence[str]) -> None:
        """Record the workers that are lost, each once in an epoch.

        Args:
            workers: all workers lost so far, with the reason for each.
        """
        for worker in workers.keys() - self._lost:
            self._lost.add(worker)
            self.meters.add("graphflow_workers_lost_total")
            _log.tell(
                "worker.lost", session=self.session, worker=worker, address=addresses[worker],
                reason=workers[worker],
            )  # fmt: skip

    def on_session_end(self) -> None:
        """Record the end of the session."""
        _log.tell(
            "session.ended", session=self.session, seconds=time.monotonic() - self.opened,
            steps=int(self.meters.value("graphflow_steps_total", "committed")),
        )  # fmt: skip
