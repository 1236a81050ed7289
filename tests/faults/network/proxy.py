"""A TCP proxy that misbehaves on request: it delays, cuts, resets, starves and corrupts.

It stands between two ZeroMQ ends: where a cluster file says a worker is. A cut is a black hole: the
connections stay, bytes wait in order and go on when it heals, and new connections are taken and
lead nowhere, as in a network whose packets are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

UP, DOWN = "up", "down"
"""To the one who listens behind the proxy, and back from there."""
_READ = 1 << 16
_WAITING = 32
"""Pieces on their way in one direction of a connection: beyond that, the sender is not read."""


class Proxy:
    """One listener; every connection to it leads to the target.

    Attributes, which may change at any time, from any thread:
        delay, jitter: seconds that each piece takes; in order all the same.
        rate: bytes a second, each way and connection; None: no limit.
        piece: bytes that are written at once, each in a packet of its own; None: as they come.
        cut: directions in which nothing passes.
        endless: what is sent down over and over, 64 MB a second at most, once all that came before
            has passed, in the place of what comes.
        spared: how many connections, the first ones, a cut and what is endless leave alone.
        corrupt: changes bytes, (direction, number of the first byte, bytes) -> bytes.
        reset_after: bytes upwards after which a connection is reset, once.

    Args:
        target: `tcp://host:port`.
    """

    def __init__(self, target: str) -> None:
        self.delay = self.jitter = 0.0
        self.rate: float | None = None
        self.piece: int | None = None
        self.cut: frozenset[str] = frozenset()
        self.endless = b""
        self.spared = 0
        self.corrupt: Callable[[str, int, bytes], bytes] | None = None
        self.reset_after: int | None = None
        self.passed = {UP: 0, DOWN: 0}
        self.connections = 0
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(0)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        assert self._started.wait(10.0)

    def sever(self, *directions: str) -> None:
        """Let nothing pass, both ways or one way, until `heal`."""
        self.cut = frozenset(directions or (UP, DOWN))

    def heal(self) -> None:
        """Let everything pass again."""
        self.cut = frozenset()

    def reset(self) -> None:
        """Reset all connections, as a router that forgot them does."""
        self._loop.call_soon_threadsafe(self._reset_all)

    def close(self) -> None:
        """End all connections and stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10.0)
        assert not self._thread.is_alive()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # On the thread of its own --------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._meet, sock=self._listener, limit=_READ)
        self._started.set()
        await self._stop.wait()
        server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0.01)

    def _reset_all(self) -> None:
        for writer in list(self._open):
            self._reset_one(writer)

    def _reset_one(self, writer: asyncio.StreamWriter) -> None:
        end = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self._open.add(writer)
        there: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Task[None]] = []
        try:
            while self.cut and number > self.spared:
                await asyncio.sleep(0.01)
            source, there = await asyncio.open_connection(*self._target, limit=_READ)
            self._open.add(there)
            for end in (writer, there):
                end.transport.set_write_buffer_limits(high=_READ)
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [
                asyncio.ensure_future(self._pump(UP, reader, there, number)),
                asyncio.ensure_future(self._pump(DOWN, source, writer, number)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # nobody listens there, it was reset, or the proxy ends
        finally:
            for pump in pumps:
                pump.cancel()
            for end in filter(None, (writer, there)):
                self._open.discard(end)
                end.transport.abort()

    async def _pump(self, way: str, reader: Any, writer: asyncio.StreamWriter, number: int) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING)
        last = asyncio.ensure_future(self._write(way, waiting, writer, number))
        try:
            due = 0.0
            while data := await reader.read(_READ):
                late = self.delay + self._random.uniform(0.0, self.jitter)
                due = max(due, self._loop.time() + late)  # a stream never overtakes itself
                await waiting.put((due, data))
            await waiting.put((0.0, b""))
            await last
        except OSError:
            pass
        finally:
            last.cancel()

    async def _write(
        self, way: str, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter,
        number: int,
    ) -> None:  # fmt: skip
        passed = 0
        while True:
            due, data = await waiting.get()
            if not data:
                return
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.corrupt is not None:
                data = self.corrupt(way, passed, data)
            step = self.piece or (max(1, int(self.rate / 50)) if self.rate else len(data))
            for start in range(0, len(data), step):
                while way in self.cut and number > self.spared:
                    await asyncio.sleep(0.01)
                part = data[start : start + step]
                writer.write(part)
                await writer.drain()
                passed += len(part)
                self.passed[way] += len(part)
                if self.rate:
                    await asyncio.sleep(len(part) / self.rate)
                elif self.piece:
                    await asyncio.sleep(0)
                if way == UP and self.reset_after is not None and passed >= self.reset_after:
                    self.reset_after = None
                    self._reset_all()
                    return
            while way == DOWN and self.endless and number > self.spared:
                writer.write(self.endless)
                await writer.drain()
                self.passed[way] += len(self.endless)
                await asyncio.sleep(len(self.endless) / 64e6)
