"""The devices that this process takes by itself: the CPU, and each GPU that CuPy can use.

CuPy is imported only where it is installed, and only when somebody asks for the GPUs. Neither a
context nor memory of a GPU is taken here.
"""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

from graphflow.base.argument_checks import did_you_mean
from graphflow.base.environment import DEVICES, hides_gpus, setting
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ops.kernels.cuda.cupy_module import import_cupy

CPU = "cpu:0"
"""The CPU of this process."""
_CPU_NAME = re.compile(r"cpu:(0|[1-9]\d*)")


@dataclass(frozen=True)
class FoundGpus:
    """The GPUs of this machine.

    Attributes:
        names: "gpu:0" and so on.
        reason: why there is none; "" if there is one.
    """

    names: tuple[str, ...] = ()
    reason: str = ""


def has_cupy() -> bool:
    """Return True if CuPy is installed and GPUs are not hidden. Nothing is imported."""
    if hides_gpus():
        return False
    return sys.modules["cupy"] is not None if "cupy" in sys.modules else _is_cupy_installed()


@cache
def _is_cupy_installed() -> bool:
    return find_spec("cupy") is not None


def find_gpus() -> FoundGpus:
    """Return the GPUs that CuPy finds; the first call imports it.

    If CuPy is installed but cannot be used, a RuntimeWarning gives the reason, once in a process.
    """
    if not has_cupy():
        return FoundGpus(reason="CuPy is not installed, or CUDA_VISIBLE_DEVICES hides all GPUs")
    return _look_for_gpus()


@cache
def _look_for_gpus() -> FoundGpus:
    try:
        runtime: Any = import_cupy().cuda.runtime
        count = int(runtime.getDeviceCount())
        for index in range(count):
            runtime.getDeviceProperties(index)  # raises what planning would meet later
        reason = "" if count else "CuPy finds no GPU"
    except Exception as error:  # a missing driver raises CuPy's own types
        count, reason = (
            0,
            f"CuPy is installed, but cannot use a GPU: {type(error).__name__}: {error}",
        )
    if reason:
        warnings.warn(
            f"{reason}; graphflow goes on with the CPU ({DEVICES}=cpu:0 says so beforehand)",
            RuntimeWarning,
            stacklevel=4,
        )
    return FoundGpus(tuple(f"gpu:{index}" for index in range(count)), reason)


def default_devices() -> tuple[str, ...]:
    """Return the names of the devices that `Cluster.here()` takes.

    They are the CPU and all GPUs, or what `GRAPHFLOW_DEVICES` names: devices such as "cpu:0,gpu:1",
    or "gpu" for all GPUs.

    Raises:
        ArgumentError: the variable names nothing, or a device that is not here.
    """
    text = setting(DEVICES)
    if text is None:
        return (CPU, *find_gpus().names)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentError(
            f"{DEVICES} in the environment is {text!r}, which names no device; give 'cpu', 'gpu' "
            "or names such as 'cpu:0,gpu:1'"
        )
    kinds: dict[str, tuple[str, ...]] = {"cpu": (CPU,)}
    if all(word in kinds or _CPU_NAME.fullmatch(word) for word in words):
        there = FoundGpus()  # without a look for GPUs
    else:
        there = find_gpus()
        kinds |= {"gpu": there.names} if there.names else {}
    chosen = dict.fromkeys(name for word in words for name in kinds.get(word, (word,)))
    for name in chosen:
        if name not in there.names and not _CPU_NAME.fullmatch(name):
            hint = did_you_mean(name.lower(), [*kinds, CPU, *there.names])
            others = ", ".join((CPU, *there.names))
            raise ArgumentError(
                f"{DEVICES} in the environment is {text!r}, and this machine has no {name!r}: "
                f"there is {others}{f' ({there.reason})' if there.reason else ''}"
                f"{f'; {hint}' if hint else ''}"
            )
    return tuple(chosen)
