"""Delays of turns for benchmarks of parameter servers, called in the processes of workers."""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

SLOWNESS = 2.0
"""How many times longer the slow worker takes."""


def wait(x: Any, seconds: Any, slow: Any) -> Any:
    """Return an array after a delay: the first of the seconds.

    Args:
        slow: number of a run in which one worker is slow; 0 for none.
    """
    factor = SLOWNESS if slow and _is_slow(int(slow)) else 1.0
    time.sleep(float(seconds.flat[0]) * factor)
    return x


def pass_back(cotangent: Any, result: Any, x: Any, seconds: Any, slow: Any) -> Any:
    """Return the cotangents of the arguments of `wait`."""
    return cotangent, 0.0 * seconds


@cache
def _is_slow(run: int) -> bool:
    """Return True in the process that asks first."""
    path = Path(tempfile.gettempdir()) / f"graphflow-slow-worker-{run}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
