"""Activity: what a session does and has done, told to logs, to meters and to `graphflow status`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphflow.runtime.protocol.clock_sync import Clock
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.wire.messages import (
    EDGE_BITS,
    Abort,
    Commit,
    Compute,
    Forget,
    Key,
    Load,
    step_of,
)

if TYPE_CHECKING:
    from graphflow.runtime.protocol.coordinator import CoordinatorMachine

_RATE_WINDOW_STEPS = 64  # steps over which the rate is taken
_TENSOR_METRICS = {
    "sent": ("graphflow_sent_bytes_total", "graphflow_sent_tensors_total"),
    "received": ("graphflow_received_bytes_total", "graphflow_received_tensors_total"),
}

_log = Log("graphflow.worker")
_coordinator_log = Log("graphflow.coordinator")


class WorkerActivity:
    """Told of each job's beginning and end by the thread that runs them; read by any.

    Args:
        addresses: of all workers.
    """

    def __init__(
        self, session: str, epoch: int, worker: int, meters: Meters, addresses: Sequence[str]
    ) -> None:
        self.session = session
        self.epoch = epoch
        self.worker = worker
        self.opened = time.monotonic()
        self.committed = 0
        self.last_seconds = 0.0
        self.step = -1  # how many steps of the session have committed, as far as is known here
        self._meters = meters
        self._addresses = addresses
        self._job: tuple[Any, int, float] | None = None  # what, of which step, since when
        self._programs: set[str] = set()
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW_STEPS)

    def begin(self, job: Any, step: int) -> None:
        """A job starts."""
        if type(job) is Compute:
            self.step = step_of(step)
        self._job = (job, step, time.monotonic())

    def end(self, job: Any, step: int, outcome: Any, *, cancelled: bool = False) -> None:
        """The job that started is over; its outcome is an exception if it failed, which it may have
        because its coordinator `cancelled` the step."""
        assert self._job is not None
        now = time.monotonic()
        seconds = now - self._job[2]
        self._job = None
        failed = isinstance(outcome, BaseException)
        if type(job) is Compute:
            self._on_computed(step, seconds, outcome if failed else None, cancelled)
        elif type(job) is Commit and not failed:
            self.on_commit(step)
        elif isinstance(job, Abort) and not failed:
            self._meters.add("graphflow_steps_total", 1, "aborted")
        elif isinstance(job, Load) and not failed:
            self._programs.add(job.program)
        elif isinstance(job, Forget) and not failed:
            self._programs.difference_update(job.programs)

    def on_commit(self, step: int) -> None:
        """A step has committed."""
        self.committed += 1
        self.step = max(self.step, step_of(step) + 1)
        self._ends.append(time.monotonic())
        self._meters.add_later(self._count_commits, None)

    def _count_commits(self, commits: Sequence[None]) -> None:
        self._meters.add("graphflow_steps_total", len(commits), "committed")

    def _on_computed(
        self, step: int, seconds: float, error: BaseException | None, cancelled: bool
    ) -> None:
        self.last_seconds = seconds
        self._meters.add_later(self._count_computed, seconds)
        if error is None:
            if _log.is_enabled("step.computed"):
                _log.tell(
                    "step.computed", session=self.session, step=step_of(step), seconds=seconds
                )
            return
        if not cancelled:  # else it counts when it is told to abort
            self._meters.add("graphflow_steps_total", 1, "failed")
        _log.tell(
            "step.cancelled" if cancelled else "step.failed",
            session=self.session, step=step_of(step), seconds=seconds,
            error=type(error).__name__, reason=str(error),
        )  # fmt: skip

    def _count_computed(self, seconds: Sequence[float]) -> None:
        self._meters.observe("graphflow_step_seconds", *seconds)

    def count_tensor(self, how: str, worker: int, edge: Key, nbytes: int) -> None:
        """A tensor was "sent" to another worker, or "received" from it."""
        self._meters.add_later(self._count_carried, (how, worker, edge, nbytes))

    def _count_carried(self, tensors: Sequence[tuple[str, int, Key, int]]) -> None:
        found: dict[tuple[str, int, Key], list[int]] = {}
        for how, worker, edge, nbytes in tensors:
            found.setdefault((how, worker, edge), []).append(nbytes)
        for (how, worker, edge), each in found.items():
            total, count = _TENSOR_METRICS[how]
            told = {total: sum(each), count: len(each)}
            self._meters.add_all(told, self._addresses[worker], _edge_label(edge))

    def report(self) -> dict[str, Any]:
        """Plain data for `status`; times are ages in seconds."""
        now, job, ends = time.monotonic(), self._job, list(self._ends)
        # Until now, so that the rate of a session that stands still falls.
        rate = len(ends) / (now - ends[0]) if len(ends) > 1 else 0.0
        return {
            "session": self.session,
            "epoch": self.epoch,
            "worker": self.worker,
            "age": now - self.opened,
            "programs": len(self._programs),
            "step": self.step,
            "committed": self.committed,
            "steps_per_second": rate,
            "last_step_seconds": self.last_seconds,
            "doing": _describe_job(job[0], job[1]) if job else "",
            "doing_seconds": now - job[2] if job else 0.0,
        }


def _describe_job(job: Any, step: int) -> str:
    what = type(job).__name__.lower()
    return f"{what} step {step_of(step)}" if isinstance(job, Compute | Commit | Abort) else what


class SessionActivity:
    """What a session over workers does, as its coordinator sees it."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.opened = time.monotonic()
        self.meters = Meters()
        self._fed = 0  # bytes, of steps that have not ended
        self._lost: set[int] = set()
        self._resent: Callable[[], dict[tuple[str, ...], float]] = dict

    def watch(self, machine: CoordinatorMachine, addresses: Sequence[str]) -> None:
        """Let the meters tell of the workers of an epoch, none of which is lost yet, when somebody
        asks."""
        workers = len(addresses)
        self._lost.clear()

        def states() -> dict[tuple[str, ...], float]:
            lost = len(machine.lost())
            return {("up",): workers - lost, ("lost",): lost}

        def clocks(read: Callable[[Clock], float]) -> dict[tuple[str, ...], float]:
            told = {(str(w),): read(machine.clock(w)) for w in range(workers)}
            return {worker: value for worker, value in told.items() if math.isfinite(value)}

        def error(clock: Clock) -> float:
            return clock.reading(time.monotonic()).error

        before = {address: count for address, count in self._resent().items() if count}

        def resent() -> dict[tuple[str, ...], float]:
            told = dict(before)
            for worker, address in enumerate(addresses):
                now = machine.stream(worker).outbound.repeats
                told[address,] = before.get((address,), 0) + now
            return told

        self._resent = resent  # for the next epoch: what counts only grows

        self.meters.watch("graphflow_workers", states)
        self.meters.watch("graphflow_resent_messages_total", resent)
        self.meters.watch("graphflow_round_trip_seconds", lambda: clocks(lambda c: c.round_trip))
        self.meters.watch("graphflow_clock_error_seconds", lambda: clocks(error))

    def add_fed_bytes(self, nbytes: int) -> None:
        """A step, which has not ended yet, is fed so much."""
        self._fed += nbytes

    def on_commit(self, step: int, seconds: float, fetched: int, fed: int = 0) -> None:
        """A step is decided, and so many bytes of it were fetched, and `fed` besides what was
        told."""
        fed, self._fed = fed + self._fed, 0
        self.meters.add_later(self._count, (seconds, fed, fetched))
        if _coordinator_log.is_enabled("step.committed"):
            _coordinator_log.tell(
                "step.committed", session=self.session, step=step_of(step), seconds=seconds
            )

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
        """A step changed nothing."""
        self.meters.add("graphflow_steps_total", 1, "aborted")
        _coordinator_log.tell(
            "step.aborted", session=self.session, step=step_of(step), seconds=seconds,
            error=type(error).__name__, reason=str(error),
        )  # fmt: skip

    def on_workers_lost(self, workers: Mapping[int, str], addresses: Sequence[str]) -> None:
        """Which workers are lost by now, and why; each is told once."""
        for worker in workers.keys() - self._lost:
            self._lost.add(worker)
            self.meters.add("graphflow_workers_lost_total")
            _coordinator_log.tell(
                "worker.lost", session=self.session, worker=worker, address=addresses[worker],
                reason=workers[worker],
            )  # fmt: skip

    def on_session_end(self) -> None:
        """The session is over."""
        _coordinator_log.tell(
            "session.ended", session=self.session, seconds=time.monotonic() - self.opened,
            steps=int(self.meters.value("graphflow_steps_total", "committed")),
        )  # fmt: skip


def _edge_label(key: Key) -> str:
    """The name of an edge for meters: one for all its tensors in a loop, and one for all words of a
    kind, which are told anew for each combination of sizes."""
    if isinstance(key, int):
        return str(key & ((1 << EDGE_BITS) - 1))
    return key.partition("/")[0]
