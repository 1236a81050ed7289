"""How threads wait for several things at once, asleep or awake."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from graphflow.runtime.polling import wakeup as waiting
from graphflow.runtime.polling.wakeup import Bell, Sleeper


@pytest.fixture
def bells() -> Iterator[list[Bell]]:
    made = [Bell(), Bell()]
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("awake", [0.0, 0.2])
def test_what_comes_is_found_asleep_or_awake(bells: list[Bell], awake: float) -> None:
    sleeper = Sleeper()
    for tag, each in enumerate(bells):
        sleeper.add(each.fileno(), tag)
    assert sleeper.sleep(0.0, awake) == []
    timer = threading.Timer(0.02, bells[1].ring)
    timer.start()
    assert sleeper.sleep(10.0, awake) == [1]
    bells[0].ring()
    assert sorted(sleeper.sleep(10.0, awake)) == [0, 1]
    for each in bells:
        each.hear()
    started = time.monotonic()
    assert sleeper.sleep(0.3, awake) == []
    assert time.monotonic() - started >= 0.25
    timer.join()
    sleeper.close()


def test_who_finds_the_processor_crowded_looks_no_more_for_longer_and_longer(
    bells: list[Bell], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slice_, yields = 100.0, 2e-3, 0

    def yielded() -> None:
        nonlocal now, yields
        now, yields = now + slice_, yields + 1

    monkeypatch.setattr(waiting, "monotonic", lambda: now)
    monkeypatch.setattr("os.sched_yield", yielded)
    sleeper = Sleeper()
    sleeper.add(bells[0].fileno(), 0)
    looked = []
    for _ in range(400):  # every 10 ms, for 4 seconds
        before = yields
        assert sleeper.sleep(1e-3, 5e-4) == []
        looked.append(yields > before)
        now += 1e-2
    assert looked[0] and yields == looked.count(True)  # one long yield a look
    assert 6 <= yields <= 12 and looked[-200:].count(True) <= 3
    slice_, now, yields = 1e-5, now + waiting._LONGEST, 0
    assert sleeper.sleep(1e-3, 5e-4) == []
    assert yields >= 40  # nobody else computes any more: it looks again all the time
    bells[0].ring()
    assert sleeper.sleep(1e-3, 5e-4) == [0]
    sleeper.close()
