"""CuPy, which everything here imports by way of this, where a GPU is first needed; captures.

CuPy makes a folder for its kernels as it is imported, in the user's home, and cannot be imported
where that fails: in containers, and for users without a home. There it gets another one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from graphflow.base.environment import home_folder, set_default
from graphflow.base.gc_pause import gc_paused
from graphflow.errors import DeviceError
from graphflow.ops.kernels.jit.object_cache import cache_folder


def import_cupy() -> Any:
    """CuPy.

    Raises:
        DeviceError: it is not installed, or cannot be imported.
    """
    if "cupy" not in sys.modules and find_spec("cupy") is not None:
        set_default("CUPY_CACHE_DIR", _folder)
    try:
        import cupy  # heavy, and only here
    except ModuleNotFoundError as error:
        raise DeviceError("a gpu device needs CuPy: pip install 'graphflow[gpu]'") from error
    except Exception as error:  # of a library that it loads, or of the folder that it is told
        raise DeviceError(f"CuPy cannot be imported: {type(error).__name__}: {error}") from error
    return cupy


def gpu_name(properties: Mapping[str, Any]) -> str:
    """The name of a GPU, of what CuPy tells of it."""
    name: bytes | str = properties["name"]
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def capture_graph(cupy: Any, stream: Any, run: Callable[[], object]) -> Any:
    """A CUDA graph of what is started on a stream, which is the current one; nothing of it is done.

    Calls that no capture allows are errors in this thread only; other devices' threads go on.

    Raises:
        Exception: of CuPy, or of what runs: it cannot be captured.
    """
    with gc_paused():  # memory that is freed meanwhile would end the capture
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            run()
        except BaseException:
            with suppress(Exception):  # the capture is lost, and so it says
                stream.end_capture()
            raise
        return stream.end_capture()


def _folder() -> str:
    """Where CuPy can keep kernels: where it does by itself, or beside our own; else in a folder
    that goes when this process ends."""
    for folder in (home_folder() / ".cupy" / "kernel_cache", cache_folder() / "cupy"):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK | os.X_OK):
                return str(folder)
    passing = tempfile.mkdtemp(prefix="graphflow-cupy-")
    atexit.register(_remove, passing, os.getpid())
    return passing


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # and no fork of it
        shutil.rmtree(folder, ignore_errors=True)
