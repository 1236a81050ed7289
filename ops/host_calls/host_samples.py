"""Sample functions of host calls: the only ones that workers run without an allowed module."""

from __future__ import annotations

from typing import Any


def triple(x: Any) -> Any:
    """Return 3·x."""
    return x * 3


def add_and_compare(x: Any, y: Any) -> Any:
    """Return x + y and x > y."""
    return x + y, x > y
