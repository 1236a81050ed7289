"""Peers of benchmarks/processes/transport.py: other libraries' endpoints, each in its own process,
and the connections to them.

    python benchmarks/lib/transport_peers.py echo PORT      # starts one end; transport.py does that

An end that is to have a CURVE key finds it in the environment: CURVE_PUBLIC and CURVE_SECRET.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import zmq

from graphflow.errors import TransportError

# Other ends ------------------------------------------------------------------------------------


def echo(port: int) -> None:
    """Sends every message back, by raw pyzmq."""
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    if "CURVE_SECRET" in os.environ:
        router.curve_publickey = os.environ["CURVE_PUBLIC"].encode()
        router.curve_secretkey = os.environ["CURVE_SECRET"].encode()
        router.curve_server = True
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
    from graphflow.runtime.polling.wakeup import EpollWaiter
    from graphflow.runtime.transport.tcp import TcpListener

    listener = TcpListener(zmq.Context.instance(), f"tcp://127.0.0.1:{port}", insecure=False)
    waiter = EpollWaiter()
    waiter.add(int(listener.socket.getsockopt(zmq.FD)), 0)
    while True:
        if not listener.has_message():
            waiter.wait(1.0)
        elif (arrived := listener.receive()) is not None:
            listener.send(arrived[0], arrived[1])


def lane(port: int) -> None:
    """Sends every message back, by the lanes of a worker."""
    from graphflow.runtime.polling.wakeup import EpollWaiter
    from graphflow.runtime.transport.unix_socket import UnixSocketListener

    lanes = UnixSocketListener(f"tcp://127.0.0.1:{port}")
    waiter = EpollWaiter()
    waiter.add(lanes.fileno(), 0)
    waiter.wait(60.0)
    found = lanes.accept()
    if found is None:
        return
    waiter.add(found[1].fileno(), 1)
    with suppress(TransportError):  # the other end has what it wanted
        while waiter.wait(60.0):
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


# Ways to them ----------------------------------------------------------------------------------


@contextmanager
def peer(name: str, **environment: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, __file__, name, str(port)], env={**os.environ, **environment}
    )
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def raw(name: str, *, keyed: bool = False) -> Iterator[Any]:
    """A socket to an end of raw pyzmq; with keys, what goes over it is encrypted."""
    public, secret = zmq.curve_keypair() if keyed else (b"", b"")
    keys = {"CURVE_PUBLIC": public.decode(), "CURVE_SECRET": secret.decode()} if keyed else {}
    with peer(name, **keys) as port:
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        if keyed:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = public
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        try:
            yield dealer
        finally:
            dealer.close()


@contextmanager
def channel() -> Iterator[Any]:
    from graphflow.runtime.polling.wakeup import EpollWaiter
    from graphflow.runtime.transport.tcp import TcpChannel

    with peer("frames") as port:
        made = TcpChannel(zmq.Context.instance(), f"tcp://127.0.0.1:{port}", insecure=False)
        waiter = EpollWaiter()
        waiter.add(int(made.socket.getsockopt(zmq.FD)), 0)
        try:
            yield made, waiter
        finally:
            made.close()


@contextmanager
def near_lane() -> Iterator[Any]:
    from graphflow.runtime.polling.wakeup import EpollWaiter
    from graphflow.runtime.transport.unix_socket import UnixSocketChannel

    with peer("lane") as port:
        until = time.monotonic() + 30.0
        while (
            made := UnixSocketChannel.connect(f"tcp://127.0.0.1:{port}")
        ) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert made is not None
        waiter = EpollWaiter()
        waiter.add(made.fileno(), 0)
        try:
            yield made, waiter
        finally:
            made.close()


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
def ray_store(processors: int = 1) -> Iterator[Any]:
    """Ray with its object store; none of its processes outlives this, however it ends."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=processors, include_dashboard=False, log_to_driver=False,
            configure_logging=False, object_store_memory=1 << 30, _temp_dir=folder,
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()


def ray_put_and_get(ray: Any, what: Any) -> object:
    """By way of its object store."""
    return ray.get(ray.put(what))


def ray_echo(ray: Any) -> Callable[[], object]:
    """A small array to an actor, which is another process, and back."""

    class Echo:
        def echo(self, array: Any) -> Any:
            return array

    actor = ray.remote(Echo).remote()
    array = np.ones(4, "float32")
    return lambda: ray.get(actor.echo.remote(array))


def ray_holder(ray: Any, nbytes: int) -> Callable[[], object]:
    """An array that an actor has, to whoever asks; what comes is for reading only."""

    class Holder:
        def __init__(self) -> None:
            self.array = np.ones(nbytes, np.uint8)

        def value(self) -> Any:
            return self.array

    holder = ray.remote(Holder).remote()
    return lambda: ray.get(holder.value.remote())


if __name__ == "__main__":
    PEERS[sys.argv[1]](int(sys.argv[2]))
