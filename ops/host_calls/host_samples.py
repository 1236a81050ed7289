"""What the samples of host calls call: the only functions that workers run without being told to
allow a module."""

from __future__ import annotations

from typing import Any


def triple(x: Any) -> Any:
    """One argument, one result."""
    return x * 3


def add_and_compare(x: Any, y: Any) -> Any:
    """Two of each."""
    return x + y, x > y
