"""Variables of the environment that graphflow heeds: read here, so that a value which means nothing
is refused rather than taken for another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from graphflow.errors import ArgumentError

SWITCHES = (
    "GRAPHFLOW_JIT",
    "GRAPHFLOW_WINOGRAD",
    "GRAPHFLOW_CUDA_GRAPHS",
    "GRAPHFLOW_GPU_LIBRARIES",
    "GRAPHFLOW_SHARED_MEMORY",
)
"""Each is on unless it is `off`."""
NCCL = "GRAPHFLOW_NCCL", ("off", "host", "on")
"""Among which GPUs NCCL may carry exchanges: none, those of one host (default), any."""
_KEPT = ("GRAPHFLOW_CACHE", "XDG_CACHE_HOME")  # where kernels and measurements are kept


def setting(name: str) -> str | None:
    """A folder or an address; None where it is not set, or empty."""
    return os.environ.get(name) or None


def set_default(name: str, default: Callable[[], str]) -> None:
    """Set what another library heeds where nobody has, for this process and those it starts."""
    if setting(name) is None:
        os.environ[name] = default()


def folder_setting(name: str) -> Path | None:
    """A folder, `~` as the user's home; None where it is not set, or empty.

    Raises:
        ArgumentError: it is in the home of a user who is not there.
    """
    told = setting(name)
    try:
        return None if told is None else Path(told).expanduser()
    except RuntimeError:
        raise ArgumentError(
            f"{name} in the environment is {told!r}, a home that is not there; give the whole path"
        ) from None


def home_folder() -> Path:
    """The user's home; / for one who has none, as container runtimes have it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def choice_setting(name: str, among: Sequence[str]) -> str | None:
    """One of a few words; None where it is not set, or empty.

    Raises:
        ArgumentError: another word.
    """
    told = setting(name)
    if told is not None and told not in among:
        several = "one of " if len(among) > 2 else ""
        named = ", ".join(among) if several else " or ".join(among)
        raise ArgumentError(f"{name} in the environment is {several}{named}, not {told!r}")
    return told


def is_on(switch: str) -> bool:
    """Whether something is to be done.

    Raises:
        ArgumentError: it is neither on nor off.
    """
    return choice_setting(switch, ("on", "off")) != "off"


def check_environment() -> None:
    """Refuse what would be refused later, in the middle of a step, where a session or a worker
    begins.

    Raises:
        ArgumentError: a switch is none of its words, or what is kept is to be in the home of a
            user who is not there.
    """
    for switch in SWITCHES:
        is_on(switch)
    choice_setting(*NCCL)
    for folder in _KEPT:
        folder_setting(folder)
