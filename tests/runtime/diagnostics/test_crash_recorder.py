"""The flight recorder: what a process that a signal ended was in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphflow.runtime.diagnostics.crash_recorder import CrashRecorder, is_generated_code, name_code

ROOT = Path(__file__).resolve().parents[3]
PROCESS = """
import ctypes, os, signal, sys, threading
from graphflow.runtime.diagnostics.crash_recorder import computing_session, name_code
from graphflow.runtime.diagnostics.crash_recorder import start_recording
start_recording(int(sys.argv[1]), int(sys.argv[2]))
def generated(kind, call, lines):
    text = f"def f():\\n a = 1\\n {call}\\n return a"
    scope = {"os": os, "signal": signal, "work": work}
    exec(compile(text, name_code(kind, lines), "exec"), scope)
    return scope["f"]
def work():
    crash = signal.pthread_kill  # as a fault of its own: this thread goes no further
    thread = threading.Thread(target=lambda: crash(threading.get_ident(), signal.SIGSEGV))
    thread.start()
    thread.join(30)
generated("commit", "a", ["first 'a'", "never"])()
if sys.argv[3] == "thread":
    generated("compute", "work()", ["x", "pooled 'p' (made at m.py:3)"])()
elif sys.argv[3] == "op":
    computing_session.set("session-a")
    # What another thread computes for is its own affair.
    threading.Thread(target=computing_session.set, args=["session-b"]).start()
    generated("compute", "os.abort()", ["x", "softmax 's'\\n(made at m.py:3)"])()
else:
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[3] == "kill" else signal.SIGSEGV)
"""


def run_process(how: str) -> tuple[int, str, str]:
    recorder = CrashRecorder()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, *map(str, recorder.descriptors), how],
            pass_fds=recorder.descriptors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, recorder.failed_op(), recorder.session()
    finally:
        recorder.close()


@pytest.mark.parametrize(
    ("how", "number", "op", "session"),
    [
        ("op", signal.SIGABRT, "softmax 's' (made at m.py:3)", "session-a"),
        ("thread", signal.SIGSEGV, "pooled 'p' (made at m.py:3)", ""),
        ("outside", signal.SIGSEGV, "", ""),
        ("kill", signal.SIGKILL, "", ""),
    ],
)
def test_the_op_that_a_process_ended_in_is_known_outside_and_whose_it_was(
    how: str, number: int, op: str, session: str
) -> None:
    assert run_process(how) == (-number, op, session)


def test_a_process_without_a_recorder_names_code_by_its_kind_alone() -> None:
    def unread() -> str:
        raise AssertionError("nobody asks for the lines")

    assert name_code("compute", (unread() for _ in range(1))) == "<compute>"
    assert is_generated_code("<compute>") and is_generated_code("<routine 12>")
    assert not is_generated_code("model.py")


def test_where_no_folder_takes_files_a_recorder_keeps_its_own_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert run_process("op") == (-signal.SIGABRT, "softmax 's' (made at m.py:3)", "session-a")
    monkeypatch.delattr(os, "memfd_create", raising=False)  # as on other systems
    recorder = CrashRecorder()
    os.write(recorder.descriptors[0], b"Fatal Python error: Aborted")
    assert (recorder.signal(), recorder.failed_op(), recorder.session()) == ("", "", "")
    recorder.close()
