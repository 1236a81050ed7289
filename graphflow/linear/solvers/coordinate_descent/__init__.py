"""Coordinate descent, on working sets of columns and on the most violated coordinates."""
