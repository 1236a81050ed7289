"""The command line as a module, for who has no script on the path."""

import subprocess
import sys


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "graphflow", "cache", "informatoin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "info or clear" in done.stderr
