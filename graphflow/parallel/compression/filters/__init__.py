"""Filters: one rule a file, by which a tensor becomes a smaller message."""
