"""The helm: how the watch waits while another thread is there."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from graphflow.runtime.polling import io_driver as module
from graphflow.runtime.polling.io_driver import LINGER, SLICE, Helm
from graphflow.runtime.polling.wakeup import Bell


def test_the_watch_looks_seldom_while_small_steps_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], list[float]()
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "sleep", slept.append)
    with closing(Bell()) as bell:
        helm = Helm(bell)
        for seconds, times in ((SLICE, 1), (SLICE, 3), (LINGER, 30), (LINGER, 5), (SLICE, 0)):
            for _ in range(times):
                assert helm.free()
                helm.leave()
            now[0] += seconds
            helm.rest()
    assert slept == [SLICE, LINGER, LINGER, SLICE, SLICE]


def test_the_watch_looks_often_until_one_thread_stays_and_then_waits_for_it_to_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], [0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept[0] += 1

    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "sleep", sleep)
    monkeypatch.setattr(module, "_LONGEST", 60.0)
    with closing(Bell()) as bell:
        helm = Helm(bell)
        for _ in range(2 * round(LINGER / SLICE)):  # steps one after the other
            assert helm.free()
            helm.rest()
            helm.leave()
        often = slept[0]
        assert often == 2 * round(LINGER / SLICE)
        assert helm.free()
        helm.rest()
        now[0] += LINGER
        before = slept[0]
        watch = threading.Thread(target=helm.rest)
        watch.start()
        while not helm._rests:
            threading.Event().wait(0.001)
        helm.leave()
        watch.join(10)
        assert not watch.is_alive() and slept[0] == before
        helm.rest()  # nobody is there: it looks often again
        assert slept[0] == before + 1
