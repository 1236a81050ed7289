"""Beginning a session on a machine that lacks something."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import zmq

import graphflow as gf
from graphflow.errors import SessionError
from graphflow.runtime.client import remote_hosts as coordinator


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            "with 2 workers needs more files .*ulimit -n",
        ),
        (zmq.ZMQError(errno.EMFILE), "needs more files and sockets"),
        (BlockingIOError(errno.EAGAIN, "unavailable"), "more processes and threads .*ulimit -u"),
        (RuntimeError("can't start new thread"), "more processes and threads"),
    ],
)
def test_what_a_session_lacks_is_told(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_scarcity(*args: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(coordinator, "RemoteHosts", raise_scarcity)
    with pytest.raises(SessionError, match=told) as caught:
        gf.Session(gf.Cluster.local(2))
    assert caught.value.__cause__ is error


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_error(*args: Any, **named: Any) -> None:
        raise OSError(errno.EIO, "disk")

    monkeypatch.setattr(coordinator, "RemoteHosts", raise_disk_error)
    with pytest.raises(OSError, match="disk"):
        gf.Session(gf.Cluster.local(2))


SCRIPT = """
import resource, graphflow as gf
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
try:
    gf.Session(gf.Cluster.local(4))
except gf.errors.SessionError as error:
    print(error)
"""


def test_a_process_that_may_open_few_files_is_told_so_and_leaves_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )  # which ends when the processes that hold its pipes have ended
    assert "a session with 4 workers needs more files and sockets" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "deadline", [0, -1.0, True, np.True_, "3", None, float("nan"), float("inf"), 10**400, 3j]
)
def test_a_deadline_that_is_no_number_of_seconds_is_refused(deadline: Any) -> None:
    with pytest.raises(SessionError, match="deadline must be a positive number of seconds"):
        gf.Session(deadline=deadline)


def test_local_workers_have_all_the_time_of_a_deadline_beyond_what_clocks_count() -> None:
    with gf.Session(gf.Cluster.local(2, threads=1, deadline=1e300), trial=False) as s:
        assert s.run(gf.constant(1.0) + 1.0) == 2.0


def test_local_workers_that_cannot_be_connected_to_are_told_with_a_remedy() -> None:
    apart = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "-r"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    script = "import graphflow as gf; gf.Session(gf.Cluster.local(2, deadline=3))"
    done = subprocess.run(
        [*apart, sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "RendezvousTimeout: worker 0 at tcp://127.0.0.1:" in done.stderr
    assert "cannot be connected to: is its loopback interface up (`ip link" in done.stderr
