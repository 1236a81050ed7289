from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    GraphflowError,
    OpError,
    ProtocolError,
    SessionError,
    StepTimeout,
    VariableError,
    WorkerLost,
)
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor
from graphflow.ir.spec import sole_symbol
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.host.host_interface import LocalHosts
from graphflow.runtime.host.session_state import DRAWS
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.partitioning.partition import SPECIALISATION_LIMITS, Partition, partition
from graphflow.runtime.program.program import Program
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.graph_codec import encode
from graphflow.runtime.wire.step_values import Computed, TensorParcel
from tests.interrupts import interrupt_after
from tests.runtime.programs import CPU, OTHER, place_nodes

FAR = "/worker:1/cpu:0"


@pytest.fixture
def outbox() -> list[TensorParcel]:
    return []


@pytest.fixture
def host(outbox: list[TensorParcel]) -> Iterator[DeviceHost]:
    """A host of two devices with the session "s"."""
    opened = DeviceHost(0, [CPU, OTHER], 1, outbox.append)
    opened.open("s")
    yield opened
    opened.close("s")


def parts(*fetches: Tensor, **devices: str) -> list[Partition]:
    graph = Graph(fetches).verify()
    return list(partition(graph, place_nodes(graph, **devices)).values())


def compute(
    host: DeviceHost,
    step: int,
    session: str = "s",
    feeds: dict[str, Any] | None = None,
    deadline: float = 30.0,
    **bindings: int,
) -> Computed:
    return host.compute(session, "p", step, bindings, feeds or {}, False, deadline)


def counter(step: float = 1.0) -> Tensor:
    v = gf.variable(np.zeros(2, "float32"), name="v")
    return gf.assign(v, v + step)


def edge_from_afar() -> list[Partition]:
    """This host's part of a graph that waits for edge 0 of another worker."""
    far = gf.variable(np.ones(2, "float32"), name="far")
    graph = Graph([gf.tanh(far, name="here")])
    return [partition(graph, place_nodes(graph, FAR, here=CPU))[CPU]]


def run_in_thread(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


# Sessions ---------------------------------------------------------------------------------------


def test_sessions_share_neither_state_nor_programs(host: DeviceHost) -> None:
    host.open("t")
    host.add("s", "p", parts(counter(1.0)))
    host.add("t", "p", parts(counter(10.0)))
    for step, session in enumerate(["s", "t", "s"]):
        compute(host, step, session)
        host.commit(session, step)
    assert host.read("s", "v").tolist() == [2, 2]
    assert host.read("t", "v").tolist() == [10, 10]
    host.close("t")
    assert host.read("s", "v").tolist() == [2, 2]
    with pytest.raises(SessionError, match="'t' is not open on worker 0"):
        host.read("t", "v")


def test_a_session_opened_again_begins_anew(host: DeviceHost) -> None:
    host.add("s", "p", parts(counter()))
    host.close("s")
    host.open("s")
    with pytest.raises(SessionError, match="program 'p' is not loaded on worker 0"):
        compute(host, 1)
    with pytest.raises(VariableError, match="'v' has no value on worker 0"):
        host.read("s", "v")


def test_closing_twice_or_what_was_never_open_does_nothing(host: DeviceHost) -> None:
    host.close("s")
    host.close("s")
    host.close("never")
    host.deliver("never", 1, 0, np.zeros(2))
    host.cancel("never", 1, StepTimeout("x"))


def test_threads_and_state_end_with_the_session(outbox: list[TensorParcel]) -> None:
    before = set(threading.enumerate())
    host = DeviceHost(0, [CPU, OTHER], 2, outbox.append)
    host.open("s")
    host.add("s", "p", parts(counter(), gf.exp(gf.variable([1.0]), name="e"), e=OTHER))
    compute(host, 1)
    state = weakref.ref(host._sessions["s"]._programs["p"])
    host.close("s")
    assert set(threading.enumerate()) <= before
    gc.collect()
    assert state() is None


def test_a_closed_embedded_session_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    hosts = LocalHosts([CPU, OTHER], 3)
    assert len(set(threading.enumerate()) - before) >= 4
    hosts.close()
    hosts.close()
    assert set(threading.enumerate()) <= before


def test_a_program_comes_over_the_wire_as_well(host: DeviceHost) -> None:
    header, buffers = encode(parts(counter()))
    host.load("s", "p", header, buffers)
    compute(host, 1)
    host.commit("s", 1)
    assert host.read("s", "v").tolist() == [1, 1]


def test_a_partition_of_a_device_that_is_not_here_is_refused(host: DeviceHost) -> None:
    with pytest.raises(SessionError, match="worker 0 has no device /worker:1/cpu:0"):
        host.add("s", "p", parts(gf.exp(gf.variable([1.0], name="v"), name="e"), e=FAR))
    with pytest.raises(VariableError):
        host.read("s", "v")  # nothing of it was taken


# Steps ------------------------------------------------------------------------------------------


def test_a_step_that_was_not_computed_is_not_committed(host: DeviceHost) -> None:
    host.add("s", "p", parts(counter()))
    with pytest.raises(SessionError, match="step 1 cannot commit: worker 0 did not compute it"):
        host.commit("s", 1)
    compute(host, 1)
    with pytest.raises(SessionError, match="step 2 cannot commit"):
        host.commit("s", 2)
    host.commit("s", 1)
    with pytest.raises(SessionError, match="step 1 cannot commit"):
        host.commit("s", 1)
    assert host.read("s", "v").tolist() == [1, 1]


def test_an_aborted_step_changes_nothing_and_cannot_commit(host: DeviceHost) -> None:
    host.add("s", "p", parts(counter()))
    compute(host, 1)
    host.abort("s", 1)
    with pytest.raises(SessionError):
        host.commit("s", 1)
    assert host.read("s", "v").tolist() == [0, 0]


def test_a_step_tried_again_draws_the_same_numbers(host: DeviceHost) -> None:
    host.add("s", "p", parts(gf.random.normal((3,))))
    first = compute(host, 1, **{DRAWS: 7}).fetches["0"]
    host.abort("s", 1)
    again = compute(host, 2, **{DRAWS: 7}).fetches["0"]
    other = compute(host, 3, **{DRAWS: 8}).fetches["0"]
    assert first.tolist() == again.tolist() != other.tolist()


def test_programs_follow_the_sizes_even_where_only_an_attribute_has_them(host: DeviceHost) -> None:
    size = gf.placeholder("float32", ("n",), name="x").shape[0]
    host.add("s", "p", parts(REGISTRY["size_of"](size=size * 3, dtype="float32")))
    for step, n in enumerate([5, 2, 5]):
        assert compute(host, step, n=n).fetches["0"] == 3 * n


def test_variables_on_two_devices_swap(host: DeviceHost) -> None:
    a = gf.variable([1.0, 2.0], name="a")
    b = gf.variable([3.0, 4.0], name="b")
    to_a, to_b = gf.assign(a, b, name="to_a"), gf.assign(b, a, name="to_b")
    host.add("s", "p", parts(REGISTRY["group"](to_a, to_b), b=OTHER, to_b=OTHER))
    for step, want in [(1, [3, 4]), (2, [1, 2])]:
        compute(host, step)
        host.commit("s", step)
        assert host.read("s", "a").tolist() == want


def test_a_variable_is_set_with_its_shape_and_dtype_only(host: DeviceHost) -> None:
    host.add("s", "p", parts(counter()))
    host.write("s", "v", np.array([5, 6], "float32"))
    assert host.read("s", "v").tolist() == [5, 6]
    for wrong in (np.zeros(3, "float32"), np.zeros(2, "float64")):
        with pytest.raises(VariableError, match=r"'v' is float32\(2,\), not "):
            host.write("s", "v", wrong)
    with pytest.raises(VariableError, match=r"'v' is float32\(2,\), not float32\(3,\)"):
        host.add("s", "q", parts(gf.variable(np.zeros(3, "float32"), name="v")))
    host.add("s", "q", parts(gf.variable(np.zeros(2, "float32"), name="v")))  # as it is: kept
    assert host.read("s", "v").tolist() == [5, 6]


def test_what_is_read_is_a_copy(host: DeviceHost) -> None:
    host.add("s", "p", parts(counter()))
    host.read("s", "v").fill(9)
    assert host.read("s", "v").tolist() == [0, 0]


def test_a_tensor_for_another_worker_goes_to_the_outbox(
    host: DeviceHost, outbox: list[TensorParcel]
) -> None:
    v = gf.variable([1.0, 2.0], name="v")
    graph = Graph([gf.exp(v * 2.0, name="e")])
    host.add("s", "p", [partition(graph, place_nodes(graph, e=FAR))[CPU]])
    compute(host, 4)
    (parcel,) = outbox
    assert (parcel.session, parcel.step, parcel.edge, parcel.target_worker) == ("s", 4, 0, 1)
    assert parcel.array.tolist() == [2, 4]


def test_programs_of_sizes_not_used_for_long_are_let_go_with_their_memory(
    host: DeviceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, arenas = CpuBackend.empty, []

    def record_arena(backend: CpuBackend, nbytes: int) -> Any:
        memory = empty(backend, nbytes)
        arenas.append(weakref.ref(memory))
        return memory

    x = gf.placeholder("float32", (None,), name="x")
    host.add("s", "p", parts(gf.tanh(x) * 2.0))
    (size,) = x.shape
    monkeypatch.setattr(CpuBackend, "empty", record_arena)
    compiled = Counter[int]()

    def count_compilation(*arguments: Any) -> Program:
        compiled[arguments[1][sole_symbol(size)]] += 1
        return Program(*arguments)

    monkeypatch.setattr("graphflow.runtime.host.session_state.Program", count_compilation)
    gc.disable()
    try:
        for step, n in enumerate([*range(1, 40), 39, 1]):
            fed = {"x": np.ones(n, "float32")}
            assert compute(host, step, feeds=fed, **{sole_symbol(size): n}).fetches["0"].shape == (
                n,
            )
            host.commit("s", step)
        alive = sum(arena() is not None for arena in arenas)
    finally:
        gc.enable()
    assert (compiled[39], compiled[1]) == (1, 2), "what was used last is kept, the rest comes back"
    assert alive < SPECIALISATION_LIMITS[0] / 2, "most lie in the same memory"


# Waiting ----------------------------------------------------------------------------------------


def test_a_tensor_that_does_not_come_ends_the_wait_at_the_deadline(host: DeviceHost) -> None:
    host.add("s", "p", edge_from_afar())
    started = time.monotonic()
    late = r"step 3: edge 0 from /worker:1/cpu:0 \('far', made at .*\) did not come"
    with pytest.raises(StepTimeout, match=late):
        compute(host, 3, deadline=0.05)
    assert time.monotonic() - started < 20
    host.abort("s", 3)
    host.deliver("s", 4, 0, np.ones(2, "float32"))  # before its step begins
    assert compute(host, 4).fetches["0"].shape == (2,)


@pytest.mark.parametrize("wrong", [np.ones(3, "float32"), np.ones(2), np.ones((1, 2), "float32")])
def test_a_tensor_of_another_shape_or_dtype_is_refused_by_the_name_of_its_edge(
    host: DeviceHost, wrong: np.ndarray[Any, Any]
) -> None:
    host.add("s", "p", edge_from_afar())
    host.deliver("s", 1, 0, wrong)
    with pytest.raises(ProtocolError, match=r"edge 0 from /worker:1/cpu:0 brought .*'far'"):
        compute(host, 1)
    host.abort("s", 1)
    host.deliver("s", 2, 0, np.ones(2, "float32"))
    assert compute(host, 2).fetches["0"].shape == (2,)


def test_a_tensor_wakes_its_reader(host: DeviceHost) -> None:
    host.add("s", "p", edge_from_afar())
    step = run_in_thread(lambda: compute(host, 1))
    time.sleep(0.05)
    host.deliver("s", 1, 0, np.zeros(2, "float32"))
    assert step.result(20).fetches["0"].tolist() == [0, 0]


def test_cancelling_wakes_a_waiting_step_with_the_reason(host: DeviceHost) -> None:
    host.add("s", "p", edge_from_afar())
    step = run_in_thread(lambda: compute(host, 1))
    time.sleep(0.05)
    host.cancel("s", 1, WorkerLost("worker 1 died"))
    with pytest.raises(WorkerLost, match="worker 1 died"):
        step.result(20)
    host.abort("s", 1)
    host.deliver("s", 2, 0, np.zeros(2, "float32"))
    compute(host, 2)  # the next one is not cancelled


def test_a_step_cancelled_before_it_begins_does_not_wait(host: DeviceHost) -> None:
    host.add("s", "p", edge_from_afar())
    host.cancel("s", 5, WorkerLost("worker 1 died"))
    host.cancel("s", 4, StepTimeout("an older one"))
    with pytest.raises(WorkerLost):
        compute(host, 5)


def test_closing_wakes_a_waiting_step(host: DeviceHost) -> None:
    host.add("s", "p", edge_from_afar())
    step = run_in_thread(lambda: compute(host, 1))
    time.sleep(0.05)
    host.close("s")
    with pytest.raises(SessionError, match="closed"):
        step.result(20)


def test_a_late_tensor_of_a_finished_step_is_dropped(host: DeviceHost) -> None:
    host.add("s", "p", edge_from_afar())
    host.deliver("s", 1, 0, np.zeros(2, "float32"))
    host.abort("s", 1)
    host.deliver("s", 1, 0, np.zeros(2, "float32"))
    host.deliver("s", 0, 0, np.zeros(2, "float32"))
    host.deliver("s", 2, "no edge of a program", np.zeros(2, "float32"))
    assert host._sessions["s"].mail._arrays == {}
    with pytest.raises(StepTimeout):
        compute(host, 2, deadline=0.01)


def test_mail_of_a_later_step_stays_when_an_earlier_one_ends() -> None:
    mail = TensorMailbox()
    mail.deadline = time.monotonic() + 10
    mail.put(1, 0, "one")
    mail.put(2, 0, "two")
    mail.finish(1)
    assert mail.take(2, 0, Awaited("there")) == "two"


def test_a_device_that_fails_wakes_the_others_and_its_error_is_the_one_raised(
    host: DeviceHost,
) -> None:
    x = gf.placeholder("float32", (2,), name="x")
    bad = gf.debug.check(x, x > 0, "positive", name="bad")
    good = gf.exp(bad + 1.0, name="good")
    host.add("s", "p", parts(good, bad=OTHER))
    with pytest.raises(OpError, match=r"check 'bad' .*failed on /worker:0/cpu:1: positive"):
        compute(host, 1, feeds={"x": -np.ones(2, "float32")})
    host.abort("s", 1)
    ok = compute(host, 2, feeds={"x": np.ones(2, "float32")})
    assert ok.fetches["0"] == pytest.approx(np.exp([2, 2]))


def test_ctrl_c_leaves_no_device_at_work(host: DeviceHost) -> None:
    far = gf.variable(np.ones(2, "float32"), name="far")
    x = gf.tanh(far, name="x")
    y = gf.exp(x, name="y")
    graph = Graph([x, y])
    cut = partition(graph, place_nodes(graph, FAR, x=CPU, y=OTHER))
    host.add("s", "p", [cut[CPU], cut[OTHER]])
    interrupt_after(lambda: compute(host, 1), 0.2)
    host.abort("s", 1)
    host.deliver("s", 2, 0, np.zeros(2, "float32"))
    assert compute(host, 2, deadline=20).fetches["1"].tolist() == [1, 1]


def test_errors_of_a_host_are_of_our_hierarchy(host: DeviceHost) -> None:
    for call in (
        lambda: compute(host, 1),
        lambda: compute(host, 1, session="nobody"),
        lambda: host.commit("s", 1),
        lambda: host.read("s", "nothing"),
        lambda: host.write("s", "nothing", np.zeros(1)),
        lambda: host.load("s", "p", b"\xc1", []),
    ):
        with pytest.raises(GraphflowError):
            call()


def test_only_a_step_that_assigns_something_has_changes_to_commit(host: DeviceHost) -> None:
    host.add("s", "p", parts(gf.constant(1.0) + gf.variable(1.0, name="read")))
    compute(host, 1)
    assert not host.has_changes("s")
    host.commit("s", 1)
    host.add("s", "p", parts(counter()))
    compute(host, 2)
    assert host.has_changes("s")
    host.commit("s", 2)
    assert host.read("s", "v").tolist() == [1, 1] and not host.has_changes("s")


@pytest.mark.parametrize("comes", ["put", "cancel"])
def test_a_thread_that_receives_hears_at_once_of_what_another_device_says(comes: str) -> None:
    mail = TensorMailbox()
    mail.deadline = time.monotonic() + 30
    asleep, rung = threading.Event(), threading.Event()

    def attend(over: Callable[[], bool], seconds: float) -> bool:
        while not over():
            asleep.set()
            assert rung.wait(20)  # as a thread sleeps that waits for sockets
            rung.clear()
        return True

    mail.attend, mail.wake = attend, rung.set
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(mail.take, 1, 7, Awaited("edge 7"))
        assert asleep.wait(20)
        if comes == "put":
            mail.put(1, 7, "array")
            assert taken.result(20) == "array"
        else:
            mail.cancel(1, SessionError("over"))
            with pytest.raises(SessionError, match="over"):
                taken.result(20)
    rung.clear()
    mail.put(2, 7, "nobody sleeps")
    assert not rung.is_set()
