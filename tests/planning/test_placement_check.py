"""A new placement stays only if its steps are not slower; one that lost is not tried again."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import MemoryLimitError
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.replan_policy import FIRST, WINDOW
from graphflow.execution.step_executor import StepExecutor
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.passes import optimize
from graphflow.placement import Assignment, Placer, Problem, register_placer
from graphflow.placement.calibration import calibrate
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers import base
from graphflow.placement.placers.single import OneDevice
from graphflow.placement.plans.building.plan_builder import FixedAssignment
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import StepQuartiles
from graphflow.planning import deployment
from graphflow.planning.migration.placement_improvement import PlacementImprovement
from graphflow.planning.placement_check import (
    HORIZON,
    SAMPLES,
    SURE,
    LostPlacement,
    PlacementCheck,
    is_slower,
    is_spread,
    merge_quartiles,
    move_seconds,
)
from graphflow.runtime.client import cluster_survey as survey
from tests.placement.speeds import profile

ONE = Cluster.here(devices=("cpu:0",), threads=1)
TWO = Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)
PROCESSES = Cluster.local(workers=2, threads=1)
SLOW, MEDIUM, FAST = ({"thread": [latency, None]} for latency in (1.0, 1e-4, 1e-9))
ROWS, WIDTH = 32, 128
CHECK = SAMPLES + 1
"""Steps of a placement until it is judged: one warms up."""


def towers() -> tuple[Tensor, list[Any]]:
    """Two towers that meet half-way, with noise and slots of an optimiser: on two devices nearly
    twice as fast, if links are."""
    x = gf.placeholder("float32", (None, WIDTH), name="x")
    noise = 0.1 * gf.random.normal((ROWS, WIDTH))
    weights = np.random.default_rng(0).normal(size=(4, WIDTH, WIDTH)).astype("float32") * 0.1
    near = [gf.tanh(x @ gf.variable(weights[i])) for i in range(2)]
    mean = gf.mean(near[0]) + gf.mean(near[1])
    far = [gf.tanh(h @ gf.variable(weights[i + 2]) + mean) for i, h in enumerate(near)]
    loss = gf.mean(gf.square(far[0] + noise)) + gf.mean(gf.square(far[1]))
    return x, [loss, gf.optim.Adam(0.01).minimize(loss)]


def data(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype("float32")


class Bench:
    """A made-up machine: speeds of links as plans are told, and durations of steps as timed."""

    def __init__(self) -> None:
        self.links: dict[str, Any] = SLOW
        self.one = self.two = 1e-3  # seconds of a step on one device, and over two

    def seconds(self, compiled: CompiledFetches, took: float) -> float:
        return self.two if has_two_devices(compiled) else self.one


def has_two_devices(compiled: CompiledFetches) -> bool:
    return compiled.plan is not None and is_spread(compiled.plan)


@pytest.fixture(autouse=True)
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Timed steps take what the bench says; nothing is kept where users keep it."""
    made = Bench()
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    steps = {"here": [1e-9, 2e-9], "process": [1e-9, 2e-9]}
    for module in (calibrate, survey):
        monkeypatch.setattr(
            module, "profile", lambda *a, **k: profile(made.links) | {"steps": steps}
        )
    monkeypatch.setattr(
        "graphflow.planning.trials.profiling_run.profile_first_steps", lambda *a, **k: 0
    )

    def with_bench(run: Any) -> Any:
        def run_timed(steps: Any, compiled: CompiledFetches, *rest: Any) -> Any:
            kept, known = compiled.recent_seconds, [*compiled.recent_seconds]
            kept.clear()
            values = run(steps, compiled, *rest)
            took = [made.seconds(compiled, seconds) for seconds in kept]
            kept.clear()
            kept.extend([*known, *took])
            compiled.warmup_seconds = 0.0
            return values

        return run_timed

    for name in ("run", "run_cached"):
        monkeypatch.setattr(StepExecutor, name, with_bench(getattr(StepExecutor, name)))
    yield made


class Training:
    """Steps of the towers in a session, and their losses."""

    def __init__(self, s: gf.Session, model: tuple[Tensor, list[Any]]) -> None:
        self.s, (self.x, self.fetches) = s, model
        self.losses: list[bytes] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            feeds = {self.x: data(len(self.losses))}
            self.losses.append(self.s.run(self.fetches, feeds)[0].tobytes())

    def stream(self, steps: int) -> None:
        """Run as many steps in one call, some of which begin ahead."""
        first = len(self.losses)
        feeds = ({self.x: data(first + i)} for i in range(steps))
        found = self.s.run(self.fetches, feeds, steps=steps)
        self.losses += [loss.tobytes() for loss, _ in found]

    @property
    def is_spread(self) -> bool:
        return is_spread(self.s.plan(self.fetches))

    @property
    def outcome(self) -> tuple[list[bytes], dict[str, bytes]]:
        variables = self.s._state.variables.items()
        return self.losses, {name: self.s.get(tensor).tobytes() for name, tensor in variables}


def train_alone(
    model: tuple[Tensor, list[Any]], steps: int
) -> tuple[list[bytes], dict[str, bytes]]:
    with gf.Session(ONE) as s:
        training = Training(s, model)
        training.run(steps)
        return training.outcome


def outcomes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        event
        for r in caplog.records
        if (event := getattr(r, "event", "")) in ("placement.confirmed", "placement.reverted")
    ]


# Replanning -----------------------------------------------------------------------------------


def test_a_replan_that_made_steps_slower_is_taken_back_and_not_repeated(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    model = towers()
    bench.one, bench.two = 1e-3, 1.2e-3
    with gf.Session(TWO) as s, caplog.at_level(logging.INFO, "graphflow.session"):
        training = Training(s, model)
        training.run(6)
        bench.links = MEDIUM
        told = s.replan()
        assert told.after < told.before and told.measured_before == pytest.approx(1e-3)
        assert "1 ms measured" in str(told)
        training.run(CHECK - 1)
        assert training.is_spread
        training.run(1)
        assert not training.is_spread and not outcomes(caplog)  # timed once more
        training.run(CHECK)
        assert not training.is_spread
        assert outcomes(caplog) == ["placement.reverted"]
        (line,) = [r.getMessage() for r in caplog.records if "reverted" in r.getMessage()]
        assert "promised=0.0018" in line and "measured=0.0012" in line
        text = str(s.plan(model[1]).report())
        assert "back to the placement before" in text and "1.2 ms" in text
        for _ in range(3):  # it lost, and nothing has changed
            told = s.replan()
            assert told.moved == () and "slower when it was tried" in str(told)
            assert not training.is_spread
            training.run(3)
        bench.links = FAST  # links that save much more than it was slower by
        assert s.replan().moved and training.is_spread
        bench.two = 5e-4
        training.run(CHECK)
        assert training.is_spread
        assert outcomes(caplog) == ["placement.reverted", "placement.confirmed"]
        assert "the new one stays" in str(s.plan(model[1]).report())
        seen = training.outcome
    assert seen == train_alone(model, len(seen[0]))


def test_a_loss_counts_in_the_predictions_of_later_plans(bench: Bench) -> None:
    x, fetches = towers()
    bench.links, bench.one, bench.two = FAST, 1e-3, 9e-3
    with gf.Session(TWO) as s:
        training = Training(s, (x, fetches))
        training.run(1)
        assert training.is_spread
        training.run(2 * CHECK)
        assert not training.is_spread
        again, others = towers()  # the same model once more is not spread any more
        s.run(others, {again: data(0)})
        assert not is_spread(s.plan(others))


def test_steps_that_were_never_timed_before_a_replan_are_timed_after_it(bench: Bench) -> None:
    model = towers()
    bench.one, bench.two = 1e-3, 2e-3
    with gf.Session(TWO) as s:
        training = Training(s, model)
        training.run(1)  # it warms up, and is not timed
        bench.links = FAST
        assert s.replan().measured_before is None and training.is_spread
        training.run(CHECK)
        assert not training.is_spread  # on trial
        assert s.plan(model[1]).verdict is None
        training.run(CHECK)
        verdict = s.plan(model[1]).verdict
        assert verdict is not None and not verdict.stays and not training.is_spread
        assert verdict.other_measured == StepQuartiles(1e-3, 1e-3, 1e-3)


def test_a_load_that_came_with_a_replan_and_stays_is_not_taken_for_a_slower_placement(
    bench: Bench,
) -> None:
    model = towers()
    with gf.Session(TWO) as s:
        training = Training(s, model)
        training.run(1 + SAMPLES)
        bench.links = FAST
        s.replan()
        bench.one, bench.two = 3e-3, 2e-3  # both were a millisecond before
        training.run(2 * CHECK + 1)
        verdict = s.plan(model[1]).verdict
        assert verdict is not None and verdict.stays and training.is_spread
        assert verdict.other_measured == StepQuartiles(3e-3, 3e-3, 3e-3)
        assert s.replan().measured_before == pytest.approx(2e-3)


def test_a_change_within_the_noise_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = towers()
    noise = iter(np.random.default_rng(0).uniform(0.7, 1.3, size=1000))
    monkeypatch.setattr(
        Bench,
        "seconds",
        lambda bench, c, took: next(noise) * (1.05e-3 if has_two_devices(c) else 1e-3),
    )
    with gf.Session(TWO) as s:
        training = Training(s, model)
        training.run(1 + SAMPLES)
        bench.links = FAST
        s.replan()
        training.run(CHECK)
        verdict = s.plan(model[1]).verdict
        assert verdict is not None and verdict.stays and training.is_spread


# The first plan -------------------------------------------------------------------------------


def test_a_first_plan_that_is_slower_than_one_device_goes_there(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    model = towers()
    bench.links, bench.one, bench.two = FAST, 1e-3, 3e-3
    with gf.Session(TWO) as s, caplog.at_level(logging.INFO, "graphflow.session"):
        training = Training(s, model)
        training.run(1)
        assert training.is_spread
        promised = s.plan(model[1]).makespan
        training.run(2 * CHECK - 1)
        assert not training.is_spread and outcomes(caplog) == ["placement.reverted"]
        verdict = s.plan(model[1]).verdict
        assert verdict is not None and verdict.promised == promised
        assert "/worker:0/cpu:0 alone" in str(s.plan(model[1]).report())
        assert s.replan().moved == ()
        training.run(30)
        assert not training.is_spread and len(outcomes(caplog)) == 1
        seen = training.outcome
    assert seen == train_alone(model, len(seen[0]))


@pytest.mark.parametrize(
    ("one", "two", "is_tried"),
    [(1.8e-3, 1.4e-3, True), (1.8e-3, 1.3e-3, False)],
    ids=["after a look at one device", "at once"],
)
def test_a_first_plan_that_is_faster_stays(
    bench: Bench, one: float, two: float, is_tried: bool
) -> None:
    model = towers()
    bench.links, bench.one, bench.two = FAST, one, two
    with gf.Session(TWO) as s:
        training = Training(s, model)
        training.run(3 * CHECK)
        verdict = s.plan(model[1]).verdict
        assert verdict is not None and verdict.stays and training.is_spread
        assert (verdict.other_measured is not None) == is_tried
        compiled = s._deployment.find(model[1])
        assert compiled is not None and not compiled.is_timed
        seen = training.outcome
    assert seen == train_alone(model, len(seen[0]))


def test_without_a_trial_the_first_plan_is_taken_at_its_word(bench: Bench) -> None:
    model = towers()
    bench.links, bench.two = FAST, 1.0
    with gf.Session(TWO, trial=False) as s:
        training = Training(s, model)
        training.run(3 * CHECK)
        assert training.is_spread and s.plan(model[1]).verdict is None
        plan = s.plan(model[1])
    with gf.Session(TWO, plan=plan) as s:  # nor is one that the user gives
        training = Training(s, model)
        training.run(3 * CHECK)
        look = gf.exp(model[1][0])
        for _ in range(3 * CHECK):
            s.run(look, {model[0]: data(0)})
        assert training.is_spread and s.plan(model[1]).placement == plan.placement


def test_where_there_is_nothing_to_choose_nothing_is_checked() -> None:
    model = towers()
    with gf.Session(ONE) as s:
        Training(s, model).run(2)
        assert s._deployment.check is None
    with gf.device("/cpu:0"):
        x = gf.placeholder("float32", (4,))
        y = gf.exp(x)
    with gf.device("/cpu:1"):
        z = gf.exp(y)
    with gf.Session(TWO) as s:
        s.run(z, {x: np.zeros(4, "float32")})
        assert is_spread(s.plan(z)) and s._deployment.check is None


def test_fetches_that_are_no_longer_run_end_the_check(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "PATIENCE", 20)
    x, fetches = towers()
    bench.links = FAST
    y = gf.sum(gf.placeholder("float32", (2,), name="y"))
    with gf.Session(TWO) as s:
        s.run(fetches, {x: data(0)})
        assert s._deployment.check is not None
        s.run(gf.sum(x), {x: data(0)})  # on one device: it runs as ever
        for _ in range(21):
            s.run(y, {"y": np.zeros(2, "float32")})
            s.run(gf.sum(y), {"y": np.zeros(2, "float32")})
        assert s._deployment.check is None


# By itself, and amid other things ---------------------------------------------------------------


def test_the_automatic_mode_goes_back_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphflow.planning.migration.replanning.shows_drift", lambda *a: True)
    monkeypatch.setattr(PlacementImprovement, "learn", lambda self: None)
    model = towers()
    bench.one, bench.two = 1e-3, 2e-3
    with gf.Session(TWO, replan="auto") as s, caplog.at_level(logging.INFO, "graphflow.session"):
        training = Training(s, model)
        training.run(6)
        bench.links = FAST
        training.run(FIRST + WINDOW - 6)
        assert training.is_spread
        training.run(20 * FIRST)
        assert not training.is_spread
        events = [getattr(r, "event", "") for r in caplog.records]
        assert events.count("placement.changed") == events.count("placement.reverted") == 1
        seen = training.outcome
    assert seen == train_alone(model, len(seen[0]))


def test_a_stream_of_steps_goes_through_a_check(bench: Bench) -> None:
    model = towers()
    bench.links, bench.one, bench.two = FAST, 1e-3, 3e-3
    with gf.Session(TWO) as s:
        training = Training(s, model)
        training.stream(4 * CHECK)
        assert not training.is_spread
        seen = training.outcome
    assert seen == train_alone(model, 4 * CHECK)


def test_a_plan_on_one_device_but_for_pins_is_not_compared_with_itself(bench: Bench) -> None:
    x = gf.placeholder("float32", (4,))
    with gf.device("/cpu:0"):
        y = gf.exp(x)
    with gf.device("/cpu:1"):
        z = gf.exp(y)
    total = gf.sum(gf.exp(gf.exp(z)))
    bench.one = bench.two = 9.0
    with gf.Session(TWO) as s:
        for _ in range(CHECK):
            assert s._deployment.check is None or not s._deployment.check.durations
            s.run(total, {x: np.zeros(4, "float32")})
        verdict = s.plan(total).verdict
        assert verdict is not None and verdict.stays and not s._deployment.lost


@dataclass(frozen=True)
class Alternating(Placer):
    """Neighbours on different devices: each step crosses between them all the time."""

    def place(self, problem: Problem) -> Assignment:
        group = problem.groups.tolist()
        turn = [at if group[at] < 0 else group[at] for at in range(problem.nodes)]
        devices = np.array([turn[at] % 2 for at in range(problem.nodes)])
        allowed = problem.allowed
        devices = np.where(
            allowed[np.arange(problem.nodes), devices], devices, np.argmax(allowed, axis=1)
        )
        return Assignment(devices, problem.topological)


def chain() -> tuple[Tensor, list[Any]]:
    """Eighty small nodes, one after the other, and an update."""
    x = gf.placeholder("float32", (None, WIDTH), name="x")
    w = gf.variable(np.ones(WIDTH, "float32"), name="w")
    h = x
    for _ in range(40):
        h = gf.tanh(h + w)
    loss = gf.mean(h)
    return x, [loss, gf.optim.SGD(0.1).minimize(loss)]


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(base, "_PLACERS", dict(base._PLACERS))
    register_placer("alternating", Alternating())
    return "alternating"


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["calls", "stream", pytest.param("killed", marks=pytest.mark.slow)])
def test_workers_whose_steps_are_slower_together_leave_them_to_one(
    alternating: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations are real here: dozens of messages between processes against one sweep over a few
    kilobytes."""
    monkeypatch.setattr(Bench, "seconds", lambda bench, c, took: took)
    model = chain()
    options: dict[str, Any] = {"checkpoint": tmp_path / "c", "every": 7} if way == "killed" else {}
    with gf.Session(PROCESSES, placer=alternating, **options) as s:
        training = Training(s, model)
        run = training.stream if way == "stream" else training.run
        training.run(1)
        assert training.is_spread
        for steps in (4, 3, CHECK, CHECK):
            run(steps)
            if way == "killed" and steps != 4:
                with suppress(ProcessLookupError):  # nobody has missed it since the last time
                    os.kill(s._life.hosts.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        run(2 * CHECK)
        assert not training.is_spread
        seen = training.outcome
    assert seen == train_alone(model, len(seen[0]))


def test_steps_of_other_sizes_do_not_count(alternating: str, bench: Bench) -> None:
    x, (loss, _) = chain()
    with gf.Session(TWO, placer=alternating) as s:
        s.run(loss, {x: np.zeros((2, WIDTH), "float32")})
        for step in range(2 * SAMPLES):
            assert s._deployment.check is not None and not s._deployment.check.durations
            s.run(loss, {x: np.zeros((2 + (step + 1) % 2, WIDTH), "float32")})
        assert s._deployment.check is None or s._deployment.check.durations


def test_all_fetches_of_the_variables_go_along(alternating: str, bench: Bench) -> None:
    x, fetches = model = chain()
    look = gf.exp(fetches[0])
    bench.two = 1.0
    with gf.Session(TWO, placer=alternating) as s:
        training = Training(s, model)
        training.run(3)
        s.run(look, {x: data(0)})
        assert is_spread(s.plan(look))
        training.run(2 * CHECK)
        assert not training.is_spread and not is_spread(s.plan(look))
        seen, last = training.outcome, s.run(look, {x: data(0)})
    assert seen == train_alone(model, len(seen[0]))
    with gf.Session(ONE) as s:
        training = Training(s, model)
        training.run(len(seen[0]))
        assert s.run(look, {x: data(0)}).tobytes() == last.tobytes()


def test_where_one_device_has_not_the_memory_the_plan_stays(
    alternating: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(placer: OneDevice, problem: Problem) -> Assignment:
        raise MemoryLimitError("too large")

    monkeypatch.setattr(OneDevice, "place", place)
    bench.two = 1.0
    with gf.Session(TWO, placer=alternating) as s:
        training = Training(s, chain())
        training.run(3 * CHECK)
        assert training.is_spread
        verdict = s.plan(training.fetches).verdict
        assert verdict is not None and verdict.stays and verdict.other_measured is None


# Decisions ------------------------------------------------------------------------------------


def make_quartiles(*values: float) -> StepQuartiles:
    return merge_quartiles({(1,): values}, {(1,): 1})


def test_slower_means_that_medians_differ_by_more_than_chance() -> None:
    fast, slow = make_quartiles(1.0, 1.1, 1.2, 1.3), make_quartiles(1.4, 1.5, 1.6, 9.0)
    assert not is_slower(fast, slow)
    assert not is_slower(make_quartiles(1.1, 1.2, 1.3, 1.4), fast)
    assert not is_slower(make_quartiles(1.02, 1.02, 1.02), make_quartiles(1.0, 1.0, 1.0))
    overlapping = make_quartiles(17.4, 18.6, 20.9), make_quartiles(18.4, 22.6, 23.4)
    assert is_slower(overlapping[1], overlapping[0])


def test_steps_of_one_placement_are_rarely_slower_than_steps_of_the_same() -> None:
    rng = np.random.default_rng(0)
    pairs = 1.0 + 0.1 * rng.standard_normal((1000, 2, SAMPLES))
    wrong = sum(is_slower(make_quartiles(*a), make_quartiles(*b)) for a, b in pairs)
    right = sum(is_slower(make_quartiles(*a * 1.25), make_quartiles(*b)) for a, b in pairs)
    assert wrong < 100 and right > 950


def test_quartiles_of_several_sets_are_weighted_means() -> None:
    merged = merge_quartiles({(1,): [1.0, 2.0, 3.0], (2,): [5.0, 5.0]}, {(1,): 3, (2,): 1})
    assert merged == StepQuartiles(2.375, 2.75, 3.125)


def plans() -> tuple[Graph, tuple[Plan, Plan]]:
    """The graph of the towers, planned over two devices if links are fast, and on one."""
    x, fetches = towers()
    spread, single = (
        gf.plan(fetches, TWO, {x: (ROWS, WIDTH)}, placer=name) for name in ("greedy", "single")
    )
    return optimize(Graph(fetches)), (spread, single)


def make_check(new: float, other: float | None) -> PlacementCheck:
    """A check of one set of fetches whose steps take given seconds."""
    _, (spread, single) = plans()
    key = (1,)
    timed = {} if other is None else {key: [other] * SAMPLES}
    return PlacementCheck(
        0,
        "one",
        {key: spread},
        {key: single},
        {key: single.makespan},
        {key: [new] * SAMPLES},
        timed,
    )


def test_moves_that_cost_more_than_they_save_are_not_made() -> None:
    saved = 1e-3 * HORIZON
    slower, faster = make_check(2e-3, 1e-3), make_check(1e-3, 2e-3)
    assert slower.should_try_other(0.9 * saved) and not slower.should_try_other(1.1 * saved)
    assert not faster.should_try_other(0.0)
    assert slower.judge(0.0).stays  # the other one is not in place, so it was not timed again
    for check in (slower, faster):
        check.tries_other = True
    assert not slower.judge(0.0).stays
    assert faster.judge(0.9 * saved).stays and not faster.judge(1.1 * saved).stays


def test_a_placement_that_was_never_timed_is_tried_unless_it_is_surely_slower(
    bench: Bench,
) -> None:
    predicted = make_check(1.0, None).other_makespans[1,]
    unsure, sure = make_check(0.7 * predicted, None), make_check(0.6 * predicted, None)
    assert unsure.should_try_other(0.0) and not sure.should_try_other(0.0)
    saved = (0.7 - 1 / SURE) * predicted * HORIZON
    assert unsure.should_try_other(0.4 * saved) and not unsure.should_try_other(0.6 * saved)


def test_the_price_of_a_move_is_that_of_the_bytes_by_way_of_the_client(bench: Bench) -> None:
    bench.links = FAST
    graph, (spread, single) = plans()
    moved = [
        spread.by_name[name].bytes
        for name in map(graph.names.__getitem__, graph.variables)
        if spread.by_name[name].device != single.by_name[name].device
    ]
    assert moved and spread.model is not None
    problem, client = spread.model.problem, spread.model.devices.index("/client")
    way = problem.bandwidth[0, client], problem.latency[0, client]
    expected = 2 * sum(way[1] + nbytes / way[0] for nbytes in moved)
    assert move_seconds([(graph, spread, single)]) == pytest.approx(expected)
    assert move_seconds([(graph, spread, single)] * 2) == pytest.approx(expected)
    assert move_seconds([(graph, single, single)]) == 0.0


def test_a_plan_that_lost_is_excluded_until_predictions_change_by_more_than_it_lost(
    bench: Bench,
) -> None:
    bench.links = FAST
    _, (fast, single) = plans()
    assert fast.model is not None
    bench.links = MEDIUM
    _, (another, single) = plans()
    x, fetches = towers()
    medium = gf.plan(
        fetches, TWO, {x: (ROWS, WIDTH)}, placer=FixedAssignment(fast.model.assignment)
    )
    ratio = (medium.makespan - medium.overhead) / (single.makespan - single.overhead)
    lost = LostPlacement(medium, 1.2, ratio)
    assert lost.excludes(medium, single)
    assert not lost.excludes(fast, single)
    assert LostPlacement(medium, 3.0, ratio).excludes(fast, single)
    assert another.placement != medium.placement
    assert not LostPlacement(medium, 9.0, ratio).excludes(another, single)
