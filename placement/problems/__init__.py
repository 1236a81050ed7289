"""Placement problems and assignments as arrays, and why a problem has no solution."""
