"""What becomes of steps when the network between real processes delays, cuts, resets or starves."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import LinkLost, RendezvousTimeout, StepTimeout, WorkerLost
from tests.faults import hazards
from tests.faults.network.proxy import DOWN, UP, Proxy
from tests.faults.running import (
    Running,
    Script,
    Worker,
    cluster_file,
    record_duration,
    resident,
    took,
)

DEAD = 5.0
ALLOW = ("--allow-ops", "tests.faults.hazards")
MB = 1 << 20


@dataclass
class Wired:
    """Two workers, each behind a proxy of its own: for the client, and for the other worker."""

    workers: list[Worker]
    proxies: list[Proxy]
    file: Path

    def session(self, **options: Any) -> gf.Session:
        return gf.Session(self.file, ops=["tests.faults.hazards"], **options)


@pytest.fixture
def wired(
    workers: Callable[..., list[Worker]],
    proxy: Callable[[str], Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Wired:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")  # all goes over the network
    two = workers(2, *ALLOW)
    between = [proxy(worker.address) for worker in two]
    return Wired(two, between, cluster_file(tmp_path, [each.address for each in between]))


def ping_pong(x: gf.Tensor) -> tuple[gf.Tensor, list[gf.Tensor], list[gf.Tensor]]:
    """x * 2 + 1 over both workers, and a count on each: (result, counts, updates)."""
    counts = []
    for worker in range(2):
        with gf.device(f"/worker:{worker}"):
            counts.append(gf.variable(np.zeros((), "float32"), name=f"count{worker}"))
    with gf.device("/worker:0"):
        doubled = x * 2.0
    with gf.device("/worker:1"):
        more = doubled + 1.0
    with gf.device("/worker:0"):
        result = more * 1.0
    return result, counts, [gf.assign(c, c + 1.0) for c in counts]


@dataclass
class Steps:
    """Steps on a thread of their own, so that the network can change meanwhile."""

    session: gf.Session
    count: int
    pause: float = 0.0

    def __post_init__(self) -> None:
        self.x = gf.placeholder("float32", (None,), name="x")
        self.result, self.counts, self.train = ping_pong(self.x)
        self.done = 0
        self.longest = 0.0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while self.done < self.count:
                fed = np.full(1000, self.done, "float32")
                start = time.monotonic()
                value, _ = self.session.run([self.result, self.train], {self.x: fed})
                self.longest = max(self.longest, time.monotonic() - start)
                assert np.array_equal(value, fed * 2 + 1)
                self.done += 1
                time.sleep(self.pause)
        except BaseException as error:
            self.error = error

    def start(self, until: int = 3) -> None:
        """Begin; some steps are done when this returns."""
        self._thread.start()
        begun = time.monotonic()
        while self.done < until and self._thread.is_alive() and time.monotonic() < begun + 30:
            time.sleep(0.005)
        assert self.done >= until, self.error

    def end(self, seconds: float) -> None:
        """All ran, each committed once on both workers."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.done} steps were done in {seconds} s"
        if self.error is not None:
            raise self.error
        assert [float(self.session.get(c)) for c in self.counts] == [self.count] * 2

    def failure(self, seconds: float) -> BaseException:
        self._thread.join(seconds)
        assert self.error is not None, f"no error in {seconds} s"
        return self.error


@pytest.mark.parametrize(
    "directions",
    [(UP, DOWN), *(pytest.param((way,), marks=pytest.mark.slow) for way in (UP, DOWN))],
    ids=["both", "up", "down"],
)
@pytest.mark.fault(11, 13, 14)
def test_a_cut_that_lasts_is_found_within_five_seconds(
    wired: Wired, directions: tuple[str, ...]
) -> None:
    with wired.session() as s:
        steps = Steps(s, 10_000)
        steps.start()
        cut = time.monotonic()
        wired.proxies[1].sever(*directions)
        failure = steps.failure(2 * DEAD)
        seconds = time.monotonic() - cut
        took({2: 11}.get(len(directions), 14), f"found, cut {'+'.join(directions)}", seconds)
        assert isinstance(failure, WorkerLost) and failure.worker == 1, failure
        assert seconds < DEAD + 1.0
        wired.proxies[1].heal()
    with wired.session() as again:  # its worker has let go of the old session, and serves
        steps = Steps(again, 5)
        steps.start()
        steps.end(30.0)


@pytest.mark.fault(13)
def test_workers_that_do_not_reach_each_other_are_named_and_a_step_can_be_tried_again(
    wired: Wired,
) -> None:
    with wired.session() as s:
        steps = Steps(s, 10_000)
        steps.start()
        wired.proxies[1].spared = 1  # ours, who came first
        cut = time.monotonic()
        wired.proxies[1].sever()
        failure = steps.failure(2 * DEAD)
        seconds = time.monotonic() - cut
        took(13, "found, cut between two workers", seconds)
        assert isinstance(failure, LinkLost), failure
        assert (failure.source, failure.target) == (0, 1) and failure.step is not None
        assert seconds < DEAD + 1.0
        for told in ("worker 0 at", "worker 1 at", f"edge {failure.edge}", "test_network.py"):
            assert told in str(failure), failure
        wired.proxies[1].heal()
        fed = np.ones(1000, "float32")
        value, _ = s.run([steps.result, steps.train], {steps.x: fed})
        assert np.array_equal(value, fed * 2 + 1)
        assert [float(s.get(c)) for c in steps.counts] == [steps.done + 1] * 2


@pytest.mark.slow  # a cut that lasts
@pytest.mark.fault(13)
def test_with_mirrors_a_cut_between_two_workers_costs_one_of_them_and_no_step(wired: Wired) -> None:
    """The link from a variable to its mirror is cut, and both reach the session."""
    with wired.session(replicas=2) as s:
        steps = Steps(s, 300, pause=0.002)
        steps.start()
        assert len(s.mirrors().places) == 2
        wired.proxies[1].spared = 1  # ours, who came first
        wired.proxies[1].sever()
        steps.end(60.0)
        took(13, "longest step with mirrors, cut between two workers", steps.longest)
        assert DEAD - 1.0 < steps.longest < DEAD + 2.0
        assert len(s.mirrors().missing) == 2, "nobody is left to mirror"


@pytest.mark.slow  # two cuts that last
@pytest.mark.fault(13)
def test_an_exchange_of_workers_that_do_not_reach_each_other_ends_by_name(wired: Wired) -> None:
    with gf.random.seed(7):
        x = gf.placeholder("float32", (8, 6), name="x")
        w = gf.variable(gf.init.glorot((6, 6)), name="w")
        loss = gf.mean(gf.square(gf.tanh(x @ w)))
        train = gf.optim.Adam(0.05).minimize(loss, strategy=gf.parallel.Data(replicas=2))
    fed = {x: np.ones((8, 6), "float32")}
    with wired.session(trial=False) as s:
        s.run([loss, train], fed)
        for each in wired.proxies:
            each.spared = 1  # ours, who came first
            cut = time.monotonic()
            each.sever()
            told = r"worker 0 at .*worker 1|worker 1 at .*worker 0"
            with pytest.raises(LinkLost, match=told) as caught:
                while True:
                    s.run([loss, train], fed)
            assert re.search(r"it is of all_\w+ '.*made at .*test_network.py", str(caught.value))
            assert time.monotonic() - cut < DEAD + 1.0
            each.heal()
            s.run([loss, train], fed)


@pytest.mark.fault(12)
def test_a_cut_of_three_seconds_heals_and_each_step_commits_once(wired: Wired) -> None:
    with wired.session() as s:
        steps = Steps(s, 200, pause=0.005)
        steps.start()
        wired.proxies[1].sever()
        time.sleep(3.0)
        wired.proxies[1].heal()
        steps.end(30.0)
        took(12, "longest step under a cut of 3 s", steps.longest)
        assert steps.longest > 2.5, "the cut was there"


@pytest.mark.fault(20, 21)
def test_resets_over_and_over_lose_nothing_and_repeat_nothing(wired: Wired) -> None:
    with wired.session() as s:
        steps = Steps(s, 150, pause=0.01)
        steps.start()
        for number in range(8):
            time.sleep(0.25)
            wired.proxies[number % 2].reset()
        steps.end(40.0)
        took(21, "longest step under resets", steps.longest)
        assert sum(each.connections for each in wired.proxies) > 8


# Whatever this process sends, by any way, it sends twice.
TWICE = """
from graphflow.runtime.transport.unix_socket import UnixSocketChannel
from graphflow.runtime.transport.bulk_tcp import BulkChannel
from graphflow.runtime.transport.tcp import TcpChannel, TcpListener

def twice(kind, name):
    send = getattr(kind, name)
    def again(self, *given):
        if not send(self, *given):
            return False
        told.append(kind.__name__)
        send(self, *given)
        return True
    return kind, name, again

told = []
doubled = [
    twice(TcpChannel, "send_unlocked"), twice(TcpListener, "send"),
    twice(UnixSocketChannel, "send"), twice(BulkChannel, "send"),
]
"""
DOUBLING = f"""{TWICE}
for each in doubled:
    setattr(*each)
import sys
from graphflow.cli.main import main
sys.argv = ["graphflow", "worker", "--listen", "tcp://127.0.0.1:*", "--threads", "1"]
main()
"""


@pytest.mark.fault(20)
@pytest.mark.parametrize("shared", ["on", "off"])
def test_what_is_delivered_twice_is_applied_once(
    shared: str,
    running: list[Running],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Orders, answers, tensors, feeds, acknowledgements: by lanes and shared memory, or by TCP."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    addresses = []
    for _ in range(2):
        running.append(worker := Script(DOUBLING))
        addresses.append(worker.line("graphflow worker").split())
    file = cluster_file(tmp_path, [next(w for w in a if "tcp://" in w) for a in addresses])
    known: dict[str, Any] = {}
    exec(TWICE, known)
    for each in known["doubled"]:
        monkeypatch.setattr(*each)
    x = gf.placeholder("float32", (None,), name="x")
    result, counts, train = ping_pong(x)
    large = np.random.default_rng(0).random(4 * MB // 4, "float32")
    with gf.Session(file, trial=False) as s:
        for number, fed in enumerate([*(np.full(9, n, "float32") for n in range(20)), large]):
            value, _ = s.run([result, train], {x: fed})
            assert np.array_equal(value, fed * 2 + 1), number
        fed = np.ones(9, "float32")
        for value, _ in s.run([result, train], ({x: fed} for _ in range(20)), steps=20):
            assert np.array_equal(value, fed * 2 + 1)
        s.set(counts[0], 40.0)
        s.run(train)
        assert [float(s.get(c)) for c in counts] == [41.0, 42.0]
    assert len(known["told"]) > 100


# A worker whose pipes lose, break or damage every few messages what they say they have sent.
BREAKING = """
import os, socket, xxhash
from graphflow.runtime.transport import bulk_tcp as pipe

send, count = pipe.BulkChannel.send, 0

def breaks(self, frames):
    global count
    count += 1
    if count % 5 or self.ended:
        return send(self, frames)
    with open(os.environ["BROKEN"], "a") as told:
        told.write("x")
    second = len(frames[1]) if len(frames) > 1 else pipe._NO_SECOND_FRAME
    sizes = pipe._HEAD.pack(len(frames[0]), second)
    if count % 3 == 0:  # in the middle of a message
        self._socket.send(sizes + bytes(frames[0])[:9])
        self._socket.shutdown(socket.SHUT_RDWR)
    elif count % 3 == 1:
        sealed = bytearray(sizes + b"".join(frames) + xxhash.xxh3_64(b"".join(frames)).digest())
        sealed[len(sealed) // 2] ^= 16
        return self._write_parts(sealed)
    else:
        self._socket.send(b"no message, of a pipe")
    return True

pipe.BulkChannel.send = breaks
import sys
from graphflow.cli.main import main
sys.argv = ["graphflow", "worker", "--listen", "tcp://127.0.0.1:*", "--threads", "1"]
main()
"""


@pytest.mark.fault(15)
def test_a_pipe_that_loses_breaks_and_damages_costs_no_tensor(
    running: list[Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    broken = tmp_path / "broken"
    monkeypatch.setenv("BROKEN", str(broken))
    addresses = []
    for _ in range(2):
        running.append(worker := Script(BREAKING))
        addresses.append(worker.line("graphflow worker").split())
    file = cluster_file(tmp_path, [next(w for w in a if "tcp://" in w) for a in addresses])
    x = gf.placeholder("float32", (None,), name="x")
    result, counts, train = ping_pong(x)
    rng, steps = np.random.default_rng(0), 0
    with gf.Session(file, trial=False, deadline=30) as s:
        began = time.monotonic()
        while time.monotonic() < began + 40 and (not broken.exists() or broken.stat().st_size < 8):
            fed = rng.random((3, 40_000, MB // 4)[steps % 3], "float32")
            value, _ = s.run([result, train], {x: fed})
            steps += 1
            assert np.array_equal(value, fed * 2 + 1), steps
        assert [float(s.get(c)) for c in counts] == [steps, steps]
    assert broken.stat().st_size >= 8


def cross_workers(x: gf.Tensor) -> gf.Tensor:
    """What is fed, by way of both workers."""
    with gf.device("/worker:0"):
        there = x * 1.0
    with gf.device("/worker:1"):
        return there * 1.0


@pytest.mark.fault(15)
def test_a_reset_in_mid_tensor_is_made_good(wired: Wired) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    back = cross_workers(x)
    value = np.random.default_rng(0).random(8 * MB // 4, "float32")
    with wired.session() as s:
        assert np.array_equal(s.run(back, {x: value[:10]}), value[:10])
        for each in wired.proxies:
            each.reset_after = 3 * MB
        with record_duration(15, "the whole step, two resets of 8 MB"):
            assert np.array_equal(s.run(back, {x: value}), value)
        assert all(each.reset_after is None for each in wired.proxies), "both were reset"


@pytest.mark.fault(15)
def test_flipped_bits_of_a_tensor_are_noticed_and_sent_again(wired: Wired) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    back = cross_workers(x)
    value = np.random.default_rng(0).random(4 * MB // 4, "float32")
    flipped: list[int] = []

    def flip(way: str, at: int, data: bytes) -> bytes:
        if flipped or at < 2 * MB:
            return data
        flipped.append(at)
        return bytes([data[0] ^ 0x10]) + data[1:]

    with wired.session() as s:
        assert np.array_equal(s.run(back, {x: value[:10]}), value[:10])
        wired.proxies[1].corrupt = flip
        with record_duration(15, "the whole step, a flipped bit of 4 MB"):
            assert np.array_equal(s.run(back, {x: value}), value)
        assert flipped


@pytest.mark.slow  # ten seconds of slow links
@pytest.mark.fault(16)
def test_delay_and_jitter_make_steps_slower_and_kill_nobody(wired: Wired) -> None:
    with wired.session() as s:
        steps = Steps(s, 5)
        steps.start(1)
        for each in wired.proxies:
            each.delay, each.jitter = 0.15, 0.1
        steps.end(60.0)
        assert steps.longest > 0.3, "there and back"


@pytest.mark.fault(18)
def test_a_byte_at_a_time_completes(wired: Wired) -> None:
    with wired.session() as s:
        steps = Steps(s, 4)
        steps.start(1)
        for each in wired.proxies:
            each.piece = 1
        steps.end(60.0)


def stream(x: gf.Tensor, times: int, consumer: Callable[[gf.Tensor], gf.Tensor]) -> gf.Tensor:
    """A loop in which worker 0 makes a tensor each turn that worker 1 consumes."""

    def body(state: Any) -> Any:
        turn, total = state
        with gf.device("/worker:0"):
            made = x + turn.astype("float32")
            more = turn + 1
        with gf.device("/worker:1"):
            used = consumer(made)
            total = total + gf.sum(used) * 0.0 + 1.0
        return more, total

    with gf.device("/worker:0"):
        start = gf.zeros((), "int32") + gf.sum(x).astype("int32") * 0
    with gf.device("/worker:1"):
        total = gf.zeros(())
    last: gf.Tensor = gf.while_loop(lambda state: state[0] < times, body, (start, total))[1]
    return last


class Growth:
    """How much more memory processes take, at most, while a block runs."""

    def __init__(self, *processes: Running) -> None:
        self._pids = [each.pid for each in processes]
        self._before = [resident(pid) for pid in self._pids]
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            now = map(resident, self._pids)
            grown = max(a - b for a, b in zip(now, self._before, strict=True))
            self.most = max(self.most, grown)

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.slow  # ten seconds of slow links
@pytest.mark.fault(19)
def test_a_slow_consumer_blocks_its_producer_and_memory_stays_bounded(wired: Wired) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    last = stream(x, 40, lambda made: hazards.sleep(made, seconds=0.05))
    with wired.session() as s:
        small = np.zeros(10, "float32")
        assert float(s.run(last, {x: small})) == 40.0
        value = np.zeros(8 * MB // 4, "float32")
        with Growth(*wired.workers) as growth:
            assert float(s.run(last, {x: value})) == 40.0
    took(19, "MB more, of 320 MB", growth.most / 1e6)
    assert growth.most < 160 * MB, "of the 320 MB that went over the edge"


@pytest.mark.slow  # ten seconds of slow links
@pytest.mark.fault(17)
def test_a_starved_link_holds_its_producer_back_with_bounded_memory(wired: Wired) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    last = stream(x, 60, lambda made: made)
    with wired.session(deadline=4.0) as s:
        value = np.zeros(8 * MB // 4, "float32")
        s.run(last, {x: value[:10]})
        wired.proxies[1].rate = 125_000.0  # 1 Mbit/s
        with Growth(*wired.workers) as growth, pytest.raises(StepTimeout, match="edge"):
            s.run(last, {x: value})
        wired.proxies[1].rate = None
    took(17, "MB more, of 480 MB", growth.most / 1e6)
    assert growth.most < 240 * MB, "of the 480 MB that the producer would have sent"


@pytest.mark.slow  # the idle steps that planning times go over the slow link, too
@pytest.mark.fault(16)
def test_a_session_starts_over_a_link_with_delay_and_jitter(wired: Wired) -> None:
    for each in wired.proxies:
        each.delay, each.jitter = 0.15, 0.1
    with wired.session() as s:
        steps = Steps(s, 3)
        steps.start(1)
        steps.end(60.0)


@pytest.mark.slow  # 200 kB at 1 Mbit/s, three times
@pytest.mark.fault(17)
def test_one_megabit_a_second_is_slow_and_right(wired: Wired) -> None:
    x = gf.placeholder("float32", (None,), name="x")
    back = cross_workers(x)
    value = np.random.default_rng(0).random(200_000 // 4, "float32")
    for each in wired.proxies:
        each.rate = 125_000.0
    with wired.session() as s:
        start = time.monotonic()
        assert np.array_equal(s.run(back, {x: value}), value)
        assert time.monotonic() - start > 3.0


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    yield port


@pytest.mark.fault(22)
def test_a_late_worker_is_waited_for(
    free_port: int, running: list[Running], tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    file = cluster_file(tmp_path, [address], "deadline = 60.0")

    def start_late() -> None:
        time.sleep(1.0)
        running.append(Worker(address))

    thread = threading.Thread(target=start_late)
    thread.start()
    with gf.Session(file) as s:
        x = gf.placeholder("float32", ())
        assert float(s.run(x * 2.0, {x: 1.0})) == 2.0
    thread.join()


@pytest.mark.fault(22)
def test_a_worker_that_never_comes_is_a_rendezvous_timeout_at_the_deadline(
    free_port: int, tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    file = cluster_file(tmp_path, [address], "deadline = 1.0")
    start = time.monotonic()
    with pytest.raises(RendezvousTimeout, match=address):
        gf.Session(file)
    took(22, "told after the deadline of 1 s", time.monotonic() - start - 1.0)
    assert 0.9 < time.monotonic() - start < 3.0
