"""Turns: a session does one thing at a time, and nothing from within itself; what is the user's
(feeds, functions, handlers) may wait for whom it likes."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import OpError, SessionError
from tests.faults import hazards

SCALAR = gf.spec("float32", ())
HAZARDS = ["tests.faults.hazards"]
WITHIN = "used from within itself"


def _clusters() -> list[Any]:
    two = ["cpu:0", "cpu:1"]
    return [
        pytest.param(lambda: None, id="this process"),
        pytest.param(lambda: gf.Cluster.here(devices=two), id="two devices"),
        pytest.param(lambda: gf.Cluster.local(workers=2), id="two workers"),
    ]


Uses = Callable[[gf.Session, gf.Tensor], Any]
USES: list[Uses] = [
    lambda s, v: s.run(gf.exp(v)),
    lambda s, v: list(s.run(gf.exp(v), [{}], steps=1)),
    lambda s, v: s.run_async(v).result(),
    lambda s, v: s.get(v),
    lambda s, v: s.set(v, np.float32(5)),
    lambda s, v: s.plan(),
    lambda s, v: s.memory(),
    lambda s, v: s.trace().__enter__(),
]


@pytest.mark.parametrize("device", ["cpu:0", "cpu:1"])
@pytest.mark.parametrize("use", USES)
def test_a_function_of_a_step_cannot_use_the_session_of_the_step(use: Uses, device: str) -> None:
    v = gf.variable(np.float32(1))
    step = gf.assign(v, v + 1)
    opened: list[gf.Session] = []

    def function(_: Any) -> Any:
        use(opened[0], v)
        return np.float32(0)

    with gf.device(device):
        called = gf.host_call(function, gf.exp(v), spec=SCALAR)
    others = []
    for each in ("cpu:0", "cpu:1"):  # one computes on a thread of its own
        with gf.device(each):
            others.append(gf.sum(gf.sin(v)))
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"]), trial=False) as s:
        opened.append(s)
        with pytest.raises(OpError, match=WITHIN):
            s.run([called, *others, step])
        assert s.get(v) == 1 and s.run(step) == 2


@pytest.mark.parametrize("device", ["cpu:0", "cpu:1"])
def test_a_function_of_a_step_takes_no_step_of_a_stream(device: str) -> None:
    v = gf.variable(np.float32(1))
    step = gf.assign(v, v + 1)
    streams: list[Iterator[Any]] = []
    with gf.device(device):
        called = gf.host_call(lambda _: next(streams[0]), gf.exp(v), spec=SCALAR)
    others = []
    for each in ("cpu:0", "cpu:1"):
        with gf.device(each):
            others.append(gf.sum(gf.sin(v)))
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"]), trial=False) as s:
        streams.append(s.run(step, [{}] * 5, steps=5))
        with pytest.raises(OpError, match=WITHIN):
            s.run([called, *others])
        assert s.get(v) == 1 and s.step == 0


def test_a_closed_session_takes_no_feeds_and_minds_no_thread_of_its_own() -> None:
    x = gf.placeholder("float32", ())
    taken: list[int] = []

    def feeds() -> Iterator[Any]:
        for i in range(5):
            taken.append(i)
            yield {x: np.float32(i)}

    both = []
    for each in ("cpu:0", "cpu:1"):
        with gf.device(each):
            both.append(gf.sin(x))
    s = gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"]), trial=False)
    stream = s.run(both, feeds(), steps=5)
    next(stream)
    s.close()
    with pytest.raises(SessionError, match="closed"):
        next(stream)
    assert taken == [0]
    told: set[str] = set()

    def run_late() -> None:
        with pytest.raises(SessionError) as caught:
            s.run(both, {x: np.float32(0)})
        told.add(str(caught.value))

    for _ in range(30):  # some have the number of one that computed
        thread = threading.Thread(target=run_late)
        thread.start()
        thread.join()
    assert told == {"the session is closed; open another one"}


def test_arrays_of_the_users_own_kind_may_look_into_the_session() -> None:
    x, v = gf.placeholder("float32", (3,)), gf.variable(np.float32(1))

    class Lazy:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.full(3, float(s.get(v)), "float32")

    with gf.Session(trial=False) as s:
        for _ in range(3):
            assert s.run(gf.sum(x) + v, {x: Lazy()}) == 4


def test_a_function_of_a_step_may_use_another_session() -> None:
    x = gf.placeholder("float32", (3,))
    with gf.Session() as inner:

        def function(array: Any) -> Any:
            return inner.run(gf.sum(x), {x: array})

        with gf.Session(trial=False) as outer:
            called = gf.host_call(function, x * 2, spec=SCALAR)
            assert outer.run(called + gf.sum(x), {x: np.ones(3, "float32")}) == 9


@pytest.mark.every(8)
@pytest.mark.parametrize("use", USES)
def test_a_handler_that_comes_in_the_midst_of_a_step_is_told_so(use: Uses) -> None:
    v = gf.variable(np.float32(1))
    told: list[str] = []
    with gf.Session(gf.Cluster.local(workers=1), ops=HAZARDS, deadline=30.0) as s:
        s.run(v)

        def handler(*_: Any) -> None:
            with pytest.raises(SessionError, match=WITHIN):
                use(s, v)
            told.append("once")

        before = signal.signal(signal.SIGUSR1, handler)
        main = threading.main_thread().ident or 0
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1))
        try:
            timer.start()
            assert s.run(hazards.sleep(v * 2, seconds=1.0)) == 2
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)
        assert told == ["once"]
        use(s, v)  # between two steps it may


@pytest.mark.parametrize("cluster", _clusters())
def test_feeds_may_wait_for_others_who_use_the_session(cluster: Callable[[], Any]) -> None:
    x = gf.placeholder("float32", (3,))
    prepared, result = gf.exp(x), gf.sum(x)
    with gf.Session(cluster(), trial=False, deadline=20.0) as s:
        ready: queue.Queue[Any] = queue.Queue(2)

        def load() -> None:
            for i in range(12):
                ready.put(s.run(prepared, {x: np.full(3, i / 8, "float32")}))

        def feeds() -> Iterator[Any]:
            for i in range(12):
                later = s.run_async(prepared, {x: np.full(3, i / 8, "float32")})
                array = ready.get(timeout=20)
                assert np.array_equal(later.result(20), array)
                assert np.array_equal(s.run(prepared, {x: np.full(3, i / 8, "float32")}), array)
                yield {x: array}

        loader = threading.Thread(target=load, daemon=True)
        loader.start()
        found = list(s.run(result, feeds(), steps=12))
        loader.join(20)
        wanted = [s.run(gf.sum(gf.exp(x)), {x: np.full(3, i / 8, "float32")}) for i in range(12)]
    assert found == wanted
