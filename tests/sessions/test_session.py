"""Sessions: fetches in any structure, state of their own, order, errors, closing, size."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import weakref
from collections import namedtuple
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    ClusterError,
    FeedError,
    FetchError,
    OpError,
    PlacementError,
    PlanError,
    SessionError,
    VariableError,
)
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.host.host_interface import LocalHosts

TWO = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
Pair = namedtuple("Pair", "left right")


def _x() -> gf.Tensor:
    return gf.placeholder("float32", name="x")


# Fetches --------------------------------------------------------------------------------------


def test_values_come_in_the_structure_of_the_fetches() -> None:
    x, v = _x(), gf.variable(3.0, name="v")
    train = gf.optim.SGD(0.5).minimize(v * v)
    with gf.Session() as s:
        got = s.run(
            {"a": [x, x + 1], "b": Pair(v, (train, gf.constant(5))), 7: x + 1, "e": []}, {x: 2}
        )
    assert got == {"a": [2, 3], "b": Pair(3, (None, 5)), 7: 3, "e": []}
    assert isinstance(got["b"], Pair)


@pytest.mark.parametrize("key", ["tensor", "name"])
@pytest.mark.parametrize("what", ["gradient", "step", "tangent"])
def test_feeds_of_a_function_serve_a_derivative_that_does_not_read_them(
    what: str, key: str
) -> None:
    """Of a linear function the derivative is constant; it is the first fetch here."""
    x, w = gf.placeholder("float32", (3,), name="x"), gf.variable(np.ones(3, "float32"), name="w")
    loss = gf.sum(2 * w) + gf.sum(x)
    fetch = {
        "gradient": gf.gradients(loss, [w])[0],
        "step": gf.optim.SGD(0.5).minimize(loss),
        "tangent": gf.jvp(loss, [w], [np.ones(3, "float32")]),
    }[what]
    feeds: dict[Any, Any] = {x if key == "tensor" else "x": np.ones(3, "float32")}
    unknown = gf.placeholder("float32", (3,), name="unknown")
    with gf.Session() as s:
        with pytest.raises(FeedError, match="leave it out"):
            s.run(fetch, {unknown: np.ones(3, "float32")})
        with pytest.raises(FeedError, match="no placeholder of these fetches has this name"):
            s.run(fetch, {"unknown": np.ones(3, "float32")})
        s.warmup(fetch, {x: (3,)})
        s.run(fetch, feeds)


def test_a_tensor_fetched_twice_gives_two_arrays() -> None:
    y = _x() * 2
    with gf.Session() as s:
        one, two = s.run([y, y], {y.node.inputs[0]: 4})
        one[...] = 0
    assert two == 8


def test_nothing_fetched_gives_nothing() -> None:
    with gf.Session() as s:
        assert s.run([]) == [] and s.run({}) == {} and s.run(()) == ()


def test_a_fetched_placeholder_or_constant_belongs_to_the_caller() -> None:
    x, c = gf.placeholder("float32", (2,)), gf.constant([1.0, 2.0])
    fed = np.array([3, 4], "float32")
    with gf.Session() as s:
        got = s.run([x, c, x], {x: fed})
        for value in got:
            value[:] = 0
        assert fed.tolist() == [3, 4] and s.run(c).tolist() == [1, 2]


@pytest.mark.parametrize("wrong", [None, "x", 3, [None], {"a": 1}, np.ones(2), (t for t in ())])
def test_what_is_no_fetch_is_told(wrong: Any) -> None:
    with gf.Session() as s:
        with pytest.raises(FetchError, match="fetches"):
            s.run(wrong)
        with pytest.raises(FetchError, match="fetches"):
            s.run_async(wrong)


@pytest.mark.parametrize("feeds", [[1], 3, "x", np.ones(2), {"x": 1}, {3: 1}])
def test_what_are_no_feeds_is_told(feeds: Any) -> None:
    with gf.Session() as s:
        for run in (s.run, s.run_async):
            with pytest.raises(FeedError, match="placeholder"):
                run(gf.constant(1), feeds)


# State ----------------------------------------------------------------------------------------


def test_two_sessions_share_graphs_but_no_state() -> None:
    v = gf.variable([1.0], name="v")
    step = gf.assign(v, v * 2)
    with gf.Session() as a, gf.Session() as b:
        a.run(step), a.run(step)
        b.set(v, [10])
        b.run(step)
        assert (a.get(v), b.get(v)) == (4, 20)


def test_get_and_set_work_before_and_after_a_step() -> None:
    v = gf.variable(gf.init.normal((3,)), name="v")
    initial = v.node.attrs["initial"]()
    with gf.Session() as s:
        assert np.array_equal(s.get(v), initial)
        s.set(v, [1, 2, 3])
        assert s.get(v).tolist() == [1, 2, 3] == s.run(v).tolist()
        s.set(v, np.array([4.0, 5.0, 6.0]))
        assert s.get(v).tolist() == [4, 5, 6] == s.run(v + 0.0).tolist()
        for wrong in ([1, 2], 1.0, [1, 2, "x"], [1j, 2, 3], v):
            with pytest.raises(VariableError, match=r"'v' \(made at .*test_session\.py"):
                s.set(v, wrong)
        assert s.get(v).tolist() == [4, 5, 6]


@pytest.mark.parametrize("wrong", ["v", 3, None, gf.constant(1.0)])
def test_only_variables_have_state(wrong: Any) -> None:
    with gf.Session() as s:
        with pytest.raises(VariableError, match=r"get at .*test_session\.py:\d+"):
            s.get(wrong)
        with pytest.raises(VariableError, match=r"set at .*test_session\.py:\d+"):
            s.set(wrong, 1)


def test_two_variables_of_one_name_are_told_with_both_lines() -> None:
    one, two = gf.variable(1.0, name="w"), gf.variable(2.0, name="w")
    with gf.Session() as s:
        for _ in range(2):
            with pytest.raises(VariableError) as caught:
                s.run(one + two)
            lines = (str(one.node.location), str(two.node.location))
            assert all(line in str(caught.value) for line in lines)
        assert s.run(two) == 2
        with pytest.raises(VariableError, match="two variables are named 'w'"):
            s.run(one)
        with pytest.raises(VariableError, match="two variables are named 'w'"):
            s.get(one)
        assert s.get(two) == 2


def test_a_step_that_never_ran_takes_no_names() -> None:
    """As in a notebook: the first cell was wrong, the second builds the model again."""
    x = _x()
    first, again = gf.variable(1.0, name="w"), gf.variable(2.0, name="w")
    with gf.Session() as s:
        with pytest.raises(FeedError):
            s.run(first * x)
        with gf.device("gpu:7"):
            pinned = first + 1
        with pytest.raises(PlacementError):
            s.run(pinned)
        assert s.run(again * x, {x: 3}) == 6


def test_unnamed_variables_get_names_in_the_order_they_were_built(tmp_path: Path) -> None:
    a, b, c = (gf.variable(float(i)) for i in range(3))
    with gf.Session() as s:
        s.run([c, a, b])
        s.save(tmp_path / "c")
    from graphflow.runtime.checkpoint import load

    values = load(tmp_path / "c").variables
    assert {name: float(value) for name, value in values.items()} == {
        "variable": 0.0, "variable_1": 1.0, "variable_2": 2.0,
    }  # fmt: skip


# Compiling ------------------------------------------------------------------------------------


def test_programs_keep_apart_whatever_the_order_of_compiling() -> None:
    x = _x()
    a, b, c = x + 1, x * 10, x - 1
    with gf.Session() as s:
        assert s.run(a, {x: 1}) == 2
        s.compile([a])
        assert s.run(b, {x: 2}) == 20
        s.compile([[a, b], c], {x: ()})
        assert s.run(a, {x: 3}) == 4
        assert s.run(c, {x: 3}) == 2
        assert s.run([a, b], {x: 3}) == [4, 30]


@pytest.mark.parametrize("cluster", [gf.Cluster.here(), TWO], ids=["one", "two"])
def test_sets_that_train_the_same_variable_are_compiled_together(cluster: gf.Cluster) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    w = gf.variable([1.0, 2.0], name="w")
    loss = gf.sum(w * w) + gf.sum(x * gf.sum(w)) / 4
    slow, fast = (gf.optim.SGD(r).minimize(loss) for r in (0.125, 0.25))
    with gf.Session(cluster) as s:
        with pytest.raises(FeedError, match="'x'"):
            s.compile([[loss, slow], fast])
        s.compile([[loss, slow], fast], {x: (4,)})
        s.run(fast, {x: np.zeros(4)})
        assert s.run([loss, slow], {x: np.zeros(3)})[0] == 1.25
        assert s.get(w).tolist() == [0.375, 0.75]


@pytest.mark.parametrize("wrong", [gf.constant(1.0), 3, "x", [3], None])
def test_what_are_no_sets_of_fetches_is_told(wrong: Any) -> None:
    with gf.Session() as s, pytest.raises(FetchError):
        s.compile(wrong)


def test_a_plan_must_fit_the_cluster_of_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[workers]]\naddress = "tcp://127.0.0.1:7001"\n')
    plan = gf.plan(gf.sum(gf.variable(np.ones(3), name="w")), gf.Cluster.here(["cpu:1"]))
    with pytest.raises(PlanError, match=r"cpu:1.*plan for this cluster"):
        gf.Session(file, plan=plan)


def test_a_plan_places_its_fetches_and_others_are_planned_around_it() -> None:
    x = gf.placeholder("float32", (None, 4), name="x")
    with gf.device("cpu:1"):
        w = gf.variable(np.ones((4, 2), "float32"), name="w")
    out, other = x @ w, gf.sum(w)
    plan = gf.plan(out, TWO, {x: (3, 4)})
    with gf.Session(plan=plan) as s:
        with pytest.raises(PlanError, match="another graph"):
            s.run(other)
        assert s.run(out, {x: np.ones((2, 4))}).tolist() == [[4, 4], [4, 4]]
        assert s.plan(out) == plan
        assert s.run(other) == 8
    with pytest.raises(PlanError, match=r"cpu:1.*plan for this cluster"):
        gf.Session(gf.Cluster.here(), plan=plan)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (SessionError, {"cluster": 3}),
        (SessionError, {"plan": "plan.json"}),
        (SessionError, {"deadline": 0}),
        (SessionError, {"deadline": float("inf")}),
        (SessionError, {"deadline": float("nan")}),
        (SessionError, {"deadline": "soon"}),
        (PlacementError, {"placer": "gready"}),
        (ClusterError, {"cluster": "/there/is/no.toml"}),
        (
            SessionError,
            {"cluster": gf.Cluster.hypothetical(1, flops=1e9, bandwidth=1e9, memory=10**9)},
        ),
    ],
)
def test_wrong_arguments_are_told_at_once(error: type[Exception], arguments: Any) -> None:
    with pytest.raises(error) as caught:
        gf.Session(**arguments)
    assert len(str(caught.value)) > 20


# Order and threads ----------------------------------------------------------------------------


def test_futures_come_in_the_order_of_the_calls() -> None:
    counter = gf.variable(np.int64(0), name="n")
    tick = gf.assign(counter, counter + 1)
    with gf.Session() as s:
        futures = [s.run_async(tick) for _ in range(50)]
        assert [int(f.result()) for f in futures] == list(range(1, 51))
        assert s.run(counter) == 50


def test_a_future_holds_the_error_of_its_step_and_the_next_goes_on() -> None:
    x = _x()
    y = gf.debug.check(x, x > 0, "positive")
    with gf.Session() as s:
        good, bad, unfed, after = (
            s.run_async(y, {x: 1}), s.run_async(y, {x: -1}), s.run_async(y),
            s.run_async(y, {x: 2}),
        )  # fmt: skip
        assert good.result() == 1
        assert isinstance(bad.exception(), OpError)
        assert isinstance(unfed.exception(), FeedError)
        assert after.result() == 2


class _Gate:
    """Stands for stdout: a step that prints waits in it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def write(self, text: str) -> None:
        self.reached.set()
        assert self.open.wait(30)

    def flush(self) -> None:
        """Nothing to flush."""


def test_queueing_does_not_wait_for_the_running_step_and_copies_the_feeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = gf.placeholder("float32", (2,), name="x")
    slow, quick = gf.debug.print(x), x + 0.0
    gate = _Gate()
    with gf.Session() as s:
        s.run([quick], {x: [0, 0]})
        monkeypatch.setattr(sys, "stdout", gate)
        first = s.run_async(slow, {x: [1, 1]})
        assert gate.reached.wait(30)
        buffer = np.zeros(2, "float32")
        queued = []
        for i in range(3):
            buffer[:] = i
            queued.append(s.run_async(quick, {x: buffer}))  # returns while the first step waits
        assert not any(f.done() for f in (first, *queued))
        gate.open.set()
        assert [f.result().tolist() for f in queued] == [[0, 0], [1, 1], [2, 2]]


def test_threads_that_run_at_once_take_turns() -> None:
    n = gf.variable(np.int64(0), name="n")
    x = gf.placeholder("int64", (), name="x")
    add = [gf.assign(n, n + x), n * 1]
    with gf.Session() as s:

        def work() -> None:
            for i in range(40):
                new, old = s.run(add, {x: i})
                assert new == old + i

        errors: list[Future[None]] = []
        threads = []
        for _ in range(4):
            future: Future[None] = Future()
            errors.append(future)
            threads.append(threading.Thread(target=_fill_future(future, work)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        for future in errors:
            future.result()
        assert s.get(n) == 4 * sum(range(40))


def _fill_future(future: Future[None], work: Any) -> Any:
    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    return run


# Errors and closing ---------------------------------------------------------------------------


def test_a_closed_session_says_so() -> None:
    v = gf.variable(1.0, name="v")
    s = gf.Session()
    s.run(v)
    s.close()
    s.close()
    uses: list[Any] = [
        lambda: s.run(v), lambda: s.run_async(v), lambda: s.get(v), lambda: s.set(v, 1),
        lambda: s.save("x"), lambda: s.load("x"), lambda: s.compile([v]),
        lambda: s.trace().__enter__(),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(SessionError, match="closed"):
            use()


def test_a_step_that_finds_its_session_closed_by_another_thread_says_so() -> None:
    v = gf.variable(1.0, name="v")
    with gf.Session(gf.Cluster.here(devices=["cpu:0"])) as s:
        s.run(v)
        s._life.hosts.close()
        with pytest.raises(SessionError, match="the session is closed; open another one"):
            s.run(v)


def test_what_a_closed_session_took_is_free_at_once_though_it_is_kept() -> None:
    w = gf.variable(np.zeros(1000, "float32"), name="w")
    step = gf.sum(gf.assign(w, w + 1.0))
    gc.collect()
    gc.disable()  # what cycles keep would be found sooner or later
    try:
        with gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=1)) as s:
            for _ in range(3):
                s.run(step)
            hosts: Any = s._life.hosts
            (held,) = hosts._host._sessions[""]._variables._by_device.values()
            value = weakref.ref(held["w"])
            del held
        assert value() is None
    finally:
        gc.enable()


def test_leaving_the_block_closes_also_on_an_error() -> None:
    with pytest.raises(ZeroDivisionError), gf.Session(TWO) as s:
        raise ZeroDivisionError
    with pytest.raises(SessionError, match="closed"):
        s.run(gf.constant(1))


@pytest.mark.parametrize("cluster", [gf.Cluster.here(), TWO], ids=["one", "two"])
def test_the_session_goes_on_after_every_kind_of_failure(cluster: gf.Cluster) -> None:
    x = gf.placeholder("float32", ("n",), name="x")
    y = gf.placeholder("float32", ("n",), name="y")
    v = gf.variable(0.0, name="v")
    step = gf.assign(v, v + gf.sum(gf.debug.check(x * y, x > 0, "positive")))
    twice = [step, gf.assign(v, v + 1)]
    failures: list[tuple[Any, Any]] = [
        (step, None), (step, {x: [1]}), (step, {x: [1], y: [1, 2]}), (step, {x: ["a"], y: [1]}),
        (step, {x: [-1], y: [1]}), (twice, {x: [1], y: [1]}), ("step", {}), (step, {v: 1}),
    ]  # fmt: skip
    with gf.Session(cluster) as s:
        for number, (fetches, feeds) in enumerate(failures * 2):
            with pytest.raises(gf.errors.GraphflowError):
                s.run(fetches, feeds)
            assert s.get(v) == number
            assert s.run(step, {x: [0.5], y: [2]}) == number + 1


def test_ctrl_c_in_a_commit_waits_until_all_of_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = gf.variable(1.0, name="a"), gf.variable(2.0, name="b")
    noise = gf.random.normal((3,))
    step = [gf.assign(a, b), gf.assign(b, a)]
    commit = DeviceHost.commit
    with gf.Session() as s:
        drawn = s.run(noise)

        def commit_with_interrupts(host: DeviceHost, session: str, number: int) -> None:
            signal.raise_signal(signal.SIGINT)
            commit(host, session, number)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(DeviceHost, "commit", commit_with_interrupts)
            with pytest.raises(KeyboardInterrupt):
                s.run([step, noise])
        assert (s.get(a), s.get(b)) == (2, 1)
        s.run(step)
        assert (s.get(a), s.get(b)) == (1, 2)
        again = s.run(noise)
        assert not np.array_equal(drawn, again)


@pytest.mark.parametrize("cluster", [gf.Cluster.here(), TWO], ids=["one", "two"])
def test_ctrl_c_in_the_computation_changes_nothing(
    cluster: gf.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two devices, their threads have let go of the buffers when `run` raises."""
    with gf.device("cpu:0"):
        a = gf.variable([1.0, 2.0], name="a")
        to_a = gf.assign(a, gf.debug.print(a) * 2)
    with gf.device(cluster.devices[-1]):
        b = gf.variable([3.0, 4.0], name="b")
        to_b = gf.assign(b, gf.debug.print(b) + a)
    gate = _Gate()

    def press() -> None:
        assert gate.reached.wait(30)
        _thread.interrupt_main()
        gate.open.set()

    with gf.Session(cluster) as s:
        s.compile([[to_a, to_b]])
        thread = threading.Thread(target=press)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sys, "stdout", gate)
            thread.start()
            s.run([to_a, to_b])
        thread.join()
        assert s.get(a).tolist() == [1, 2] and s.get(b).tolist() == [3, 4]
        s.run([to_a, to_b])
        assert s.get(a).tolist() == [2, 4] and s.get(b).tolist() == [4, 6]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("done", [False, True])
def test_ctrl_c_while_variables_are_given_their_values_loses_none(
    at: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `load`: workers have the first ones, and a program that would run."""
    variables = [gf.variable(0.0, name=name) for name in "abc"]
    add = [gf.assign(v, v + 1) for v in variables]
    write, calls = LocalHosts.write, iter(range(1, 100))

    def write_then_interrupt(hosts: LocalHosts, *what: Any) -> None:
        number = next(calls)
        if number != at or done:
            write(hosts, *what)
        if number == at:
            raise KeyboardInterrupt

    with gf.Session() as s:
        for value, variable in enumerate(variables):
            s.set(variable, 10.0 * value)
        monkeypatch.setattr(LocalHosts, "write", write_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            s.run(add)
        assert [s.get(v) for v in variables] == [0, 10, 20]
        assert s.run(add) == [1, 11, 21]
        assert [s.get(v) for v in variables] == [1, 11, 21]


# Size -----------------------------------------------------------------------------------------


def test_a_chain_of_ten_thousand_nodes_runs() -> None:
    x = y = _x()
    for _ in range(10_000):
        y = y + 1.0
    with gf.Session() as s:
        assert s.run(y, {x: 0}) == 10_000


def test_a_wide_graph_of_five_thousand_nodes_runs_and_differentiates() -> None:
    w = gf.variable(np.ones(4, "float32"), name="w")
    parts = [gf.sum(w * float(i)) for i in range(1_500)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    with gf.Session() as s:
        value, gradient = s.run([total, *gf.gradients(total, [w])])
    assert value == pytest.approx(4 * 1_500 * 1_499 / 2, rel=1e-4)
    assert np.allclose(gradient, 1_500 * 1_499 / 2)
