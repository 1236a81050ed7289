"""ParameterServer(replicas=2): a server or a worker that dies costs the window, and no commit."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ClusterError

ROWS, TURNS = 6, 4


class Model:
    """A regression on a server (worker 0) and two workers."""

    def __init__(self, **options: Any) -> None:
        with gf.random.seed(2):
            self.x = gf.placeholder("float32", ("B", 20), name="x")
            hidden = gf.tanh(self.x @ gf.variable(gf.init.glorot((20, 16)), name="w"))
            out = hidden @ gf.variable(gf.init.glorot((16, 1)), name="v")
            self.loss = gf.mean(gf.square(out - 1.0))
            strategy = gf.parallel.ParameterServer(window=TURNS, workers=2, **options)
            self.train = gf.optim.Adam(0.05).minimize(self.loss, strategy=strategy)

    def feed(self, number: int) -> dict[gf.Tensor, Any]:
        shape = (2 * TURNS * ROWS, 20)
        return {self.x: np.random.default_rng(number).normal(size=shape).astype("float32")}

    def state(self, s: gf.Session) -> list[bytes]:
        variables = [v.outputs[0] for v in gf.Graph([self.train]).variables]
        return [s.get(v).tobytes() for v in variables]


def local() -> gf.Session:
    return gf.Session(gf.Cluster.local(workers=3, threads=1), trial=False)


def kill(s: gf.Session, worker: int) -> None:
    os.kill(s._life.hosts.pids[worker], signal.SIGKILL)  # type: ignore[attr-defined]


def test_a_server_that_dies_between_windows_costs_no_bit() -> None:
    def run(killing: bool, **options: Any) -> list[list[bytes]]:
        model = Model(consistency="bsp", **options)
        states = []
        with local() as s:
            for number in range(4):
                if killing and number == 2:
                    assert s.mirrors().places
                    kill(s, 0)
                    assert model.state(s) == states[-1]
                s.run([model.loss, model.train], model.feed(number))
                states.append(model.state(s))
        return states

    assert run(True, replicas=2) == run(False)


@pytest.mark.slow  # a session for each moment
@pytest.mark.parametrize("victim", [0, 1])
def test_whoever_dies_within_a_window_the_state_is_of_a_commit(victim: int) -> None:
    """The window is done again, in an order of its own, from the state of the last commit."""
    for moment in range(8):
        model = Model(consistency="async", replicas=2)
        with local() as s:
            for number in range(3):
                s.run([model.loss, model.train], model.feed(number))
            before, begun = model.state(s), s.step
            timer = threading.Timer(0.0005 * moment, kill, (s, victim))
            timer.start()
            s.run([model.loss, model.train], model.feed(3))
            timer.join()
            assert s.step == begun + 1
            after, history = model.state(s), s.history()[-1]
            time.sleep(0.02)
            s.get(next(iter(gf.Graph([model.loss]).variables)).outputs[0])
        again = Model(consistency="async")
        with gf.Session() as s:
            for variable, value in zip(gf.Graph([again.train]).variables, before, strict=True):
                spec = variable.specs[0]
                known = np.frombuffer(value, spec.dtype).reshape([int(n) for n in spec.shape])
                s.set(variable.outputs[0], known)
            strategy = again.train.node.attrs["strategy"]
            s.run([again.loss, again.train], {**again.feed(3), strategy.order: history.order})
            assert again.state(s) == after


def test_more_replicas_than_workers_are_refused() -> None:
    model = Model(replicas=2)
    with (
        gf.Session(gf.Cluster.local(workers=1)) as s,
        pytest.raises(ClusterError, match="replicas=2 needs 2 workers, and the cluster has 1"),
    ):
        s.run([model.loss, model.train], model.feed(0))
