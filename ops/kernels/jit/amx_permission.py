"""Permission to use AMX, the tiles of x86 processors that multiply bfloat16 matrices.

Tiles are 8 KiB of registers. Linux saves them for a process only after it has asked once, for all
its threads and children; without this permission the first tile instruction ends the process.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from graphflow.base.environment import is_on
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.ops.kernels.jit.denormals import is_x86

_FEATURES = ("amx-tile", "amx-bf16", "avx512bf16", "avx512bw")
_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18


def may_use_amx() -> bool:
    """Return whether kernels may use AMX: it is there, Linux permits it, GRAPHFLOW_AMX is not off.

    The first call asks Linux for permission.
    """
    return is_on("GRAPHFLOW_AMX") and describe_obstacle() is None


@cache
def describe_obstacle() -> str | None:
    """Return why this process cannot use AMX; None if it can."""
    if not is_x86():
        return "the processor is no x86"
    features = compiler().features.split(",")
    missing = [name for name in _FEATURES if f"+{name}" not in features]
    if missing:
        return f"the processor has no {missing[0]}"
    if sys.platform != "linux":
        return "only Linux gives permission for it"
    error = _request_permission()
    return None if error == 0 else f"Linux refuses permission (error {error})"


def _request_permission() -> int:
    """Ask Linux to save tiles for this process; return 0, or the number of an error."""
    library = ctypes.CDLL(None, use_errno=True)
    refused = library.syscall(
        ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST_PERMISSION), ctypes.c_long(_TILE_DATA)
    )
    return ctypes.get_errno() if refused else 0
