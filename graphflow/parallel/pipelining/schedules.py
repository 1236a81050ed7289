"""The pipeline schedules of the literature, each a function from sizes to a `Schedule`.

Below, p is the number of devices and m that of micro-batches; f, b and w are the seconds of a
stage's forward pass, of its input's gradient and of its weights' gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.argument_checks import checks_arguments
from graphflow.errors import ScheduleError
from graphflow.parallel.mesh.count_arguments import as_count
from graphflow.parallel.pipelining.schedule import (
    Phase,
    Schedule,
    Task,
    Updates,
    register_schedule,
    schedule_error,
)

_PHASES: tuple[Phase, ...] = ("F", "B", "W")


@register_schedule("gpipe")
@checks_arguments(ScheduleError)
def gpipe(stages: int, microbatches: int, recompute: bool = True) -> Schedule:
    """All forward passes, then all backward passes.

    Idle (p-1)(f+b). Each device stores m micro-batches, or only the stages' inputs with
    `recompute`.

    Source: Huang et al., GPipe, NeurIPS 2019.
    """
    p, m = _check_sizes("gpipe", stages, microbatches)
    orders = [
        [Task("F", s, i) for i in range(m)] + [Task("B", s, i) for i in range(m)] for s in range(p)
    ]
    return Schedule("GPipe", p, m, _to_tuples(orders), recompute=recompute)


@register_schedule("1f1b")
@checks_arguments(ScheduleError)
def one_f_one_b(stages: int, microbatches: int, recompute: bool = False) -> Schedule:
    """Each backward pass as early as possible, then forward and backward passes in turn.

    Idle (p-1)(f+b) as in GPipe, but stage s stores only min(m, p-s) micro-batches.

    Source: Narayanan et al., PipeDream-Flush, ICML 2021; DAPPLE, PPoPP 2021.
    """
    p, m = _check_sizes("one_f_one_b", stages, microbatches)
    orders = [_alternate(s, m, p - s) for s in range(p)]
    return Schedule("1F1B", p, m, _to_tuples(orders), recompute=recompute)


@register_schedule("pipedream")
@checks_arguments(ScheduleError)
def pipedream(
    stages: int, microbatches: int, updates: Updates = "stash", group: int | None = None
) -> Schedule:
    """1F1B that never drains.

    With "stash" (PipeDream), stage s holds p-s versions of its weights, and its gradients are p-1-s
    updates late. With "vertical", all stages use the version that the first one had, so all are p-1
    late. "double-buffered" (2BW) updates every `group` micro-batches, at least p, holds two
    versions, and is one update late.

    Source: Harlap et al., PipeDream, SOSP 2019; Narayanan et al., PipeDream-2BW, ICML 2021.
    """
    p, m = _check_sizes("pipedream", stages, microbatches)
    if updates not in ("stash", "vertical", "double-buffered"):
        raise schedule_error(
            "pipedream",
            f"updates must be 'stash', 'vertical' or 'double-buffered', not {updates!r}",
        )
    if group is None:
        group = p if updates == "double-buffered" else 1
    _check_sizes("pipedream", p, m, group=group)
    if updates == "double-buffered" and group < p:
        raise schedule_error(
            "pipedream",
            f"with two versions of the weights an update takes at least {p} micro-batches, one for "
            f"each stage, not {group}",
        )
    name = {"stash": "PipeDream", "vertical": "PipeDream, vertical sync"}.get(
        updates, "PipeDream-2BW"
    )
    return Schedule(name, p, m, one_f_one_b(p, m).orders, updates, group)


@register_schedule("interleaved", stages_per_device=2)
@checks_arguments(ScheduleError)
def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B in which each device holds several stages, every p-th one.

    Idle (p-1)(f+b)/v for v stages on a device, where f and b are those of all its stages together.
    Device s stores at most min(mv, pv+p-1-2s) micro-batches of one stage (v > 1).

    Args:
        stages: the stages of the network: p·v.
        microbatches: a multiple of p.
        chunks: v, the stages on a device.

    Source: Narayanan et al., Megatron-LM, SC 2021.
    """
    total, m = _check_sizes("interleaved", stages, microbatches)
    _check_sizes("interleaved", total, m, chunks=chunks)
    if total % chunks:
        raise schedule_error(
            "interleaved",
            f"{total} stages do not divide into {chunks} on each device; give "
            f"{total - total % chunks + chunks}, or another multiple of {chunks}",
        )
    p = total // chunks
    if m % p:
        raise schedule_error(
            "interleaved",
            f"{m} micro-batches are no multiple of {p} devices; give {m - m % p + p}, or use "
            "one_f_one_b",
        )
    orders = []
    for device in range(p):
        forward = [_chunk_task("F", k, device, p, chunks) for k in range(m * chunks)]
        backward = [_chunk_task("B", k, device, p, chunks) for k in range(m * chunks)]
        # The first backward pass of a device comes when a micro-batch has passed all stages; then
        # forward and backward passes alternate.
        after = (p - device - 1) * (1 if chunks == 1 else 2)  # with one chunk this is 1F1B
        ahead = min(after + (chunks - 1) * p, m * chunks)
        orders.append(_merge(forward, backward, ahead + 1 if ahead < m * chunks else ahead))
    return Schedule(f"interleaved 1F1B ({chunks} stages a device)", total, m, _to_tuples(orders))


@register_schedule("zb-h1")
@checks_arguments(ScheduleError)
def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with the gradients of weights delayed into time that would be idle.

    Idle (p-1)(f+b-w) for m of at least p and w no longer than f and b. No device stores more than p
    micro-batches, as many as the first one does in 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
    """
    p, m = _check_sizes("zb_h1", stages, microbatches)
    orders = [_delay_weight_gradients(s, m, ahead=p - s, late=s) for s in range(p)]
    return Schedule("ZB-H1", p, m, _to_tuples(orders))


@register_schedule("zb-h2")
@checks_arguments(ScheduleError)
def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 with so many forward passes ahead that nothing is idle if f = b = w.

    Idle (p-1)(f+b-2w) between consecutive batches, for m of at least 2p-1 and w no longer than f
    and b. Up to 2p-1 micro-batches are stored.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
    """
    p, m = _check_sizes("zb_h2", stages, microbatches)
    orders = [_delay_weight_gradients(s, m, ahead=2 * (p - s) - 1, late=2 * s) for s in range(p)]
    return Schedule("ZB-H2", p, m, _to_tuples(orders))


@register_schedule("zb-v", stages_per_device=2)
@checks_arguments(ScheduleError)
def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two stages on each device, laid out as a V: the last stage is on the device of the first one.

    Nothing is idle between batches if f = b = w. The activations of at most 2p stages are stored,
    as many as the first device stores in 1F1B.

    Args:
        stages: the stages of the network: 2p.
        microbatches: their number.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (section on memory).
    """
    total, m = _check_sizes("zb_v", stages, microbatches)
    if total % 2:
        raise schedule_error(
            "zb_v",
            f"each device holds two stages, but {total} is odd; give an even number, such as "
            f"{total + 1}",
        )
    orders = [_v_order(device, total // 2, m) for device in range(total // 2)]
    return Schedule("ZB-V", total, m, _to_tuples(orders))


@register_schedule("chimera")
@checks_arguments(ScheduleError)
def chimera(stages: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions: each device holds the weights of two stages, one of
    each.

    Idle p-2 if f = b = 1; at most p micro-batches are stored.

    Args:
        stages: an even number.
        microbatches: a multiple of it.

    Source: Li & Hoefler, Chimera, SC 2021.
    """
    p, m = _check_sizes("chimera", stages, microbatches)
    if p % 2 or m % p:
        even = p + p % 2
        raise schedule_error(
            "chimera",
            f"{p} stages and {m} micro-batches; give an even number of stages, and a multiple of "
            f"it of micro-batches, such as {even} and {-(-m // even) * even}",
        )
    return Schedule("Chimera", p, m, _to_tuples(_bidirectional_orders(p, m)))


# Orders ---------------------------------------------------------------------------------------


def _alternate(stage: int, m: int, ahead: int) -> list[Task]:
    """Return a stage's tasks: `ahead` forward passes, then backward and forward passes in turn."""
    forward = [Task("F", stage, i) for i in range(m)]
    return _merge(forward, [Task("B", stage, i) for i in range(m)], min(ahead, m))


def _merge(forward: Sequence[Task], backward: Sequence[Task], ahead: int) -> list[Task]:
    """Return `ahead` forward tasks, then one of each in turn, backward first."""
    order = list(forward[:ahead])
    for index, task in enumerate(backward):
        order.append(task)
        order += forward[ahead + index : ahead + index + 1]
    return order


def _chunk_task(phase: Phase, k: int, device: int, p: int, chunks: int) -> Task:
    """Return the k-th task of a phase on a device: p micro-batches of one stage, then of its next
    stage."""
    group, place = divmod(k, p * chunks)
    chunk = place // p
    if phase == "B":
        chunk = chunks - 1 - chunk
    return Task(phase, chunk * p + device, group * p + place % p)


def _delay_weight_gradients(stage: int, m: int, ahead: int, late: int) -> list[Task]:
    """Return 1F1B tasks in which each W comes `late` backward passes after its B."""
    order: list[Task] = []
    waiting: list[Task] = []
    for task in _alternate(stage, m, ahead):
        if task.phase == "B":
            waiting.append(Task("W", stage, task.microbatch))
            order.append(task)
            if len(waiting) > late:
                order.append(waiting.pop(0))
        else:
            order.append(task)
    return order + waiting


def _v_order(device: int, p: int, m: int) -> list[Task]:
    """Return a device's tasks: a warm-up, a steady pattern of both stages' three tasks, and the
    rest."""
    stages = (device, 2 * p - 1 - device)
    order: list[Task] = []
    count = {(phase, half): 0 for phase in _PHASES for half in (0, 1)}

    def add(*tasks: tuple[Phase, int]) -> None:
        for phase, half in tasks:
            if count[phase, half] < m:
                order.append(Task(phase, stages[half], count[phase, half]))
                count[phase, half] += 1

    for _ in range(2 * (p - device) - 1):
        add(("F", 0))
    for _ in range(device):
        add(("F", 1), ("F", 0))
    for _ in range(p - device):
        add(("F", 1), ("B", 1), ("W", 1))
    while count["F", 1] < count["F", 0] or count["F", 0] < m:
        add(("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    for _ in range(device):
        add(("B", 0), ("B", 1))
    for _ in range(p - device):
        add(("B", 0), ("W", 0))
    for half in (1, 0):
        for _ in range(count["W", half], m):
            add(("B", half), ("W", half))
    return order


def _bidirectional_orders(p: int, m: int) -> list[list[Task]]:
    """Return tasks by list scheduling in unit times.

    Of the tasks that are ready, the oldest p micro-batches come first, then backward before forward
    passes, then later stages.
    """
    down = [i // (p // 2) % 2 == 0 for i in range(m)]
    todo: list[set[Task]] = [set() for _ in range(p)]
    for i in range(m):
        for stage in range(p):
            home = stage if down[i] else p - 1 - stage
            todo[home] |= {Task("F", stage, i), Task("B", stage, i)}
    orders: list[list[Task]] = [[] for _ in range(p)]
    stored, done = [0] * p, set[Task]()

    def is_ready(task: Task, device: int) -> bool:
        phase, stage, i = task
        if phase == "F":
            return stored[device] < p and (not stage or Task("F", stage - 1, i) in done)
        return Task("F", stage, i) in done and (stage == p - 1 or Task("B", stage + 1, i) in done)

    def rank(task: Task) -> tuple[int, bool, int, int]:
        return (task.microbatch // p, task.phase == "F", -task.stage, task.microbatch)

    while any(todo):
        step = set[Task]()
        for device in range(p):
            ready = [task for task in todo[device] if is_ready(task, device)]
            if ready:
                task = min(ready, key=rank)
                todo[device].discard(task)
                orders[device].append(task)
                stored[device] += 1 if task.phase == "F" else -1
                step.add(task)
        done |= step
    return orders


def _to_tuples(orders: Sequence[Sequence[Task]]) -> tuple[tuple[Task, ...], ...]:
    """Return lists of tasks as tuples."""
    return tuple(map(tuple, orders))


def _check_sizes(name: str, stages: int, microbatches: int, **others: int) -> tuple[int, int]:
    """Check numbers of stages and micro-batches, and return them as ints.

    Raises:
        ScheduleError: a number is below 1, or there would be more than `MAX_TASKS` tasks.
    """
    for what, given in (("stages", stages), ("microbatches", microbatches), *others.items()):
        if as_count(given) is None:
            raise schedule_error(name, f"{what} must be an int of at least 1, not {given!r}")
    stages, microbatches = int(stages), int(microbatches)
    if stages * microbatches > MAX_TASKS:
        raise schedule_error(
            name,
            f"{stages:,} stages of {microbatches:,} micro-batches are more tasks than can be "
            f"written, which is {MAX_TASKS:,}; give it fewer of either",
        )
    return stages, microbatches


MAX_TASKS = 1_000_000
"""The most (stage, micro-batch) pairs of a schedule. All its tasks are written out."""
