"""Parameter servers whose parties die, freeze or are cut off: the whole window, or nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import LinkLost, OpError, WorkerLost
from graphflow.ir.op import Tensor
from graphflow.parallel import ParameterServer
from graphflow.parallel.servers.window_history import WindowHistory
from tests.faults import hazards
from tests.faults.network.proxy import Proxy
from tests.faults.running import Worker, cluster_file
from tests.runtime.program import crashes

Array = np.ndarray[Any, Any]
Hazard = Callable[[Tensor], Tensor]
RATE, SIZE = 0.125, 3
WINDOW = 3
NOWHERE = -1
OPS = ["tests.faults.hazards", "tests.runtime.program.crashes"]
SLOW = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Struck(gf.optim.Optimizer):
    """Descent that meets a hazard at one of its updates, counted from the first window on."""

    at: Tensor
    hazard: Hazard

    def _update(self, value: Any, gradient: Any, target: Any, shared: Any) -> Any:
        count = target.read("count", shape=())
        target.write("count", count + 1.0)
        here = gf.equal(count, self.at)
        return value - RATE * gf.cond(here, lambda: self.hazard(gradient), lambda: gradient)


class Window:
    """Rows that a weight comes near to; a turn of a micro-batch, or an update, meets a hazard."""

    def __init__(self, hazard: Hazard, consistency: Any = "async", window: int = WINDOW) -> None:
        self.strategy = ParameterServer(1, consistency, window=window, workers=2)
        self.total = 2 * window
        self.x = gf.placeholder("float64", ("B", SIZE), name="x")
        self.is_struck = gf.placeholder("bool", ("B",), name="is_struck")
        self.at = gf.placeholder("float64", (), name="at")
        self.weight = gf.variable(np.linspace(-1.0, 1.0, SIZE), name="weight")
        rows = gf.cond(gf.any(self.is_struck), lambda: hazard(self.x), lambda: self.x)
        gap = self.weight - rows
        loss = gf.mean(gf.sum(gap * gap * 0.5, 1))
        optimizer = Struck(at=self.at, hazard=hazard)
        self.fetches = [loss, optimizer.minimize(loss, strategy=self.strategy)]
        self.done = 0
        self.value = np.linspace(-1.0, 1.0, SIZE)

    def run(self, s: gf.Session, turn: int = NOWHERE, update: int = NOWHERE) -> WindowHistory:
        """Run a window, and compare it with a loop over its pushes.

        Args:
            turn: the micro-batch whose turn meets the hazard.
            update: the update of this window that does.
        """
        rows = np.random.default_rng(self.done).integers(-9, 9, (self.total, SIZE)) * 1.0
        at = NOWHERE if update == NOWHERE else self.done * self.total + update
        struck = np.arange(self.total) == turn
        s.run(self.fetches, {self.x: rows, self.is_struck: struck, self.at: float(at)})
        came = s.history()[-1]
        order, numbers = came.order[0].tolist(), came.micro_batches[0].tolist()
        together = 2 if self.strategy.consistency == "pool" else 1
        assert sorted(numbers) == [*range(self.total)]
        weight, pushed = self.value, list[Array]()
        seen = [weight, weight]
        for worker, number in zip(order, numbers, strict=True):
            pushed.append(seen[worker] - rows[number])
            if len(pushed) == together:
                weight = weight - RATE * (sum(pushed[1:], pushed[0]) * (1.0 / together))
                pushed = []
            seen[worker] = weight
        self.value, self.done = weight, self.done + 1
        np.testing.assert_array_equal(s.get(self.weight), self.value)
        return came


def session(**options: Any) -> gf.Session:
    return gf.Session(gf.Cluster.local(3, threads=1), trial=False, ops=OPS, **options)


@pytest.mark.parametrize("party", ["server", pytest.param("worker", marks=SLOW)])
def test_a_party_killed_at_each_push_costs_no_bit(party: str, tmp_path: Path) -> None:
    """The windows before it are as they were seen, and its own counts each push once."""
    bomb = tmp_path / "bomb"
    window = Window(lambda x: crashes.crash_once(x, path=str(bomb)))
    with session(checkpoint=tmp_path / "saved", every=3) as s:
        window.run(s)
        for number in range(window.total):
            bomb.touch()
            window.run(s, **{"update" if party == "server" else "turn": number})
            assert not bomb.exists(), f"{party} at push {number}"
            window.run(s)
        assert s.step == window.done == 1 + 2 * window.total


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[SLOW] * (number != 3)) for number in range(2 * WINDOW)]
)
def test_the_mirror_of_a_server_killed_at_a_push_goes_on(number: int, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    window = Window(lambda x: crashes.crash_once(x, path=str(bomb)))
    with session(replicas=2) as s:
        window.run(s)
        bomb.touch()
        window.run(s, update=number)
        assert not bomb.exists()
        window.run(s)
        assert s.step == window.done == 3


@pytest.mark.parametrize("place", [{"update": 2}, {"turn": 3}], ids=["server", "worker"])
def test_without_copies_a_lost_party_is_told(place: dict[str, int], tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    window = Window(lambda x: crashes.crash_once(x, path=str(bomb)))
    with session() as s:
        window.run(s)
        bomb.touch()
        with pytest.raises(WorkerLost, match=r"worker \d"):
            window.run(s, **place)


def test_a_party_that_fails_changes_nothing_and_the_session_goes_on() -> None:
    window = Window(hazards.fail)
    with session() as s:
        for place in [{"update": 0}, {"turn": 1}, {"update": 5}, {"turn": 4}]:
            window.run(s)
            with pytest.raises(OpError, match="ZeroDivisionError"):
                window.run(s, **place)
            np.testing.assert_array_equal(s.get(window.weight), window.value)


def test_others_take_the_micro_batches_of_a_worker_that_freezes() -> None:
    """Worker 1 sleeps in its first turn. The window does not wait for more than this turn."""
    window = Window(lambda x: hazards.sleep(x, seconds=1.0), "pool", 8)
    with session() as s:
        window.run(s)
        begun = time.monotonic()
        came = window.run(s, turn=1)
        assert time.monotonic() - begun < 3.0
        assert came.turns == (15, 1)
        assert int(came.order[0][-1]) == 1
        window.run(s)


@pytest.mark.slow  # a silent process is given five seconds
@pytest.mark.parametrize("worker", [0, 2])
def test_a_process_that_stops_in_its_turn_is_replaced(worker: int, tmp_path: Path) -> None:
    window = Window(lambda x: hazards.sleep(x, seconds=1.0))
    with session(checkpoint=tmp_path / "saved", every=2) as s:
        for _ in range(3):
            window.run(s)
        pid = s._life.hosts.pids[worker]
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGSTOP))
        timer.start()
        window.run(s, **({"update": 1} if worker == 0 else {"turn": 3}))
        assert s._life.hosts.pids[worker] != pid
        window.run(s)


@pytest.mark.slow  # a silent link is given five seconds
@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_between_server_and_worker_alone_is_told_and_heals(
    cut: int,
    workers: Callable[..., list[Worker]],
    proxy: Callable[[str], Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client reaches all three. The window that is cut changes nothing."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    allowed = [each for name in OPS for each in ("--allow-ops", name)]
    between = [proxy(each.address) for each in workers(3, *allowed)]
    file = cluster_file(tmp_path, [each.address for each in between])
    window = Window(lambda x: x)
    with gf.Session(file, ops=OPS, trial=False) as s:
        for _ in range(2):
            window.run(s)
        between[cut].spared = 1  # the client's connection, which came first
        begun = time.monotonic()
        between[cut].sever()
        with pytest.raises(LinkLost, match=r"worker [01] at .*worker [012] at"):
            while True:
                window.run(s)
        assert time.monotonic() - begun < 6.0
        between[cut].heal()
        np.testing.assert_array_equal(s.get(window.weight), window.value)
        for _ in range(2):
            window.run(s)
