"""`graphflow up` and `down`: real workers of a cluster file, killed, back, and stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.cli.main import main
from graphflow.runtime.launch.supervisor_records import ClusterRecord, RecordFile
from tests.ssh_server import needs_sshd, ssh_server

ROOT = Path(gf.__file__).parents[1]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep records and keys of tests apart from the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A cluster file of two workers on free ports of this host; it is stopped at the end."""
    file = tmp_path / "cluster.toml"
    file.write_text(
        "".join(f'[[workers]]\naddress = "tcp://127.0.0.1:{p}"\n' for p in free_ports(2))
    )
    yield file
    if (record := RecordFile(file).read()) is not None:
        RecordFile(file).stop(record, 5.0)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(each) for each in arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def record_of(file: Path) -> ClusterRecord:
    record = RecordFile(file).read()
    assert record is not None
    return record


def worker_pids(file: Path) -> list[int]:
    return [worker.pid for worker in record_of(file).workers if worker.pid is not None]


def test_a_cluster_in_the_background_outlives_a_killed_worker_until_it_is_stopped(
    capsys: pytest.CaptureFixture[str], cluster: Path
) -> None:
    code, out, err = run(capsys, "up", "--detach", cluster)
    assert code == 0 and not err
    assert f"s = gf.Session({str(cluster)!r})" in out and "2 workers up" in out
    first = worker_pids(cluster)
    assert all(str(pid) in out for pid in first) and len(first) == 2

    code, _, err = run(capsys, "up", cluster)
    assert code == 1 and "is up, supervised by process" in err and "graphflow down" in err

    os.kill(first[1], signal.SIGKILL)
    wait_until(lambda: len(pids := worker_pids(cluster)) == 2 and pids[1] != first[1])
    x = gf.placeholder("float32", (2,), name="x")
    with gf.Session(cluster) as s:  # at the addresses of the file, as before
        assert s.run(x * 2, {x: np.ones(2, "float32")}).tolist() == [2, 2]
        assert [each.pid for each in s.workers] == worker_pids(cluster)

    code, out, _ = run(capsys, "status")
    assert code == 0 and "worker 1 was restarted 1 time" in out and str(cluster) in out
    code, out, _ = run(capsys, "status", cluster, "--json")
    assert json.loads(out)["supervisor"]["workers"][1]["restarts"] == 1
    log = Path(record_of(cluster).log or "").read_text()
    assert "worker 1 ended (this host, exit status -9)" in log and "is up again" in log

    last = worker_pids(cluster)
    code, out, _ = run(capsys, "down", cluster)
    assert code == 0 and all(f"process {pid}" in out for pid in last)
    assert not any(map(is_alive, last))
    code, out, err = run(capsys, "down", cluster)
    assert code == 0 and "nothing to stop" in out and not err
    assert run(capsys, "status")[0] == 2


def test_ctrl_c_stops_a_cluster_in_the_foreground(cluster: Path) -> None:
    command = [sys.executable, "-m", "graphflow", "up", str(cluster)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("Ctrl-C stops them" in line for line in lines)
        wait_until(lambda: record_of(cluster).is_ready)
        pids = worker_pids(cluster)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert len(pids) == 2 and not any(map(is_alive, pids))
    assert RecordFile(cluster).read() is None


# Bad input ----------------------------------------------------------------------------------------


def test_a_port_in_use_stops_all_workers_and_is_named(
    capsys: pytest.CaptureFixture[str], cluster: Path
) -> None:
    port = int(cluster.read_text().rpartition(":")[2].rstrip('"\n'))
    with socket.create_server(("127.0.0.1", port)):
        code, out, err = run(capsys, "up", cluster)
    assert code == 1 and f"127.0.0.1:{port}" in err and "worker 1 (this host, exit status" in err
    pids = [int(line.split()[3]) for line in out.splitlines()[1:] if line.split()[3].isdigit()]
    assert not any(map(is_alive, pids)) and RecordFile(cluster).read() is None


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the OpenSSH client")
@pytest.mark.parametrize(
    ("host", "says"),
    [("no-such-host.invalid", "Could not resolve"), ("127.0.0.1", "Connection refused")],
)
def test_a_host_that_ssh_does_not_reach_is_an_error_with_sshs_own_line(
    capsys: pytest.CaptureFixture[str], cluster: Path, host: str, says: str
) -> None:
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        settings = f'[launch]\nssh = ["-p", "{port}", "-F", "none"]\n'
        cluster.write_text(cluster.read_text() + f'ssh = "{host}"\n' + settings)
        code, _, err = run(capsys, "up", cluster)
    assert code == 1 and f"worker 1 ({host}, by ssh, exit status 255)" in err and says in err
    assert RecordFile(cluster).read() is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[workers]]\ndevices = ['h100']\n", "worker 0 has no address"),
        ("[[worker]]\n", "did you mean 'workers'"),
        ("{one}[launch]\npyton = 'x'\n", r"line 4: unknown key 'pyton'; did you mean 'python'"),
        ("{one}[launch]\nssh = '-p 22'\n", r"line 4: ssh must be a list of strings"),
        ("{one}[launch]\nenv = {{ A = 1 }}\n", r"line 4: A must be a string, not 1"),
        ("{one}[launch]\noptions = ['--listen=x']\n", r"line 4: --listen=x is what `graphflow up`"),
        ("{one}ssh = '-oProxyCommand=x'\n", r"line 3: '-oProxyCommand=x' is no host"),
        ("[[workers]]\naddress = 'tcp://10.9.9.9:7001'\n", 'write key = "10.9.9.9" in its table'),
        (
            "{one}devices = [{{name = 'cpu:0', threads = 1}}, 'cpu:1']\n",
            "must have the same threads",
        ),
    ],
)
def test_a_file_from_which_no_worker_can_be_started_is_refused_before_any(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text.format(one="[[workers]]\naddress = 'tcp://127.0.0.1:7001'\n"))
    code, out, err = run(capsys, "up", file)
    assert code in (1, 2) and says in err and "Traceback" not in err and not out
    assert RecordFile(file).read() is None


def test_a_file_that_is_not_there_is_an_error_of_both_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in ("up", "down"):
        code, _, err = run(capsys, command, tmp_path / "clutser.toml")
        assert code == 2 and "there is no such file" in err


# ssh and keys -------------------------------------------------------------------------------------


@needs_sshd
@pytest.mark.slow
def test_workers_by_ssh_get_keys_that_are_made_and_are_trusted_by_both_sides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, (port,) = tmp_path / "ssh.toml", free_ports(1)
    with ssh_server(tmp_path) as options:
        file.write_text(
            f'[[workers]]\naddress = "tcp://127.0.0.1:{port}"\nkey = "box1"\nssh = "127.0.0.1"\n'
            f"[launch]\npython = '{sys.executable}'\nssh = {options}\n"
            f"env = {{ GRAPHFLOW_KEYS = '{tmp_path / 'there'}' }}\n"
        )
        for made in (True, False):  # the second time, all keys are there
            code, out, err = run(capsys, "up", "-d", file)
            assert code == 0, err
            assert ("made the key of your sessions" in out) == made
            assert "127.0.0.1, by ssh" in out
            x = gf.placeholder("float32", (2,), name="x")
            with gf.Session(file) as s:
                assert s.run(x * 2, {x: np.ones(2, "float32")}).tolist() == [2, 2]
            (pid,) = worker_pids(file)
            assert run(capsys, "down", file)[0] == 0
            wait_until(lambda pid=pid: not is_alive(pid))
    kept = (tmp_path / "there" / "box1.secret").stat()
    assert kept.st_mode & 0o777 == 0o600
