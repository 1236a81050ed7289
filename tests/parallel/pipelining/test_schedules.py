"""Schedules against the closed forms of their papers, and against bad input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import ScheduleError
from graphflow.parallel.pipelining.schedule import SCHEDULES, Schedule, Task, execution_order
from graphflow.parallel.pipelining.schedules import (
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_h2,
    zb_v,
)
from graphflow.parallel.pipelining.staleness import staleness
from graphflow.parallel.pipelining.timeline import draw, run

SIZES = st.integers(1, 7)
SECONDS = st.integers(1, 9)


@given(SIZES, st.integers(1, 20), SECONDS, SECONDS)
def test_gpipe_and_1f1b_are_idle_for_one_forward_and_backward_pass_of_each_other_stage(
    p: int, m: int, f: int, b: int
) -> None:
    for schedule in (gpipe(p, m, recompute=False), one_f_one_b(p, m)):
        assert run(schedule, f, b).idle == (float((p - 1) * (f + b)),) * p
    assert run(gpipe(p, m), f, b).idle == (float((p - 1) * (f + b + f)),) * p


@given(SIZES, st.integers(1, 20))
def test_1f1b_stores_as_many_micro_batches_as_stages_follow(p: int, m: int) -> None:
    assert run(gpipe(p, m), 1, 1).stored == (m,) * p
    assert run(one_f_one_b(p, m), 1, 1).stored == tuple(min(m, p - s) for s in range(p))


@given(SIZES, st.integers(1, 4), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_device(
    p: int, v: int, groups: int, f: int, b: int
) -> None:
    m = groups * p
    timeline = run(interleaved(p * v, m, v), f, b)
    assert timeline.idle == (float((p - 1) * (v * f + v * b) / v),) * p
    assert timeline.stored == tuple(
        min(m * v, p * v + p - 1 - 2 * s if v > 1 else p - s) for s in range(p)
    )
    assert interleaved(p, m, 1).orders == one_f_one_b(p, m).orders


@given(st.integers(1, 6), st.integers(0, 8), SECONDS, SECONDS, SECONDS)
def test_weight_gradients_that_are_put_off_fill_idle_time(
    p: int, more: int, f: int, b: int, w: int
) -> None:
    m = 2 * p - 1 + more
    w = min(w, f, b)  # the closed forms hold where nothing is put off beyond what is idle
    first, second = run(zb_h1(p, m), f, b, w), run(zb_h2(p, m), f, b, w)
    assert max(first.idle) == (p - 1) * (f + b - w)
    assert max(first.stored) <= p
    assert max(second.stored) <= 2 * p - 1
    assert max(second.idle) == (p - 1) * max(0, f + b - 2 * w)


@given(st.integers(1, 7), st.integers(0, 8), SECONDS, SECONDS, SECONDS)
def test_few_micro_batches_are_idle_as_long_where_as_many_as_devices_suffice(
    p: int, more: int, f: int, b: int, w: int
) -> None:
    first = run(zb_h1(p, p + more), f, b, min(w, f, b))
    assert max(first.idle) == (p - 1) * (f + b - min(w, f, b))
    few = run(zb_h2(p, max(1, p - 1)), f, b, min(w, f, b))
    assert max(few.idle) >= (p - 1) * max(0, f + b - 2 * min(w, f, b))


@given(st.integers(1, 8), st.integers(0, 12))
def test_a_v_of_stages_is_never_idle_between_batches_where_all_passes_take_as_long(
    p: int, more: int
) -> None:
    timeline = run(zb_v(2 * p, 2 * p + more), 1, 1, 1)
    assert timeline.idle == (0.0,) * p
    assert max(timeline.stored) <= 2 * p


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_two_directions_leave_p_minus_2_idle(p: int, turns: int) -> None:
    timeline = run(chimera(p, turns * p), 1, 1)
    assert timeline.idle == (float(p - 2),) * p
    assert max(timeline.stored) <= p


@given(SIZES, st.integers(0, 10))
def test_pipedream_holds_p_minus_s_versions_and_is_p_minus_1_minus_s_updates_late(
    p: int, more: int
) -> None:
    m = 2 * p + more
    for s in range(p):
        stale = staleness(pipedream(p, m), s)
        assert stale.versions == p - s
        assert stale.late[p:] == (p - 1 - s,) * (m - p)
        # Update t of stage s is made from w^(t-p+1+s): what all stages together use is mixed.
        assert stale.used[p:] == tuple(i - (p - 1 - s) for i in range(p, m))


@given(SIZES, st.integers(0, 10))
def test_vertical_sync_uses_one_version_at_all_stages(p: int, more: int) -> None:
    schedule = pipedream(p, 2 * p + more, "vertical")
    assert len({staleness(schedule, s).used for s in range(p)}) == 1
    assert staleness(schedule, p - 1).late[p:] == (p - 1,) * (p + more)


@given(st.integers(2, 7), st.integers(0, 10))
def test_double_buffered_weights_are_two_versions_and_one_update_late(p: int, more: int) -> None:
    schedule = pipedream(p, 3 * p + more, "double-buffered")
    for s in range(p):
        stale = staleness(schedule, s)
        assert stale.versions == 2
        assert set(stale.late[p:]) == {1}


def test_with_a_flush_no_gradient_is_late() -> None:
    assert staleness(one_f_one_b(3, 4), 0).late == (0, 0, 0, 0)


def test_one_forward_one_backward_with_two_stages_and_four_microbatches() -> None:
    assert draw(one_f_one_b(2, 4)).split("\n") == [
        "F0 F1 .. B0 F2 B1 F3 B2 .. B3",
        ".. F0 B0 F1 B1 F2 B2 F3 B3 ..",
    ]


def test_stages_are_told_where_a_device_has_several() -> None:
    assert draw(chimera(2, 2)).startswith("F0/0 F1/1 ")
    assert draw(one_f_one_b(1, 2)) == "F0 B0 F1 B1"


def test_weights_change_when_their_gradient_is_there() -> None:
    """With W apart from B, that is later: what comes in between uses the weights from before."""
    schedule = Schedule("mine", 3, 8, zb_h1(3, 8).orders, "stash")
    assert staleness(schedule, 2).used == (0, 0, 0, 1, 2, 3, 4, 5)
    assert staleness(schedule, 2).late[3:] == (2,) * 5
    assert staleness(pipedream(3, 8), 2).late == (0,) * 8


def test_a_schedule_that_takes_no_time_is_never_idle() -> None:
    assert run(gpipe(2, 2), 0, 0).bubble == 0.0


def test_a_transfer_is_waited_for_between_devices_only() -> None:
    near = run(zb_v(2, 4), 1, 1, 1, transfer=5.0)
    assert near.makespan == run(zb_v(2, 4), 1, 1, 1).makespan  # both stages on one device
    away = run(one_f_one_b(2, 1), 1, 1, transfer=5.0)
    assert away.makespan == 4 + 2 * 5


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 4))
def test_every_schedule_runs_each_task_once_on_the_device_of_its_stage(
    name: str, half: int, turns: int
) -> None:
    stages = 2 * half
    schedule = SCHEDULES[name](stages, stages * turns)
    tasks = [task for _, task in execution_order(schedule)]
    assert len(set(tasks)) == len(tasks) == sum(map(len, schedule.orders))
    assert draw(schedule).count("\n") + 1 == schedule.devices


F, B, W = Task("F", 0, 0), Task("B", 0, 0), Task("W", 0, 0)
LAST = (Task("F", 1, 0), Task("B", 1, 0))
CROSSING = (
    (F, B, Task("F", 0, 1), Task("B", 0, 1)),
    (Task("F", 1, 1), Task("B", 1, 1), *LAST),
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one_f_one_b(0, 4), "stages must be an int of at least 1, not 0"),
        (lambda: one_f_one_b(4, "4"), "microbatches must be an int of at least 1"),
        (lambda: interleaved(5, 8, 2), "5 stages do not divide into 2"),
        (lambda: interleaved(8, 6, 2), "6 micro-batches are no multiple of 4 devices; give 8"),
        (lambda: zb_v(5, 4), "5 is odd"),
        (lambda: chimera(4, 6), "4 stages and 6 micro-batches"),
        (lambda: pipedream(4, 8, "never"), "not 'never'"),
        (lambda: pipedream(4, 8, "double-buffered", 2), "at least 4"),
        (
            lambda: pipedream(4, 8, group=4),
            "group=4 is for updates='double-buffered', not for 'stash'",
        ),
        (lambda: run(one_f_one_b(2, 2), None, 1), "forward is None: give seconds"),
        (lambda: run(one_f_one_b(2, 2), 1, "two"), "backward is 'two': give seconds"),
        (lambda: Schedule("mine", 1, 1, ((F,),)), "misses B of micro-batch 0"),
        (lambda: Schedule("mine", 1, 1, ((F, F, B),)), "repeats F of micro-batch 0"),
        (lambda: Schedule("mine", 1, 1, ((F, B, Task("F", 3, 0)),)), "no place for F"),
        (
            lambda: Schedule("mine", 1, 1, ((F,), (B,))),
            "on device 1, but another of its tasks on 0",
        ),
        (lambda: Schedule("mine", 1, 1, ((B, F),)), "would deadlock.*device 0 has B"),
        (
            lambda: Schedule("mine", 2, 2, CROSSING),
            "after 1 tasks: device 0 has B of micro-batch 0 at stage 0 next, which needs B of "
            "micro-batch 0 at stage 1; device 1 has F of micro-batch 1.*; reorder the tasks",
        ),
        (lambda: Schedule("mine", 2, 1, ((F, W, B), (*LAST, Task("W", 1, 0)))), "needs B of"),
        (lambda: Schedule("mine", 2, 1, ((F, B, W), LAST)), "misses W.* at stage 1; add it"),
        (lambda: Schedule("mine", 2, 1, ((F, B), (*LAST, F))), "repeats F of.*; leave it in one"),
        (lambda: gpipe(10**9, 2), "1,000,000,000 stages of 2 .* more tasks than can be written"),
        (lambda: run(one_f_one_b(2, 2), [1, 2, 3], 1), "each of the 2 stages"),
        (lambda: run(one_f_one_b(2, 2), 1, -1), "0 or more"),
        (lambda: run(one_f_one_b(2, 2), float("nan"), 1), "forward is nan"),
        (lambda: run(one_f_one_b(2, 2), 1, 1, transfer=-1), "transfer is -1"),
        (lambda: run("1f1b", 1, 1), "run at .* takes a schedule, such as.*not '1f1b'"),
        (lambda: draw(5), "draw at .* takes a schedule"),
        (lambda: draw(one_f_one_b(2, 2), 0.5), "whole number of columns"),
        (lambda: draw(one_f_one_b(2, 2), 0, 0), "whole number of columns"),
        (lambda: staleness(one_f_one_b(2, 2), 2), "are 0 to 1, not 2"),
        (lambda: interleaved(4, 4, "2"), "chunks must be an int of at least 1, not '2'"),
        (
            lambda: pipedream(2, 4, "double-buffered", 0),
            "group must be an int of at least 1, not 0",
        ),
        (lambda: Schedule("mine", 1, 1, 5), "orders must be a tuple of tasks"),
        (lambda: Schedule("mine", 1, 1, ((1, 2),)), r"device 0 has tasks such as.*not 1"),
        (
            lambda: Schedule("mine", 1, 1, ((F, B), ())),
            r"device 1 must have a tuple of tasks, not \(\)",
        ),
        (lambda: Schedule("mine", 0, 1, ((F, B),)), "stages must be an int of at least 1, not 0"),
        (lambda: Schedule("mine", 1, 1, ((F, B),), "never"), "updates must be one of 'flush'"),
        (lambda: Schedule("mine", 1, 1, ((F, B),), group=2), "group=2 is for .*, not for 'flush'"),
        (lambda: Schedule("mine", 1, 1, ((F, Task("F", 0, [0])),)), "device 0 has tasks such as"),
        (lambda: Schedule("mine", 1, 1, ((F, Task("F", 0.0, 0)),)), "numbers from 0 up, not Task"),
        (lambda: Schedule("mine", 1, 1, ((F, Task("f", 0, 0)),)), "phase 'F', 'B' or 'W'"),
        (
            lambda: Schedule("mine", 4, 8, one_f_one_b(4, 8).orders, "double-buffered", 2),
            "F of micro-batch 4 at stage 0 uses weights that B of micro-batch 1 at stage 0 updates",
        ),
        (
            lambda: Schedule("mine", 2, 4, chimera(2, 4).orders, "stash"),
            "has B of micro-batch 1 at stage 1 before B of micro-batch 0 at stage 1, but each",
        ),
        (
            lambda: Schedule("mine", 1, 2, ((F, B), (Task("F", 0, 1), Task("B", 0, 1))), "stash"),
            "stage 0 is on devices 0 and 1, whose weights have to change together",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()
