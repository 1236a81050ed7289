"""Counts that users give: ints, also numpy's."""

from __future__ import annotations

import numpy as np


def as_count(value: object, least: int = 1) -> int | None:
    """A count as an int; None where it is none (a bool, a float, text), or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        return None
    return int(value)


def set_frozen_fields(frozen: object, **values: object) -> None:
    """Give fields of a frozen dataclass, while it is made, the values that they stand for."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


__all__ = ["as_count", "set_frozen_fields"]
