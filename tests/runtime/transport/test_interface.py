"""A transport is one file: a module of a user's adds one, and nothing else is touched."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.base import addresses
from graphflow.errors import ClusterError, TransportError
from graphflow.runtime import transport
from graphflow.runtime.transport import transport_of
from graphflow.runtime.worker.worker_status import WorkerAddress, request_reports

IPC = '''
from graphflow.base.addresses import Address
from graphflow.errors import TransportError
from graphflow.runtime.transport import register_transport
from graphflow.runtime.transport.interface import Transport
from graphflow.runtime.transport.zmq_sockets import ZmqChannel, ZmqListener


class IpcTransport(Transport):
    """`ipc:///path`: named Unix sockets, carried by ZeroMQ."""

    scheme = "ipc"

    def parse(self, address):
        return Address("localhost", scheme="ipc") if address.startswith("ipc:///") else None

    def check_address(self, address, *, insecure, listening):
        parts = self.parse(address)
        if parts is None:
            raise TransportError(f"{address!r} is not of the form ipc:///path")
        return parts

    def listen(self, context, address, *, insecure, **options):
        return ZmqListener(context, address, address, **options)

    def connect(self, context, address, *, insecure, **options):
        return ZmqChannel(context, address, address, **options)


register_transport(IpcTransport())
'''
WORKER = """
import ipc_transport, sys
from graphflow.cli.main import main
sys.argv = ["graphflow", "worker", "--listen", sys.argv[1], "--threads", "1"]
main()
"""


@pytest.fixture
def ipc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the transport's file, which is imported here and found by child processes."""
    (tmp_path / "ipc_transport.py").write_text(IPC)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(transport, "_transports", dict(transport._transports))
    monkeypatch.setattr(addresses, "_parsers", dict(addresses._parsers))
    importlib.import_module("ipc_transport")
    yield tmp_path
    del sys.modules["ipc_transport"]


@pytest.fixture
def workers(ipc: Path) -> Iterator[list[str]]:
    """The addresses of two worker processes that listen by the new transport."""
    with ExitStack() as stack:
        listening = []
        for number in range(2):
            address = f"ipc://{ipc}/{number}"
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, address], stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.terminate)
            assert process.stdout is not None
            assert f"listening on {address} " in process.stdout.readline()
            listening.append(address)
        yield listening


@pytest.mark.every(2)
@pytest.mark.parametrize("shared", ["on", "off"])
def test_a_session_runs_over_a_transport_that_one_file_adds(
    shared: str, ipc: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)  # off: all messages go by the transport
    workers = request.getfixturevalue("workers")
    file = ipc / "cluster.toml"
    file.write_text("".join(f'[[workers]]\naddress = "{each}"\n' for each in workers))
    x = gf.placeholder("float32", (None,), name="x")
    with gf.device("/worker:0"):
        doubled = x * 2.0
    with gf.device("/worker:1"):
        count = gf.variable(0.0, name="count")
        result = gf.sum(doubled + 1.0) + gf.assign(count, count + 1.0)
    large = np.arange(1 << 19, dtype="float32") % 7
    with gf.Session(str(file), trial=False) as s:
        for step in range(5):
            assert s.run(result, {x: np.ones(9, "float32")}) == 27.0 + step + 1
        assert s.run(result, {x: large}) == pytest.approx(float((large * 2 + 1).sum()) + 6)
    reports = request_reports([WorkerAddress(each) for each in workers], seconds=20.0)
    assert [report["devices"] for report in reports] == [["cpu:0"]] * 2  # type: ignore[index]


def test_a_scheme_is_known_once_its_module_was_imported(
    ipc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transport_of("ipc:///tmp/here").scheme == "ipc"
    with pytest.raises(TransportError, match="ipc:///path"):
        transport_of("ipc://here").check_address("ipc://here", insecure=False, listening=True)
    with pytest.raises(TransportError, match="tcp://, ipc://"):
        transport_of("rdma://here")
    known = gf.Worker(0, "ipc:///tmp/here", (gf.Device("/worker:0/cpu:0", "cpu", 1),))
    assert known.loopback
    monkeypatch.setattr(addresses, "_parsers", {"tcp": addresses.parse_tcp})
    with pytest.raises(ClusterError, match="tcp://host:port"):
        gf.Worker(0, "ipc:///tmp/here", known.devices)
