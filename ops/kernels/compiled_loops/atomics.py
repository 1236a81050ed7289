"""Steps of loops that several threads run at the same time; `native` knows them by name.

As Python they are what one thread sees.
"""

from __future__ import annotations

from typing import Any


def atomic_add(numbers: Any, index: int, amount: float) -> float:
    """Add to an item in one step that no other thread comes between; return the item before.

    Args:
        numbers: an array of int64 or float64.
        index: of the item.
        amount: a number of the array's kind.
    """
    before: float = numbers[index]
    numbers[index] = before + amount
    return before


def atomic_load(numbers: Any, index: int) -> int:
    """Return an item of an array of int64 as other threads have written it by now."""
    return int(numbers[index])


def yield_thread() -> None:
    """Let another thread run on this processor, if one waits for it."""
