"""Escape text for HTML, without loading the table of all entities at import."""

from __future__ import annotations


def escape(text: str) -> str:
    """Return text that HTML shows as it is, also within an attribute's quotes."""
    from html import escape as replace  # slow to load

    return replace(text)
