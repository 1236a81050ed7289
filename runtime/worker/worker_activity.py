"""A worker's activity for one session: log events, metrics, and data for `graphflow status`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.wire.messages import Abort, Commit, Compute, Forget, Load
from graphflow.runtime.wire.step_values import EDGE_BITS, Key, step_of

_RATE_WINDOW_STEPS = 64  # the last commits, over which the rate of steps is taken
_TENSOR_METRICS = {
    "sent": ("graphflow_sent_bytes_total", "graphflow_sent_tensors_total"),
    "received": ("graphflow_received_bytes_total", "graphflow_received_tensors_total"),
}

_log = Log("graphflow.worker")


class WorkerActivity:
    """Counts a session's jobs, steps and tensors on a worker.

    The thread that runs the jobs reports their begin and end. Any thread may call `report`.

    Args:
        addresses: the addresses of all workers, by worker number.

    Attributes:
        committed: steps that have committed here.
        step: steps of the session that have committed, as far as this worker knows.
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
        self.step = -1
        self._meters = meters
        self._addresses = addresses
        self._job: tuple[Any, int, float] | None = None  # message, step, begin
        self._programs: set[str] = set()
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW_STEPS)

    def begin(self, job: Any, step: int) -> None:
        """Record that a job begins."""
        if type(job) is Compute:
            self.step = step_of(step)
        self._job = (job, step, time.monotonic())

    def end(self, job: Any, step: int, outcome: Any, *, cancelled: bool = False) -> None:
        """Record that the current job has ended.

        Args:
            outcome: its result; an exception if it failed.
            cancelled: whether it failed because the coordinator cancelled the step.
        """
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
        """Record that a step has committed."""
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
        if not cancelled:  # a cancelled step counts as aborted, when the abort arrives
            self._meters.add("graphflow_steps_total", 1, "failed")
        _log.tell(
            "step.cancelled" if cancelled else "step.failed",
            session=self.session, step=step_of(step), seconds=seconds,
            error=type(error).__name__, reason=str(error),
        )  # fmt: skip

    def _count_computed(self, seconds: Sequence[float]) -> None:
        self._meters.observe("graphflow_step_seconds", *seconds)

    def count_tensor(self, how: str, worker: int, edge: Key, nbytes: int) -> None:
        """Count a tensor.

        Args:
            how: "sent" or "received".
            worker: the worker at the other end.
            edge: the key of the edge.
        """
        self._meters.add_later(self._count_carried, (how, worker, edge, nbytes))

    def _count_carried(self, tensors: Sequence[tuple[str, int, Key, int]]) -> None:
        found: dict[tuple[str, int, Key], list[int]] = {}
        for how, worker, edge, nbytes in tensors:
            found.setdefault((how, worker, edge), []).append(nbytes)
        for (how, worker, edge), each in found.items():
            total, count = _TENSOR_METRICS[how]
            counts = {total: sum(each), count: len(each)}
            self._meters.add_all(counts, self._addresses[worker], _edge_label(edge))

    def report(self) -> dict[str, Any]:
        """Return the state as plain data for `graphflow status`. Times are ages in seconds."""
        now, job, ends = time.monotonic(), self._job, list(self._ends)
        # The window ends now, not at the last commit: the rate of an idle session must fall.
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
    """Name a job for `graphflow status`, such as "compute step 7"."""
    what = type(job).__name__.lower()
    return f"{what} step {step_of(step)}" if isinstance(job, Compute | Commit | Abort) else what


def _edge_label(key: Key) -> str:
    """Return the metric label of an edge.

    All tensors of an edge in a loop have one label. Control messages have one label for each kind,
    since their keys are new for each combination of sizes.
    """
    if isinstance(key, int):
        return str(key & ((1 << EDGE_BITS) - 1))
    return key.partition("/")[0]
