"""Replanning: state goes to its new homes bit for bit, between steps, and only where it pays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, OpError, SessionError
from graphflow.execution.replan_policy import (
    FIRST,
    WINDOW,
    Replanned,
    check_replan,
    shows_drift,
    window_position,
)
from graphflow.ir.op import Tensor
from graphflow.placement.calibration import calibrate
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning import planner
from graphflow.planning.migration.placement_improvement import PlacementImprovement
from graphflow.runtime.client import cluster_survey as survey
from tests.placement.speeds import profile

EMBEDDED = Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)
PROCESSES = Cluster.local(workers=2, threads=1)
CLUSTERS = pytest.mark.parametrize(
    "cluster", [EMBEDDED, PROCESSES], ids=["two devices", "two processes"]
)
SLOW = {"process": [1.0, 1e3], "thread": [1.0, None]}
FAST = {"process": [1e-9, 1e12], "thread": [1e-9, None]}
Machine = dict[str, Any]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A made-up machine whose links can be changed, and whose workers have their full speed;
    nothing is kept where users keep it."""
    state: Machine = {"links": SLOW, "steps": {"here": [1e-9, 2e-9], "process": [1e-9, 2e-9]}}
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    for module in (calibrate, survey):
        monkeypatch.setattr(
            module, "profile", lambda *a, **k: profile(state["links"]) | {"steps": state["steps"]}
        )
    monkeypatch.setattr(planner, "speeds_of_workers", lambda *a: {})
    yield state


def towers() -> tuple[Tensor, list[Any]]:
    """Two towers, with noise and slots of an optimiser; fetches of a step."""
    x = gf.placeholder("float32", (None, 64), name="x")
    losses = []
    for i in range(2):
        h = x
        for j in range(3):
            rng = np.random.default_rng(10 * i + j)
            w = rng.normal(size=(64, 64)).astype("float32") * 0.1
            h = gf.tanh(h @ gf.variable(w, name=f"w{i}{j}"))
        losses.append(gf.mean(gf.square(h + 0.1 * gf.random.normal((8, 64)))))
    loss = losses[0] + losses[1]
    return x, [loss, gf.optim.Adam(0.01).minimize(loss)]


def data(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=(8, 64)).astype("float32")


def states(s: gf.Session) -> dict[str, bytes]:
    return {name: s.get(tensor).tobytes() for name, tensor in s._state.variables.items()}


def list_used_devices(s: gf.Session) -> set[str]:
    return {n.device for n in s.plan().nodes if n.finish > n.start}


def ran(
    cluster: Cluster, fetches: list[Any], x: Tensor, between: Callable[[gf.Session], Any]
) -> tuple[list[bytes], dict[str, bytes], Any]:
    with gf.Session(cluster, trial=False) as s:
        seen = [s.run(fetches, {x: data(i)})[0].tobytes() for i in range(3)]
        told = between(s)
        seen += [s.run(fetches, {x: data(i)})[0].tobytes() for i in range(3, 6)]
        return seen, states(s), told


@pytest.mark.parametrize(
    "cluster", [EMBEDDED, pytest.param(PROCESSES, marks=pytest.mark.slow)], ids=["here", "beside"]
)
def test_a_run_with_a_replan_in_the_middle_gives_the_bits_of_one_without(
    cluster: Cluster, machine: Machine
) -> None:
    x, fetches = towers()

    def replan(s: gf.Session) -> Any:
        before = states(s)
        assert len(list_used_devices(s)) == 1
        machine["links"] = FAST
        told = s.replan()
        assert states(s) == before  # to the bit, before another step runs
        assert len(list_used_devices(s)) == 2
        homes = {s._state.names[node]: home for node, home in s._state.homes.items()}
        assert {homes[name] for name in told.moved} <= set(cluster.devices)
        return told

    seen, state, told = ran(cluster, fetches, x, replan)
    machine["links"] = SLOW
    expected, plain, _ = ran(cluster, fetches, x, lambda s: None)
    assert seen == expected and state == plain
    assert len(told.moved) >= 9  # weights of a tower, and two slots of each
    assert told.gain > 0 and "variables moved" in str(told)  # how much, the machine decides


@CLUSTERS
def test_what_lives_elsewhere_now_is_forgotten_at_its_old_home(
    cluster: Cluster, machine: Machine
) -> None:
    x, fetches = towers()
    with gf.Session(cluster, trial=False) as s:
        s.run(fetches, {x: data(0)})
        (home,) = set(s._state.homes.values())
        machine["links"] = FAST
        (name, *_) = s.replan().moved
        if cluster is PROCESSES:
            with pytest.raises(gf.errors.VariableError, match="has no value"):
                s._life.hosts.read(int(home.split("/")[1].split(":")[1]), name)
        else:
            kept = s._life.hosts._host._sessions[""]._variables
            assert [name in kept.of_device(device) for device in cluster.devices].count(True) == 1
        assert s.run(fetches, {x: data(1)})[0].shape == ()


def test_other_fetches_of_the_same_variables_go_along(machine: Machine) -> None:
    x, fetches = towers()
    look = gf.sum(gf.square(fetches[0]))
    with gf.Session(EMBEDDED, trial=False) as s:
        for i in range(3):
            s.run(fetches, {x: data(i)})
        s.run(look, {x: data(0)})
        before = s.run(look, {x: data(9)})
        machine["links"] = FAST
        assert s.replan().moved
        s._steps.committed -= 1  # the same random numbers again
        assert s.run(look, {x: data(9)}).tobytes() == before.tobytes()
        s.run(fetches, {x: data(4)})
        assert s.plan(look).placement


def test_nothing_moves_where_nothing_is_gained(machine: Machine) -> None:
    x, fetches = towers()
    with gf.Session(EMBEDDED, trial=False) as s:
        assert s.replan() == Replanned((), 0, 0)
        s.run(fetches, {x: data(0)})
        placed = s.plan().placement
        told = s.replan()
        assert told.moved == () and told.gain == 0.0 and "stays" in str(told)
        assert s.plan().placement == placed


def test_on_one_device_replanning_tells_what_is_predicted_by_now(machine: Machine) -> None:
    x, fetches = towers()
    with gf.Session(Cluster.here(threads=1), trial=False) as s:
        s.run(fetches, {x: data(0)})
        naive = s.plan().makespan
        assert s.replan() == Replanned((), naive, naive)
        with s.trace():
            for i in range(3):
                s.run(fetches, {x: data(i)})
        told = s.replan()
        assert told.moved == () and told.after == told.before == s.plan().makespan != naive


def test_a_step_that_fails_after_a_replan_leaves_the_moved_state_alone(machine: Machine) -> None:
    x, fetches = towers()
    with gf.Session(EMBEDDED, trial=False) as s:
        s.run(fetches, {x: data(0)})
        machine["links"] = FAST
        s.replan()
        before = states(s)
        with pytest.raises((OpError, gf.errors.FeedError)):
            s.run(fetches, {x: np.zeros((3, 64), "float32")})
        assert states(s) == before


def test_what_fails_while_variables_move_leaves_their_values_with_the_client(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, fetches = towers()
    with gf.Session(EMBEDDED, trial=False) as s:
        s.run(fetches, {x: data(0)})
        before = states(s)
        machine["links"] = FAST
        with monkeypatch.context() as broken:

            def raise_no_room(program: str, partitions: Any) -> None:
                raise SessionError("no more")

            broken.setattr(s._life.hosts, "add", raise_no_room)
            with pytest.raises(SessionError, match="no more"):
                s.replan()
            assert states(s) == before
        s.run(fetches, {x: data(1)})
        seen = states(s)
    machine["links"] = SLOW
    with gf.Session(EMBEDDED, trial=False) as s:
        for i in range(2):
            s.run(fetches, {x: data(i)})
        assert states(s) == seen


def test_a_closed_session_does_not_replan() -> None:
    s = gf.Session(EMBEDDED, trial=False)
    s.close()
    with pytest.raises(SessionError, match="closed"):
        s.replan()


# By itself ------------------------------------------------------------------------------------


def test_windows_come_at_twice_the_number_of_steps_each_time() -> None:
    starts = [n for n in range(400) if window_position(n) == 0]
    assert starts == [FIRST * 2**k for k in range(6)]
    assert [window_position(FIRST + i) for i in range(WINDOW + 1)] == [*range(WINDOW), None]
    assert window_position(0) is None


def test_drift_is_several_steps_off_to_the_same_side() -> None:
    assert shows_drift([1.2, 1.3, 1.15], 1.0)
    assert shows_drift([0.5, 0.6, 1.0, 0.7], 1.0)
    assert not shows_drift([1.2, 1.3, 1.05, 1.0, 0.99], 1.0)
    assert not shows_drift([1.2, 0.5, 1.3, 0.6], 1.0)
    assert not shows_drift([1.2, 1.2, 1.2], 0.0)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that always count as drifted, and teach nothing: how long they really take here is a
    matter of what else runs on this machine."""
    monkeypatch.setattr("graphflow.planning.migration.replanning.shows_drift", lambda *a: True)
    monkeypatch.setattr(PlacementImprovement, "learn", lambda self: None)
    monkeypatch.setattr("graphflow.planning.planner.learn_steps", lambda *a: False)


def test_the_automatic_mode_goes_over_once_and_says_so(
    machine: Machine, caplog: pytest.LogCaptureFixture, steady: None
) -> None:
    x, fetches = towers()
    expected = ran_steps(EMBEDDED, fetches, x, None)
    with caplog.at_level(logging.INFO, "graphflow.session"):
        seen = ran_steps(EMBEDDED, fetches, x, "auto", lambda: machine.update(links=FAST))
    assert seen == expected
    told = [r.getMessage() for r in caplog.records if "placed anew" in r.getMessage()]
    assert len(told) == 1 and "variables moved" in told[0]


def ran_steps(
    cluster: Cluster,
    fetches: list[Any],
    x: Tensor,
    replan: str | None,
    change: Callable[[], Any] = lambda: None,
) -> list[bytes]:
    with gf.Session(cluster, trial=False, replan=replan) as s:
        seen = []
        for i in range(4 * FIRST):
            seen.append(s.run(fetches, {x: data(i)})[0].tobytes())
            if i == 0:
                change()
        return seen


def test_the_automatic_mode_stays_where_less_than_a_tenth_is_gained(
    machine: Machine, caplog: pytest.LogCaptureFixture, steady: None
) -> None:
    x, fetches = towers()
    with caplog.at_level(logging.DEBUG, "graphflow.session"):
        ran_steps(EMBEDDED, fetches, x, "auto")
    told = [r.getMessage() for r in caplog.records]
    assert told and all("stays" in line for line in told)


@pytest.mark.parametrize("value", ["always", True, 3])
def test_a_mode_that_does_not_exist_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="'auto'"):
        check_replan(value)
    with pytest.raises(ArgumentError, match="'auto'"):
        gf.Session(replan=value)
