"""What is no strategy, or none for a network, is refused with the numbers, a remedy, and the line
on which it was written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DeviceError, GraphflowError, ScheduleError, ShardingError
from graphflow.parallel import Schedule, Task, one_f_one_b

Data, Pipeline, Shard = gf.parallel.Data, gf.parallel.Pipeline, gf.parallel.Shard
ELSEWHERE = gf.placeholder("float64", ("B", 6), name="z")
HERE = re.escape(__file__) + r":\d+"


def catch_refusal(make: Callable[[], Any], batch: int = 8) -> str:
    """What is said of a strategy, or of a step of three layers that is divided by it."""
    with pytest.raises((ShardingError, ScheduleError, DeviceError)) as caught:
        strategy = make()
        h = x = gf.placeholder("float64", ("B", 6), name="x")
        for scope in "abc":
            with gf.name_scope(scope):
                h = gf.tanh(h @ gf.variable(np.ones((6, 6)), name="w"))
                loss = gf.mean(h) if scope == "c" else h
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        gf.plan(train, gf.Cluster.local(2), {x: (batch, 6)})
    return str(caught.value)


def schedule(*orders: str, stages: int = 2, microbatches: int = 1) -> Schedule:
    """A schedule of tasks such as B01: the backward pass of stage 0 for micro-batch 1."""
    tasks = tuple(tuple(Task(t[0], int(t[1]), int(t[2])) for t in o.split()) for o in orders)  # type: ignore[arg-type]
    return Schedule("mine", stages, microbatches, tasks)


@pytest.mark.parametrize("make, told", [
    (lambda: Data(3), rf"Data at {HERE}: the mesh \(data 3\) takes 3 .*make an axis smaller"),
    (lambda: Data(2, devices=["cpu:7", "cpu:8"]), rf"Data at {HERE}: no device 'cpu:7'"),
    (lambda: Data(2, batch=["y"]), rf"Data at {HERE}: batch names 'y'.*there are 'x'"),
    (lambda: Data(2, batch=[ELSEWHERE]), rf"Data at {HERE}: batch names <Tensor 'z'.* are 'x'"),
    (lambda: Data(9), rf"Data at {HERE}: .*takes 9 devices"),
    (lambda: Data(replica=2), rf"Data at {HERE}: .* 'replica' \(did you mean 'replicas'\?\)"),  # type: ignore[call-arg]
    (lambda: Shard({"m": 2}, {"w": ("m",)}), rf"Shard at {HERE}: a rule names 'w'.*did you mean "
     r"'a/w' or 'b/w' or 'c/w', or all such, '\*/w'\?"),
    (lambda: Shard({"m": 2}, {"w*": ("m",)}), rf"Shard at {HERE}: .*, or all such, '\*/w\*'\?"),
    (lambda: Shard({"m": 2}, {"a/w": ("k",)}), rf"Shard at {HERE}: .* has no axis 'k'; it has m"),
    (lambda: Shard({"m": 2}) * Data(2), rf"Shard at {HERE}: the mesh \(data 2 × m 2\) takes 4"),
    (lambda: Pipeline(99), rf"Pipeline at {HERE}: 99 stages for a network of 7 nodes; give 1 to 7"),
    (lambda: Pipeline(["a", "b"]), rf"Pipeline at {HERE}: .*'c/matmul'.*put them under one of"),
    (lambda: Pipeline(["a", "x"]), rf"Pipeline at {HERE}: stage 1: no node is under the .*'x'"),
    (lambda: Pipeline([["b", "c"], "a"]), r"'b/matmul' .* reads 'a/tanh' \(made at .*\) of stage 1;"
     r" .* put 'a/tanh' into stage 0 or one before, or 'b/matmul' into stage 1 or one behind"),
    (lambda: Pipeline(2) * Pipeline(2), rf"Pipeline at {HERE}: .*one Pipeline the stages of both"),
    (lambda: Pipeline(2) * Data, rf"Pipeline at {HERE}: .*write Pipeline\(…\) \* gf.parallel.Data"),
    (lambda: Pipeline(2) * Data(2), rf"Pipeline at {HERE}: the mesh .* takes 4 devices"),
    (lambda: Pipeline(2, lambda p, m: 3), rf"Pipeline at {HERE}: .*gives a schedule.*not 3"),  # type: ignore[arg-type, return-value]
    (lambda: Pipeline(2, lambda p, m: 1 / 0), rf"Pipeline at {HERE}: .*ZeroDivisionError for 2"),  # type: ignore[arg-type, return-value]
    (lambda: Pipeline(2, lambda p, m: one_f_one_b(p + 1, m)), rf"{HERE}: 2 stages, but.* has 3"),
    (lambda: Pipeline(2, one_f_one_b(2, 4), 3), rf"Pipeline at {HERE}: 3 micro-batches, but .* 4"),
    (lambda: Pipeline("auto", one_f_one_b(2, 4), 3), rf"{HERE}: 3 micro-batches, but .* has 4"),
    (lambda: Pipeline(2, "interleaved", chunks=3), r"unexpected keyword argument 'chunks'"),  # type: ignore[call-arg]
])  # fmt: skip
def test_a_strategy_that_is_none_for_a_network_is_refused_with_its_line(
    make: Callable[[], Any], told: str
) -> None:
    said = catch_refusal(make)
    assert re.search(told, said), said
    assert said.count(" at ") - said.count("made at") <= 2, said


@pytest.mark.parametrize("make, told", [
    (lambda: Pipeline(3, "interleaved", 4), r"interleaved at .*3 stages do not.*give 4, or an"),
    (lambda: Pipeline(4, "interleaved", 5), r"5 micro-batches are no multiple of 2.*give 6"),
    (lambda: Pipeline(3, "zb-v", 4), r"zb_v at .*3 is odd; give an even number, such as 4"),
    (lambda: Pipeline(3, "chimera", 5), r"3 stages and 5 micro-batches; .* such as 4 and 8"),
    (lambda: gf.parallel.run(one_f_one_b(2, 4), -1, 1), r"run at .*forward is -1: give seconds"),
    (lambda: gf.parallel.staleness(gf.parallel.pipedream(2, 4), 7), r"are 0 to 1, not 7"),
    (lambda: gf.parallel.staleness(one_f_one_b(2, 4)), r"missing a required argument: 'stage'"),  # type: ignore[call-arg]
    (lambda: Schedule("mine"), r"Schedule at .*missing a required argument: 'stages'"),  # type: ignore[call-arg]
    (lambda: schedule("F00 B00", "B10 F10"), r"'mine' at .*deadlock after 1 tasks: device 0"
     r" has B of .*device 1 has B .* which needs F of micro-batch 0 at stage 1; reorder the tasks"),
    (lambda: Pipeline(1, schedule("F00 F01 B00 B01", "F02 B02", stages=1, microbatches=3)),
     r"schedule 'mine' at .* take 2 paths through the devices, 1 in one \(such as 2\) "
     r"and 2 in another .*; send as many"),
    (lambda: schedule("F00", "F10 B10"), r"misses B of micro-batch 0 at stage 0; add it"),
    (lambda: schedule("F00 B00", stages=10**12), r"it misses B.* and 1,999,999,999,997 other"),
    (lambda: schedule("F00 F00 B00", "F10 B10"), r"repeats F of micro-batch 0 at stage 0; leave"),
    (lambda: schedule("F50 B00", "F10 B10"), r"no place for F of micro-batch 0 at stage 5; leave"),
    (lambda: schedule("F00 B10", "F10 B00"), r"'mine' .* on device 1, but another of its .* on 0"),
])  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused_where_it_is_written(
    make: Callable[[], Any], told: str
) -> None:
    with pytest.raises(GraphflowError, match=told) as caught:
        make()
    assert re.search(HERE, str(caught.value))


def test_a_step_of_a_session_names_the_line_of_its_strategy() -> None:
    x = gf.placeholder("float64", (None, 3), name="x")
    loss = gf.mean(gf.square(x @ gf.variable(np.ones((3, 3)))))
    train = gf.optim.SGD(0.1).minimize(loss, strategy=Data(4))
    with gf.Session() as s, pytest.raises(ShardingError, match=rf"Data at {HERE}: a batch of 3"):
        s.run(train, {x: np.ones((3, 3))})
    strategy = Shard({"m": 2}, {"y": ("m",)})
    with pytest.raises(ShardingError, match=rf"Shard at {HERE}: a rule names 'y'"):
        strategy.report(gf.optim.SGD(0.1).minimize(loss, strategy=strategy))


@pytest.mark.parametrize("other", [
    Data(4), Data(3, shard_state=True), Shard({"data": 1, "m": 2}, {"w": ("m",)}),
    Pipeline(1, microbatches=3), Pipeline(1, "pipedream", 3),
])  # fmt: skip
def test_variables_of_one_session_are_trained_by_one_strategy(other: Any) -> None:
    """What was cut for a mesh is not cut for another one; the session goes on as it was."""
    x = gf.placeholder("float64", (None, 3), name="x")
    w = gf.variable(np.ones((6, 3)), name="w")
    loss = gf.mean(gf.square(gf.matmul(x, w, transpose_b=True)))
    cut = Shard({"data": 2}, {"w": ("data",), "x": (None,)})
    first, second = (gf.optim.SGD(0.1).minimize(loss, strategy=s) for s in (cut, other))
    feeds = {x: np.ones((12, 3))}
    with gf.Session() as s:
        s.run(first, feeds)
        with pytest.raises(ShardingError, match=r"'w' .*lies over the mesh data 2.*one strategy"):
            s.run(second, feeds)
        before = s.run(loss, feeds)
        assert s.run([loss, first], feeds)[0] == before > s.run(loss, feeds)


def test_each_variable_stays_with_the_strategy_that_divided_it() -> None:
    """Two networks of one session, each trained in its way; what is fetched later goes that way."""
    x = gf.placeholder("float64", (None, 3), name="x")
    feeds = {x: np.ones((12, 3))}
    losses, steps = [], []
    for name, strategy in (("a", Data(2)), ("b", Data(3)), ("c", Pipeline(1, microbatches=4))):
        w = gf.variable(np.ones((3, 3)), name=name)
        losses.append(gf.mean(gf.square(x @ w)))
        steps.append(gf.optim.SGD(0.1).minimize(losses[-1], strategy=strategy))
    with gf.Session() as s:
        s.run(losses, feeds)
        for step in steps:
            s.run(step, feeds)
        after = [float(s.run(loss, feeds)) for loss in losses]
    np.testing.assert_allclose(after, after[0], rtol=1e-12)
