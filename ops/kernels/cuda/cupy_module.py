"""CuPy, imported when a GPU is first needed, and CUDA graph captures.

CuPy creates a kernel folder in the user's home when it is imported, and cannot be imported if that
fails, as in containers and for users without a home. It is given another folder then.
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
from graphflow.base.process.gc_pause import gc_paused
from graphflow.errors import DeviceError
from graphflow.ops.kernels.jit.object_cache import cache_folder


def import_cupy() -> Any:
    """Import CuPy.

    Raises:
        DeviceError: it is not installed, or its import fails.
    """
    if "cupy" not in sys.modules and find_spec("cupy") is not None:
        set_default("CUPY_CACHE_DIR", _folder)
    try:
        import cupy  # heavy, and only here
    except ModuleNotFoundError as error:
        raise DeviceError("a gpu device needs CuPy: pip install 'graphflow[gpu]'") from error
    except Exception as error:  # of a library that it loads, or of its folder
        raise DeviceError(f"CuPy cannot be imported: {type(error).__name__}: {error}") from error
    return cupy


def gpu_name(properties: Mapping[str, Any]) -> str:
    """Return the name of a GPU, from the properties that CuPy gives."""
    name: bytes | str = properties["name"]
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def capture_graph(cupy: Any, stream: Any, run: Callable[[], object]) -> Any:
    """Capture what `run` starts on the current stream as a CUDA graph, without running it.

    Calls that captures do not allow fail in this thread only; other devices' threads go on.

    Raises:
        Exception: of CuPy or of `run`, if it cannot be captured.
    """
    with gc_paused():  # freeing memory would end the capture
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            run()
        except BaseException:
            with suppress(Exception):  # raises, since the capture is lost
                stream.end_capture()
            raise
        return stream.end_capture()


def _folder() -> str:
    """Return a writable folder for CuPy's kernels.

    It is CuPy's own, one beside ours, or a temporary one that is removed when this process ends.
    """
    for folder in (home_folder() / ".cupy" / "kernel_cache", cache_folder() / "cupy"):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK | os.X_OK):
                return str(folder)
    passing = tempfile.mkdtemp(prefix="graphflow-cupy-")
    atexit.register(_remove, passing, os.getpid())
    return passing


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
