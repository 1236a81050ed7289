"""Escape text for HTML. The standard library's module loads a table of all entities for that."""

from __future__ import annotations

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})


def escape(text: str) -> str:
    """Return text that HTML shows as it is, also within an attribute's quotes."""
    return text.translate(_ENTITIES)
