"""What the runtime adds to the wire: arrays, small messages and steps between processes, against
memcpy, raw pyzmq, gloo (torch.distributed) and Ray's object store, all measured by turns.

    python benchmarks/processes/transport.py [--rounds 20]
        [--only arrays,keyed,messages,steps,many,store]
                                   [--output results/transport.json]

One way of an array is half of a round trip. "raw pyzmq" sends an array as one frame without a copy,
and copies it once into place where it arrives; with keys it is encrypted as ours is. Its round trip
of 100 bytes is the unit of messages and steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

import graphflow as gf
from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.security.keys import COORDINATOR, WORKER, Keyring

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import write
from transport_peers import (
    channel,
    near_lane,
    raw,
    ray_echo,
    ray_holder,
    ray_put_and_get,
    ray_store,
    torch_peer,
)

MB = 1 << 20
Times = dict[str, list[float]]


@contextmanager
def workers(count: int = 2, *, shared: bool = True) -> Iterator[gf.Session]:
    os.environ["GRAPHFLOW_SHARED_MEMORY"] = "on" if shared else "off"
    with gf.Session(Cluster.local(count, threads=1, deadline=300), trial=False) as session:
        yield session


@contextmanager
def keyed_workers() -> Iterator[gf.Session]:
    """Two workers that show keys, as they do by default beyond loopback."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(
            patch.dict(
                os.environ, GRAPHFLOW_KEYS=str(folder), GRAPHFLOW_SHARED_MEMORY="off",
                GRAPHFLOW_LOG_LEVEL="error",
            )
        )  # fmt: skip
        ring = Keyring(folder)
        for name, role in (("boss", COORDINATOR), ("box", WORKER)):
            ring.create_pair(name, role)
            ring.add((folder / f"{name}.public").read_text(), name)
        lines = ['key = "boss"']
        for _ in range(2):
            command = ["worker", "--listen", "tcp://127.0.0.1:*", "--key", "box", "--threads", "1"]
            worker = subprocess.Popen(
                [sys.executable, "-m", "graphflow", *command], stdout=subprocess.PIPE, text=True
            )
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
            assert worker.stdout is not None
            address = worker.stdout.readline().partition(" listening on ")[2].split()[0]
            lines += ["[[workers]]", f'address = "{address}"', 'key = "box"']
        (folder / "cluster.toml").write_text("\n".join(lines))
        cluster = Cluster.load(folder / "cluster.toml")
        yield stack.enter_context(gf.Session(cluster, trial=False))


def hosts_of(session: gf.Session) -> Any:
    """What measures the links between its workers."""
    return session._life.hosts


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


def thrice(action: Callable[[], object], share: float = 1.0) -> Callable[[], float]:
    """The median of three times, as workers measure theirs: the first finds the caches full of what
    others moved."""
    once = clocked(action, share=share)
    return lambda: median(once() for _ in range(3))


def told(title: str, times: Times, ours: str, unit: str, goal: str) -> dict[str, Any]:
    """Medians, and how each stands to the unit."""
    medians = {name: median(each) for name, each in times.items()}
    print(f"\n{title}; goal: {goal}")
    for name, value in medians.items():
        stands = f"{value / medians[unit]:7.2f} x {unit}"
        print(f"  {name:<34} {value * 1e6:12.1f} us {stands}", flush=True)
    ratio = medians[ours] / medians[unit]
    return {
        "title": title, "goal": goal, "median_seconds": medians, "ratio": ratio,
        "speed_ratio": 1 / ratio,
    }  # fmt: skip


# What is measured ------------------------------------------------------------------------------


def blocks(nbytes: int) -> tuple[Any, Any]:
    """An array to send, and where it comes back to."""
    return np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)


def bounce(dealer: Any, source: Any, target: Any) -> None:
    """A round trip of an array by raw pyzmq."""
    dealer.send(source, copy=False)
    target[:] = np.frombuffer(dealer.recv(copy=False).buffer, np.uint8)


def there_and_back(dealer: Any, small: bytes) -> None:
    """The unit: a round trip of a short message by raw pyzmq."""
    dealer.send(small)
    dealer.recv()


def arrays(rounds: int) -> list[dict[str, Any]]:
    results = []
    with ExitStack() as stack:
        shared = hosts_of(stack.enter_context(workers()))
        tcp = hosts_of(stack.enter_context(workers(shared=False)))
        dealer = stack.enter_context(raw("echo"))
        dist = stack.enter_context(torch_peer()) if find_spec("torch") else None
        for size in (1, 4, 16, 64):
            nbytes = size * MB
            source, target = blocks(nbytes)
            contenders = {
                "memcpy": thrice(partial(np.copyto, target, source)),
                "shared memory": partial(shared.probe_link, 0, 1, nbytes, 3),
                "tcp": partial(tcp.probe_link, 0, 1, nbytes, 3),
                "raw pyzmq": thrice(partial(bounce, dealer, source, target), 0.5),
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


def keyed(rounds: int) -> list[dict[str, Any]]:
    """Arrays over TCP, encrypted."""
    results = []
    with ExitStack() as stack:
        hosts = hosts_of(stack.enter_context(keyed_workers()))
        dealer = stack.enter_context(raw("echo", keyed=True))
        for size in (1, 4, 16, 64):
            nbytes = size * MB
            contenders = {
                "tcp": partial(hosts.probe_link, 0, 1, nbytes, 3),
                "raw pyzmq": thrice(partial(bounce, dealer, *blocks(nbytes)), 0.5),
            }
            title = f"{size} MB over TCP with keys"
            times = turns(contenders, rounds)
            results.append(told(title, times, "tcp", "raw pyzmq", "1 / 0.9 = 1.11 x raw pyzmq"))
    return results


def store(rounds: int) -> list[dict[str, Any]]:
    """Ray's object store beside ours. Apart from the rest: its processes take part of both cores
    while they have nothing to do."""
    if find_spec("ray") is None:
        return []
    small, results, held = b"x" * 100, [], {}
    for size in (4, 16, 64):
        with gf.device("/worker:0"):
            held[size] = gf.variable(np.ones(size * MB // 4, "float32"), name=f"held{size}")
    with ExitStack() as stack:
        session = stack.enter_context(workers())
        hosts = hosts_of(session)
        dealer = stack.enter_context(raw("echo"))
        ray = stack.enter_context(ray_store())
        for size in (4, 16, 64):
            nbytes = size * MB
            source, target = blocks(nbytes)
            contenders = {
                "memcpy": thrice(partial(np.copyto, target, source)),
                "shared memory": partial(hosts.probe_link, 0, 1, nbytes, 3),
                "Ray put + get": thrice(partial(ray_put_and_get, ray, source)),
            }
            times = turns(contenders, rounds)
            results.append(
                told(f"{size} MB beside Ray", times, "shared memory", "Ray put + get", "< 1 x Ray")
            )
            contenders = {
                "variable of a worker": thrice(partial(session.run, held[size])),
                "Ray: array of an actor": thrice(ray_holder(ray, nbytes)),
            }
            times = turns(contenders, rounds)
            actor = "Ray: array of an actor"
            title = f"{size} MB fetched, ours to be written to"
            results.append(told(title, times, "variable of a worker", actor, "< 1 x Ray"))

        contenders = {
            "raw round trip": clocked(partial(there_and_back, dealer, small), 20),
            "echo between workers": lambda: 2 * hosts.probe_link(0, 1, 0, 20),
            "Ray put + get of 100 bytes": clocked(partial(ray_put_and_get, ray, small), 20),
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
        ours, waiter = stack.enter_context(channel())
        near, beside = stack.enter_context(near_lane())
        feed = {x: np.ones(4, "float32")}
        session.run(fetch, feed)
        session.run(scalar)
        hosts = hosts_of(session)

        def frame() -> None:
            ours.send(there)
            while not ours.has_message():
                waiter.wait(1.0)
            ours.receive()

        def short() -> None:
            near.send(there)
            beside.wait(1.0)
            near.receive()

        times = turns(
            {
                "raw round trip": clocked(partial(there_and_back, dealer, small), 20),
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
                f"{count} workers": clocked(partial(session.run, fetch, feed), 20)
                for count, session in zip(counts, sessions, strict=True)
            },
            rounds,
        )
    return [
        told("start of a session with idle workers", starts, "32 workers", "2 workers", "16"),
        told("a step of two workers", times, "32 workers", "2 workers", "about 1"),
    ]


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "arrays": arrays, "keyed": keyed, "messages": messages, "steps": steps, "many": many,
    "store": store,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"--only knows no {', '.join(unknown)}; it takes {', '.join(PARTS)}")
    for name in ("torch", "ray"):
        if not find_spec(name):
            print(f"{name} is not installed: left out (pip install graphflow[bench])")
    found = [PARTS[name](options.rounds) for name in wanted]
    write("transport", list(itertools.chain(*found)), options.output)


if __name__ == "__main__":
    main()
