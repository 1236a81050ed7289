"""When the tasks of a schedule run: a simulation in seconds, and a drawing in text.

timeline = run(one_f_one_b(4, 8), forward=1.0, backward=2.0)
timeline.idle, timeline.stored
print(draw(one_f_one_b(stages=2, microbatches=4)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ScheduleError
from graphflow.parallel.mesh.count_arguments import as_count
from graphflow.parallel.pipelining.schedule import (
    Phase,
    Schedule,
    Task,
    execution_order,
    require_schedule,
    schedule_error,
)


@dataclass(frozen=True)
class ScheduleTimeline:
    """When each task of a schedule runs, in seconds.

    Attributes:
        spans: for each device, (task, start, end) of its tasks.
        stored: for each device, the most micro-batches (of one of its stages) whose activations it
            holds.
    """

    spans: tuple[tuple[tuple[Task, float, float], ...], ...]
    stored: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(spans[-1][2] for spans in self.spans)

    @property
    def period(self) -> float:
        """Seconds between two consecutive batches: the longest time of a device from its first task
        to its last."""
        return max(spans[-1][2] - spans[0][1] for spans in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each device computes."""
        return tuple(sum(end - start for _, start, end in spans) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of each period in which a device waits."""
        return tuple(self.period - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the devices' time that is idle."""
        return sum(self.idle) / (self.period * len(self.spans)) if self.period else 0.0


@checks_arguments(ScheduleError)
def run(
    schedule: Schedule,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float | Sequence[float] = 0.0,
    transfer: float = 0.0,
) -> ScheduleTimeline:
    """Simulate a schedule.

    Args:
        schedule: the schedule.
        forward, backward, weight: seconds for each micro-batch, one number for each stage or one
            for all: the forward pass, the gradient of a stage's input, and the gradient of its
            weights. If the schedule does not divide them, a backward pass takes the sum of both.
        transfer: seconds between two devices.

    Raises:
        ScheduleError: `schedule` is no Schedule, or a time is negative, infinite or missing.
    """
    require_schedule(schedule, "run")
    if not _is_time(transfer):
        raise schedule_error("run", f"transfer is {transfer!r}: give seconds, 0 or more")
    seconds = _durations(schedule, forward, backward, weight)
    homes = schedule.homes
    ends: dict[Task, float] = {}
    free = [0.0] * schedule.devices
    spans: list[list[tuple[Task, float, float]]] = [[] for _ in schedule.orders]
    for device, task in execution_order(schedule):
        start = free[device]
        for need in schedule.needs(task):
            away = homes[need.stage, need.microbatch] != device
            start = max(start, ends[need] + (transfer if away else 0.0))
        free[device] = ends[task] = start + seconds[task.phase][task.stage]
        spans[device].append((task, start, free[device]))
    stored = (_most_stored(order, schedule.last) for order in schedule.orders)
    return ScheduleTimeline(tuple(map(tuple, spans)), tuple(stored))


def _durations(
    schedule: Schedule,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float | Sequence[float],
) -> dict[Phase, list[float]]:
    """Return the seconds of each phase and stage."""

    def of_stages(given: float | Sequence[float], what: str) -> list[float]:
        """Return seconds for each stage.

        Raises:
            ScheduleError: a number is missing, negative or infinite.
        """
        found: list[Any]
        found = list(given) if isinstance(given, Iterable) else [given] * schedule.stages
        if len(found) != schedule.stages or not all(map(_is_time, found)):
            raise schedule_error(
                "run",
                f"{what} is {given!r}: give seconds (0 or more), the same for all or one for each "
                f"of the {schedule.stages} stages",
            )
        return found

    f, b, w = (
        of_stages(given, what)
        for given, what in ((forward, "forward"), (backward, "backward"), (weight, "weight"))
    )
    if schedule.recompute:
        b = [x + y for x, y in zip(b, f, strict=True)]
    if not schedule.splits_backward:
        b = [x + y for x, y in zip(b, w, strict=True)]
    return {"F": f, "B": b, "W": w}


def _is_time(seconds: Any) -> bool:
    """Return True if a value is a finite number of seconds, 0 or more."""
    return isinstance(seconds, Real) and 0 <= float(seconds) < math.inf


def _most_stored(order: Sequence[Task], last: Phase) -> int:
    """Return the most activations held at once. A stage holds them from its F to the last task that
    reads them."""
    held = most = 0
    for task in order:
        held += (task.phase == "F") - (task.phase == last)
        most = max(most, held)
    return most


MAX_COLUMNS = 1_000_000
"""The most columns of a drawing."""


@checks_arguments(ScheduleError)
def draw(schedule: Schedule, forward: int = 1, backward: int = 1, weight: int = 1) -> str:
    """Draw a schedule in text: a line for each device, a column for each unit of time; `..` is
    idle.

    If a device has several stages, the stage follows the task: F0/4 belongs to stage 4.

    Args:
        schedule: the schedule.
        forward, backward, weight: columns that a task takes.

    Raises:
        ScheduleError: `schedule` is no Schedule; columns are not whole numbers, or all 0.
    """
    require_schedule(schedule, "draw")
    columns = (forward, backward, weight if schedule.splits_backward else 0)
    if any(as_count(c, least=0) is None for c in columns) or not any(columns):
        raise schedule_error(
            "draw",
            f"a task takes a whole number of columns, not {forward!r}, {backward!r} and "
            f"{weight!r}; for times in seconds see gf.parallel.run",
        )
    timeline = run(schedule, forward, backward, weight if schedule.splits_backward else 0)
    if timeline.makespan > MAX_COLUMNS:
        raise schedule_error(
            "draw",
            f"{int(timeline.makespan):,} columns are more than can be drawn, which is "
            f"{MAX_COLUMNS:,}; let tasks take fewer",
        )
    cells: list[dict[int, str]] = []
    for spans in timeline.spans:
        row: dict[int, str] = {}
        for task, start, end in spans:
            where = f"/{task.stage}" if schedule.several else ""
            for time in range(int(start), int(end)):
                row[time] = f"{task.phase}{task.microbatch}{where}"
        cells.append(row)
    width = max(len(cell) for row in cells for cell in row.values())
    length = int(timeline.makespan)
    return "\n".join(
        " ".join(row.get(time, "." * width).ljust(width) for time in range(length)).rstrip()
        for row in cells
    )
