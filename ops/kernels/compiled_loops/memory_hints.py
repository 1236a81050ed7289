"""Hints to the processor in loops; `native` knows them by name. As Python they do nothing."""

from __future__ import annotations

from typing import Any


def prefetch(numbers: Any, index: int) -> None:
    """Start to load an item of an array that is read soon. Its index may be outside the array."""
