"""`graphflow worker --announce`: one line of JSON that launchers read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphflow.errors import ArgumentError
from graphflow.runtime.worker.announcement import Announcement, keep_announced

_WORKER = [sys.executable, "-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:*"]


@pytest.mark.every(2)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_announces_itself_in_a_file_until_it_ends(
    tmp_path: Path, end: signal.Signals
) -> None:
    file = tmp_path / "worker.json"
    with subprocess.Popen([*_WORKER, "--announce", str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        until = time.monotonic() + 30.0
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        found = Announcement.parse(file.read_text(), str(file))
        assert found.address.encode() in process.stdout.readline()
        assert found.pid == process.pid and found.devices == ("cpu:0",) and found.key is None
        process.send_signal(end)
        process.wait(30.0)
    assert not list(tmp_path.iterdir())


def test_a_worker_announces_itself_on_stdout_alone() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*_WORKER, "--announce", "-"], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        told = json.loads(process.stdout.readline())
        assert told["address"].encode() in process.stderr.readline()
        assert told["pid"] == process.pid
        process.terminate()
        assert process.stdout.read() == b""


def test_a_file_that_another_worker_wrote_meanwhile_stays(tmp_path: Path) -> None:
    file = tmp_path / "worker.json"
    first = Announcement("tcp://127.0.0.1:1", None, ("cpu:0",), "a", 1)
    with keep_announced(str(file), sys.stdout, first):
        file.write_text("the next one\n")
    assert file.read_text() == "the next one\n"


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    place = str(tmp_path / "none" / "worker.json")
    line = Announcement("tcp://127.0.0.1:1", None, (), "a", 1)
    with (
        pytest.raises(ArgumentError, match=r"--announce .* cannot be written: No such file"),
        keep_announced(place, sys.stdout, line),
    ):
        pass


@pytest.mark.parametrize("line", ["", "[]", "null", "{}", '{"address": "a", "devices": 1}', "é"])
def test_a_line_that_is_no_announcement_is_an_error(line: str) -> None:
    with pytest.raises(ArgumentError, match="no announcement of a worker"):
        Announcement.parse(line, "worker.json")
