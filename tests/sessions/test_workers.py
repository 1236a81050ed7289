"""`Session.workers`: who computes, where, and whether it is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import SessionError, WorkerLost
from graphflow.runtime.security.keys import COORDINATOR, WORKER, Keyring
from graphflow.runtime.worker.announcement import Announcement


def test_a_session_in_this_process_has_one_worker() -> None:
    with gf.Session() as s:
        (worker,) = s.workers
        assert (worker.address, worker.pid, worker.state) == ("", os.getpid(), "up")
        assert worker.devices == ("/worker:0/cpu:0",) and (worker.memory or 0) > 1 << 20
        assert "this process" in str(worker)
    with pytest.raises(SessionError, match="closed"):
        _ = s.workers


def test_a_killed_worker_is_shown_as_lost_with_the_reason() -> None:
    x = gf.placeholder("float32", ())
    with gf.device("/worker:0"):
        first = x + 1.0
    with gf.device("/worker:1"):
        y = first * 2.0
    with gf.Session(gf.Cluster.local(workers=2)) as s:
        assert s.run(y, {x: np.float32(1.0)}) == 4.0
        both = s.workers
        assert [each.state for each in both] == ["up", "up"]
        assert len({each.pid for each in both} - {os.getpid(), None}) == 2
        assert both[1].pid is not None
        os.kill(both[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            s.run(y, {x: np.float32(1.0)})
        alive, lost = s.workers
        assert (alive.state, alive.pid) == ("up", both[0].pid)
        assert (lost.state, lost.pid, lost.address) == ("lost", None, both[1].address)
        assert "signal 9" in lost.reason and "signal 9" in str(lost)


def test_a_worker_with_a_key_is_asked_with_the_sessions_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path / "keys"))
    ring = Keyring()
    for name, role in (("alice", COORDINATOR), ("box", WORKER)):
        ring.add(str(ring.create_pair(name, role).public), "own")
    file = tmp_path / "worker.json"
    command = [sys.executable, "-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:*"]
    with subprocess.Popen([*command, "--key", "box", "--announce", str(file)]) as process:
        try:
            until = time.monotonic() + 30.0
            while not file.exists() and time.monotonic() < until:
                time.sleep(0.01)
            told = Announcement.parse(file.read_text(), str(file))
            config = tmp_path / "cluster.toml"
            config.write_text(f'[[workers]]\naddress = "{told.address}"\nkey = "{told.key}"\n')
            with gf.Session(str(config)) as s:
                (worker,) = s.workers
            assert (worker.pid, worker.state, worker.host) == (process.pid, "up", told.host)
        finally:
            process.terminate()
