"""Worker processes: how they start, what they print, and that they always end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import graphflow
from graphflow import _version
from graphflow.errors import AddressInUse, InsecureAddress, RendezvousTimeout, TransportError
from graphflow.runtime.launch.local import LocalWorkers, _end_all
from graphflow.runtime.worker.host_protocol import default_factory
from graphflow.runtime.worker.process import WorkerProcess
from graphflow.runtime.worker.serving import main, serve
from tests.faults.running import Script

HOST = f"{Path(__file__).parents[1] / 'protocol' / 'fake_host.py'}:FakeHost"
START = 30.0
# Not resolved: graphflow.runtime is a link, and must be imported through it.
ROOT = str(Path(next(iter(graphflow.__path__))).parent)


def has_ended(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def worker(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphflow.runtime.worker", *arguments]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd="/", **more
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_prints_one_line_and_ends_cleanly_on_a_signal(number: int) -> None:
    process = worker("--listen", "tcp://127.0.0.1:*", "--device", "cpu:0", "--device", "cpu:1")
    assert process.stdout is not None
    line = process.stdout.readline()
    expected = rf"graphflow worker {re.escape(_version.__version__)} listening on "
    assert re.fullmatch(expected + r"tcp://127\.0\.0\.1:\d+ with cpu:0, cpu:1\n", line)
    process.send_signal(number)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (0, "", "")


def test_a_port_in_use_is_one_line_and_an_exit_status() -> None:
    with_port = LocalWorkers(1, threads=1, deadline=START, host=HOST)
    try:
        process = worker("--listen", with_port.addresses[0])
        output, errors = process.communicate(timeout=10)
        assert process.returncode == 1 and output == ""
        assert errors.count("\n") == 1 and "listens" in errors and "another port" in errors
        with pytest.raises(AddressInUse):
            serve(with_port.addresses[0])
    finally:
        with_port.stop()


def test_addresses_that_cannot_be_used_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(InsecureAddress, match="--insecure"):
        serve("tcp://0.0.0.0:7001")
    with pytest.raises(TransportError, match="tcp://host:port"):
        serve("127.0.0.1")
    assert main(["--listen", "nonsense"]) == 1
    assert "graphflow worker: " in capsys.readouterr().err


def process() -> WorkerProcess:
    return WorkerProcess(
        "tcp://127.0.0.1:*", devices=["cpu:0"], threads=1, insecure=False, factory=default_factory
    )


def test_a_worker_that_is_asked_to_end_and_has_no_session_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphflow.runtime.worker.process._TICK", 60.0)
    worker = process()
    serving = threading.Thread(target=worker.run)
    serving.start()
    time.sleep(0.5)  # by then it waits for somebody to say something
    worker.drain(60.0)
    serving.join(20.0)
    is_over = not serving.is_alive()
    worker.stop()
    serving.join()
    worker.close()
    assert is_over


def test_signal_handlers_are_restored_after_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(
        "graphflow.runtime.worker.process.WorkerProcess.run", lambda self, parent: None
    )
    serve("tcp://127.0.0.1:*")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# The local launcher ----------------------------------------------------------------------------


def test_local_workers_run_the_parents_package_one_blas_thread_and_no_user_main(
    tmp_path: Path,
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('a shadowed standard library')")
    host = tmp_path / "host.py"
    host.write_text(
        textwrap.dedent("""
        import os, random, sys
        import graphflow
        print(os.environ["OPENBLAS_NUM_THREADS"], list(graphflow.__path__)[0], flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        Host = None
        """)
    )
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{ROOT!r}]
        sys.path.remove({str(tmp_path)!r})
        print("main runs")
        from graphflow.runtime.launch.local import LocalWorkers
        workers = LocalWorkers(2, threads=1, deadline=30, host={f"{host}:Host"!r})
        print(len(set(workers.addresses)))
        workers.stop()
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("main runs") == 1 and "2" in lines
    assert lines.count(f"1 {ROOT}/graphflow") == 2
    assert done.stderr.count("to stderr") == 2


def test_a_worker_that_does_not_come_up_shows_what_it_wrote(tmp_path: Path) -> None:
    host = tmp_path / "host.py"
    host.write_text("raise RuntimeError('no such library')")
    with pytest.raises(RendezvousTimeout, match=r"(?s)worker \d ended.*no such library"):
        LocalWorkers(2, threads=1, deadline=START, host=f"{host}:Host")


def test_a_worker_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    host = tmp_path / "host.py"
    marker = tmp_path / "pid"
    host.write_text(
        f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    with pytest.raises(RendezvousTimeout, match="did not start within"):
        LocalWorkers(1, threads=1, deadline=4.0, host=f"{host}:Host")
    assert has_ended(int(marker.read_text()))


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["SIGKILL", "exit", "exception"])
def test_local_workers_end_when_their_parent_does(how: str) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = [{ROOT!r}]
        from graphflow.placement.clusters.cluster import Cluster
        from graphflow.runtime.client.remote_hosts import RemoteHosts
        hosts = RemoteHosts(Cluster.local(2, threads=1), deadline=30, host={HOST!r})
        print(*hosts.pids, flush=True)
        how = {how!r}
        if how == "SIGKILL":
            time.sleep(60)
        if how == "exception":
            raise ValueError("of the user")
    """)
    parent = Script(script)
    try:
        pids = [int(pid) for pid in parent.line().split()]
        assert len(pids) == 2
        if how == "SIGKILL":
            parent.send(signal.SIGKILL)
        parent.wait(20.0)
    finally:
        parent.end()
    assert all(has_ended(pid) for pid in pids)


def test_an_interrupt_of_the_terminal_leaves_local_workers_to_their_parent() -> None:
    workers = LocalWorkers(1, threads=1, deadline=START, host=HOST)
    try:
        os.kill(workers.pids[0], signal.SIGINT)
        assert not has_ended(workers.pids[0], 0.3)
    finally:
        workers.stop()
    assert has_ended(workers.pids[0], 0.1)


def test_a_worker_that_ends_waits_for_the_thread_that_drives_its_sockets() -> None:
    worker, drives, is_open = process(), threading.Event(), list[bool]()

    def look() -> bool:
        drives.set()
        time.sleep(0.2)  # the worker is closed meanwhile
        is_open.append(worker._wakeup.fileno() >= 0)
        return True

    driving = threading.Thread(target=worker.drive_until, args=(look, 10.0))
    driving.start()
    drives.wait()
    worker.close()
    driving.join()
    assert is_open == [True] and worker._failure is None


def test_a_ctrl_c_while_workers_are_ended_leaves_none_of_them() -> None:
    """What ends them is called once."""
    ended: list[str] = []

    class Each:
        def terminate(self) -> None:
            signal.raise_signal(signal.SIGINT)

        def finish(self, until: float) -> None:
            ended.append("worker")

        def close(self) -> None:
            ended.append("nursery")

    with pytest.raises(KeyboardInterrupt):
        _end_all([Each(), Each()], [Each()], os.getpid())  # type: ignore[list-item]
    assert ended == ["worker", "worker", "nursery"]
