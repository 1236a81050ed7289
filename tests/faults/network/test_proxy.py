"""The proxy itself: bytes pass unchanged and in order, unless it is told otherwise."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.network.proxy import UP, Proxy


@pytest.fixture
def echo() -> Iterator[str]:
    """Who sends everything back."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def answer(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := end.recv(1 << 16):
                end.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                ends.append(end)
                threading.Thread(target=answer, args=(end,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
    thread.join(5.0)


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.removeprefix("tcp://").rpartition(":")
    end = socket.create_connection((host, int(port)), timeout=5.0)
    end.settimeout(5.0)
    return end


def receive_bytes(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        assert more, "it was closed"
        data += more
    return data


@pytest.mark.parametrize("setting", [{}, {"delay": 0.02, "jitter": 0.02}, {"piece": 1}])
def test_bytes_pass_in_order(
    echo: str, proxy: Callable[[str], Proxy], setting: dict[str, float]
) -> None:
    between = proxy(echo)
    for name, value in setting.items():
        setattr(between, name, value)
    data = bytes(range(256)) * 8
    with connect(between) as end:
        for start in range(0, len(data), 512):
            end.sendall(data[start : start + 512])
        assert receive_bytes(end, len(data)) == data


def test_a_rate_is_kept(echo: str, proxy: Callable[[str], Proxy]) -> None:
    between = proxy(echo)
    between.rate = 100_000.0
    with connect(between) as end:
        start = time.monotonic()
        end.sendall(bytes(30_000))
        receive_bytes(end, 30_000)
        assert time.monotonic() - start >= 0.25


def test_a_cut_holds_bytes_until_it_heals(echo: str, proxy: Callable[[str], Proxy]) -> None:
    between = proxy(echo)
    with connect(between) as end:
        end.sendall(b"before")
        assert receive_bytes(end, 6) == b"before"
        between.sever(UP)
        end.sendall(b"after")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(5)
        between.heal()
        end.settimeout(5.0)
        assert receive_bytes(end, 5) == b"after"


def test_a_reset_ends_connections_and_new_ones_pass(
    echo: str, proxy: Callable[[str], Proxy]
) -> None:
    between = proxy(echo)
    between.reset_after = 10
    with connect(between) as end, pytest.raises(OSError):
        while True:
            end.sendall(bytes(8))
            assert end.recv(8)
            time.sleep(0.01)
    with connect(between) as end:
        end.sendall(b"again")
        assert receive_bytes(end, 5) == b"again"


def test_chosen_bytes_are_corrupted(echo: str, proxy: Callable[[str], Proxy]) -> None:
    between = proxy(echo)

    def flip(way: str, at: int, data: bytes) -> bytes:
        place = 3 - at
        if way != UP or not 0 <= place < len(data):
            return data
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    between.corrupt = flip
    with connect(between) as end:
        end.sendall(b"aaaaaa")
        assert receive_bytes(end, 6) == b"aaa`aa"
