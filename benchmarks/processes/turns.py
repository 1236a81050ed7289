"""Turns of a worker with a parameter server on one host: the worker sends a gradient, the server
updates its weights, the worker receives them. Against torch's RPC, and Ray's actors.

    python benchmarks/processes/turns.py [--rounds 7] [--output results/turns.json]

The two are processes. Ours run many turns in one step (docs/design/sessions/concurrent-loops.md).
Their loops are like those of `gf.parallel.ParameterServer`: a worker pulls, computes, and pushes.
A worker of torch makes one remote call a turn, which carries the gradient and returns the weights.
Ray's client drives both actors, as in the asynchronous parameter server of its guide.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import report, write

SIZES = {"4 KiB": (1 << 10, 2000), "1 MiB": (1 << 18, 200), "16 MiB": (1 << 22, 20)}
"""Float32 elements of a tensor, and turns of a window."""
RATE = 0.001

# The server's side of the peer -------------------------------------------------------------------

_weights: dict[int, Any] = {}


def update(gradient: Any) -> Any:
    """Subtract a gradient from the weights of its size, and return them."""
    weights = _weights.get(len(gradient))
    if weights is None:
        weights = _weights[len(gradient)] = gradient.new_ones(len(gradient))
    weights.sub_(gradient, alpha=RATE)
    return weights


def serve(port: int) -> None:
    """Be the server until the worker shuts down."""
    _join_rpc("server", 0, port)
    import torch.distributed.rpc as rpc

    rpc.shutdown()


def _join_rpc(name: str, rank: int, port: int) -> None:
    import torch
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


@contextmanager
def torch_rpc() -> Iterator[Callable[[int, int], Callable[[], float]]]:
    """Yield a function (elements, turns) -> a function that returns the seconds of a turn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    code = f"import turns; turns.serve({port})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}
    )
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed.rpc as rpc
    import turns  # the server knows `update` by this module's name

    _join_rpc("worker", 1, port)

    def contender(elements: int, count: int) -> Callable[[], float]:
        def window() -> float:
            gradient = torch.zeros(elements)
            start = time.perf_counter()
            for _ in range(count):
                gradient = rpc.rpc_sync("server", turns.update, args=(gradient,)) * 0.5
            return (time.perf_counter() - start) / count

        return window

    try:
        yield contender
    finally:
        rpc.shutdown()
        process.wait(30)


@contextmanager
def ray_actors() -> Iterator[Callable[[int, int], Callable[[], float]]]:
    """Yield a function (elements, turns) -> a function that returns the seconds of a turn."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")

    @ray.remote
    class Server:
        def __init__(self, elements: int) -> None:
            self.weights = np.ones(elements, np.float32)

        def apply_gradients(self, gradient: Any) -> Any:
            self.weights -= RATE * gradient
            return self.weights

    @ray.remote
    class Worker:
        def compute_gradients(self, weights: Any) -> Any:
            return weights * np.float32(0.5)

    def contender(elements: int, count: int) -> Callable[[], float]:
        server, worker = Server.remote(elements), Worker.remote()

        def window() -> float:
            weights = server.apply_gradients.remote(np.zeros(elements, np.float32))
            ray.get(weights)
            start = time.perf_counter()
            for _ in range(count):
                ready, _ = ray.wait([worker.compute_gradients.remote(weights)])
                weights = server.apply_gradients.remote(ready[0])
            ray.get(weights)
            return (time.perf_counter() - start) / count

        return window

    try:
        yield contender
    finally:
        ray.shutdown()


@contextmanager
def graphflow() -> Iterator[Callable[[int, int], Callable[[], float]]]:
    """Yield a function (elements, turns) -> a function that returns the seconds of a turn."""
    import graphflow as gf

    with gf.Session(gf.Cluster.local(2, threads=1), trial=False) as session:

        def contender(elements: int, count: int) -> Callable[[], float]:
            step = window_of_turns(elements, count)
            for _ in range(3):  # the first agrees on shared memory
                session.run(step)

            def window() -> float:
                start = time.perf_counter()
                session.run(step)
                return (time.perf_counter() - start) / count

            return window

        yield contender


def window_of_turns(elements: int, count: int) -> Any:
    """Build a step in which a server and a worker on another process take turns."""
    import graphflow as gf
    from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party

    weights = gf.variable(np.ones(elements, np.float32), name=f"weights_{elements}")
    loops = ConcurrentLoops()
    push, pull = (loops.channel((elements,), "float32") for _ in range(2))

    def server(party: Party) -> Any:
        def turn(state: Any, _: Any) -> Any:
            which, gradient = party.merge([push])
            state = state - RATE * gradient
            party.send(pull, state)
            return state, which

        party.send(pull, weights)
        return party.scan(turn, weights, length=count)[0]

    def worker(party: Party) -> Any:
        def turn(_: Any, __: Any) -> Any:
            party.send(push, party.receive(pull) * 0.5)
            return np.int32(0), None

        return party.scan(turn, np.int32(0), length=count)[0]

    loops.add(server, "/worker:0")
    loops.add(worker, "/worker:1")
    return gf.assign(weights, loops.build()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    with ExitStack() as stack:
        sides = {"graphflow": stack.enter_context(graphflow())}
        peers = {"torch": ("torch RPC", torch_rpc), "ray": ("Ray actors", ray_actors)}
        for package, (name, peer) in peers.items():
            if find_spec(package):
                sides[name] = stack.enter_context(peer())
            else:
                print(f"{package} is not installed: left out (pip install graphflow[bench])")
        for title, (elements, count) in SIZES.items():
            windows = {name: side(elements, count) for name, side in sides.items()}
            seconds: dict[str, list[float]] = {name: [] for name in windows}
            for turn in range(options.rounds + 1):
                for name, window in windows.items():
                    taken = window()
                    if turn:
                        seconds[name].append(taken)
            results.append(report(f"a turn of {title}", seconds))
            least = min(seconds["graphflow"])
            print(f"  {1 / least:,.0f} turns a second at best", flush=True)
    write("turns", results, options.output)


if __name__ == "__main__":
    main()
