"""Counts that users give, as ints or as numpy's ints."""

from __future__ import annotations

from graphflow.base.argument_checks import as_count


def set_frozen_fields(frozen: object, **values: object) -> None:
    """Set fields of a frozen dataclass, in its `__post_init__`, to their normalised values."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


__all__ = ["as_count", "set_frozen_fields"]
