"""Bytes that nobody should send, to real workers, while another client runs its steps there."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251 — to show that nobody reads it
import random
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import MessageTooLarge, ProtocolError, WorkerLost
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.security.connection_guard import HANDSHAKE_SECONDS
from graphflow.runtime.security.keys import COORDINATOR, WORKER, Keyring
from graphflow.runtime.wire.array_codec import CHUNK_BYTES
from graphflow.runtime.wire.frame_codec import CONTROL_CAP, decode, encode
from graphflow.runtime.wire.messages import Chunk, Compute, Envelope, Hello, Load, Ping, Read
from tests.faults.hostile.strangers import (
    Bystander,
    Stranger,
    are_closed,
    is_closed,
    open_silent_connection,
    ports,
)
from tests.faults.network.proxy import Proxy
from tests.faults.running import Worker, cluster_file, record_duration, resident, took
from tests.runtime.security.test_connection_guard import connect_with_handshake, flood, wait_for

OWN = Version.own()
HELLO = Hello(1, OWN.version, OWN.wire, OWN.python)
NOISE = random.Random(0).randbytes(1 << 16)
BYTES = {
    "garbage": NOISE,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "a long request": b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"a=b&" * 25_000,
    "TLS": bytes.fromhex("16030100c8010000c40303") + NOISE[:200],
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(1000),
    "half a greeting": b"\xff" + bytes(8) + b"\x7f\x03",
    "a greeting, then garbage": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + NOISE,
    "an old greeting, then garbage": b"\x01\x00" + NOISE,
}


class Served:
    """A worker with a port of its own, with and without keys; and whoever comes to it."""

    def __init__(self, worker: Worker, folder: Path, *, keyed: bool) -> None:
        self.worker, self.address = worker, worker.address
        top = ['key = "boss"'] if keyed else []
        self.file = cluster_file(folder, [self.address], *top, key="box" if keyed else "")
        self._ring = Keyring() if keyed else None

    def stranger(self, name: str = "boss", role: str = COORDINATOR) -> Stranger:
        """A peer, with a key where there are keys: by default one that the worker trusts."""
        if self._ring is None:
            return Stranger(self.address)
        own = self._ring.own_pair(name, role)
        return Stranger(self.address, own, self._ring.key_of("box", "worker"))


SEALED = pytest.param("with keys", marks=pytest.mark.slow)  # each the same once more, in 25 s


@pytest.fixture(scope="module", params=["without keys", SEALED])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keyed = request.param == "with keys"
    with pytest.MonkeyPatch.context() as patch:
        if keyed:
            patch.setenv("GRAPHFLOW_KEYS", str(folder / "keys"))
            ring = Keyring()
            for name, role in (("boss", COORDINATOR), ("box", WORKER)):
                ring.add(str(ring.create_pair(name, role).public), name)
        worker = Worker("tcp://127.0.0.1:*", *(("--key", "box") if keyed else ()))
        try:
            yield Served(worker.ready(), folder, keyed=keyed)
            assert worker.process.poll() is None, worker.describe_output()
        finally:
            worker.end()


@pytest.mark.slow
@pytest.mark.fault(23, 24)
def test_other_protocols_at_every_port_and_a_thousand_silent_connections_keep_nobody_out(
    served: Served,
) -> None:
    heard = ports(served.worker.pid)
    assert heard == [int(served.address.rsplit(":", 1)[1])]  # there is no other
    with Bystander(served.file):
        sockets = [open_silent_connection(served.address) for _ in range(1000)]
        for data in BYTES.values():
            sockets.append(open_silent_connection(served.address))
            with contextlib.suppress(OSError):  # ended before all was said
                sockets[-1].sendall(data)
        with served.stranger() as late:  # someone new comes in meanwhile
            assert late.ask(HELLO, "Welcome").version == OWN.version
        with record_duration(23, "closed: what speaks something else"):
            assert are_closed(sockets[1000:], 2 * HANDSHAKE_SECONDS)
        with record_duration(24, "closed: silent ones, after that"):
            assert are_closed(sockets, 2 * HANDSHAKE_SECONDS)
        for each in sockets:
            each.close()


@pytest.mark.fault(24)
def test_a_cap_on_connections_holds_at_once(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    (worker,) = workers(1, "--max-connections", "50")
    with Bystander(cluster_file(tmp_path, [worker.address])):
        silent = [open_silent_connection(worker.address) for _ in range(300)]
        with record_duration(24, "capped"):
            until = time.monotonic() + 3.0
            left = [each for each in silent if not is_closed(each, 0.001)]
            while len(left) > 50 and time.monotonic() < until:
                left = [each for each in left if not is_closed(each, 0.001)]
        assert 0 < len(left) <= 50
        with Stranger(worker.address) as late:
            assert late.ask(HELLO, "Welcome").version == OWN.version
        for each in silent:
            each.close()


@pytest.mark.fault(28)
@pytest.mark.parametrize("size", [CONTROL_CAP + 1, 2 << 20, 16 << 20])
def test_a_frame_that_is_too_large_ends_its_connection(served: Served, size: int) -> None:
    with Bystander(served.file), served.stranger() as sender:
        sender.ask(HELLO, "Welcome")
        with record_duration(28, f"dropped, {size} bytes"):
            sender.send(bytes(size))
            assert sender.is_dropped()
    with pytest.raises(MessageTooLarge, match="the cap is"):
        decode(bytes(size))


@pytest.mark.fault(29)
@pytest.mark.parametrize("size", [1 << 20, 200])
def test_a_message_without_an_end_is_aborted_at_the_budget(
    workers: Callable[..., list[Worker]], tmp_path: Path, size: int
) -> None:
    (worker,) = workers(1)
    with Bystander(cluster_file(tmp_path, [worker.address])):
        before = resident(worker.pid)
        with contextlib.closing(connect_with_handshake(worker.address)) as sock:
            head = bytes([1, size]) if size < 256 else b"\x03" + struct.pack(">Q", size)
            seconds = flood(sock, head + bytes(size), 5.0)
            assert seconds < 5.0
            took(29, f"aborted, parts of {size} bytes", seconds)
            assert resident(worker.pid) - before < 512 << 20


ENDLESS = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # a frame that others follow


@pytest.mark.fault(29)
def test_a_worker_whose_answer_has_no_end_is_lost_before_it_fills_memory(
    workers: Callable[..., list[Worker]], proxy: Callable[[str], Proxy], tmp_path: Path
) -> None:
    (worker,) = workers(1)
    between = proxy(worker.address)
    with gf.Session(cluster_file(tmp_path, [between.address]), deadline=6.0) as session:
        count = gf.variable(np.zeros((), "float32"), name="count")
        step = gf.assign(count, count + 1.0)
        assert session.run(step) == 1
        before = resident(os.getpid())
        between.endless = ENDLESS
        started = time.monotonic()
        with pytest.raises(WorkerLost, match=r"worker 0 at .* without an end: more than 10 MiB"):
            for _ in range(10):  # whose first answer may still come before it
                session.run(step)
        took(29, "a worker is lost", time.monotonic() - started)
        assert time.monotonic() - started < 4.0
        assert resident(os.getpid()) - before < 64 << 20


@pytest.mark.fault(29)
def test_what_floods_the_link_of_a_worker_fills_no_memory_and_its_steps_go_on(
    workers: Callable[..., list[Worker]], proxy: Callable[[str], Proxy], tmp_path: Path
) -> None:
    two = workers(2)
    between = proxy(two[1].address)
    with gf.Session(cluster_file(tmp_path, [two[0].address, between.address])) as session:
        x = gf.placeholder("float32", (None,))
        with gf.device("/worker:0"):
            doubled = x * 2.0
        with gf.device("/worker:1"):
            more = doubled + 1.0
        fed = np.arange(1000, dtype="float32")
        assert np.array_equal(session.run(more, {x: fed}), fed * 2 + 1)
        assert between.connections == 2  # the session's own, and the link
        before = resident(two[0].pid)
        between.spared, between.endless = 1, ENDLESS
        with record_duration(29, "a link is dropped"):
            until = time.monotonic() + 6.0
            while not (told := [e for e in two[0].errors if "connection.dropped" in e]):
                assert time.monotonic() < until, two[0].describe_output()
                time.sleep(0.01)
        assert resident(two[0].pid) - before < 64 << 20
        assert "more than 10 MiB came over a link" in told[0]
        between.endless = b""
        assert wait_for(lambda: between.connections > 2)  # it was made anew
        assert np.array_equal(session.run(more, {x: fed}), fed * 2 + 1)


# What is no message -------------------------------------------------------------------------------

FRAMES: dict[str, bytes] = {
    "a bomb of maps": b"\xdd\x00\x0f\xff\xf0" + b"\x80" * 0xFFFF0,
    "a bomb of lists of maps": (b"\xdc\xff\xff" + b"\x80" * 0xFFFF) * 12,
    "a bomb of lists": b"\xdd\x00\x0f\xff\xf0" + b"\x90" * 0xFFFF0,
    "deep nesting": b"\x91" * 500_000 + b"\xc0",
    "deep maps": b"\x81\xa1a" * 300_000 + b"\xc0",
    "a key twice": b"\x93\xa4Ping\x97\xa0\x00\x00\x00\x00\x00\xa0\x82\xa1a\x01\xa1a\x02",
    "an extension": b"\x93\xa4Ping\xc7\x04\x05abcd\x80",
    "a time": msgpack.packb(["Ping", [msgpack.Timestamp(1)], []]),
    "bad UTF-8": b"\x93\xa2\xff\xfe\x90\x80",
    "a claim of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "a claim of many entries": b"\xdd\xff\xff\xff\xff",
    "numbers that are none": msgpack.packb(["Ping", ["s", float("nan"), 0, 0, 1, 0, ""], []]),
    "nothing": b"",
}


@pytest.mark.fault(30)
@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_that_is_no_message_is_refused_within_a_tenth_of_a_second(what: str) -> None:
    times = []
    for _ in range(3):  # the best of three: others use the machine, too
        started = time.perf_counter()
        with pytest.raises(ProtocolError):
            decode(FRAMES[what])
        times.append(time.perf_counter() - started)
    took(30, f"refused: {what}", min(times))
    assert min(times) < 0.1


@pytest.mark.fault(30)
def test_frames_that_are_no_messages_change_nothing_and_end_their_connection(
    served: Served,
) -> None:
    with Bystander(served.file):
        before = resident(served.worker.pid)
        for frame in FRAMES.values():
            with served.stranger() as sender:
                sender.ask(HELLO, "Welcome")
                sender.send(frame)
                assert sender.ask(HELLO, "Welcome")  # one is forgiven
        with served.stranger() as sender:
            sender.ask(HELLO, "Welcome")
            for _ in range(40):
                sender.send(b"nonsense")
            assert sender.is_dropped()
        assert resident(served.worker.pid) - before < 64 << 20


GOOD: dict[str, Any] = {"dtype": "float32", "shape": [2, 3], "axes": [0, 1], "nbytes": 24}
HEADERS: dict[str, tuple[dict[str, Any], int]] = {
    "objects": ({"dtype": "object"}, 24),
    "objects by their letter": ({"dtype": "|O"}, 24),
    "a structure": ({"dtype": "f4,O"}, 24),
    "more elements than bytes": ({"shape": [2, 4]}, 24),
    "a product that overflows": ({"shape": [2**62, 4], "nbytes": 0}, 0),
    "a size that overflows": ({"shape": [2**48, 0], "nbytes": 0}, 0),
    "too many axes": ({"shape": [1] * 40, "axes": list(range(40)), "nbytes": 4}, 4),
    "an axis twice": ({"axes": [1, 1]}, 24),
    "a short buffer": ({}, 20),
    "a long buffer": ({}, 28),
    "an offset beyond": ({"offset": 1 << 40}, 24),
    "four terabytes": ({"shape": [2**40], "axes": [0], "nbytes": 2**42}, CHUNK_BYTES),
}


@pytest.mark.fault(31)
def test_headers_of_arrays_are_refused_before_memory_is_taken(served: Served) -> None:
    with Bystander(served.file):
        before = resident(served.worker.pid)
        for wrong, size in HEADERS.values():
            with served.stranger() as sender:
                sender.open()
                sender.give("value", 3, "w", bytes(size), **{**GOOD, **wrong})
                with record_duration(31, "refused"):
                    reason = sender.ask(Ping(), "Broken").reason
                assert re.search("array|axes|chunk|dtype|bytes", reason)
        assert resident(served.worker.pid) - before < 64 << 20


@pytest.mark.fault(31)
@pytest.mark.parametrize("shape", [[-2, -3], [-1], [2.0, 3], [True], ["2"], 6, None, [[2]]])
def test_sizes_that_are_none_do_not_even_decode(shape: Any) -> None:
    chunk = Chunk("edge", 1, 1, "float32", [2, 3], [0, 1], 24, 0)
    body = [shape if f.name == "shape" else getattr(chunk, f.name) for f in fields(Chunk)]
    with Stranger("tcp://127.0.0.1:1") as sender:
        envelope = sender.envelope()
    with pytest.raises(ProtocolError, match="shape"):
        decode(msgpack.packb(["Chunk", envelope, body]))
    frame = encode(envelope, chunk)
    whole = msgpack.packb(("edge", 1, "float32", [2, 3], [0, 1], 24))
    assert frame.endswith(whole)
    wrong = msgpack.packb(("edge", 1, "float32", shape, [0, 1], 24))
    with pytest.raises(ProtocolError):
        decode(frame.removesuffix(whole) + wrong)


class Canary:
    """What leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.fault(32)
def test_a_pickle_is_never_read_wherever_it_is_put(served: Served, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    loads = [pickle.dumps(Canary(canary), protocol) for protocol in range(6)]
    with Bystander(served.file):
        for load in loads:
            with served.stranger() as sender:
                sender.open()
                sender.send(load)
                sender.send(encode(Envelope(sender.session, 1, -1, 0, 1), Ping()), load)
                sender.give("part", 3, 0, load)
                with record_duration(32, "refused"):
                    assert sender.ask(Load(3, "p", 1), "Failed").error == "ProtocolError"
                sender.give("value", 4, "w", load)
                sender.give("feed", 5, "x", load)
                sender.ask(Compute(5, "p", {}, ["x"], False, 5.0), "Failed")
                assert sender.ask(Read(6, "w"), "Failed").error == "VariableError"
    assert not canary.exists()
    pickle.loads(loads[-1])  # noqa: S301
    assert canary.exists()  # it would have told
