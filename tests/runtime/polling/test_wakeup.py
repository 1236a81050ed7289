"""How threads wait for several things at once, asleep or awake."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from graphflow.runtime.polling import wakeup as waiting
from graphflow.runtime.polling.wakeup import EpollWaiter, WakeupFd


@pytest.fixture
def wakeups() -> Iterator[list[WakeupFd]]:
    made = [WakeupFd(), WakeupFd()]
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("awake", [0.0, 0.2])
def test_what_comes_is_found_asleep_or_awake(wakeups: list[WakeupFd], awake: float) -> None:
    waiter = EpollWaiter()
    for tag, each in enumerate(wakeups):
        waiter.add(each.fileno(), tag)
    assert waiter.wait(0.0, awake) == []
    timer = threading.Timer(0.02, wakeups[1].wake)
    timer.start()
    assert waiter.wait(10.0, awake) == [1]
    wakeups[0].wake()
    assert sorted(waiter.wait(10.0, awake)) == [0, 1]
    for each in wakeups:
        each.drain()
    started = time.monotonic()
    assert waiter.wait(0.3, awake) == []
    assert time.monotonic() - started >= 0.25
    timer.join()
    waiter.close()


def test_who_finds_the_processor_crowded_looks_no_more_for_longer_and_longer(
    wakeups: list[WakeupFd], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slice_, yields = 100.0, 2e-3, 0

    def yield_processor() -> None:
        nonlocal now, yields
        now, yields = now + slice_, yields + 1

    monkeypatch.setattr(waiting, "monotonic", lambda: now)
    monkeypatch.setattr("os.sched_yield", yield_processor)
    waiter = EpollWaiter()
    waiter.add(wakeups[0].fileno(), 0)
    looked = []
    for _ in range(400):  # every 10 ms, for 4 seconds
        before = yields
        assert waiter.wait(1e-3, 5e-4) == []
        looked.append(yields > before)
        now += 1e-2
    assert looked[0] and yields == looked.count(True)  # one long yield a look
    assert 6 <= yields <= 12 and looked[-200:].count(True) <= 3
    slice_, now, yields = 1e-5, now + waiting._LONGEST, 0
    assert waiter.wait(1e-3, 5e-4) == []
    assert yields >= 40  # nobody else computes any more: it looks again all the time
    wakeups[0].wake()
    assert waiter.wait(1e-3, 5e-4) == [0]
    waiter.close()
