"""Environment variables that graphflow reads, all in one place.

A value without a meaning is an error; it is never taken for another value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from graphflow.errors import ArgumentError

SWITCHES = (
    "GRAPHFLOW_AMX",
    "GRAPHFLOW_JIT",
    "GRAPHFLOW_WINOGRAD",
    "GRAPHFLOW_CUDA_GRAPHS",
    "GRAPHFLOW_GPU_LIBRARIES",
    "GRAPHFLOW_SHARED_MEMORY",
)
"""Features that are on unless the variable is `off`."""
NCCL = "GRAPHFLOW_NCCL", ("off", "host", "on")
"""The GPUs among which NCCL may run collectives: none, those of one host (default), or any."""
DEVICES = "GRAPHFLOW_DEVICES"
"""The devices that sessions of a process take unless they are given some: "cpu", "cpu:0,gpu:1"."""
DESCRIPTIONS = {
    "GRAPHFLOW_AMX": "`off`: products of bfloat16 are computed in float32, without AMX tiles",
    "GRAPHFLOW_CACHE": "folder of compiled kernels and measurements; default: `~/.cache/graphflow`",
    "GRAPHFLOW_CUDA_GRAPHS": "`off`: GPUs run kernels one by one",
    "GRAPHFLOW_DEVICES": "devices of sessions that name none: `cpu`, `cpu:0,gpu:1`",
    "GRAPHFLOW_GPU_LIBRARIES": "`off`: no kernels of cuBLAS and cuDNN",
    "GRAPHFLOW_JIT": "`off`: numpy computes, and nothing is compiled",
    "GRAPHFLOW_KEYS": "folder of keys; default: `~/.config/graphflow/keys`",
    "GRAPHFLOW_LOG": "`text` or `json`: log events to stderr",
    "GRAPHFLOW_LOG_LEVEL": "`debug`, `info`, `warning` or `error`",
    "GRAPHFLOW_METRICS": "address at which sessions serve metrics for Prometheus",
    "GRAPHFLOW_NCCL": "GPUs among which NCCL runs collectives: `off`, `host` (default) or `on`",
    "GRAPHFLOW_SHARED_MEMORY": "`off`: workers of one host exchange tensors through sockets only",
    "GRAPHFLOW_WINOGRAD": "`off`: no convolutions by Winograd's method",
}
"""All variables of graphflow, each with its meaning."""
_CACHE_FOLDERS = ("GRAPHFLOW_CACHE", "XDG_CACHE_HOME")  # for kernels and measurements


def setting(name: str) -> str | None:
    """Return the value of a variable; None if it is unset or empty."""
    return os.environ.get(name) or None


def thread_limit() -> int | None:
    """Return the threads that `OMP_NUM_THREADS` allows a process; None if it holds no number.

    Of a list such as "4,2", one number a level of nesting, the first one counts.
    """
    word = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(word) if word.isdecimal() and int(word) else None


def given_names() -> list[str]:
    """Return the names of graphflow's variables that are set, sorted."""
    return sorted(name for name in os.environ if name.startswith("GRAPHFLOW_"))


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this one's, with changes."""
    return {**os.environ, **changes}


def hides_gpus() -> bool:
    """Return True if the user hides all GPUs of this machine from CUDA."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def set_default(name: str, default: Callable[[], str]) -> None:
    """Set a variable for this process and its children, unless the user has set it.

    For variables that other libraries read.
    """
    if setting(name) is None:
        os.environ[name] = default()


def folder_setting(name: str) -> Path | None:
    """Return a folder, with `~` expanded; None if the variable is unset or empty.

    Raises:
        ArgumentError: it names the home of a user that does not exist.
    """
    value = setting(name)
    try:
        return None if value is None else Path(value).expanduser()
    except RuntimeError:
        raise ArgumentError(
            f"{name} in the environment is {value!r}, but there is no such home; give the whole "
            "path"
        ) from None


def home_folder() -> Path:
    """Return the user's home folder; "/" for a user without one, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def choice_setting(name: str, among: Sequence[str]) -> str | None:
    """Return one of a few words; None if the variable is unset or empty.

    Raises:
        ArgumentError: it holds another word.
    """
    value = setting(name)
    if value is not None and value not in among:
        several = "one of " if len(among) > 2 else ""
        named = ", ".join(among) if several else " or ".join(among)
        raise ArgumentError(f"{name} in the environment must be {several}{named}, not {value!r}")
    return value


def is_on(switch: str) -> bool:
    """Return True unless a switch is off.

    Raises:
        ArgumentError: it is neither on nor off.
    """
    return choice_setting(switch, ("on", "off")) != "off"


def check_environment() -> None:
    """Refuse wrong variables when a session or worker starts, not in the middle of a step.

    Raises:
        ArgumentError: a switch has an unknown value, or a cache folder is in the home of a user
            that does not exist.
    """
    for switch in SWITCHES:
        is_on(switch)
    choice_setting(*NCCL)
    for folder in _CACHE_FOLDERS:
        folder_setting(folder)
