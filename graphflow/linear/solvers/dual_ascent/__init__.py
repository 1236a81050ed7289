"""Dual coordinate ascent by rows: in sequence, on threads and on a GPU."""
