"""The staleness of gradients without a flush, and the versions of its weights that each stage
holds.

Source: Harlap et al., PipeDream, SOSP 2019; Narayanan et al., PipeDream-2BW, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ScheduleError
from graphflow.parallel.mesh.count_arguments import as_count
from graphflow.parallel.pipelining.schedule import Schedule, require_schedule, schedule_error


@dataclass(frozen=True)
class Staleness:
    """The staleness of one stage's gradients.

    Attributes:
        used: for each micro-batch, how many updates the weights had that its passes used.
        late: for each micro-batch, how many updates came between the weights that it used and the
            update that it takes part in.
        versions: the most versions of the weights that are held at once.
    """

    used: tuple[int, ...]
    late: tuple[int, ...]
    versions: int


@checks_arguments(ScheduleError)
def staleness(schedule: Schedule, stage: int) -> Staleness:
    """Return how stale the gradients of a stage are.

    Raises:
        ScheduleError: there is no such stage.

    Source: Harlap et al., PipeDream, SOSP 2019; Narayanan et al., PipeDream-2BW, ICML 2021.
    """
    require_schedule(schedule, "staleness")
    if as_count(stage, least=0) is None or stage >= schedule.stages:
        raise schedule_error(
            "staleness",
            f"the stages of {schedule.name!r} are 0 to {schedule.stages - 1}, not {stage!r}",
        )
    if schedule.updates == "flush":
        zeros = (0,) * schedule.microbatches
        return Staleness(zeros, zeros, 1)
    every = schedule.versions
    used = [every[stage, i] for i in range(schedule.microbatches)]
    made = [
        i // schedule.group for i in range(schedule.microbatches)
    ]  # the update of each micro-batch
    late = [now - then for now, then in zip(made, used, strict=True)]
    return Staleness(tuple(used), tuple(late), _most_versions(schedule, stage, used))


def _most_versions(schedule: Schedule, stage: int, used: Sequence[int]) -> int:
    """Return the most versions held at once. A version is held until no later micro-batch needs
    it."""
    order = [task for tasks in schedule.orders for task in tasks if task.stage == stage]
    done = most = 0
    for at, task in enumerate(order):
        newest = done // schedule.group
        ahead = {used[later.microbatch] for later in order[at:]}
        most = max(most, len({v for v in ahead if v <= newest} | {newest}))
        done += task.phase == schedule.last
    return most
