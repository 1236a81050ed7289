"""A pipeline schedule as pure data: for each device, its tasks in order.

A task is the forward pass (F), the backward pass (B) or, in schedules that divide that, the
gradient of the weights (W) of one stage for one micro-batch. A device takes its tasks in order and
waits for what each one needs. Nothing else is decided while they run.

`schedules.py` has the schedules of the literature, `timeline.py` simulates and draws them. A new
schedule is a function with `@register_schedule` in a file of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ScheduleError
from graphflow.ir.op import user_location
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields

Phase = Literal["F", "B", "W"]
_PHASES = get_args(Phase)

Updates = Literal["flush", "stash", "vertical", "double-buffered"]
"""When weights change. "flush": once, after all micro-batches. "stash": at each backward pass of a
stage, which uses the weights of its forward pass. "vertical": likewise, with the weights that the
first stage had when the micro-batch entered. "double-buffered": every `group` micro-batches, with
two versions."""


class Task(NamedTuple):
    """One phase of one stage for one micro-batch."""

    phase: Phase
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.phase} of micro-batch {self.microbatch} at stage {self.stage}"


def schedule_error(what: str, why: str) -> ScheduleError:
    """Return an error that names a function or schedule, and the user's line."""
    return ScheduleError(f"{what} at {user_location()}: {why}")


@checks_arguments(ScheduleError)
@dataclass(frozen=True)
class Schedule:
    """An order of tasks for each device.

    Args:
        name: the name in the literature.
        stages: the stages of the network; more than there are devices, if a device has several.
        microbatches: the parts of one batch.
        orders: for each device, its tasks.
        updates: when weights change; see `Updates`.
        group: micro-batches for each update, if it is double-buffered.
        recompute: whether a backward pass computes the forward pass again instead of storing it.

    Raises:
        ScheduleError: a task is missing, occurs twice, or is divided at some stages only; the
            devices would deadlock; or, without a flush, weights would change in another order than
            that of micro-batches, or be read before they exist.
    """

    name: str
    stages: int
    microbatches: int
    orders: tuple[tuple[Task, ...], ...]
    updates: Updates = "flush"
    group: int = 1
    recompute: bool = False
    _turns: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The device of each task, in an order in which all tasks can run."""

    def __post_init__(self) -> None:
        _check_parts(self)
        _check_complete(self)
        set_frozen_fields(self, _turns=tuple([device for device, _ in _find_execution_order(self)]))
        if self.updates != "flush":
            _check_updates(self)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.orders)

    @property
    def several(self) -> bool:
        """True if a device has tasks of several stages. Labels of tasks then name the stage,
        too."""
        return any(len({task.stage for task in order}) > 1 for order in self.orders)

    @property
    def splits_backward(self) -> bool:
        """True if the gradient of the weights is a task of its own."""
        return any(task.phase == "W" for task in self.orders[0])

    @property
    def last(self) -> Phase:
        """The phase with which a stage finishes a micro-batch."""
        return "W" if self.splits_backward else "B"

    @property
    def homes(self) -> dict[tuple[int, int], int]:
        """The device of each (stage, micro-batch)."""
        return {
            (task.stage, task.microbatch): device
            for device, order in enumerate(self.orders)
            for task in order
        }

    @property
    def done_ahead(self) -> dict[tuple[int, int], int]:
        """For each (stage, micro-batch), how many micro-batches the stage finished before this
        one's F."""
        last, done = self.last, Counter[int]()
        found: dict[tuple[int, int], int] = {}
        for phase, stage, microbatch in chain.from_iterable(self.orders):
            if phase == "F":
                found[stage, microbatch] = done[stage]
            done[stage] += phase == last
        return found

    @property
    def versions(self) -> dict[tuple[int, int], int]:
        """For each (stage, micro-batch), how many updates its weights had seen when its passes used
        them."""
        if self.updates == "flush":
            return dict.fromkeys(self.homes, 0)
        if self.updates == "double-buffered":
            return {(s, i): max(0, i // self.group - 1) for s, i in self.homes}
        ahead = self.done_ahead
        return {(s, i): ahead[0 if self.updates == "vertical" else s, i] for s, i in ahead}

    def needs(self, task: Task) -> list[Task]:
        """Return the tasks whose results a task reads."""
        phase, stage, microbatch = task
        if phase == "W":
            return [Task("B", stage, microbatch)]
        if phase == "F":
            return [Task("F", stage - 1, microbatch)] if stage else []
        found = [Task("F", stage, microbatch)]
        if stage + 1 < self.stages:
            found.append(Task("B", stage + 1, microbatch))
        return found


class ScheduleFunction(Protocol):
    """The interface of a schedule: a function from sizes to a `Schedule`."""

    def __call__(self, stages: int, microbatches: int) -> Schedule:
        """Return the schedule of a network of so many stages and a batch of so many micro-batches.

        Raises:
            ScheduleError: the schedule does not exist for these sizes.
        """


Function = TypeVar("Function", bound=ScheduleFunction)

SCHEDULES: dict[str, ScheduleFunction] = {}
"""The registered schedules, by the names that `Pipeline(schedule=)` takes."""
STAGES_PER_DEVICE: dict[str, int] = {}
"""How many stages each registered schedule puts on a device."""


def register_schedule(name: str, stages_per_device: int = 1) -> Callable[[Function], Function]:
    """Register a `ScheduleFunction` under a name, for `Pipeline(schedule=name)`.

    Args:
        name: the name. A later registration of a name replaces the earlier one.
        stages_per_device: stages on each device, with which `Pipeline("auto")` finds the number of
            stages from that of devices.
    """

    def register(function: Function) -> Function:
        SCHEDULES[name] = function
        STAGES_PER_DEVICE[name] = stages_per_device
        return function

    return register


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """Yield all tasks and their devices in an order in which they can run."""
    orders = [iter(order) for order in schedule.orders]
    for device in schedule._turns:
        yield device, next(orders[device])


def _find_execution_order(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """Yield tasks as `execution_order` does, for a schedule that is being made.

    Raises:
        ScheduleError: there is no such order. The message says what each device waits for.
    """
    done: set[Task] = set()
    at = [0] * schedule.devices
    left = sum(map(len, schedule.orders))
    while left:
        before = left
        for device, order in enumerate(schedule.orders):
            for task in islice(order, at[device], None):
                if not done.issuperset(schedule.needs(task)):
                    break
                yield device, task
                done.add(task)
                at[device] += 1
                left -= 1
        if left == before:
            raise _deadlock_error(schedule, at, done)


def _deadlock_error(schedule: Schedule, at: Sequence[int], done: set[Task]) -> ScheduleError:
    """Return the error of a schedule whose devices wait for each other."""
    waits = []
    for device, order in enumerate(schedule.orders):
        if at[device] < len(order):
            task = order[at[device]]
            missing = next(need for need in schedule.needs(task) if need not in done)
            waits.append(f"device {device} has {task} next, which needs {missing}")
    return schedule_error(
        _describe(schedule),
        f"it would deadlock after {len(done)} tasks: {'; '.join(waits)}; reorder the tasks so that "
        "each one's needs come before it",
    )


def _describe(schedule: Schedule) -> str:
    """Name a schedule for messages."""
    return f"schedule {schedule.name!r}"


def _check_parts(schedule: Schedule) -> None:
    """Check the types and ranges of a schedule's fields.

    Raises:
        ScheduleError: see above.
    """
    what = _describe(schedule)
    for name in ("stages", "microbatches", "group"):
        given = getattr(schedule, name)
        count = as_count(given)
        if count is None:
            raise schedule_error(what, f"{name} must be an int of at least 1, not {given!r}")
        set_frozen_fields(schedule, **{name: count})
    if schedule.updates not in get_args(Updates):
        choices = ", ".join(map(repr, get_args(Updates)))
        raise schedule_error(what, f"updates must be one of {choices}, not {schedule.updates!r}")
    if schedule.group != 1 and schedule.updates != "double-buffered":
        raise schedule_error(
            what,
            f"group={schedule.group} is for updates='double-buffered', not for "
            f"{schedule.updates!r}; leave it out",
        )
    orders = schedule.orders
    if not isinstance(orders, tuple | list) or not orders:
        raise schedule_error(
            what, f"orders must be a tuple of tasks for each device, not {orders!r}"
        )
    for device, order in enumerate(orders):
        if not isinstance(order, tuple | list) or not order:
            raise schedule_error(what, f"device {device} must have a tuple of tasks, not {order!r}")
        wrong = next((task for task in order if not _is_task(task)), None)
        if wrong is not None:
            raise schedule_error(
                what,
                f"device {device} has tasks such as gf.parallel.Task('F', stage, microbatch), of "
                f"phase 'F', 'B' or 'W' and with numbers from 0 up, not {wrong!r}",
            )


def _is_task(task: Any) -> bool:
    """Return True if a value is a Task with a known phase and numbers from 0 on."""
    return (
        isinstance(task, Task)
        and task.phase in _PHASES
        and as_count(task.stage, least=0) is not None
        and as_count(task.microbatch, least=0) is not None
    )


def require_schedule(schedule: Any, what: str) -> None:
    """Check that an argument is a Schedule.

    Raises:
        ScheduleError: it is not.
    """
    if not isinstance(schedule, Schedule):
        raise schedule_error(
            what, f"it takes a schedule, such as gf.parallel.one_f_one_b(2, 4), not {schedule!r}"
        )


def _check_complete(schedule: Schedule) -> None:
    """Check that each task of each stage and micro-batch occurs once, and that a stage has all
    tasks of a micro-batch on one device.

    Raises:
        ScheduleError: see above.
    """
    counts = Counter(chain.from_iterable(schedule.orders))
    stages, microbatches = schedule.stages, schedule.microbatches
    phases: tuple[Phase, ...] = (
        ("B", "F", "W") if any(t.phase == "W" for t in counts) else ("B", "F")
    )
    fitting = {t for t in counts if t.stage < stages and t.microbatch < microbatches}
    strange = counts.keys() - fitting
    missing = (  # a generator: there may be too many to list
        task
        for phase in phases
        for stage in range(stages)
        for microbatch in range(microbatches)
        if (task := Task(phase, stage, microbatch)) not in fitting
    )
    lacking = len(phases) * stages * microbatches - len(fitting)
    repeated = {t for t, count in counts.items() if count > 1}
    what = f"{_describe(schedule)} (stages={stages}, microbatches={microbatches})"
    for problem, number, first, remedy in (
        ("it has no place for", len(strange), min(strange, default=None), "leave it out"),
        ("it misses", lacking, next(missing, None), "add it to its device's order"),
        ("it repeats", len(repeated), min(repeated, default=None), "leave it in one place"),
    ):
        if number:
            others = f" and {number - 1:,} other tasks" if number > 1 else ""
            raise schedule_error(
                what,
                f"{problem} {first}{others}; {remedy}: each task of each stage and micro-batch is "
                "there once",
            )
    homes: dict[tuple[int, int], int] = {}
    for device, order in enumerate(schedule.orders):
        for task in order:
            home = homes.setdefault((task.stage, task.microbatch), device)
            if home != device:
                raise schedule_error(
                    what,
                    f"it has {task} on device {device}, but another of its tasks on {home}; put "
                    "them on one: a stage has all tasks of a micro-batch on one device",
                )


def _check_updates(schedule: Schedule) -> None:
    """Check that weights change in the order of micro-batches, and exist before they are read.

    Raises:
        ScheduleError: see above.
    """
    what, last = _describe(schedule), schedule.last
    homes: dict[int, int] = {}
    done = Counter[int]()
    for device, order in enumerate(schedule.orders):
        for task in order:
            home = homes.setdefault(task.stage, device)
            if home != device:
                raise schedule_error(
                    what,
                    f"stage {task.stage} is on devices {home} and {device}, whose weights have to "
                    "change together; updates='flush' lets them",
                )
            if task.phase == last and task.microbatch != done[task.stage]:
                raise schedule_error(
                    what,
                    f"it has {task} before {task._replace(microbatch=done[task.stage])}, but each "
                    "of these updates the weights; put them into the order of micro-batches, or "
                    "give updates='flush'",
                )
            done[task.stage] += task.phase == last
    ahead = schedule.done_ahead
    for (stage, microbatch), used in schedule.versions.items():
        if ahead[stage, microbatch] < used * schedule.group:
            maker = Task(last, stage, used * schedule.group - 1)
            larger = ", or give a larger group" if schedule.updates == "double-buffered" else ""
            raise schedule_error(
                what,
                f"it would deadlock: {Task('F', stage, microbatch)} uses weights that {maker} "
                f"updates, which comes behind it; put that before it{larger}",
            )
