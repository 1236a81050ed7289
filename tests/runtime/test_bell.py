"""How threads wait for several things at once, asleep or awake."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from graphflow.runtime.transport.bell import Bell, Sleeper


@pytest.fixture
def bells() -> Iterator[list[Bell]]:
    made = [Bell(), Bell()]
    yield made
    for bell in made:
        bell.close()


@pytest.mark.parametrize("awake", [0.0, 0.2])
def test_what_comes_is_found_asleep_or_awake(bells: list[Bell], awake: float) -> None:
    sleeper = Sleeper()
    for tag, bell in enumerate(bells):
        sleeper.add(bell.fileno(), tag)
    assert sleeper.sleep(0.0, awake) == []
    timer = threading.Timer(0.02, bells[1].ring)
    timer.start()
    assert sleeper.sleep(10.0, awake) == [1]
    bells[0].ring()
    assert sorted(sleeper.sleep(10.0, awake)) == [0, 1]
    for bell in bells:
        bell.hear()
    started = time.monotonic()
    assert sleeper.sleep(0.3, awake) == []
    assert time.monotonic() - started >= 0.25
    timer.join()
    sleeper.close()
