"""The driver lock: how the background thread waits while another thread polls."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from graphflow.runtime.polling import io_driver as module
from graphflow.runtime.polling.io_driver import LINGER, SLICE, SocketDriverLock
from graphflow.runtime.polling.wakeup import WakeupFd


def test_the_watch_looks_seldom_while_small_steps_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], list[float]()
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "sleep", slept.append)
    with closing(WakeupFd()) as wakeup:
        driver = SocketDriverLock(wakeup)
        for seconds, times in ((SLICE, 1), (SLICE, 3), (LINGER, 30), (LINGER, 5), (SLICE, 0)):
            for _ in range(times):
                assert driver.try_acquire()
                driver.release()
            now[0] += seconds
            driver.wait_in_background()
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
    with closing(WakeupFd()) as wakeup:
        driver = SocketDriverLock(wakeup)
        for _ in range(2 * round(LINGER / SLICE)):  # steps one after the other
            assert driver.try_acquire()
            driver.wait_in_background()
            driver.release()
        often = slept[0]
        assert often == 2 * round(LINGER / SLICE)
        assert driver.try_acquire()
        driver.wait_in_background()
        now[0] += LINGER
        before = slept[0]
        watch = threading.Thread(target=driver.wait_in_background)
        watch.start()
        while not driver._waits_long:
            threading.Event().wait(0.001)
        driver.release()
        watch.join(10)
        assert not watch.is_alive() and slept[0] == before
        driver.wait_in_background()  # nobody is there: it looks often again
        assert slept[0] == before + 1
