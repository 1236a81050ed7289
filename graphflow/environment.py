"""Variables of the environment that graphflow heeds: read here, so that a value which means nothing
is refused rather than taken for another."""

from __future__ import annotations

import os
from collections.abc import Sequence

from graphflow.errors import ArgumentError

SWITCHES = (
    "GRAPHFLOW_JIT",
    "GRAPHFLOW_WINOGRAD",
    "GRAPHFLOW_CUDA_GRAPHS",
    "GRAPHFLOW_GPU_LIBRARIES",
    "GRAPHFLOW_SHARED_MEMORY",
)
"""Each is on unless it is `off`."""


def setting(name: str) -> str | None:
    """A folder or an address; None where it is not set, or empty."""
    return os.environ.get(name) or None


def word(name: str, among: Sequence[str]) -> str | None:
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
    return word(switch, ("on", "off")) != "off"


def check_switches() -> None:
    """Refuse what `is_on` would refuse later, where a session or a worker begins."""
    for switch in SWITCHES:
        is_on(switch)
