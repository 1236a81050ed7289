"""What the runtime adds to the wire: arrays, small messages and steps between processes, against
memcpy, raw pyzmq, gloo (torch.distributed) and Ray's object store, all measured by turns.

    python benchmarks/transport.py [--rounds 20] [--only arrays,messages,steps,many,store]
                                   [--output results/transport.json]

One way of an array is half of a round trip. "raw pyzmq" sends an array as one frame without a copy,
and copies it once into place where it arrives; its round trip of 100 bytes is the unit of messages
and steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq
from peers import write

import graphflow as gf
from graphflow.errors import TransportError
from graphflow.placement.cluster import Cluster

MB = 1 << 20
Times = dict[str, list[float]]


# Peers, each in a process of its own -----------------------------------------------------------


def echo(port: int) -> None:
    """Sends every message back, by raw pyzmq."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    place: Any = None
    while True:
        route, frame = router.recv(), router.recv(copy=False)
        if len(frame) < 65536:
            router.send_multipart([route, frame.bytes])
            continue
        if place is None or place.nbytes != len(frame):
            place = np.empty(len(frame), np.uint8)
        place[:] = np.frombuffer(frame.buffer, np.uint8)
        router.send(route, zmq.SNDMORE)
        router.send(place, copy=False)


def frames(port: int) -> None:
    """Sends every message back, by the listener of a worker."""
    from graphflow.runtime.transport.bell import Sleeper
    from graphflow.runtime.transport.tcp import Listener

    listener = Listener(zmq.Context.instance(), f"tcp://127.0.0.1:{port}", insecure=False)
    sleeper = Sleeper()
    sleeper.add(int(listener.socket.getsockopt(zmq.FD)), 0)
    while True:
        if not listener.has_message():
            sleeper.sleep(1.0)
        elif (arrived := listener.receive()) is not None:
            listener.send(arrived[0], arrived[1])


def lane(port: int) -> None:
    """Sends every message back, by the lanes of a worker."""
    from graphflow.runtime.transport.bell import Sleeper
    from graphflow.runtime.transport.lane import Lanes

    lanes = Lanes(f"tcp://127.0.0.1:{port}")
    asleep = Sleeper()
    asleep.add(lanes.fileno(), 0)
    asleep.sleep(60.0)
    found = lanes.admit()
    if found is None:
        return
    asleep.add(found[1].fileno(), 1)
    with suppress(TransportError):  # the other end has what it wanted
        while asleep.sleep(60.0):
            while (frames := found[1].receive()) is not None:
                found[1].send(frames)


def gloo(port: int) -> None:
    """Rank 1: sends every tensor back."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    while True:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0)
        if not int(size):
            return
        tensor = torch.empty(int(size), dtype=torch.uint8)
        for _ in range(2):
            dist.recv(tensor, 0)
            dist.send(tensor, 0)


PEERS: dict[str, Callable[[int], None]] = {
    "echo": echo, "frames": frames, "lane": lane, "gloo": gloo,
}  # fmt: skip


@contextmanager
def peer(name: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, __file__, "--peer", name, str(port)])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def raw(name: str) -> Iterator[Any]:
    with peer(name) as port:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        try:
            yield dealer
        finally:
            dealer.close()


@contextmanager
def workers(count: int = 2, *, shared: bool = True) -> Iterator[gf.Session]:
    os.environ["GRAPHFLOW_SHARED_MEMORY"] = "on" if shared else "off"
    with gf.Session(Cluster.local(count, threads=1, deadline=300), trial=False) as session:
        yield session


# By turns --------------------------------------------------------------------------------------


def turns(contenders: dict[str, Callable[[], float]], rounds: int) -> Times:
    """Seconds, as each contender measures itself; the first two rounds warm up."""
    times: Times = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, once in contenders.items():
            seconds = once()
            if turn > 1:
                times[name].append(seconds)
    return times


def clocked(action: Callable[[], object], repeats: int = 1, share: float = 1.0) -> Any:
    def once() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        return (time.perf_counter() - start) / repeats * share

    return once


def told(title: str, times: Times, ours: str, unit: str, goal: str) -> dict[str, Any]:
    """Medians, and how each stands to the unit."""
    medians = {name: median(each) for name, each in times.items()}
    print(f"\n{title}; goal: {goal}")
    for name, value in medians.items():
        ratio = f"{value / medians[unit]:7.2f} x {unit}"
        print(f"  {name:<34} {value * 1e6:12.1f} us {ratio}", flush=True)
    ratio = medians[ours] / medians[unit]
    return {
        "title": title, "goal": goal, "median_seconds": medians, "ratio": ratio,
        "speed_ratio": 1 / ratio,
    }  # fmt: skip


# What is measured ------------------------------------------------------------------------------


def arrays(rounds: int) -> list[dict[str, Any]]:
    results = []
    with ExitStack() as stack:
        shared = stack.enter_context(workers())._hosts
        tcp = stack.enter_context(workers(shared=False))._hosts
        dealer = stack.enter_context(raw("echo"))
        dist = stack.enter_context(torch_peer()) if find_spec("torch") else None
        for size in (1, 4, 16, 64):
            nbytes = size * MB
            source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)

            def bounce(source: Any = source, target: Any = target) -> None:
                dealer.send(source, copy=False)
                target[:] = np.frombuffer(dealer.recv(copy=False).buffer, np.uint8)

            contenders = {
                "memcpy": clocked(lambda t=target, s=source: np.copyto(t, s)),
                "shared memory": lambda n=nbytes: shared.probe_link(0, 1, n, 3),
                "tcp": lambda n=nbytes: tcp.probe_link(0, 1, n, 3),
                "raw pyzmq": clocked(bounce, share=0.5),
            }
            if dist is not None:
                contenders["gloo"] = dist(nbytes)
            times = turns(contenders, rounds)
            results.append(
                told(f"{size} MB to another process of this host", times, "shared memory",
                     "memcpy", "1 / 0.7 = 1.43 x memcpy from 4 MB")
            )  # fmt: skip
            results.append(
                told(f"{size} MB over TCP", {k: times[k] for k in ("tcp", "raw pyzmq")}, "tcp",
                     "raw pyzmq", "1 / 0.9 = 1.11 x raw pyzmq")
            )  # fmt: skip
    return results


@contextmanager
def torch_peer() -> Iterator[Callable[[int], Callable[[], float]]]:
    import torch
    import torch.distributed as dist

    with peer("gloo") as port:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=2)

        def contender(nbytes: int) -> Callable[[], float]:
            tensor = torch.ones(nbytes, dtype=torch.uint8)

            def bounce() -> float:
                dist.send(torch.tensor([nbytes]), 1)
                for _ in range(2):  # the first finds both ready
                    start = time.perf_counter()
                    dist.send(tensor, 1)
                    dist.recv(tensor, 1)
                return (time.perf_counter() - start) / 2

            return bounce

        yield contender
        dist.send(torch.tensor([0]), 1)
        dist.destroy_process_group()


@contextmanager
def ray_store() -> Iterator[Any]:
    """Ray with its object store; none of its processes outlives this, however it ends."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False,
            object_store_memory=1 << 30, _temp_dir=folder,
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()


def ray_echo(ray: Any) -> Callable[[], object]:
    """A small array to an actor, which is another process, and back."""

    class Echo:
        def echo(self, array: Any) -> Any:
            return array

    actor = ray.remote(Echo).remote()
    array = np.ones(4, "float32")
    return lambda: ray.get(actor.echo.remote(array))


def store(rounds: int) -> list[dict[str, Any]]:
    """Ray's object store beside ours. Apart from the rest: its processes take part of both cores
    while they have nothing to do."""
    if find_spec("ray") is None:
        return []
    small, results = b"x" * 100, []
    with ExitStack() as stack:
        hosts = stack.enter_context(workers())._hosts
        dealer = stack.enter_context(raw("echo"))
        ray = stack.enter_context(ray_store())
        for size in (4, 16, 64):
            nbytes = size * MB
            source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
            contenders = {
                "memcpy": clocked(lambda t=target, s=source: np.copyto(t, s)),
                "shared memory": lambda n=nbytes: hosts.probe_link(0, 1, n, 3),
                "Ray put + get": clocked(lambda s=source: ray.get(ray.put(s))),
            }
            times = turns(contenders, rounds)
            results.append(
                told(f"{size} MB beside Ray", times, "shared memory", "Ray put + get", "< 1 x Ray")
            )

        def bounce() -> None:
            dealer.send(small)
            dealer.recv()

        contenders = {
            "raw round trip": clocked(bounce, 20),
            "echo between workers": lambda: 2 * hosts.probe_link(0, 1, 0, 20),
            "Ray put + get of 100 bytes": clocked(lambda: ray.get(ray.put(small)), 20),
            "Ray: to an actor and back": clocked(ray_echo(ray), 20),
        }
        times = turns(contenders, rounds)
        actor = "Ray: to an actor and back"
        results.append(
            told("small messages beside Ray", times, "echo between workers", actor, "< 1 x Ray")
        )
    return results


def chain() -> tuple[Any, Any]:
    """One tiny edge each way."""
    x = gf.placeholder("float32", (4,), name="x")
    with gf.device("/worker:0"):
        first = x + 1.0
    with gf.device("/worker:1"):
        second = first * 2.0
    with gf.device("/worker:0"):
        return second - 3.0, x


def messages(rounds: int) -> list[dict[str, Any]]:
    small = b"x" * 100
    with gf.device("/worker:0"):
        scalar = gf.variable(np.float32(1), name="scalar")
    fetch, x = chain()
    there = [small]
    with ExitStack() as stack:
        session = stack.enter_context(workers())
        dealer = stack.enter_context(raw("echo"))
        ours, asleep = stack.enter_context(channel())
        near, beside = stack.enter_context(near_lane())
        feed = {x: np.ones(4, "float32")}
        session.run(fetch, feed)
        session.run(scalar)
        hosts = session._hosts

        def bounce() -> None:
            dealer.send(small)
            dealer.recv()

        def frame() -> None:
            ours.send(there)
            while not ours.has_message():
                asleep.sleep(1.0)
            ours.receive()

        def short() -> None:
            near.send(there)
            beside.sleep(1.0)
            near.receive()

        times = turns(
            {
                "raw round trip": clocked(bounce, 20),
                "frames over TCP": clocked(frame, 20),
                "frames to a process of this host": clocked(short, 20),
                "echo between workers": lambda: 2 * hosts.probe_link(0, 1, 0, 20),
                "read of a scalar": clocked(lambda: session.get(scalar), 20),
                "step, an edge each way": clocked(lambda: session.run(fetch, feed), 20),
            },
            rounds,
        )
    unit = "raw round trip"
    return [
        told("small messages", times, "frames over TCP", unit, "1.3 raw round trips"),
        told("a step", {k: times[k] for k in (unit, "step, an edge each way")},
             "step, an edge each way", unit, "3 raw round trips"),
    ]  # fmt: skip


@contextmanager
def channel() -> Iterator[Any]:
    from graphflow.runtime.transport.bell import Sleeper
    from graphflow.runtime.transport.tcp import Channel

    with peer("frames") as port:
        made = Channel(zmq.Context.instance(), f"tcp://127.0.0.1:{port}", insecure=False)
        sleeper = Sleeper()
        sleeper.add(int(made.socket.getsockopt(zmq.FD)), 0)
        try:
            yield made, sleeper
        finally:
            made.close()


@contextmanager
def near_lane() -> Iterator[Any]:
    from graphflow.runtime.transport.bell import Sleeper
    from graphflow.runtime.transport.lane import Lane

    with peer("lane") as port:
        until = time.monotonic() + 30.0
        while (made := Lane.to(f"tcp://127.0.0.1:{port}")) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert made is not None
        sleeper = Sleeper()
        sleeper.add(made.fileno(), 0)
        try:
            yield made, sleeper
        finally:
            made.close()


def steps(rounds: int) -> list[dict[str, Any]]:
    x = gf.placeholder("float64", (512, 1024), name="x")
    with gf.device("/worker:0"):
        weights = gf.constant(np.ones((1024, 256)))
        first = x @ weights
    with gf.device("/worker:1"):
        fetch = gf.sum(gf.tanh(first) @ gf.constant(np.ones((256, 256))))
    tiny, y = chain()
    with gf.device("/worker:0"):
        total = gf.variable(np.zeros(4, "float32"), name="total")
        trained = gf.assign(total, total + tiny)
    small = [{y: np.full(4, k, "float32")} for k in range(50)]
    large = [{x: np.full((512, 1024), k, "float64")} for k in range(50)]
    results = []
    with workers() as session:
        for title, each, feeds in (
            ("50 small steps", tiny, small),
            ("50 small steps that assign", trained, small),
            ("50 steps with feeds of 4 MB", fetch, large),
        ):
            session.run(each, feeds[0])

            def loop(each: Any = each, feeds: Any = feeds) -> None:
                for given in feeds:
                    session.run(each, given)

            def together(each: Any = each, feeds: Any = feeds) -> None:
                for _ in session.run(each, feeds, steps=len(feeds)):
                    pass

            times = turns({"one by one": clocked(loop), "steps=50": clocked(together)}, rounds)
            results.append(told(title, times, "steps=50", "one by one", "less"))
    return results


def many(rounds: int) -> list[dict[str, Any]]:
    """Idle workers: what they cost at the start and in each step of two of them."""
    counts = (2, 8, 32)
    fetch, x = chain()
    feed = {x: np.ones(4, "float32")}
    starts: Times = {}
    with ExitStack() as stack:
        sessions = []
        for count in counts:
            start = time.perf_counter()
            sessions.append(stack.enter_context(workers(count)))
            starts[f"{count} workers"] = [time.perf_counter() - start]
            sessions[-1].run(fetch, feed)
        times = turns(
            {
                f"{count} workers": clocked(lambda s=session: s.run(fetch, feed), 20)
                for count, session in zip(counts, sessions, strict=True)
            },
            rounds,
        )
    return [
        told("start of a session with idle workers", starts, "32 workers", "2 workers", "16"),
        told("a step of two workers", times, "32 workers", "2 workers", "about 1"),
    ]


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "arrays": arrays, "messages": messages, "steps": steps, "many": many, "store": store,
}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        PEERS[sys.argv[2]](int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for name in ("torch", "ray"):
        if not find_spec(name):
            print(f"{name} is not installed: left out (pip install graphflow[bench])")
    found = [PARTS[name](options.rounds) for name in options.only.split(",")]
    write("transport", list(itertools.chain(*found)), options.output)


if __name__ == "__main__":
    main()
