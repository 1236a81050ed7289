"""The command line as a module, for who has no script on the path."""

import os
import subprocess
import sys


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "graphflow", "cache", "informatoin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "info or clear" in done.stderr


def test_a_locale_without_some_of_our_letters_gets_question_marks() -> None:
    command = [sys.executable, "-m", "graphflow", "plan", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert b"heft, auto, exact ?" in done.stdout
