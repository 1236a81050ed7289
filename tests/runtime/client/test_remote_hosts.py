"""A session over real worker processes: results, and every way in which a step can fail."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from graphflow import _version
from graphflow.errors import (
    ClusterError,
    GraphflowError,
    GraphLimitError,
    InsecureAddress,
    OpError,
    ProtocolError,
    RendezvousTimeout,
    SessionError,
    StepTimeout,
    VersionMismatch,
    WorkerLost,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Device, Worker
from graphflow.runtime.client import worker_membership as membership
from graphflow.runtime.client.handshake import workers_to_leave_out
from graphflow.runtime.client.remote_hosts import RemoteHosts
from graphflow.runtime.host.session_state import FAILED
from graphflow.runtime.launch.local import LocalWorkers
from graphflow.runtime.wire.array_codec import CHUNK_BYTES
from graphflow.runtime.wire.messages import Compute
from graphflow.runtime.wire.step_values import StepResult
from tests.faults.running import stop
from tests.interrupts import interrupt_after

HOST = f"{Path(__file__).parents[1] / 'protocol' / 'fake_host.py'}:FakeHost"
START = 30.0  # seconds
DETECTION = 5.0  # seconds in which a dead or stopped worker is noticed


def remote(addresses: list[str], devices: tuple[str, ...] = ("cpu:0",), **more: Any) -> Cluster:
    workers = tuple(
        Worker(
            index, address, tuple(Device(f"/worker:{index}/{d}", "cpu", 1 << 30) for d in devices)
        )
        for index, address in enumerate(addresses)
    )
    return Cluster(workers, kind="remote", **more)


def start(workers: int = 2) -> RemoteHosts:
    return RemoteHosts(Cluster.local(workers=workers, threads=1), deadline=START, host=HOST)


def load(hosts: RemoteHosts, name: str, *programs: str, constants: Any = ()) -> None:
    hosts.load(name, {i: (words.encode(), list(constants)) for i, words in enumerate(programs)})


def run(hosts: RemoteHosts, name: str, step: int, feeds: Any = None, **more: Any) -> StepResult:
    given = {"bindings": {}, "trace": False, "deadline": 20.0} | more
    return hosts.step(name, step, feeds=feeds or {}, **given)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalWorkers]:
    """Two workers that outlive sessions, as those of `graphflow worker` do."""
    workers = LocalWorkers(2, threads=1, deadline=START, host=HOST)
    yield workers
    workers.stop()


@pytest.fixture
def hosts(shared: LocalWorkers) -> Iterator[RemoteHosts]:
    with RemoteHosts(remote(shared.addresses), deadline=START) as hosts:
        yield hosts


@pytest.fixture
def own() -> Iterator[RemoteHosts]:
    """Two workers that a test may kill."""
    with start() as hosts:
        yield hosts


# What works ------------------------------------------------------------------------------------


def test_a_step_feeds_computes_moves_tensors_and_fetches(hosts: RemoteHosts) -> None:
    load(hosts, "p", "sum send:1:e", "receive:e sum", constants=[np.ones(3, "float32")])
    x = np.arange(3, dtype="float32")
    result = run(hosts, "p", 1, {0: {"x": x}}, bindings={"n": 3}, trace=True)
    assert result.fetches["sum0"].tolist() == [1, 2, 3]
    assert result.fetches["sum1"].tolist() == [2, 3, 4]
    assert result.peak == {"/worker:0/cpu:0": 64, "/worker:1/cpu:0": 64}
    assert {(track, name) for track, name, start, end in result.spans if start <= end} == {
        ("/worker:0/cpu:0", "sum"),
        ("/worker:0/cpu:0", "send"),
        ("/worker:1/cpu:0", "receive"),
        ("/worker:1/cpu:0", "sum"),
    }


def test_arrays_of_many_chunks_arrive_whole_everywhere(hosts: RemoteHosts) -> None:
    big = np.arange(2 * CHUNK_BYTES // 8 + 3, dtype=np.float64)
    load(hosts, "p", "send:1:e", "receive:e sum", constants=[big])
    result = run(hosts, "p", 1, {0: {"x": big}})
    assert (result.fetches["sum1"] == 3 * big).all()
    hosts.write(1, "w", big[::-1])
    assert (hosts.read(1, "w") == big[::-1]).all()


def test_steps_are_committed_once_each_before_a_read_sees_them(hosts: RemoteHosts) -> None:
    load(hosts, "p", "count send:1:e", "receive:e count")
    for step in range(50):
        run(hosts, "p", step)
        assert hosts.read(step % 2, "n") == step + 1


def test_more_spans_than_fit_in_a_message_arrive(hosts: RemoteHosts) -> None:
    load(hosts, "p", "count " * 5000)
    assert len(run(hosts, "p", 1, trace=True).spans) == 5000


def test_two_sessions_share_workers_without_sharing_state(
    shared: LocalWorkers, hosts: RemoteHosts
) -> None:
    with RemoteHosts(remote(shared.addresses[::-1]), deadline=START) as others:
        load(hosts, "p", "count send:1:e sleep:0.01", "receive:e sum")
        load(others, "p", "send:1:e sleep:0.01", "receive:e count sum")
        both: list[Any] = []

        def steps(session: RemoteHosts, fed: float) -> None:
            for step in range(20):
                result = run(session, "p", step, {0: {"x": np.full(2, fed, "float32")}})
                both.append(result.fetches["sum1"].tolist() == [fed, fed])

        threads = [
            threading.Thread(target=steps, args=(session, fed))
            for session, fed in ((hosts, 1.0), (others, 2.0))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert both == [True] * 40
        assert [int(hosts.read(i, "n")) for i in (0, 1)] == [20, 0]
        assert [int(others.read(i, "n")) for i in (0, 1)] == [0, 20]


def test_machines_and_links_are_measured(hosts: RemoteHosts) -> None:
    reports = hosts.measure()
    assert reports[1]["devices"] == ["/worker:1/cpu:0"] and reports[0]["flops"] == 1e9
    found = hosts.probe_speeds()
    assert [found[i]["rate"] for i in (0, 1)] == [5.0, 5.0]
    assert found[0]["pid"] == reports[0]["pid"] != found[1]["pid"]
    small, large = (hosts.probe_link(0, 1, nbytes, 5) for nbytes in (8, 2 * CHUNK_BYTES))
    assert 0 < small < 5 and 0 < large < 5


# What fails, and leaves the session usable -----------------------------------------------------


def test_an_op_error_names_op_and_line_and_carries_the_remote_traceback(hosts: RemoteHosts) -> None:
    load(hosts, "bad", "count receive:never", "raise")
    with pytest.raises(OpError, match=r"matmul_1 at model.py:7") as caught:
        run(hosts, "bad", 1)
    assert "worker 1" in caught.value.__notes__[0] and "fake_host.py" in caught.value.__notes__[0]
    load(hosts, "good", "count", "count")
    run(hosts, "good", 2)
    assert hosts.read(0, "n") == 1, "the failed step must not have counted"


def test_workers_of_which_one_could_not_prepare_a_program_agree_on_their_ways_anew(
    hosts: RemoteHosts,
) -> None:
    """Each keeps so many sizes: of what the others let go of then, it does not know."""
    load(hosts, "p", "", "raise")
    with pytest.raises(OpError, match="cannot be compiled"):
        hosts.prepare("p", {"n": 3})
    _, orders = hosts._make_orders(
        hosts._require_program("p"), Compute(0, "p", {}, [], False, 1), 1, {}, True
    )
    assert [order.message.bindings for order in orders.values()] == [{FAILED: 1}] * 2


@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["told with the next step", "told by itself"])
def test_a_commit_that_fails_ends_the_session(hosts: RemoteHosts, pause: float) -> None:
    """It was decided, and cannot be undone: the worker's state is of no step."""
    load(hosts, "p", "sum", "sum")
    load(hosts, "q", "sum", "spoil")
    fed = {0: {"x": np.ones(3, "float32")}}
    for step in range(1, 4):  # workers know who speaks, and take the short way
        run(hosts, "p", step, fed)
    run(hosts, "q", 4, fed)
    time.sleep(pause)
    with pytest.raises(WorkerLost, match="commit of step 4 failed: there is no memory for it"):
        run(hosts, "p", 5, fed)


def test_a_step_past_its_deadline_names_the_edge_that_was_waited_for(hosts: RemoteHosts) -> None:
    load(hosts, "p", "receive:gradient", "")
    with pytest.raises(StepTimeout, match="edge gradient"):
        run(hosts, "p", 1, deadline=0.3)


def test_an_op_that_sleeps_past_the_deadline_is_a_timeout_that_names_its_worker(
    hosts: RemoteHosts,
) -> None:
    load(hosts, "p", "", "sleep:1.5")
    started = time.monotonic()
    with pytest.raises(StepTimeout, match=r"step 1 .*worker 1"):
        run(hosts, "p", 1, deadline=0.2)
    assert time.monotonic() - started < 1.4
    load(hosts, "q", "count", "count")
    run(hosts, "q", 2)
    assert hosts.read(1, "n") == 1


@pytest.mark.parametrize(
    ("deadline", "slack"), [(0.5, 5.0), (5.0, -4.8)], ids=["the step's", "the sockets'"]
)
def test_a_process_that_was_stopped_past_a_deadline_takes_what_came_meanwhile(
    hosts: RemoteHosts, monkeypatch: pytest.MonkeyPatch, deadline: float, slack: float
) -> None:
    load(hosts, "p", "count", "count")
    monkeypatch.setattr(membership, "SLACK", slack)
    sleep = hosts._loop._waiter.wait
    stopped: list[float] = []

    def stop(seconds: float, awake: float = 0.0) -> list[int]:
        """As if the process were stopped when its step has just been sent."""
        if not stopped:
            stopped.append(seconds)
            time.sleep(1.5)
            return []
        return sleep(seconds, awake)

    monkeypatch.setattr(hosts._loop._waiter, "wait", stop)
    run(hosts, "p", 1, deadline=deadline)
    assert stopped and hosts.read(0, "n") == hosts.read(1, "n") == 1


def test_another_thread_cancels_a_step_and_the_next_one_runs(hosts: RemoteHosts) -> None:
    load(hosts, "p", "receive:never", "count")
    threading.Timer(0.2, hosts.cancel).start()
    with pytest.raises(SessionError, match="step 1 was cancelled"):
        run(hosts, "p", 1)
    load(hosts, "q", "", "count")
    run(hosts, "q", 2)
    assert hosts.read(1, "n") == 1


def test_ctrl_c_cancels_a_step_and_the_next_one_runs(hosts: RemoteHosts) -> None:
    load(hosts, "p", "receive:never", "count")
    interrupt_after(lambda: run(hosts, "p", 1), 0.3)
    load(hosts, "q", "", "count")
    run(hosts, "q", 2)
    assert hosts.read(1, "n") == 1


def test_a_partition_that_a_worker_refuses_is_an_error_of_load(hosts: RemoteHosts) -> None:
    with pytest.raises(GraphLimitError, match="10000000 nodes"):
        load(hosts, "p", "", "too large")
    with pytest.raises(SessionError, match="not loaded"):
        run(hosts, "p", 1)


def test_steps_must_be_new_and_arrays_must_be_able_to_travel(hosts: RemoteHosts) -> None:
    load(hosts, "p", "count", "")
    run(hosts, "p", 5)
    with pytest.raises(SessionError, match="step 5 is not after step 5"):
        run(hosts, "p", 5)
    with pytest.raises(ProtocolError, match="object"):
        hosts.write(0, "w", np.array([None]))
    with pytest.raises(ProtocolError, match="object"):
        hosts.read(0, "unsendable")
    with pytest.raises(OpError, match="KeyError"):
        hosts.read(0, "unknown")
    assert hosts.read(0, "n") == 1


def test_garbage_on_a_workers_port_does_not_touch_a_running_step(
    shared: LocalWorkers, hosts: RemoteHosts
) -> None:
    load(hosts, "p", "sleep:0.5 send:1:e", "receive:e sum", constants=[np.ones(2)])
    context: Any = zmq.Context()
    stop = threading.Event()

    def disturb() -> None:
        host, port = shared.addresses[1].removeprefix("tcp://").split(":")
        stranger = context.socket(zmq.DEALER)
        stranger.connect(shared.addresses[1])
        while not stop.is_set():
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(100))
            stranger.send_multipart([os.urandom(50)])
            stranger.send_multipart([b"\x80\x04\x95pickle", b"x", b"y"])
            stranger.send(bytes(CHUNK_BYTES + 1))
            time.sleep(0.02)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert run(hosts, "p", 1).fetches["sum1"].tolist() == [2, 2]
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


# Losing workers --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_killed_or_stopped_in_mid_step_is_lost_within_five_seconds(
    own: RemoteHosts, number: int
) -> None:
    load(own, "p", "receive:never", "receive:never")
    at = [0.0]

    def strike() -> None:
        at[0] = time.monotonic()
        os.kill(own.pids[1], number)

    threading.Timer(0.3, strike).start()
    with pytest.raises(WorkerLost, match=r"worker 1 at tcp://\S+ was lost in step 7") as caught:
        run(own, "p", 7, deadline=30.0)
    assert time.monotonic() - at[0] < DETECTION
    if number == signal.SIGKILL:
        assert "killed by signal 9" in str(caught.value)
    with pytest.raises(WorkerLost, match="worker 1"):
        run(own, "p", 8)
    with pytest.raises(WorkerLost, match="worker 1"):
        own.read(1, "n")
    assert own.read(0, "n") == 0


def test_a_worker_that_ends_itself_is_lost_with_its_exit_status(own: RemoteHosts) -> None:
    load(own, "p", "", "crash")
    with pytest.raises(WorkerLost, match="exit status 11"):
        run(own, "p", 1)


def test_a_worker_whose_gpu_is_lost_says_so_and_ends(own: RemoteHosts) -> None:
    """No later step could be computed there, so it counts as lost, and another one may do it."""
    pid = own.pids[1]
    load(own, "p", "", "lose")
    with pytest.raises(WorkerLost, match="gpu:0 failed: an illegal address") as lost:
        run(own, "p", 1)
    assert lost.value.worker == 1
    until = time.monotonic() + 5.0
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_no_process_is_left_after_close_even_with_a_stopped_or_busy_worker() -> None:
    hosts = start(3)
    pids = hosts.pids
    load(hosts, "p", "", "sleep:30", "")
    with pytest.raises(StepTimeout):
        run(hosts, "p", 1, deadline=0.1)
    stop(pids[0])
    hosts.close()
    hosts.close()
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(SessionError, match="closed"):
        run(hosts, "p", 2)


def test_closing_while_a_step_runs_ends_the_step() -> None:
    hosts = start()
    load(hosts, "p", "receive:never", "")
    threading.Timer(0.3, hosts.close).start()
    with pytest.raises(GraphflowError):
        run(hosts, "p", 1, deadline=30.0)


# Starting --------------------------------------------------------------------------------------


def test_nobody_at_an_address_is_a_rendezvous_timeout_that_says_where() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RendezvousTimeout, match=f"{address}.*graphflow worker"):
        RemoteHosts(remote([address]), deadline=0.5)


def test_a_worker_that_comes_up_late_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made: list[Any] = []

    def join() -> None:
        with RemoteHosts(remote([f"tcp://127.0.0.1:{port}"]), deadline=START) as hosts:
            made.append(hosts.measure())

    thread = threading.Thread(target=join)
    thread.start()
    time.sleep(0.4)
    late = LocalWorkers(1, threads=1, deadline=START, host=HOST, listen=f"tcp://127.0.0.1:{port}")
    thread.join()
    late.stop()
    assert made


def test_a_worker_of_another_version_is_refused_with_both_versions(
    shared: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = _version.__version__
    monkeypatch.setattr(_version, "__version__", "9.9.9")
    with pytest.raises(VersionMismatch, match=rf"{theirs}.*9\.9\.9"):
        RemoteHosts(remote(shared.addresses), deadline=START)


def test_devices_that_a_worker_does_not_have_are_named(shared: LocalWorkers) -> None:
    with pytest.raises(ClusterError, match="has cpu:0, but not cpu:1"):
        RemoteHosts(remote(shared.addresses, devices=("cpu:0", "cpu:1")), deadline=START)


def test_an_address_beyond_loopback_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InsecureAddress, match="insecure"):
        RemoteHosts(remote(["tcp://192.0.2.1:7001"]), deadline=START)


@pytest.mark.parametrize(
    ("pairs", "out"),
    [
        ([], set()),
        ([(0, 1)], {1}),
        ([(2, 0), (0, 2)], {2}),
        ([(0, 1), (0, 2), (3, 0)], {0}),
        ([(0, 1), (1, 2), (2, 0)], {1, 2}),
        ([(0, 1), (2, 3)], {1, 3}),
    ],
)
def test_who_is_left_out_so_that_all_others_reach_each_other(
    pairs: list[tuple[int, int]], out: set[int]
) -> None:
    assert workers_to_leave_out(pairs) == out


def test_a_process_that_ends_before_it_is_connected_to_is_missed_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = LocalWorkers.__init__

    def start_then_kill(workers: LocalWorkers, *args: Any, **named: Any) -> None:
        start(workers, *args, **named)
        os.kill(workers.pids[1], signal.SIGKILL)
        workers.wait_exit(1, START)

    monkeypatch.setattr(LocalWorkers, "__init__", start_then_kill)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"worker 1 .* killed by signal 9"):
        RemoteHosts(Cluster.local(2, threads=1), deadline=START)
    assert time.monotonic() - started < START / 2
