"""Graphs that are too much, names that lead elsewhere, pages that should not ask, and a worker that
runs out of file descriptors; while another client runs its steps."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphLimitError
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.wire.array_codec import CHUNK_BYTES, split_array
from graphflow.runtime.wire.graph_codec import encode
from graphflow.runtime.wire.messages import Hello, Load, Open, Read, Save
from tests.faults.hostile.strangers import Bystander, Stranger
from tests.faults.running import Running, Worker, cluster_file, record_duration, resident, took
from tests.runtime.programs import make_partition
from tests.runtime.wire.test_graph_codec import ATTRS, INPUTS, OP, message, node_of

OWN = Version.own()
HELLO = Hello(1, OWN.version, OWN.wire, OWN.python)


# Graphs -------------------------------------------------------------------------------------------


def encode_changed(change: Callable[[Any], Any]) -> tuple[bytes, list[Any]]:
    header, buffers = message()
    change(header[0])
    return msgpack.packb(header), buffers


def encode_endless_loop() -> tuple[bytes, list[Any]]:
    one = gf.constant(np.float32(1))
    return encode([make_partition(gf.while_loop(lambda v: v > 0.0, lambda v: v, one))])


def encode_nested_loops(depth: int = 5) -> tuple[bytes, list[Any]]:
    def body(left: int, v: Any) -> Any:
        return v + 1.0 if not left else gf.scan(
            lambda c, _: (body(left - 1, c), ()), v, length=10_000
        )[0]  # fmt: skip

    return encode([make_partition(body(depth, gf.constant(np.float32(1))))])


TOO_MUCH: dict[str, Callable[[], tuple[bytes, list[Any]]]] = {
    "a node that reads itself": lambda: encode_changed(
        lambda p: node_of(p, "tanh").__setitem__(
            INPUTS, [[p["nodes"].index(node_of(p, "tanh")), 0]]
        )
    ),
    "a cycle": lambda: encode_changed(
        lambda p: node_of(p, "matmul").__setitem__(
            INPUTS, [[0, 0], [p["nodes"].index(node_of(p, "tanh")), 0]]
        )
    ),
    "ten million nodes": lambda: encode_changed(
        lambda p: p.__setitem__("nodes", [None] * 10_000_000)
    ),
    "a variable of a terabyte": lambda: encode_changed(
        lambda p: (
            node_of(p, "variable")[ATTRS].update(
                shape=[2**38], initial={"init": ["normal", [2**38], "float32", 0.0, 1.0, [0, 0]]}
            )
            or p.update(outputs=[[1, 0]], fetches={})
        )
    ),
    "a tensor of an exabyte": lambda: encode_changed(
        lambda p: node_of(p, "placeholder")[ATTRS].update(shape=[10**9, 10**9])
    ),
    "an op that is not known": lambda: encode_changed(
        lambda p: node_of(p, "tanh").__setitem__(OP, "exec")
    ),
    "an endless loop": encode_endless_loop,
    "loops in loops": encode_nested_loops,
}


def submit(sender: Stranger, header: bytes, buffers: list[Any], request: int) -> Any:
    """What comes of a program."""
    parts = [np.frombuffer(header, np.uint8), *buffers]
    for index, part in enumerate(parts):
        for chunk, data in split_array("part", request, index, part):
            sender.tell(chunk, bytes(data))
    return sender.ask(Load(request, "p", len(parts)), "Failed")


@pytest.mark.fault(33)
def test_a_graph_beyond_the_limits_is_refused_when_it_is_submitted(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    (worker,) = workers(1)
    with Bystander(cluster_file(tmp_path, [worker.address])), Stranger(worker.address) as sender:
        sender.open()
        for request, (what, make) in enumerate(TOO_MUCH.items(), 3):
            header, buffers = make()
            before, started = resident(worker.pid), time.monotonic()
            refused = submit(sender, header, buffers, request)
            assert refused.error == "GraphLimitError", (what, refused)
            took(33, f"refused: {what}", time.monotonic() - started)
            assert time.monotonic() - started < 5.0, what
            assert resident(worker.pid) - before < 128 << 20, what
        whole = next(split_array("part", 90, 0, np.zeros(CHUNK_BYTES, np.uint8)))[0]
        chunk = replace(whole, shape=[2**43], nbytes=2**43)
        sender.tell(chunk, bytes(CHUNK_BYTES))  # a constant of 8 TB
        assert "budget" in sender.ask(Read(91, "w"), "Broken").reason


@pytest.mark.fault(33)
def test_a_session_is_told_of_its_endless_loop_and_goes_on(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    (worker,) = workers(1)
    with gf.Session(cluster_file(tmp_path, [worker.address])) as session:
        one = gf.variable(np.float32(1), name="one")
        with pytest.raises(GraphLimitError, match="cannot end") as told:
            session.run(gf.while_loop(lambda v: v > 0.0, lambda v: v, one))
        assert __file__ in str(told.value)
        assert session.run(one + 1.0) == 2.0


@pytest.mark.fault(33)
def test_limits_of_the_worker_are_its_own(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    limits = ("--max-nodes", "20", "--max-memory", "0.001", "--max-iterations", "100")
    (worker,) = workers(1, *limits)
    with gf.Session(cluster_file(tmp_path, [worker.address])) as session:
        x = gf.placeholder("float32", (), name="x")
        long = x
        for _ in range(30):
            long = gf.sin(long)
        wide = gf.variable(gf.init.zeros((1000, 1000)), name="wide")
        for wrong, feeds in (
            (long, {x: 1.0}),
            (gf.sum(wide), {}),
            (gf.while_loop(lambda v: v < 9.0, lambda v: v + 1.0, x), {x: 1.0}),
            (gf.scan(lambda c, _: (c + 1.0, ()), x, length=101)[0], {x: 1.0}),
        ):
            with pytest.raises(GraphLimitError):
                session.run(wrong, feeds)
        assert session.run(x + 1.0, {x: 1.0}) == 2.0


# Names --------------------------------------------------------------------------------------------

ELSEWHERE = [
    "../../evil",
    "/tmp/evil",
    "a/b",
    ".",
    "..",
    "",
    "x\0y",
    "worker-0.safetensors/../../e",
]


@pytest.mark.fault(34)
def test_names_of_checkpoints_that_lead_elsewhere_are_refused(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    (worker,) = workers(1, "--checkpoints", str(root))
    before = sorted(tmp_path.rglob("*"))
    good = ".step-00000001.partial-0123456789abcdef"
    with Bystander(cluster_file(tmp_path, [worker.address])), Stranger(worker.address) as sender:
        before = sorted(tmp_path.rglob("*"))
        sender.open()
        request = 2
        for name in ELSEWHERE:
            for folder, file in ((name, "worker-0.safetensors"), (good, name)):
                request += 1
                with record_duration(34, "refused"):
                    refused = sender.ask(Save(request, folder, file, 1), "Failed")
                assert refused.error == "ProtocolError" and "does not name" in refused.text
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.fault(34)
def test_names_in_logs_stay_on_their_line_and_name_no_file(
    running: list[Running], tmp_path: Path
) -> None:
    running.append(worker := Worker(env={"GRAPHFLOW_LOG": "text"}).ready())
    evil = "x\nworker.lost session=1 worker=1\x1b[2J../../evil"
    with Stranger(worker.address) as sender:
        sender.session = evil
        sender.open()
        assert sender.ask(Read(3, evil), "Failed").error == "VariableError"
        sender.send(b"\xff" + evil.encode())
        assert sender.ask(Read(4, evil), "Failed")
    assert not [line for line in worker.errors if line.startswith("worker.lost")]
    assert not any("\x1b" in line for line in worker.errors)


# Pages --------------------------------------------------------------------------------------------


def request_status(port: int, **headers: str) -> int:
    """The status that a page answers with."""
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=5.0
        ) as page:
            return int(page.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.fault(35)
def test_pages_of_other_origins_and_names_are_answered_by_403(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")
    port = 20_000 + os.getpid() % 10_000  # below those that the system gives to others meanwhile
    (worker,) = workers(1, "--metrics", f"127.0.0.1:{port}")
    with Bystander(cluster_file(tmp_path, [worker.address])):
        assert request_status(port) == 200
        with record_duration(35, "answered by 403"):
            assert request_status(port, Host="evil.example") == 403
        assert request_status(port, Host=f"evil.example:{port}") == 403
        assert request_status(port, Origin="http://evil.example") == 403
        assert request_status(port, Origin="null") == 403
        for noise in (b"\0" * 4096, b"GET " + b"a" * 100_000, b"\x16\x03\x01\x02\x00" + b"x" * 600):
            with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
                try:
                    sock.sendall(noise)
                    sock.shutdown(socket.SHUT_WR)
                    answer = sock.recv(4096)
                except OSError:  # it has been ended: no answer
                    answer = b""
                assert b"200 OK" not in answer
        assert request_status(port) == 200


SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`${x}"


@pytest.mark.fault(35)
def test_a_script_in_a_nodes_name_stays_text_in_pages(tmp_path: Path) -> None:
    x = gf.placeholder("float32", (4, 4), name=SCRIPT)
    y = gf.sum(gf.tanh(gf.matmul(x, x), name=SCRIPT + "2"), name=SCRIPT + "3")
    made = gf.plan(y, gf.Cluster.hypothetical("2xh100"))
    for name in ("plan.html", "plan.svg"):
        made.save(tmp_path / name)
        page = (tmp_path / name).read_text()
        assert "<script>alert(1)" not in page and "<img src=x" not in page
        assert "</script><script>" not in page
    with gf.Session() as session, session.trace() as trace:
        session.run(y, {x: np.ones((4, 4), "float32")})
    trace.save(tmp_path / "trace.json")
    names = {
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert any("alert(1)" in name for name in names)


# Descriptors --------------------------------------------------------------------------------------


@pytest.mark.fault(48)
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is a command of Linux")
def test_without_descriptors_new_work_is_refused_and_taken_again_when_there_are_some(
    running: list[Running], tmp_path: Path
) -> None:
    running.append(worker := Worker(inside=("prlimit", "--nofile=120:120")).ready())
    with Bystander(cluster_file(tmp_path, [worker.address])):
        refused, strangers = [], []
        for _ in range(12):
            strangers.append(sender := Stranger(worker.address))
            sender.ask(HELLO, "Welcome")
            peers = [worker.address, *(f"tcp://127.0.0.1:{port}" for port in range(1, 20))]
            with record_duration(48, "taken on, or refused: the last one"):
                sender.tell(Open(2, 0, peers, 2.0))
                answer = sender.answer()
            if type(answer).__name__ == "Failed":
                refused.append(answer)
                break
        assert refused and refused[0].error == "TransportError"
        assert "file descriptors" in refused[0].text
        for each in strangers:
            each.close()
        let_go = time.monotonic()
        until = let_go + 60.0
        while time.monotonic() < until:  # leases end, and their links with them
            with Stranger(worker.address) as late:
                late.ask(HELLO, "Welcome")
                late.tell(Open(2, 0, [worker.address, "tcp://127.0.0.1:1"], 2.0))
                if type(late.answer()).__name__ == "Ready":
                    took(48, "taken on again, by leases", time.monotonic() - let_go)
                    return
            time.sleep(1.0)
        raise AssertionError("nothing new is taken on")
