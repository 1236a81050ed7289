"""Placers: one algorithm a file, each Problem -> Assignment.

A new placer is a new file here that ends in `register_placer("name", Class())`, or the same call in
a user's module.
"""

from __future__ import annotations

from graphflow.placement.placers.base import (
    Placer,
    get_placer,
    place,
    placer_names,
    register_placer,
)

__all__ = ["Placer", "get_placer", "place", "placer_names", "register_placer"]
