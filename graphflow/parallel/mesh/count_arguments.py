"""Counts that users give, as ints or as numpy's ints."""

from __future__ import annotations

import numpy as np


def as_count(value: object, least: int = 1) -> int | None:
    """Return a count as an int; None if it is no int (a bool, a float, text), or less than
    `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        return None
    return int(value)


def set_frozen_fields(frozen: object, **values: object) -> None:
    """Set fields of a frozen dataclass, in its `__post_init__`, to their normalised values."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


__all__ = ["as_count", "set_frozen_fields"]
