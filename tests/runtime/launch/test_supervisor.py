"""The supervisor of `graphflow up`: when it restarts a worker, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from graphflow.errors import LaunchError
from graphflow.runtime.launch.supervisor import Supervisor
from graphflow.runtime.launch.worker_launcher import ENDED, RUNNING, WAITING, LaunchedWorker
from graphflow.runtime.worker.announcement import Announcement


class Scripted:
    """A launcher of two workers whose states a test sets."""

    def __init__(self) -> None:
        self.states, self.restarted, self.refuses = [RUNNING, RUNNING], list[int](), False

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        raise AssertionError("they run already")

    def workers(self) -> list[LaunchedWorker]:
        told = Announcement("tcp://127.0.0.1:7001", None, ("cpu:0",), "box", 17)
        return [
            LaunchedWorker(i, told if state == RUNNING else None, state, "this host", f"log {i}")
            for i, state in enumerate(self.states)
        ]

    def restart(self, index: int) -> None:
        if self.refuses:
            raise LaunchError("ssh cannot be run")
        self.restarted.append(index)
        self.states[index] = WAITING

    def stop(self) -> None:
        pass


def test_a_worker_that_ends_is_restarted_at_once_and_others_are_left_alone() -> None:
    launcher, told = Scripted(), list[str]()
    supervisor = Supervisor(launcher, told.append)
    assert supervisor.check(0.0) and not supervisor.check(0.1) and not told
    launcher.states[1] = ENDED
    assert supervisor.check(1.0) and supervisor.check(1.0)
    assert launcher.restarted == [1] and supervisor.restarts == [0, 1]
    assert "worker 1 ended" in told[0] and "log 1" in told[0]
    assert not supervisor.check(1.1)  # it starts
    launcher.states[1] = RUNNING
    assert supervisor.check(1.2) and "worker 1 is up again: process 17" in told[1]


def restart_times(supervisor: Supervisor, launcher: Scripted, end: float) -> list[float]:
    """Return when worker 1 is restarted if each of its processes ends at once."""
    found, now = [], 0.0
    while now < end:
        launcher.states[1] = ENDED
        before = len(launcher.restarted)
        supervisor.check(now)
        found += [now] * (len(launcher.restarted) - before)
        now += 0.25
    return found


def test_one_that_never_listens_is_restarted_after_pauses_that_double_up_to_half_a_minute() -> None:
    launcher = Scripted()
    times = restart_times(Supervisor(launcher, lambda line: None), launcher, 200.0)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert [round(pause) for pause in pauses[:6]] == [1, 1, 2, 4, 8, 16]
    assert all(30.0 <= pause <= 31.0 for pause in pauses[6:]) and len(pauses) >= 9


def test_a_minute_of_running_makes_a_worker_healthy_again() -> None:
    launcher = Scripted()
    supervisor = Supervisor(launcher, lambda line: None)
    restart_times(supervisor, launcher, 20.0)
    launcher.states[1] = RUNNING
    supervisor.check(100.0)
    supervisor.check(161.0)
    launcher.states[1] = ENDED
    count = len(launcher.restarted)
    supervisor.check(162.0)
    supervisor.check(162.0)
    assert len(launcher.restarted) == count + 1


def test_a_launcher_that_refuses_is_asked_again() -> None:
    launcher, told = Scripted(), list[str]()
    supervisor = Supervisor(launcher, told.append)
    launcher.states[0], launcher.refuses = ENDED, True
    for now in range(10):
        supervisor.check(float(now))
    assert len(told) >= 3 and not launcher.restarted
    launcher.refuses = False
    for now in range(10, 20):
        supervisor.check(float(now))
    assert launcher.restarted == [0]
