"""The `graphflow` command while graphflow is being loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys; from graphflow_command import main; sys.exit(main())"  # as installed
LOADING = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
LOADED = """
import signal

def main():
    return 7 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 8
"""


@pytest.mark.parametrize(
    ("interrupted", "ignored", "status"),
    [(True, False, -signal.SIGINT), (False, False, 7), (True, True, 8)],
)
def test_ctrl_c_while_it_loads_ends_it_without_a_word_unless_it_is_ignored(
    tmp_path: Path, interrupted: bool, ignored: bool, status: int
) -> None:
    package = tmp_path / "graphflow"
    (package / "cli").mkdir(parents=True)
    (package / "__init__.py").write_text(LOADING if interrupted else "")
    (package / "cli" / "__init__.py").touch()
    (package / "cli" / "main.py").write_text(LOADED)
    command = [sys.executable, "-c", SCRIPT]
    if ignored:  # as shells start what runs in the background
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (status, "")
