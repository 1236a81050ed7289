"""What tests of faults share: real processes that all end, proxies, hosts, keys, and a look at what
is left behind after each test."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from graphflow.runtime.security.keys import COORDINATOR, WORKER, Keyring
from tests.faults.network.network import Hosts, NoNamespaces
from tests.faults.network.proxy import Proxy
from tests.faults.running import Running, Script, Worker, is_alive
from tests.loaded import MARK, preloaded_server
from tests.shared_fork_servers import SharedForkServers

_SECONDS = 5.0
"""For what ends by itself to be gone after a test."""


def _find_marked_processes(kept: Collection[int]) -> dict[int, str]:
    """The processes that were started under the mark, also those whose parent has ended, but for
    those that are kept for later tests."""
    found = {}
    wanted = "=".join(MARK).encode()
    for place in Path("/proc").glob("[0-9]*"):
        if (number := int(place.name)) in (os.getpid(), *kept):
            continue
        try:
            if wanted in (place / "environ").read_bytes().split(b"\0") and is_alive(number):
                command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[number] = f"process {number}: {command[:200]}"
        except (OSError, ValueError):
            continue  # it is gone, or not ours
    return found


def _open() -> Counter[str]:
    """Sockets and memory that this process holds by descriptors."""
    kinds: Counter[str] = Counter()
    for place in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(place)
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:", "/dev/shm/")):
            kinds[target.split("[")[0]] += 1
    return kinds


def _stays(thread: threading.Thread) -> bool:
    """Whether a thread serves the whole process from its first use on: pyzmq's, which frees what
    was sent without a copy."""
    return type(thread).__module__ == "zmq.utils.garbage"


def _describe_thread(thread: threading.Thread) -> str:
    """A thread, with where it stands."""
    frame = sys._current_frames().get(thread.ident or 0)
    place = "".join(traceback.format_stack(frame)[-2:]) if frame is not None else ""
    return f"{thread.name}\n{place}"


def _segments() -> set[str]:
    shared = Path("/dev/shm")
    return {p.name for p in shared.glob("*graphflow*")} if shared.is_dir() else set()


@pytest.fixture(autouse=True)
def leftovers(
    shared_fork_servers: SharedForkServers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Nothing that a test began may be there when it has ended: no process, wherever its parent
    went, no socket, no shared memory, no thread."""
    monkeypatch.setenv(*MARK)
    keeper = preloaded_server()

    def list_kept_pids() -> list[int]:
        waiting = [server.pid for server in shared_fork_servers.waiting]
        return [*waiting, *((keeper.pid,) if keeper is not None else ())]

    def sockets() -> Counter[str]:
        """Those beside the one to each server that waits."""
        return _open() - Counter({"socket:": len(shared_fork_servers.waiting)})

    threads, kinds, segments = set(threading.enumerate()), sockets(), _segments()
    others = _find_marked_processes(list_kept_pids())
    yield
    until = time.monotonic() + _SECONDS
    while True:
        gc.collect()
        left = [
            told
            for number, told in _find_marked_processes(list_kept_pids()).items()
            if number not in others
        ]
        readers = {server._reader for server in shared_fork_servers.waiting}
        left += [
            f"thread {_describe_thread(t)}"
            for t in set(threading.enumerate()) - threads - readers
            if not _stays(t)
        ]
        left += [f"{count} more of {kind}" for kind, count in (sockets() - kinds).items()]
        left += [f"shared memory {name}" for name in _segments() - segments]
        if not left or time.monotonic() > until:
            break
        time.sleep(0.05)
    assert left == []


@pytest.fixture
def running() -> Iterator[list[Running]]:
    """Processes that end with the test, whatever state they are in."""
    found: list[Running] = []
    yield found
    for each in reversed(found):
        each.end()


@pytest.fixture
def workers(running: list[Running]) -> Callable[..., list[Worker]]:
    """Starts some `graphflow worker`s side by side."""

    def start(count: int, *options: str, **more: Any) -> list[Worker]:
        fresh = [Worker("tcp://127.0.0.1:*", *options, **more) for _ in range(count)]
        running.extend(fresh)
        return [worker.ready() for worker in fresh]

    return start


@pytest.fixture
def script(running: list[Running]) -> Callable[..., Script]:
    """Starts a script."""

    def start(text: str, *arguments: str, **more: Any) -> Script:
        running.append(fresh := Script(text, *arguments, **more))
        return fresh

    return start


@pytest.fixture
def proxy() -> Iterator[Callable[[str], Proxy]]:
    """Puts a proxy in front of an address."""
    found: list[Proxy] = []

    def stand(target: str) -> Proxy:
        found.append(fresh := Proxy(target))
        return fresh

    yield stand
    for each in found:
        each.close()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Three hosts at a switch. They are one machine, so that they could share memory."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    try:
        found = Hosts(3)
    except NoNamespaces as error:
        pytest.skip(f"network namespaces: {error}")
    yield found
    found.end()


@pytest.fixture
def keys(tmp_path: Path) -> Mapping[str, str]:
    """The environment with a folder of keys: "boss", a coordinator's, and "box", a worker's, who
    trust each other."""
    folder = tmp_path / "keys"
    ring = Keyring(folder)
    for name, role in (("boss", COORDINATOR), ("box", WORKER)):
        ring.create_pair(name, role)
        ring.add((folder / f"{name}.public").read_text(), name)
    return {"GRAPHFLOW_KEYS": str(folder)}
