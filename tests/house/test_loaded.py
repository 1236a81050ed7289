"""A fork of the preloaded test process behaves like a process that was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphflow.runtime.launch.fork_server import can_fork
from tests.loaded import ROOT, preloaded_server, run_python

TOLD = """
import os, signal, sys, threading, graphflow
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("OF_A_TEST"), "GRAPHFLOW_TEST" in os.environ)
print(sys.stdin.read(), sys.stdout.encoding, sys.stdout.write_through, sys.stderr.errors)
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.active_count(), sys.flags.utf8_mode)
print(graphflow.__file__, sys.modules["__main__"].TOLD, file=sys.stderr)
raise SystemExit(7)
"""  # noqa: E501
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OF_A_TEST": "ä"}
ENVIRONMENT.pop("GRAPHFLOW_TEST", None)
needs_forks = pytest.mark.skipif(not can_fork(), reason="processes have no descriptors here")


@pytest.mark.every(2)
@needs_forks
@pytest.mark.parametrize("how", ["text", "file"])
def test_a_fork_says_of_itself_what_a_process_says_that_is_started(
    how: str, tmp_path: Path
) -> None:
    text = f"TOLD = 1{TOLD}"
    (tmp_path / "told.py").write_text(text)
    command = [*(["-c", text] if how == "text" else [str(tmp_path / "told.py")]), "a", "-b"]
    started = subprocess.run(
        [sys.executable, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    forked = run_python(command, ENVIRONMENT, tmp_path)
    assert started.returncode == 7 and "__main__" in started.stdout
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        started.returncode, started.stdout, started.stderr,
    )  # fmt: skip


@needs_forks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_by_signals_as_any_process(number: int) -> None:
    text = "import time; print('begins', flush=True); time.sleep(60)"
    keeper = preloaded_server()
    assert keeper is not None
    process = keeper.start(["-c", text], ENVIRONMENT)
    with process.stdout, process.stderr:
        assert process.stdout.readline() == "begins\n"
        os.kill(process.pid, number)
        assert process.wait(10.0) == -number
        assert ("KeyboardInterrupt" in process.stderr.read()) == (number == signal.SIGINT)


@needs_forks
def test_when_the_process_that_is_kept_has_ended_there_is_another() -> None:
    before = preloaded_server()
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    before._reader.join(10.0)
    after = preloaded_server()
    assert after is not None and after.pid != before.pid
    assert run_python(["-c", "print(1)"], ENVIRONMENT).stdout == "1\n"
